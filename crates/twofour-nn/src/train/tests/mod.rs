//! Training as a whole: it learns, and it resumes bit for bit.

mod candle;
mod checkpoint;
mod encoder;
mod forms;
mod ranks;
mod sparsifier;
mod teacher;

use std::sync::Arc;

use twofour::{
    layer::{MaskRule, WeightGradient},
    select::Transposable,
};

use super::{
    BlockNorm, Corpus, Decay, LevelSchedule, SparseBegin, SparsifierPlan, SparsifierRule, SparsityPlan, StepReport,
    Trainer,
};
use crate::{
    Error, Result,
    engine::{Memory as _, SparseLayer as _, cpu::CpuEngine},
    linear::SparsePrecision,
    recipe::{ModelKind, ModelSettings},
    settings::OwnValue,
    train::{
        OptimizerKind, TrainingSettings,
        methods::{DecayTarget, Method, SwitchMean},
    },
};

fn model() -> ModelSettings {
    ModelSettings {
        kind: ModelKind::Gpt,
        layers: 2,
        width: 32,
        heads: 2,
        kv_heads: None,
        context: 16,
        feed_forward: Some(64),
        ..Default::default()
    }
}

fn training() -> TrainingSettings {
    TrainingSettings {
        batch: 4,
        steps: 60,
        learning_rate: 3e-3,
        final_learning_rate: 3e-4,
        warm_up: 4,
        seed: 9,
        ..Default::default()
    }
}

fn layers() -> Vec<String> {
    (0..2).flat_map(|layer| ["up", "down"].map(|part| format!("blocks.{layer}.mlp.{part}"))).collect()
}

fn down() -> Vec<String> {
    layers().into_iter().filter(|name| name.ends_with("down")).collect()
}

fn corpus() -> Arc<Corpus> {
    let text = b"Two of every four weights are kept, and the others are zero. ".repeat(30);
    Arc::new(Corpus::new(text, 0.1).unwrap())
}

fn trainer_with(plan: SparsityPlan, training: TrainingSettings) -> Trainer<CpuEngine> {
    Trainer::new(CpuEngine, &model(), &training, plan, corpus()).unwrap()
}

fn trainer(plan: &SparsityPlan) -> Trainer<CpuEngine> {
    trainer_with(plan.clone(), training())
}

/// Plans of every method, and with settings that the defaults do not reach.
fn plans() -> Vec<(&'static str, SparsityPlan)> {
    let of = |method| SparsityPlan::of_method(method, layers(), 60);
    let fst = SparsityPlan { mask_every: 3, ..of(Method::FST) };
    vec![
        ("dense", of(Method::DENSE)),
        ("fixed", of(Method::FIXED)),
        ("ste", of(Method::STE)),
        ("ste, every 3", SparsityPlan { mask_every: 3, ..of(Method::STE) }),
        ("ste, steps 3 to 7", SparsityPlan { begin: SparseBegin::Step(3), end: Some(7), ..of(Method::STE) }),
        ("sr-ste", of(Method::SR_STE)),
        (
            "decay of weights",
            SparsityPlan { decay: Some(Decay { strength: 0.1, target: DecayTarget::Weight }), ..of(Method::SR_STE) },
        ),
        ("fst", fst.clone()),
        ("fst to step 8", SparsityPlan { end: Some(8), ..fst }),
        ("s-ste", of(Method::S_STE)),
        (
            "gradual, then dense",
            SparsityPlan {
                begin: SparseBegin::Step(2),
                two_of_four_from: Some(5),
                end: Some(7),
                observes: true,
                ..of(Method::GRADUAL)
            },
        ),
        ("gradual", of(Method::GRADUAL)),
        ("adams", {
            let mut plan = of(Method::ADAMS);
            plan.own.set("dense_until_step", OwnValue::Number(5.0));
            plan
        }),
        ("fst and others", mixed()),
        (
            "step, option 2",
            SparsityPlan {
                begin: SparseBegin::Settled { earliest: 2, latest: 5 },
                switch_mean: SwitchMean::Geometric,
                ..of(Method::STEP)
            },
        ),
        (
            "activation, then dense",
            SparsityPlan { end: Some(7), ..SparsityPlan::of_method(Method::ACTIVATION, down(), 60) },
        ),
        ("s-ste, fp8", SparsityPlan { precision: SparsePrecision::Fp8, ..of(Method::S_STE) }),
        ("fst, fp8", SparsityPlan { precision: SparsePrecision::Fp8, mask_every: 3, ..of(Method::FST) }),
        ("s-ste, fp8", SparsityPlan { precision: SparsePrecision::Fp8, ..of(Method::S_STE) }),
        ("fst, fp8", SparsityPlan { precision: SparsePrecision::Fp8, mask_every: 3, ..of(Method::FST) }),
        ("step", SparsityPlan { begin: SparseBegin::Settled { earliest: 2, latest: 5 }, ..of(Method::STEP) }),
        ("sparsifier, cubic", cubic()),
        ("sparsifier, in place", in_place()),
        ("sparsifier, one shot, then dense", one_shot()),
        (
            "sparsifier and others",
            SparsityPlan { overrides: mixed().overrides, layers: vec!["blocks.0.mlp.up".to_owned()], ..cubic() },
        ),
    ]
}

/// Masks of whole blocks whose level rises every second step, with straight-through gradients.
fn cubic() -> SparsityPlan {
    let rule = SparsifierRule::WeightNorm { block: [4, 4], zeros: 12, norm: BlockNorm::L1 };
    let schedule = LevelSchedule::Cubic { start_level: 0.1, start: 1, steps: 7 };
    SparsityPlan {
        sparsifier: Some(SparsifierPlan { rule, level: 0.75, schedule, ..SparsifierPlan::TWO_OF_FOUR }),
        mask_every: 2,
        begin: SparseBegin::Step(1),
        ..SparsityPlan::of_method(Method::SPARSIFIER, layers(), 60)
    }
}

/// Unstructured masks in three rises, whose pruned weights stay zero.
fn in_place() -> SparsityPlan {
    let schedule = LevelSchedule::Iterative { start: 2, every: 3, rounds: 3 };
    SparsityPlan {
        sparsifier: Some(SparsifierPlan {
            rule: SparsifierRule::Unstructured,
            level: 0.6,
            schedule,
            in_place: true,
            ..SparsifierPlan::TWO_OF_FOUR
        }),
        weight_gradient: WeightGradient::Masked,
        mask_every: 0,
        begin: SparseBegin::Step(2),
        ..SparsityPlan::of_method(Method::SPARSIFIER, layers(), 60)
    }
}

/// 2:4 for some steps under one mask, with masked gradients.
fn one_shot() -> SparsityPlan {
    let schedule = LevelSchedule::OneShot { step: 3 };
    SparsityPlan {
        sparsifier: Some(SparsifierPlan { schedule, ..SparsifierPlan::TWO_OF_FOUR }),
        weight_gradient: WeightGradient::Masked,
        mask_every: 0,
        begin: SparseBegin::Step(3),
        end: Some(8),
        ..SparsityPlan::of_method(Method::SPARSIFIER, layers(), 60)
    }
}

/// FST, but for one layer that has another method, one that becomes 2:4 later, and one that is observed alone.
fn mixed() -> SparsityPlan {
    let of = |method, name: &str| SparsityPlan::of_method(method, vec![name.to_owned()], 60);
    SparsityPlan {
        mask_every: 3,
        overrides: vec![
            of(Method::S_STE, "blocks.0.mlp.down"),
            SparsityPlan { begin: SparseBegin::Step(4), ..of(Method::STE, "blocks.1.attn.qkv") },
            SparsityPlan { observes: true, layers: vec!["blocks.1.mlp.up".to_owned()], ..SparsityPlan::dense() },
        ],
        ..of(Method::FST, "blocks.0.mlp.up")
    }
}

fn steps(trainer: &mut Trainer<CpuEngine>, count: usize) -> Vec<StepReport> {
    let untimed = |report: StepReport| StepReport { seconds: 0.0, ..report };
    (0..count).map(|_| untimed(trainer.step().unwrap())).collect()
}

/// Parameters and moments, bit by bit.
fn bits(trainer: &Trainer<CpuEngine>) -> Vec<u32> {
    let mut all = vec![];
    for parameter in trainer.model.parameters() {
        for buffer in [parameter.master()].into_iter().chain(parameter.moments().into_iter().flatten()) {
            all.extend(CpuEngine.read(buffer).unwrap().iter().map(|v| v.to_bits()));
        }
    }
    all
}

#[test]
fn a_llama_learns_dense_and_sparse() {
    let model = ModelSettings { kind: ModelKind::Llama, heads: 4, kv_heads: Some(2), ..model() };
    for method in [Method::DENSE, Method::STE] {
        let plan = SparsityPlan::of_method(method, layers(), 60);
        let mut trainer = Trainer::new(CpuEngine, &model, &training(), plan, corpus()).unwrap();
        let before = trainer.validate(4).unwrap();
        while !trainer.is_finished() {
            trainer.step().unwrap();
        }
        let after = trainer.validate(4).unwrap();
        assert!(after < before - 0.5, "{method:?}: {before} to {after}");
    }
}

#[test]
fn every_method_learns() {
    for (name, plan) in plans() {
        let mut trainer = trainer(&plan);
        let before = trainer.validate(100).unwrap();
        assert!((before - 256f64.ln()).abs() < 0.2, "{name}: an untrained model knows nothing, found {before}");
        let reports = steps(&mut trainer, 60);
        let after = trainer.validate(100).unwrap();
        assert!(after < 2.8, "{name}: {before} before, {after} after");
        assert!(trainer.is_finished() && reports.iter().all(|r| r.targets == 64 && r.gradient_norm > 0.0));
        assert_eq!(trainer.validate(100).unwrap(), after, "{name}: validation changes nothing");
        let flips = reports.iter().filter(|report| report.flip_rate > 0.0).count();
        assert_eq!(
            flips > 0,
            !(matches!(name, "dense" | "fixed" | "adams")
                || name.starts_with("activation")
                || name.contains("one shot")),
            "{name}: {flips} steps with flips"
        );
    }
}

#[test]
fn validation_between_steps_changes_nothing() {
    for (name, plan) in plans() {
        let (mut quiet, mut curious) = (trainer(&plan), trainer(&plan));
        for _ in 0..8 {
            curious.validate(4).unwrap();
            assert_eq!(steps(&mut quiet, 1), steps(&mut curious, 1), "{name}");
        }
        assert!(bits(&quiet) == bits(&curious), "{name}");
    }
}

#[test]
fn micro_batches_add_up_to_the_batch() {
    for (name, plan) in plans() {
        // Scales of 8-bit floats and tiles of activations are those of a micro-batch, too.
        if plan.weight_gradient == WeightGradient::Mvue
            || plan.precision == SparsePrecision::Fp8
            || plan.method == Method::ACTIVATION
        {
            continue;
        }
        let mut whole = trainer(&plan);
        let mut parts = trainer_with(plan, TrainingSettings { micro_batch: Some(1), ..training() });
        for (a, b) in steps(&mut whole, 3).iter().zip(steps(&mut parts, 3)) {
            assert!((a.loss - b.loss).abs() < 1e-5, "{name}: {} and {}", a.loss, b.loss);
            let norm = (a.gradient_norm - b.gradient_norm).abs() / a.gradient_norm;
            assert!(norm < 1e-4, "{name}: {} and {}", a.gradient_norm, b.gradient_norm);
        }
    }
}

#[test]
fn mvue_takes_a_seed_for_each_micro_batch_and_layers_have_seeds_far_apart() {
    let plan =
        SparsityPlan { weight_gradient: WeightGradient::Mvue, ..SparsityPlan::of_method(Method::STE, layers(), 60) };
    let seeds = |trainer: &Trainer<CpuEngine>| -> Vec<u64> {
        trainer.model.linears().filter_map(|linear| Some(linear.sparse()?.seed().unwrap())).collect()
    };
    let mut parts = trainer_with(plan, TrainingSettings { micro_batch: Some(1), ..training() });
    let before = seeds(&parts);
    assert!((1..before.len()).all(|i| before[..i].iter().all(|other| other.abs_diff(before[i]) > 1 << 32)));
    steps(&mut parts, 2);
    assert!(seeds(&parts).iter().zip(before).all(|(after, before)| *after == before + 8));
}

#[test]
fn layers_change_form_where_the_plan_says() {
    let plan = SparsityPlan {
        begin: SparseBegin::Step(3),
        end: Some(7),
        ..SparsityPlan::of_method(Method::STE, layers(), 60)
    };
    let mut trainer = trainer(&plan);
    let sparse: Vec<bool> = steps(&mut trainer, 10).iter().map(|report| report.is_sparse).collect();
    assert_eq!(sparse, [false, false, false, true, true, true, true, false, false, false]);
    let step = SparsityPlan {
        begin: SparseBegin::Settled { earliest: 2, latest: 5 },
        ..SparsityPlan::of_method(Method::STEP, layers(), 60)
    };
    let reports = steps(&mut super::tests::trainer(&step), 10);
    let first = reports.iter().position(|report| report.is_sparse).unwrap();
    assert!((3..=6).contains(&first), "{first}");
    assert!(reports[first..].iter().all(|report| report.is_sparse));
}

#[test]
fn masks_are_chosen_every_so_often() {
    let every = |mask_every| SparsityPlan { mask_every, ..SparsityPlan::of_method(Method::STE, layers(), 60) };
    let selected = |mask_every| -> Vec<bool> {
        steps(&mut trainer(&every(mask_every)), 7).iter().map(|r| !r.layer_flip_rates.is_empty()).collect()
    };
    assert_eq!(selected(1), [true; 7]);
    assert_eq!(selected(3), [false, false, true, false, false, true, false]);
    assert_eq!(selected(0), [false; 7]);
    // Transposable masks are 2:4 along columns too.
    let plan = SparsityPlan { rule: MaskRule::Transposable(Transposable::GreedyAbs), ..every(2) };
    let mut trainer = trainer(&plan);
    steps(&mut trainer, 4);
    for linear in trainer.model.linears().filter(|linear| linear.sparse().is_some()) {
        let mask = linear.sparse().unwrap().mask().unwrap();
        mask.verify(twofour::Pattern::TWO_FOUR, twofour::Axis::Column).unwrap();
        mask.verify(twofour::Pattern::TWO_FOUR, twofour::Axis::Row).unwrap();
    }
}

#[test]
fn pruned_weights_shrink_by_decay_alone() {
    // With a learning rate for decay only: gradients of pruned weights are masked.
    let decay = Some(Decay { strength: 0.5, target: DecayTarget::Weight });
    let plan = SparsityPlan { decay, ..SparsityPlan::of_method(Method::FIXED, layers(), 60) };
    let settings = TrainingSettings { weight_decay: 0.0, ..training() };
    let mut trainer = trainer_with(plan, settings);
    let read = |trainer: &Trainer<CpuEngine>| {
        let linear = trainer.model.linears().find(|linear| linear.sparse().is_some()).unwrap();
        (CpuEngine.read(linear.weight().master()).unwrap(), linear.sparse().unwrap().mask().unwrap())
    };
    let (before, mask) = read(&trainer);
    let rate = trainer.step().unwrap().learning_rate;
    let (after, same) = read(&trainer);
    assert_eq!(mask, same);
    let left = (1.0 - rate * 0.5) as f32;
    for (i, (before, after)) in before.iter().zip(&after).enumerate() {
        if !mask.is_kept(i / mask.cols(), i % mask.cols()) {
            assert_eq!(*after, before * left);
        }
    }
}

#[test]
fn steps_that_are_not_finite_are_skipped_and_counted() {
    for (method, optimizer) in [
        (Method::DENSE, OptimizerKind::Adamw),
        (Method::STE, OptimizerKind::Adamw),
        (Method::FST, OptimizerKind::Adamw),
        (Method::STE, OptimizerKind::Sgd),
        (Method::GRADUAL, OptimizerKind::Sgd),
    ] {
        let mut plan = SparsityPlan { observes: true, ..SparsityPlan::of_method(method, layers(), 60) };
        if method == Method::GRADUAL {
            // The step that is skipped is of a 3:4 layer, and the next one of a 2:4 layer.
            (plan.begin, plan.two_of_four_from) = (SparseBegin::Step(1), Some(3));
        }
        let mut trainer = trainer_with(plan, TrainingSettings { optimizer, ..training() });
        steps(&mut trainer, 2);
        let before = bits(&trainer);
        let poison = |trainer: &mut Trainer<CpuEngine>, value: f32| {
            let bias = trainer.model.parameters_mut().into_iter().find(|p| p.name() == "norm.bias").unwrap();
            let mut values = CpuEngine.read(bias.master()).unwrap();
            let old = std::mem::replace(&mut values[3], value);
            bias.write(&CpuEngine, &values).unwrap();
            old
        };
        let good = poison(&mut trainer, f32::NAN);
        let report = trainer.step().unwrap();
        assert!(report.skipped && report.skipped_so_far == 1 && trainer.skipped_steps() == 1, "{method:?}");
        assert!(report.flip_rate == 0.0 && report.observed_flip_rate.is_none(), "{report:?}");
        poison(&mut trainer, good);
        assert!(bits(&trainer) == before, "{method:?}");
        assert!(!trainer.step().unwrap().skipped && bits(&trainer) != before);
        poison(&mut trainer, f32::INFINITY);
        let error = (0..40).find_map(|_| trainer.step().err()).unwrap();
        assert!(matches!(error, Error::Diverged { count: 30, .. }), "{error}");
    }
}

#[test]
fn settings_out_of_range_are_named() -> Result<()> {
    let new = |training: TrainingSettings| {
        Trainer::new(CpuEngine, &model(), &training, SparsityPlan::dense(), corpus()).map(|_| ())
    };
    new(TrainingSettings { clip_norm: f64::INFINITY, ..training() })?;
    for (bad, word) in [
        (TrainingSettings { batch: 0, ..training() }, "batch"),
        (TrainingSettings { micro_batch: Some(3), ..training() }, "micro_batch"),
        (TrainingSettings { learning_rate: f64::NAN, ..training() }, "learning_rate"),
        (TrainingSettings { warm_up: 1000, ..training() }, "warm_up"),
        (TrainingSettings { weight_decay: -1.0, ..training() }, "weight_decay"),
        (TrainingSettings { beta2: 1.0, ..training() }, "beta2"),
    ] {
        let message = new(bad).unwrap_err().to_string();
        assert!(message.contains(word), "{message}");
    }
    let plan =
        SparsityPlan { layers: vec!["blocks.9.mlp.up".to_owned()], ..SparsityPlan::of_method(Method::STE, vec![], 60) };
    let error = Trainer::new(CpuEngine, &model(), &training(), plan, corpus()).unwrap_err().to_string();
    assert!(error.contains("blocks.9.mlp.up"), "{error}");
    Ok(())
}
