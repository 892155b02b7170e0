//! A sparsifier inside the loop.

use std::{collections::BTreeMap, fs};

use twofour::{
    DataType, MatrixRef,
    file::{Overwrite, Reader},
    sparsify::{ParameterRule as _, Regrowth, Schedule as _, Sparsifier},
};

use super::{bits, corpus, cubic, in_place, layers, model, one_shot, steps, trainer, trainer_with, training};
use crate::{
    engine::{Memory as _, cpu::CpuEngine},
    linear::{LayerForm, Linear, Masking},
    model::{CHECKPOINT_FILE, Inference},
    train::{
        DecaySearch, LevelSchedule, PatternText, SparseBegin, SparsifierPlan, SparsifierRule, SparsityPlan, Trainer,
        TrainingSettings,
        methods::{Method, SparsifierCriterion},
    },
};

fn master(linear: &Linear<CpuEngine>) -> Vec<f32> {
    CpuEngine.read(linear.weight().master()).unwrap()
}

fn matrix<'a>(linear: &Linear<CpuEngine>, values: &'a [f32]) -> MatrixRef<'a, f32> {
    MatrixRef::new(linear.out_features(), linear.in_features(), values).unwrap()
}

/// The planned layers.
fn masked(trainer: &Trainer<CpuEngine>) -> impl Iterator<Item = &Linear<CpuEngine>> {
    trainer.model.linears().filter(|linear| trainer.plan.layers.iter().any(|name| name == linear.name()))
}

#[test]
fn masks_are_those_of_a_sparsifier_outside_of_the_loop_and_levels_follow_the_schedule() {
    for (plan, first) in [(cubic(), 1), (in_place(), 2), (one_shot(), 3)] {
        let own = plan.sparsifier.clone().unwrap();
        let mut trainer = trainer(&plan);
        let mut outside = Sparsifier::new(Regrowth::FromDense);
        for linear in masked(&trainer) {
            let (rows, cols) = (linear.out_features(), linear.in_features());
            outside.prepare(linear.weight().name(), rows, cols, own.rule, own.level).unwrap();
        }
        for step in 1..=12 {
            // Masks that are chosen in place are those of the weights before their zeros, which are the lowest of the
            // same weights after.
            let report = trainer.step().unwrap();
            let is_masked = step >= first && plan.end.is_none_or(|end| step < end);
            let is_due = step == first || plan.selects_mask_after(step);
            assert_eq!(report.layer_flip_rates.is_empty(), !(is_masked && is_due && step != first), "step {step}");
            outside.set_epoch(&own.schedule, step);
            for linear in masked(&trainer) {
                assert_eq!(linear.form(), if is_masked { LayerForm::Masked } else { LayerForm::Dense }, "step {step}");
                let (name, values) = (linear.weight().name(), master(linear));
                if is_masked && is_due {
                    outside.step_one(name, matrix(linear, &values)).unwrap();
                }
                let inside = trainer.host_masks().next().unwrap();
                assert_eq!(inside.mask(name), outside.mask(name), "{name}, step {step}");
                if is_masked {
                    assert_eq!(linear.masked().unwrap().0, inside.mask(name).unwrap(), "{name}, step {step}");
                    let due = (first..=step).rev().find(|s| *s == first || plan.selects_mask_after(*s)).unwrap();
                    assert_eq!(inside.level(name), Some(own.schedule.level(own.level, due)), "{name}, step {step}");
                }
            }
        }
    }
}

#[test]
fn saliency_compares_products_of_weights_and_gradients() {
    let own = SparsifierPlan { criterion: SparsifierCriterion::Saliency, ..SparsifierPlan::TWO_OF_FOUR };
    let base = SparsityPlan::of_method(Method::SPARSIFIER, layers(), 60);
    let begin = SparseBegin::Step(1);
    let plan = SparsityPlan { sparsifier: Some(own.clone()), mask_every: 1, begin, ..base };
    let mut trainer = trainer(&plan);
    let mut differs = false;
    for _ in 0..4 {
        trainer.step().unwrap();
        for linear in masked(&trainer) {
            let gradient = CpuEngine.read(linear.weight().gradient().unwrap()).unwrap();
            let values = master(linear);
            let products: Vec<f32> = values.iter().zip(&gradient).map(|(w, g)| w * g).collect();
            let expected = own.rule.mask(matrix(linear, &products), 1.0).unwrap();
            assert_eq!(linear.masked().unwrap().0, &expected, "{}", linear.name());
            differs |= own.rule.mask(matrix(linear, &values), 1.0).unwrap() != expected;
        }
    }
    assert!(differs, "magnitudes would have chosen the same");
}

#[test]
fn flip_rates_are_the_shares_of_changed_elements() {
    let plan = cubic();
    let mut trainer = trainer(&plan);
    steps(&mut trainer, 3);
    let before: Vec<_> = masked(&trainer).map(|linear| linear.mask().unwrap().unwrap()).collect();
    let report = trainer.step().unwrap();
    let after: Vec<_> = masked(&trainer).map(|linear| linear.mask().unwrap().unwrap()).collect();
    let rates: Vec<f64> = after.iter().zip(&before).map(|(a, b)| a.flip_rate(b).unwrap()).collect();
    assert!(rates.iter().all(|rate| *rate > 0.0), "{rates:?}");
    assert_eq!(report.layer_flip_rates, rates);
    let elements: f64 = after.iter().map(|mask| (mask.rows() * mask.cols()) as f64).sum();
    let flips: u64 = after.iter().zip(&before).map(|(a, b)| a.flips(b).unwrap()).sum();
    assert_eq!(report.flip_rate, flips as f64 / elements);
}

#[test]
fn pruned_weights_train_stay_or_are_zero() {
    // Without weight decay, so that only gradients move weights.
    let settings = TrainingSettings { weight_decay: 0.0, ..training() };
    let begin = SparseBegin::Step(0);
    let constant = |masking| {
        let own = SparsifierPlan {
            rule: SparsifierRule::Unstructured,
            level: 0.5,
            in_place: masking == Masking::InPlace,
            ..SparsifierPlan::TWO_OF_FOUR
        };
        let gradient = match masking {
            Masking::StraightThrough => twofour::layer::WeightGradient::Dense,
            _ => twofour::layer::WeightGradient::Masked,
        };
        let base = SparsityPlan::of_method(Method::SPARSIFIER, layers(), 60);
        SparsityPlan { sparsifier: Some(own), mask_every: 5, weight_gradient: gradient, begin, ..base }
    };
    for masking in [Masking::StraightThrough, Masking::Masked, Masking::InPlace] {
        let mut trainer = trainer_with(constant(masking), settings.clone());
        let before: Vec<_> = masked(&trainer).map(|linear| (master(linear), linear.mask().unwrap().unwrap())).collect();
        assert!(masked(&trainer).all(|linear| linear.masked().unwrap().1 == masking));
        steps(&mut trainer, 4);
        for (linear, (values, mask)) in masked(&trainer).zip(&before) {
            let now = master(linear);
            assert_eq!(linear.mask().unwrap().as_ref(), Some(mask), "it is chosen after five steps");
            let pruned = |values: &[f32]| -> Vec<u32> {
                let is_pruned = |i: &usize| !mask.is_kept(i / mask.cols(), i % mask.cols());
                (0..values.len()).filter(is_pruned).map(|i| values[i].to_bits()).collect()
            };
            let (was, is) = (pruned(values), pruned(&now));
            assert_eq!(was.len(), values.len() / 2);
            match masking {
                Masking::StraightThrough => {
                    assert!(was.iter().zip(&is).filter(|(a, b)| a != b).count() > was.len() / 2)
                }
                Masking::Masked => assert!(was == is && is.iter().any(|bits| *bits != 0)),
                Masking::InPlace => assert!(is.iter().all(|bits| *bits == 0)),
            }
            assert!(now != *values, "kept weights train");
        }
        steps(&mut trainer, 16);
        let flips: u64 =
            masked(&trainer).zip(&before).map(|(l, (_, mask))| l.mask().unwrap().unwrap().flips(mask).unwrap()).sum();
        // What is zero in the weight is never kept again; what moved has grown back in part.
        assert_eq!(flips > 0, masking != Masking::InPlace, "{masking:?}: {flips}");
    }
}

#[test]
fn weights_in_place_lose_more_at_every_rise_and_regain_nothing() {
    let plan = in_place();
    let mut trainer = trainer(&plan);
    let mut zeros: BTreeMap<String, Vec<bool>> = BTreeMap::new();
    for step in 1..=12 {
        trainer.step().unwrap();
        for linear in masked(&trainer) {
            let now: Vec<bool> = master(linear).iter().map(|w| w.to_bits() == 0).collect();
            if let Some(before) = zeros.insert(linear.name().to_owned(), now.clone()) {
                assert!(before.iter().zip(&now).all(|(before, now)| !before || *now), "step {step}");
            }
            let share = now.iter().filter(|zero| **zero).count() as f64 / now.len() as f64;
            let expected = [0.0, 0.2, 0.4, 0.6][[2, 5, 8].iter().filter(|rise| step >= **rise).count()];
            assert!((share - expected).abs() < 1e-3, "step {step}: {share}");
        }
    }
}

#[test]
fn a_model_is_saved_as_squash_mask_leaves_it() {
    let directory = tempfile::tempdir().unwrap();
    let two_of_four = SparsityPlan { end: None, ..one_shot() };
    for (name, plan) in [("blocks", cubic()), ("2:4", two_of_four), ("in place", in_place())] {
        let mut trainer = trainer(&plan);
        steps(&mut trainer, 9);
        trainer.save(directory.path()).unwrap();
        // Masks and levels of the checkpoint, read without a trainer.
        let own = plan.sparsifier.as_ref().unwrap();
        let mut outside = Sparsifier::new(Regrowth::FromDense);
        let mut weights = BTreeMap::new();
        for linear in masked(&trainer) {
            let (rows, cols) = (linear.out_features(), linear.in_features());
            outside.prepare(linear.weight().name(), rows, cols, own.rule, own.level).unwrap();
            weights.insert(linear.weight().name().to_owned(), master(linear));
        }
        outside.load(directory.path().join(CHECKPOINT_FILE)).unwrap();
        let mut slices: BTreeMap<&str, &mut [f32]> =
            weights.iter_mut().map(|(name, values)| (name.as_str(), values.as_mut_slice())).collect();
        let squashed = outside.squash_mask(|name| slices.remove(name)).unwrap();
        assert!(squashed.iter().all(|parameter| parameter.level == own.level), "{name}");
        let path = directory.path().join("model.safetensors");
        let (engine, gpt) = trainer.engine_and_model();
        gpt.save(engine, &path, Overwrite::Yes, DataType::F32).unwrap();
        let saved = crate::model::Gpt::from_reader(&CpuEngine, &Reader::open(&path).unwrap()).unwrap();
        for linear in saved.linears().filter(|linear| weights.contains_key(linear.weight().name())) {
            assert_eq!(master(linear), weights[linear.weight().name()], "{name}");
        }
        let reader = Reader::open(&path).unwrap();
        let is_compressed = |layer: &String| reader.compressed_info(&format!("{layer}.weight")).is_ok();
        assert_eq!(layers().iter().all(is_compressed), name == "2:4", "{name}");
        assert_eq!(layers().iter().any(is_compressed), name == "2:4", "{name}");
        // What runs the model in memory computes with the same weights.
        let tokens: Vec<u32> = (0..12).collect();
        let logits = |model: &crate::model::Gpt<CpuEngine>| {
            Inference::<f32>::new(&CpuEngine, model).unwrap().session().logits(&tokens).unwrap()
        };
        // 2:4 kernels add in another order.
        let (found, expected) = (logits(trainer.model()), logits(&saved));
        assert!(found.len() == expected.len());
        assert!(found.iter().zip(&expected).all(|(a, b)| (a - b).abs() < 1e-4 * (1.0 + b.abs())), "{name}");
        fs::remove_file(&path).unwrap();
    }
}

#[test]
fn a_level_rises_at_a_step_that_is_skipped_too() {
    let mut trainer = trainer(&in_place());
    steps(&mut trainer, 4);
    let poisoned = trainer.model.parameters_mut().into_iter().find(|p| p.name() == "norm.bias").unwrap();
    poisoned.write(&CpuEngine, &[f32::NAN; 32]).unwrap();
    let report = trainer.step().unwrap();
    assert!(report.skipped && report.flip_rate > 0.0 && report.layer_flip_rates.len() == 4, "{report:?}");
    for linear in masked(&trainer) {
        let level = trainer.host_masks().next().unwrap().level(linear.weight().name()).unwrap();
        assert!((level - 0.4).abs() < 1e-12 && (linear.mask().unwrap().unwrap().density() - 0.6).abs() < 1e-3);
    }
}

#[test]
fn checkpoints_of_other_masks_are_refused_and_nothing_changes() {
    let directory = tempfile::tempdir().unwrap();
    let mut saved = trainer(&cubic());
    steps(&mut saved, 3);
    saved.save(directory.path()).unwrap();
    let mut other = trainer(&in_place());
    steps(&mut other, 3);
    let before = bits(&other);
    let error = other.resume(directory.path()).unwrap_err().to_string();
    assert!(error.contains("other sparsity"), "{error}");
    assert!(bits(&other) == before && other.steps_done() == 3);
}

#[test]
fn plans_that_contradict_themselves_are_refused() {
    let good = cubic();
    let own = good.sparsifier.clone().unwrap();
    let with = |own| SparsityPlan { sparsifier: Some(own), ..cubic() };
    let schedule = |schedule| with(SparsifierPlan { schedule, ..own.clone() });
    let rule = |rule| with(SparsifierPlan { rule, ..own.clone() });
    good.check().unwrap();
    let norm = crate::train::BlockNorm::L2;
    let saliency = SparsifierPlan { criterion: SparsifierCriterion::Saliency, ..own.clone() };
    for (bad, word) in [
        (SparsityPlan { sparsifier: None, ..cubic() }, "rule of its masks"),
        (SparsityPlan { begin: SparseBegin::Step(0), ..with(saliency) }, "gradient of the step before"),
        (SparsityPlan { method: Method::STE, ..cubic() }, "`ste`"),
        (SparsityPlan { observes: true, ..cubic() }, "observed"),
        (SparsityPlan { weight_gradient: twofour::layer::WeightGradient::Mvue, ..cubic() }, "MVUE"),
        (with(SparsifierPlan { in_place: true, ..own.clone() }), "in place"),
        (with(SparsifierPlan { level: 1.5, ..own.clone() }), "1.5"),
        (with(SparsifierPlan { level: f64::NAN, ..own.clone() }), "NaN"),
        (rule(SparsifierRule::WeightNorm { block: [0, 4], zeros: 0, norm }), "block"),
        (rule(SparsifierRule::WeightNorm { block: [1, 4], zeros: 5, norm }), "zeros"),
        (rule(SparsifierRule::NearlyDiagonal { nearliness: 4 }), "nearliness"),
        (schedule(LevelSchedule::Cubic { start_level: 0.9, start: 0, steps: 4 }), "0.9"),
        (schedule(LevelSchedule::Cubic { start_level: 0.1, start: 0, steps: 0 }), "at least 1"),
        (schedule(LevelSchedule::Steps { at: vec![3, 3], factors: vec![0.1, 0.2] }), "ascending"),
        (schedule(LevelSchedule::Steps { at: vec![3], factors: vec![0.1, 0.2] }), "as many"),
        (schedule(LevelSchedule::Steps { at: vec![3], factors: vec![2.0] }), "2"),
    ] {
        let message = bad.check().unwrap_err().to_string();
        assert!(message.contains(word), "{word}: {message}");
    }
    // A band that is wider than a weight is found when the first mask is chosen.
    let wide = SparsityPlan { begin: SparseBegin::Step(0), ..rule(SparsifierRule::NearlyDiagonal { nearliness: 99 }) };
    let error = Trainer::new(CpuEngine, &model(), &training(), wide, corpus()).unwrap_err().to_string();
    assert!(error.contains("nearliness") && error.contains("blocks.0.mlp.up.weight"), "{error}");
}

/// Each pattern holds in what was trained, and the model learns under it.
#[test]
fn every_pattern_learns_and_holds() {
    for text in ["4:8", "4:2:8", "block:8x8@0.5", "rows@0.25", "columns@0.25", "unstructured@0.6"] {
        let pattern: twofour::select::Sparsity = text.parse().unwrap();
        let rule = SparsifierRule::Pattern(PatternText(pattern));
        let level = if text.contains('@') { pattern.level().unwrap() } else { 1.0 };
        let own = SparsifierPlan { rule, level, ..SparsifierPlan::TWO_OF_FOUR };
        let base = SparsityPlan::of_method(Method::SPARSIFIER, layers(), 20);
        let begin = SparseBegin::Step(0);
        let mut trainer = trainer(&SparsityPlan { sparsifier: Some(own), mask_every: 5, begin, ..base });
        let before = trainer.validate(100).unwrap();
        steps(&mut trainer, 20);
        assert!(trainer.validate(100).unwrap() < before - 0.2, "{text}");
        for linear in masked(&trainer) {
            let mask = linear.mask().unwrap().unwrap();
            let found = twofour::verify::conformance_of_mask(&mask, pattern, twofour::Axis::Row, 1).unwrap();
            assert!(found.obeys() && mask.density() < 0.8, "{text}: {found:?}");
        }
    }
    // Half of the level prunes half of the groups, blocks or rows.
    let values: Vec<f32> = (0..256).map(|i| (i % 37) as f32 + 0.5).collect();
    let matrix = twofour::MatrixRef::new(16, 16, &values).unwrap();
    for (text, half, density) in [("4:8", 0.5, 0.75), ("block:4x4@0.5", 0.25, 0.75), ("rows@0.5", 0.25, 0.75)] {
        let rule = SparsifierRule::Pattern(PatternText(text.parse().unwrap()));
        assert_eq!(rule.mask(matrix, half).unwrap().density(), density, "{text}");
        assert_eq!(rule.mask(matrix, 0.0).unwrap().density(), 1.0, "{text}");
    }
    let vectors = SparsifierRule::Pattern(PatternText("4:2:8".parse().unwrap()));
    assert_eq!([0.0, 1.0].map(|level| vectors.mask(matrix, level).unwrap().density()), [1.0, 0.25]);
}

#[test]
fn a_band_around_the_diagonal_learns() {
    let rule = SparsifierRule::NearlyDiagonal { nearliness: 33 };
    let own = SparsifierPlan { rule, ..SparsifierPlan::TWO_OF_FOUR };
    let base = SparsityPlan::of_method(Method::SPARSIFIER, layers(), 60);
    let mut trainer = trainer(&SparsityPlan { sparsifier: Some(own), mask_every: 0, ..base });
    let before = trainer.validate(100).unwrap();
    steps(&mut trainer, 60);
    assert!(trainer.validate(100).unwrap() < before - 1.0);
    for linear in masked(&trainer) {
        let values = master(linear);
        assert_eq!(linear.masked().unwrap().0, &rule.mask(matrix(linear, &values), 1.0).unwrap());
    }
}

#[test]
fn levels_of_a_plan_are_listed_where_they_change() {
    let list = |schedule, [begin, end]: [u64; 2], every| {
        let plan = SparsifierPlan { schedule, level: 0.8, ..SparsifierPlan::TWO_OF_FOUR };
        plan.levels([begin, end], every)
    };
    assert_eq!(list(LevelSchedule::Constant, [5, 50], 3), [(5, 0.8)]);
    assert_eq!(list(LevelSchedule::OneShot { step: 9 }, [5, 50], 0), [(5, 0.0), (9, 0.8)]);
    let rises = list(LevelSchedule::Iterative { start: 4, every: 10, rounds: 4 }, [4, 30], 0);
    assert_eq!(rises.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [4, 14, 24]);
    let steps = LevelSchedule::Steps { at: vec![4, 8], factors: vec![0.5, 1.0] };
    assert_eq!(list(steps.clone(), [4, 50], 0), [(4, 0.4), (8, 0.8)]);
    assert!(steps.chooses_at(8) && !steps.chooses_at(9));
    let cubic = list(LevelSchedule::Cubic { start_level: 0.0, start: 10, steps: 1 << 39 }, [10, 1 << 40], 7);
    assert!(cubic.len() == 11 && cubic.is_sorted_by(|a, b| a.0 < b.0 && a.1 < b.1), "{cubic:?}");
    assert_eq!(cubic.last(), Some(&(10 + (1 << 39), 0.8)));
    assert!(cubic[1..10].iter().all(|(step, _)| step % 7 == 0));
}

#[test]
fn trial_runs_for_a_decay_leave_a_sparsifiers_layers_unobserved() {
    let own = SparsityPlan { layers: vec!["blocks.0.mlp.up".to_owned()], ..cubic() };
    let fst = SparsityPlan::of_method(Method::FST, vec!["blocks.1.mlp.up".to_owned()], 60);
    let plan = SparsityPlan { overrides: vec![own], ..fst };
    let search = DecaySearch { grid: vec![1e-3], steps: 4 };
    for strength in [None, Some(1e-3)] {
        let (_, trial) = search.run(CpuEngine, (&(&model()).into(), &training()), &plan, &corpus(), strength).unwrap();
        assert!(trial.flip_rate > 0.0, "{trial:?}");
    }
}
