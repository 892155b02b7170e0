//! Layers that change their form, observed masks, searched decay, and gradient descent.

use super::{bits, corpus, layers, mixed, model, steps, trainer, trainer_with, training};
use crate::{
    engine::{Memory as _, cpu::CpuEngine},
    linear::LayerForm,
    train::{
        Decay, DecaySearch, OptimizerKind, SparseBegin, SparsityPlan, Trainer, TrainingSettings,
        methods::{DecayTarget, Method},
    },
};

/// The form of every linear layer.
fn forms(trainer: &Trainer<CpuEngine>) -> Vec<(String, LayerForm)> {
    trainer.model.linears().map(|linear| (linear.name().to_owned(), linear.form())).collect()
}

#[test]
fn layers_change_their_form_each_by_its_own_part() {
    use LayerForm::{Dense, ThreeOfFour, TwoOfFour};
    let mut trainer = trainer(&mixed());
    for step in 0..60 {
        for (name, form) in forms(&trainer) {
            let expected = match name.as_str() {
                "blocks.0.mlp.up" if step < 50 => TwoOfFour,
                "blocks.0.mlp.down" => TwoOfFour,
                "blocks.1.attn.qkv" if step >= 4 => TwoOfFour,
                _ => Dense,
            };
            assert_eq!(form, expected, "{name}, step {step}");
        }
        let report = trainer.step().unwrap();
        assert!(report.observed_flip_rate.is_some());
        // The soft threshold selects at every step, FST at every third.
        let fst = report.layer_flip_rates[0];
        assert!((step + 1) % 3 == 0 || step >= 49 || fst == 0.0, "step {step}: {fst}");
    }
    let gradual = SparsityPlan::of_method(Method::GRADUAL, layers(), 60);
    let mut trainer = trainer_with(gradual, training());
    for step in 0..60 {
        let expected = if step < 6 {
            Dense
        } else if step < 18 {
            ThreeOfFour
        } else {
            TwoOfFour
        };
        for (name, form) in forms(&trainer) {
            assert_eq!(form, if name.contains("mlp") { expected } else { Dense }, "{name}, step {step}");
        }
        trainer.step().unwrap();
    }
}

#[test]
fn observed_masks_change_nothing_and_flip_as_those_that_are_used() {
    let dense =
        |observes| SparsityPlan { observes, layers: if observes { layers() } else { vec![] }, ..SparsityPlan::dense() };
    let (mut plain, mut observed) = (trainer(&dense(false)), trainer(&dense(true)));
    let (a, b) = (steps(&mut plain, 6), steps(&mut observed, 6));
    assert!(bits(&plain) == bits(&observed));
    assert!(a.iter().all(|r| r.observed_flip_rate.is_none()));
    assert!(b.iter().all(|r| r.observed_flip_rate.is_some_and(|rate| rate > 0.0 && rate < 0.5)), "{b:?}");
    for method in [Method::STE, Method::S_STE] {
        let plan = SparsityPlan { observes: true, ..SparsityPlan::of_method(method, layers(), 60) };
        for report in steps(&mut trainer(&plan), 6) {
            assert_eq!(report.observed_flip_rate, Some(report.flip_rate), "{method:?}");
        }
    }
}

#[test]
fn gradient_descent_learns_with_decay_on_the_gradient_and_on_the_weight() {
    let settings = TrainingSettings {
        optimizer: OptimizerKind::Sgd,
        learning_rate: 0.3,
        final_learning_rate: 0.03,
        weight_decay: 1e-4,
        ..training()
    };
    let mut ends = vec![];
    for target in [DecayTarget::Gradient, DecayTarget::Weight] {
        let decay = Some(Decay { strength: 0.05, target });
        let plan = SparsityPlan { decay, ..SparsityPlan::of_method(Method::SR_STE, layers(), 60) };
        let mut trainer = trainer_with(plan, settings.clone());
        assert!(trainer.model.parameters().iter().all(|p| p.moments().unwrap().len() == 1));
        steps(&mut trainer, 60);
        ends.push(trainer.validate(100).unwrap());
    }
    assert!(ends.iter().all(|loss| *loss < 4.0) && ends[0] != ends[1], "{ends:?}");
    let plan = SparsityPlan::of_method(Method::STEP, layers(), 60);
    let error = Trainer::new(CpuEngine, &model(), &settings, plan, corpus()).unwrap_err().to_string();
    assert!(error.contains("second moments"), "{error}");
}

#[test]
fn second_moments_of_step_are_frozen_until_its_own_end() {
    let own = "blocks.0.mlp.up";
    let others = SparsityPlan::of_method(Method::STE, vec!["blocks.0.mlp.down".to_owned()], 60);
    for overrides in [vec![], vec![others]] {
        let plan = SparsityPlan {
            begin: SparseBegin::Settled { earliest: 2, latest: 5 },
            end: Some(9),
            overrides,
            ..SparsityPlan::of_method(Method::STEP, vec![own.to_owned()], 60)
        };
        let mut trainer = trainer(&plan);
        let second_moment = |trainer: &Trainer<CpuEngine>| -> Vec<u32> {
            let parameters = trainer.model.parameters();
            let weight = parameters.iter().find(|p| p.name() == format!("{own}.weight")).unwrap();
            CpuEngine.read(weight.moments().unwrap()[1]).unwrap().into_iter().map(f32::to_bits).collect()
        };
        for step in 0..14 {
            let before = second_moment(&trainer);
            trainer.step().unwrap();
            let moves = second_moment(&trainer) != before;
            let form = trainer.plan.form_at(step, true);
            match step {
                0..2 => assert!(moves, "dense, step {step}"),
                6..9 => assert!(!moves && form == LayerForm::TwoOfFour, "2:4, step {step}"),
                9.. => assert!(moves && form == LayerForm::Dense, "dense again, step {step}"),
                // It switches after one of these, the last of which is the first past `latest`.
                _ => {}
            }
        }
    }
}

#[test]
fn trials_find_the_strength_whose_masks_settle() {
    let plan = SparsityPlan::of_method(Method::FST, layers(), 60);
    let search = DecaySearch { grid: vec![1e-6, 1e-2, 10.0], steps: 20 };
    let run =
        |strength| search.run(CpuEngine, (&(&model()).into(), &training()), &plan, &corpus(), strength).unwrap().1;
    let trials: Vec<_> = search.trials().map(run).collect();
    assert!(trials.iter().all(|trial| trial.flip_rate > 0.0), "{trials:?}");
    // The same again: from the same weights over the same batches.
    assert_eq!(run(Some(1e-2)), trials[2]);
    // What decays strongly flips less.
    assert!(trials[3].flip_rate < 0.7 * trials[1].flip_rate, "{trials:?}");
    let choice = search.choose(&trials).unwrap();
    assert!(choice.candidates.len() == 3 && search.grid.contains(&choice.strength));
    let mut plan = plan;
    plan.set_decay(choice.strength);
    assert_eq!(plan.decay.unwrap().strength, choice.strength);
}
