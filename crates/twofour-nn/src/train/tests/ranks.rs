//! Several ranks train as one does.

use std::{sync::Arc, thread, time::Duration};

use twofour::{Mask, layer::WeightGradient};

use super::{bits, corpus, layers, model, plans, steps, trainer, trainer_with, training};
use crate::{
    Error, Result,
    engine::{
        Memory as _, SparseLayer as _,
        cpu::{CpuBuffer, CpuEngine},
    },
    linear::SparsePrecision,
    train::{
        GradientReduction, SparsityPlan, StepReport, Trainer, TrainingSettings,
        methods::Method,
        ranks::{HostReduction, Rank, Seat, train_together},
    },
};

type Member = (CpuEngine, Box<dyn GradientReduction<CpuEngine>>);
type Make = Arc<dyn Fn(CpuEngine) -> Result<Trainer<CpuEngine>> + Send + Sync>;

fn members(ranks: usize) -> Vec<Member> {
    (0..ranks).map(|_| (CpuEngine, Box::new(HostReduction::new(1).unwrap()) as _)).collect()
}

fn make_with(plan: &SparsityPlan, training: TrainingSettings) -> Make {
    let (plan, corpus) = (plan.clone(), corpus());
    Arc::new(move |engine| Trainer::new(engine, &model(), &training, plan.clone(), corpus.clone()))
}

fn make(plan: &SparsityPlan) -> Make {
    make_with(plan, training())
}

/// Runs `work` on rank 0's trainer.
fn lead<R>(members: Vec<Member>, make: Make, work: impl FnOnce(&mut Trainer<CpuEngine>) -> Result<R>) -> Result<R> {
    train_together(members, make.clone(), |engine, seat| work(&mut make(engine)?.take(seat)?))
}

fn numbers(reports: &[StepReport]) -> Vec<(u64, u64, u64)> {
    let of = |r: &StepReport| (r.loss.to_bits(), r.gradient_norm.to_bits(), r.flip_rate.to_bits());
    reports.iter().map(of).collect()
}

/// How far losses are apart that differ by the order of sums alone: rounding to 8 bits makes steps of such differences,
/// and has a scale for each share of a batch.
fn tolerance(plan: &SparsityPlan) -> f64 {
    if plan.precision == SparsePrecision::Fp8 { 1e-3 } else { 1e-5 }
}

#[test]
fn ranks_do_what_micro_batches_do() {
    for (name, plan) in plans() {
        // Ranks draw other numbers than micro-batches do.
        let gradient = match plan.weight_gradient {
            WeightGradient::Mvue => WeightGradient::Dense,
            other => other,
        };
        let plan = SparsityPlan { weight_gradient: gradient, ..plan };
        for (ranks, micro_batch) in [(2, None), (2, Some(1)), (4, None)] {
            let own = TrainingSettings { micro_batch, ..training() };
            let together = lead(members(ranks), make_with(&plan, own), |t| Ok(steps(t, 12))).unwrap();
            let micro_batch = Some(micro_batch.unwrap_or(4 / ranks));
            let alone = steps(&mut trainer_with(plan.clone(), TrainingSettings { micro_batch, ..training() }), 12);
            for (a, b) in together.iter().zip(&alone) {
                let within = tolerance(&plan);
                assert!((a.loss - b.loss).abs() < within, "{name}, {ranks}, step {}: {} {}", a.step, a.loss, b.loss);
                let norm = (a.gradient_norm - b.gradient_norm).abs() / b.gradient_norm;
                assert!(norm < 10.0 * within, "{name}, {ranks}: {} and {}", a.gradient_norm, b.gradient_norm);
                assert_eq!((a.targets, a.is_sparse, a.step), (b.targets, b.is_sparse, b.step), "{name}");
            }
        }
    }
}

/// A rank that is late, by another time at every call.
#[derive(Debug)]
struct Late(HostReduction, u64);

impl GradientReduction<CpuEngine> for Late {
    fn ready(&mut self, rank: &Rank, gradients: Vec<&mut CpuBuffer>) -> Result<()> {
        self.1 += 1;
        thread::sleep(Duration::from_micros(self.1 * 977 % 1500));
        self.0.ready(rank, gradients)
    }

    fn finish(&mut self, rank: &Rank, loss: &mut CpuBuffer) -> Result<()> {
        self.0.finish(rank, loss)
    }

    fn refuse(&mut self, rank: &Rank) -> Result<()> {
        self.0.refuse(rank)
    }

    fn threads(&self) -> Option<Arc<rayon::ThreadPool>> {
        self.0.threads()
    }
}

#[test]
fn results_do_not_depend_on_which_rank_is_late() {
    let plan = SparsityPlan { mask_every: 2, ..SparsityPlan::of_method(Method::FST, layers(), 60) };
    let run = |late: Option<usize>| {
        let mut members = members(2);
        if let Some(rank) = late {
            members[rank].1 = Box::new(Late(HostReduction::new(1).unwrap(), 0));
        }
        lead(members, make(&plan), |t| Ok((numbers(&steps(t, 6)), bits(t)))).unwrap()
    };
    let expected = run(None);
    assert!(run(Some(0)) == expected && run(Some(1)) == expected);
}

#[test]
fn ranks_resume_exactly_and_one_goes_on_where_two_stopped() {
    for (name, plan) in plans() {
        let folder = tempfile::tempdir().unwrap();
        let at = folder.path().to_owned();
        let save = at.clone();
        let whole = lead(members(2), make(&plan), move |t| {
            steps(t, 5);
            t.save(&save)?;
            t.validate(4)?;
            let reports = steps(t, 5);
            Ok((numbers(&reports), bits(t), reports))
        });
        let (expected, expected_bits, reports) = whole.unwrap();
        let begin = make(&plan);
        let resume: Make = Arc::new(move |engine| {
            let mut trainer = begin(engine)?;
            trainer.resume(&at)?;
            Ok(trainer)
        });
        let resumed = lead(members(2), resume.clone(), |t| Ok((numbers(&steps(t, 5)), bits(t)))).unwrap();
        assert!(resumed == (expected, expected_bits), "{name}");
        let mut alone = resume(CpuEngine).unwrap();
        // The first sums differ in their order alone, but for random estimates.
        let first = steps(&mut alone, 1);
        let distance = (first[0].loss - reports[0].loss).abs();
        assert!(distance < tolerance(&plan), "{name}: {distance}");
        assert_eq!(first[0].step, 5);
    }
}

#[test]
fn gradients_that_one_rank_refuses_are_skipped_by_all() {
    let plan = SparsityPlan::of_method(Method::FST, layers(), 60);
    let poisoned: Make = {
        let make = make(&plan);
        Arc::new(move |engine| {
            let mut trainer = make(engine)?;
            let bias = trainer.model.parameters_mut().into_iter().find(|p| p.name() == "norm.bias").unwrap();
            let mut values = CpuEngine.read(bias.master())?;
            values[3] = f32::INFINITY;
            bias.write(&CpuEngine, &values)?;
            Ok(trainer)
        })
    };
    let error = lead(members(2), poisoned, |trainer| {
        let before = bits(trainer);
        let report = trainer.step()?;
        assert!(report.skipped && report.loss.is_nan());
        assert!(bits(trainer) == before);
        (0..40).try_for_each(|_| trainer.step().map(drop))
    });
    assert!(matches!(error, Err(Error::Diverged { .. })), "{error:?}");
}

#[test]
fn a_single_rank_that_refuses_is_enough() {
    let mut seats = Seat::<CpuEngine>::group(members(2).into_iter().map(|(_, reduction)| reduction).collect());
    let (second, first) = (seats.pop().unwrap(), seats.pop().unwrap());
    let run = |mut seat: Seat<CpuEngine>, refuses: bool| -> Vec<f32> {
        let mut found = vec![];
        for step in 0..3 {
            let buffer = || {
                let mut buffer = CpuEngine.zeros(crate::engine::Kind::Wide, 1).unwrap();
                CpuEngine.write(&mut buffer, &[1.5]).unwrap();
                buffer
            };
            let mut loss = buffer();
            let mut gradients = [buffer(), buffer()];
            for (index, gradient) in gradients.iter_mut().enumerate() {
                if refuses && step == 1 && index == 1 {
                    seat.reduction.refuse(&seat.rank).unwrap();
                    break;
                }
                seat.reduction.ready(&seat.rank, vec![gradient]).unwrap();
            }
            seat.reduction.finish(&seat.rank, &mut loss).unwrap();
            found.push(CpuEngine.read(&loss).unwrap()[0]);
        }
        found
    };
    thread::scope(|scope| {
        for (seat, refuses) in [(first, false), (second, true)] {
            scope.spawn(move || {
                let losses = run(seat, refuses);
                assert!(losses[1].is_nan() && losses[0] == 3.0 && losses[2] == 3.0, "{refuses}: {losses:?}");
            });
        }
    });
}

#[test]
fn a_rank_that_fails_or_panics_stops_the_others_and_says_why() {
    let plan = SparsityPlan::dense();
    let broken = |break_it: fn() -> Result<()>| -> Result<()> {
        let make = make(&plan);
        let main = thread::current().id();
        let own: Make = Arc::new(move |engine| {
            if thread::current().id() != main {
                break_it()?;
            }
            make(engine)
        });
        lead(members(4), own, |trainer| trainer.step().map(drop))
    };
    let error = broken(|| Err(Error::length("memory of a rank", 2, 1))).unwrap_err();
    assert!(error.to_string().contains("memory of a rank") && matches!(error, Error::Rank { .. }), "{error}");
    let error = broken(|| panic!("on purpose")).unwrap_err();
    assert!(matches!(&error, Error::Rank { reason, .. } if reason.contains("panicked")), "{error}");
}

#[test]
fn masks_that_differ_name_their_layer() {
    let plan = SparsityPlan { mask_every: 0, ..SparsityPlan::of_method(Method::STE, layers(), 60) };
    let differing = |layer: &'static str| -> Error {
        let make = make(&plan);
        let main = thread::current().id();
        let own: Make = Arc::new(move |engine| {
            let mut trainer = make(engine)?;
            if thread::current().id() != main {
                for linear in trainer.model.linears_mut().filter(|linear| linear.name() == layer) {
                    let mask = linear.sparse().unwrap().mask()?;
                    // The first group keeps what it pruned.
                    let other = Mask::from_fn(mask.rows(), mask.cols(), |row, col| {
                        mask.is_kept(row, col) != (row == 0 && col < 4)
                    });
                    let seed = linear.sparse().unwrap().seed()?;
                    linear.restore(other, None, seed)?;
                }
            }
            Ok(trainer)
        });
        lead(members(2), own, |trainer| trainer.step().map(drop)).unwrap_err()
    };
    for layer in ["blocks.0.mlp.down", "blocks.1.mlp.up"] {
        let error = differing(layer).to_string();
        assert!(error.contains(layer), "{error}");
    }
}

#[test]
fn weights_that_differ_are_found() {
    let make = make(&SparsityPlan::dense());
    let main = thread::current().id();
    let own: Make = Arc::new(move |engine| {
        let mut trainer = make(engine)?;
        if thread::current().id() != main {
            let bias = trainer.model.parameters_mut().into_iter().find(|p| p.name() == "norm.bias").unwrap();
            let mut values = CpuEngine.read(bias.master())?;
            values[3] += 0.5;
            bias.write(&CpuEngine, &values)?;
        }
        Ok(trainer)
    });
    let error = lead(members(2), own, |trainer| trainer.step().map(drop)).unwrap_err().to_string();
    assert!(error.contains("the weights"), "{error}");
}

#[test]
fn random_estimates_have_seeds_of_their_own_on_each_rank_and_checkpoints_those_of_rank_0() {
    let plan = SparsityPlan::of_method(Method::FST, layers(), 60);
    let seeds = |trainer: &Trainer<CpuEngine>| -> Vec<u64> {
        trainer.model.linears().filter_map(|linear| Some(linear.sparse()?.seed().unwrap())).collect()
    };
    let alone = seeds(&trainer(&plan));
    let seats = Seat::group(members(2).into_iter().map(|(_, reduction)| reduction).collect());
    let found: Vec<Vec<u64>> = thread::scope(|scope| {
        let take = |seat| seeds(&trainer(&plan).take(seat).unwrap());
        let threads: Vec<_> = seats.into_iter().map(|seat| scope.spawn(move || take(seat))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    assert_eq!(found[0], alone);
    assert!(found[1].iter().zip(&alone).all(|(other, own)| other.abs_diff(*own) > 1 << 32));
}

#[test]
fn a_batch_that_is_not_divided_evenly_is_refused() {
    let taken = |training: TrainingSettings, ranks: usize| {
        lead(members(ranks), make_with(&SparsityPlan::dense(), training), |_| Ok(())).map_err(|e| e.to_string())
    };
    let error = taken(training(), 3).unwrap_err();
    assert!(error.contains("4 for 3 ranks"), "{error}");
    let error = taken(TrainingSettings { batch: 12, micro_batch: Some(4), ..training() }, 2).unwrap_err();
    assert!(error.contains("micro_batch") && error.contains("4 for 6"), "{error}");
    taken(TrainingSettings { batch: 12, micro_batch: Some(12), ..training() }, 2).unwrap();
}
