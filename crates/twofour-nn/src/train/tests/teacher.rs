//! Learning from a teacher.

use super::{bits, layers, plans, steps, trainer_with, training};
use crate::{
    Error, Result,
    engine::{Memory as _, cpu::CpuEngine},
    model::{DistillationLoss, Gpt, TrainedModel as _},
    train::{SparsityPlan, Trainer, TrainingSettings, methods::Method},
};

const LOSS: DistillationLoss = DistillationLoss { divergence: 1.0, cross_entropy: 0.25, hidden: 0.5 };

/// A model of the student's sizes that has learned the text.
fn dense() -> Gpt<CpuEngine> {
    let mut trainer = trainer_with(SparsityPlan::dense(), TrainingSettings { steps: 40, ..training() });
    steps(&mut trainer, 40);
    trainer.model
}

fn student(plan: &SparsityPlan, teacher: Gpt<CpuEngine>, loss: DistillationLoss) -> Result<Trainer<CpuEngine>> {
    trainer_with(plan.clone(), training()).learn_from(teacher, loss)
}

#[test]
fn a_student_comes_nearer_to_its_teacher_while_its_zeros_stay() {
    let plan = SparsityPlan::of_method(Method::FIXED, layers(), 60);
    for loss in [DistillationLoss::default(), DistillationLoss { divergence: 0.0, hidden: 1.0, ..LOSS }, LOSS] {
        let mut trainer = student(&plan, dense(), loss).unwrap();
        let before = trainer.validate(8).unwrap();
        let losses: Vec<f64> = (0..30).map(|_| trainer.step().unwrap().loss).collect();
        assert!(losses[29] < 0.6 * losses[0], "{loss:?}: {losses:?}");
        assert!(trainer.validate(8).unwrap() < before, "{loss:?}");
        assert!(trainer.is_sparse());
    }
    // The loss is a mean over targets, however many passes a step has.
    let whole = student(&plan, dense(), LOSS).unwrap().step().unwrap();
    let settings = TrainingSettings { micro_batch: Some(1), ..training() };
    let parts = trainer_with(plan, settings).learn_from(dense(), LOSS).unwrap().step().unwrap();
    assert!((whole.loss - parts.loss).abs() < 1e-5 && (whole.gradient_norm / parts.gradient_norm - 1.0).abs() < 1e-4);
}

#[test]
fn students_resume_bit_for_bit_and_only_with_their_teacher() {
    let config = trainer_with(SparsityPlan::dense(), training()).model.config().clone();
    let teacher = |seed| Gpt::from_config(&CpuEngine, &config, seed).unwrap();
    let plans = plans().into_iter().filter(|(name, _)| ["fixed", "sr-ste", "sparsifier, cubic"].contains(name));
    for (name, plan) in plans {
        let mut whole = student(&plan, teacher(3), LOSS).unwrap();
        let expected = steps(&mut whole, 4);
        let directory = tempfile::tempdir().unwrap();
        let mut begun = student(&plan, teacher(3), LOSS).unwrap();
        steps(&mut begun, 2);
        begun.save(directory.path()).unwrap();
        let mut resumed = student(&plan, teacher(3), LOSS).unwrap();
        resumed.resume(directory.path()).unwrap();
        assert_eq!(steps(&mut resumed, 2), expected[2..], "{name}");
        assert!(bits(&resumed) == bits(&whole), "{name}");
        let others = [
            student(&plan, teacher(4), LOSS).unwrap(),
            student(&plan, teacher(3), DistillationLoss::default()).unwrap(),
            trainer_with(plan, training()),
        ];
        for mut other in others {
            let error = other.resume(directory.path()).unwrap_err();
            assert!(matches!(error, Error::OtherRun { what: "teacher or weights of its loss", .. }), "{name}: {error}");
        }
    }
}

#[test]
fn frozen_tables_stay_while_the_rest_trains_and_resumes() {
    let settings = TrainingSettings { frozen_embeddings: true, ..training() };
    let plan = SparsityPlan::of_method(Method::FIXED, layers(), 60);
    let begin = || trainer_with(plan.clone(), settings.clone()).learn_from(dense(), LOSS).unwrap();
    let masters = |trainer: &Trainer<CpuEngine>| -> Vec<(String, Vec<f32>)> {
        let parameters = trainer.model().parameters();
        let read = |p: &crate::parameter::Parameter<CpuEngine>| CpuEngine.read(p.master()).unwrap();
        parameters.into_iter().map(|p| (p.name().to_owned(), read(p))).collect()
    };
    let mut whole = begin();
    let before = masters(&whole);
    let expected = steps(&mut whole, 4);
    for ((name, before), (_, after)) in before.iter().zip(masters(&whole)) {
        let is_table = ["embedding.weight", "head.weight"].contains(&name.as_str());
        assert_eq!(*before == after, is_table, "{name}");
    }
    let directory = tempfile::tempdir().unwrap();
    let mut begun = begin();
    steps(&mut begun, 2);
    begun.save(directory.path()).unwrap();
    let mut resumed = begin();
    resumed.resume(directory.path()).unwrap();
    assert_eq!(steps(&mut resumed, 2), expected[2..]);
    assert!(masters(&resumed) == masters(&whole));
    // Trained tables are another run, and a table under a mask is none that stays.
    let mut other = student(&plan, dense(), LOSS).unwrap();
    assert!(matches!(other.resume(directory.path()), Err(Error::OtherRun { .. })));
    let head = SparsityPlan::of_method(Method::STE, vec!["head".to_owned()], 60);
    let model = Gpt::from_config(&CpuEngine, whole.model().config(), 1).unwrap();
    let refused = Trainer::with_model(CpuEngine, model, &settings, head, whole.data().clone());
    assert!(matches!(refused, Err(Error::Conflict { .. })));
}

#[test]
fn learned_masks_begin_as_the_zeros_of_a_pruned_model_and_choose_among_its_teachers_weights() {
    let plan = SparsityPlan::of_method(Method::LEARNABLE, layers(), 60);
    let pruned = |taught: &Gpt<CpuEngine>| {
        let mut model = Gpt::from_config(&CpuEngine, taught.config(), 1).unwrap();
        for (own, taught) in model.linears_mut().zip(taught.linears()) {
            let (rows, cols) = (taught.out_features(), taught.in_features());
            let values = CpuEngine.read(taught.weight().master()).unwrap();
            // The first two of every four, whatever their magnitude, a little larger.
            let kept = values.iter().enumerate().map(|(i, value)| if i % 4 < 2 { value * 1.1 } else { 0.0 });
            assert!(rows * cols == values.len() && cols % 4 == 0);
            own.weight_mut().write(&CpuEngine, &kept.collect::<Vec<_>>()).unwrap();
        }
        model
    };
    let data = trainer_with(SparsityPlan::dense(), training()).data().clone();
    let begin =
        |student: Gpt<CpuEngine>| Trainer::with_model(CpuEngine, student, &training(), plan.clone(), data.clone());
    let teacher = dense();
    let mut trainer = begin(pruned(&teacher)).unwrap().learn_from(dense(), LOSS).unwrap();
    for (linear, taught) in trainer.model().linears().zip(teacher.linears()) {
        let Some((mask, _)) = linear.masked() else { continue };
        let elements = (0..mask.rows()).flat_map(|row| (0..mask.cols()).map(move |col| (row, col)));
        let alike = elements.filter(|(row, col)| mask.is_kept(*row, *col) == (col % 4 < 2)).count();
        let share = alike as f64 / (mask.rows() * mask.cols()) as f64;
        assert!(share > 0.7, "{}: {share}", linear.name());
        let [own, taught] = [linear, taught].map(|linear| CpuEngine.read(linear.weight().master()).unwrap());
        assert!(own.iter().zip(&taught).enumerate().all(|(i, (own, taught))| i % 4 < 2 || own == taught));
    }
    let before = trainer.validate(8).unwrap();
    steps(&mut trainer, 50);
    assert!(trainer.validate(8).unwrap() < before && trainer.model().linears().any(|linear| linear.is_two_of_four()));
    // A teacher with its features in another order is not the model that was pruned.
    let mut other = dense();
    for linear in other.linears_mut() {
        let mut values = CpuEngine.read(linear.weight().master()).unwrap();
        values.reverse();
        linear.weight_mut().write(&CpuEngine, &values).unwrap();
    }
    let refused = begin(pruned(&teacher)).unwrap().learn_from(other, LOSS);
    assert!(matches!(refused, Err(Error::Setting { expected, .. }) if expected.contains("same order")));
}
