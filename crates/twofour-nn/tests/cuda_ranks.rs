//! On two devices: data parallel training against one device. With fewer devices the tests skip; with
//! `TWOFOUR_REQUIRE_TWO_GPUS` set they fail.
#![cfg(feature = "cuda")]

mod support;

use std::{
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use twofour::DataType;
use twofour_nn::{
    Error, Result,
    recipe::{Method, ModelKind, ModelSettings, TrainingSettings},
    train::{
        GradientReduction, SparsityPlan, StepReport, Trainer,
        ranks::{NcclReduction, Seat, train_together},
    },
};
use twofour_transformer::engine::{Kind, Memory as _, cuda::CudaEngine};

use support::{buffer, corpus, layers, two_engines};

type Member = (CudaEngine, Box<dyn GradientReduction<CudaEngine>>);
type Make = Arc<dyn Fn(CudaEngine) -> Result<Trainer<CudaEngine>> + Send + Sync>;

fn members(compute: DataType) -> Option<Vec<Member>> {
    let engines = two_engines(compute)?;
    let sums = NcclReduction::group(&engines).unwrap();
    Some(engines.into_iter().zip(sums.into_iter().map(|sums| Box::new(sums) as _)).collect())
}

fn make(plan: &SparsityPlan, micro_batch: Option<usize>) -> Make {
    let model = ModelSettings {
        kind: ModelKind::Gpt,
        layers: 2,
        width: 128,
        heads: 4,
        context: 64,
        feed_forward: Some(256),
        kv_heads: None,
        ..Default::default()
    };
    let training = TrainingSettings { batch: 4, micro_batch, steps: 300, warm_up: 4, seed: 9, ..Default::default() };
    let (corpus, plan) = (corpus(), plan.clone());
    Arc::new(move |engine| Trainer::new(engine, &model, &training, plan.clone(), corpus.clone()))
}

fn lead<R>(members: Vec<Member>, make: Make, work: impl FnOnce(&mut Trainer<CudaEngine>) -> Result<R>) -> Result<R> {
    train_together(members, make.clone(), |engine, seat| work(&mut make(engine)?.take(seat)?))
}

fn steps(trainer: &mut Trainer<CudaEngine>, count: usize) -> Result<Vec<StepReport>> {
    (0..count).map(|_| trainer.step()).collect()
}

fn numbers(reports: &[StepReport]) -> Vec<(u64, u64, u64)> {
    let of = |r: &StepReport| (r.loss.to_bits(), r.gradient_norm.to_bits(), r.flip_rate.to_bits());
    reports.iter().map(of).collect()
}

fn plans() -> Vec<(&'static str, SparsityPlan)> {
    let of = |method| SparsityPlan::of_method(method, layers(), 300);
    vec![
        ("dense", of(Method::DENSE)),
        ("ste", of(Method::STE)),
        ("sr-ste", of(Method::SR_STE)),
        ("fst", SparsityPlan { mask_every: 3, ..of(Method::FST) }),
        ("s-ste", of(Method::S_STE)),
        ("sparsifier", SparsityPlan { mask_every: 3, ..of(Method::SPARSIFIER) }),
    ]
}

#[test]
fn two_gpus_do_what_micro_batches_do() {
    for (compute, tolerance) in [(DataType::F32, 1e-4), (DataType::BF16, 1e-2), (DataType::F16, 1e-2)] {
        for (name, plan) in plans().into_iter().filter(|(name, _)| compute != DataType::F32 || *name == "dense") {
            let Some(members) = members(compute) else { return };
            let together = lead(members, make(&plan, None), |trainer| steps(trainer, 12)).unwrap();
            let Some(engine) = two_engines(compute).and_then(|mut engines| engines.pop()) else { return };
            let alone = steps(&mut make(&plan, Some(2))(engine).unwrap(), 12).unwrap();
            for (a, b) in together.iter().zip(&alone) {
                assert_eq!((a.skipped, a.targets), (b.skipped, b.targets), "{name} {compute}: {a:?}, {b:?}");
                if !a.skipped {
                    assert!((a.loss - b.loss).abs() < tolerance * b.loss, "{name} {compute}: {a:?}, {b:?}");
                }
            }
        }
    }
}

#[test]
fn two_runs_on_two_gpus_have_the_same_bits_and_so_has_one_that_is_resumed() {
    for (name, plan) in plans() {
        let folder = tempfile::tempdir().unwrap();
        let Some(first) = members(DataType::BF16) else { return };
        let save = folder.path().to_owned();
        let (before, after) = lead(first, make(&plan, None), move |trainer| {
            let before = steps(trainer, 4)?;
            trainer.save(&save)?;
            trainer.validate(4)?;
            Ok((numbers(&before), numbers(&steps(trainer, 5)?)))
        })
        .unwrap();
        let Some(second) = members(DataType::BF16) else { return };
        let again = lead(second, make(&plan, None), |trainer| Ok(numbers(&steps(trainer, 4)?))).unwrap();
        assert_eq!(again, before, "{name}");
        let Some(third) = members(DataType::BF16) else { return };
        let (begin, at) = (make(&plan, None), folder.path().to_owned());
        let resume: Make = Arc::new(move |engine| {
            let mut trainer = begin(engine)?;
            trainer.resume(&at)?;
            Ok(trainer)
        });
        let resumed = lead(third, resume, |trainer| Ok(numbers(&steps(trainer, 5)?))).unwrap();
        assert_eq!(resumed, after, "{name}");
    }
}

/// 250 steps, in which masks and weights are compared at steps 100 and 200.
#[test]
fn masks_of_two_gpus_stay_the_same() {
    let plan = SparsityPlan { mask_every: 5, ..SparsityPlan::of_method(Method::FST, layers(), 300) };
    let Some(members) = members(DataType::BF16) else { return };
    let reports = lead(members, make(&plan, None), |trainer| steps(trainer, 250)).unwrap();
    assert!(reports.iter().all(|report| !report.skipped) && reports[249].loss < reports[0].loss);
}

#[test]
fn sums_are_those_of_the_host() {
    let Some(members) = members(DataType::BF16) else { return };
    let (engines, sums): (Vec<_>, Vec<_>) = members.into_iter().unzip();
    let seats = Seat::group(sums);
    let values =
        |rank: usize, len: usize| -> Vec<f32> { (0..len).map(|i| (i % 97 + rank * 13) as f32 * 0.25).collect() };
    thread::scope(|scope| {
        for (engine, mut seat) in engines.into_iter().zip(seats) {
            scope.spawn(move || {
                for len in [1usize, 3, 1000, 1 << 20, (1 << 22) + 5] {
                    let rank = seat.rank().index();
                    let buffer = |len: usize| buffer(&engine, Kind::Wide, &values(rank, len));
                    let (mut gradient, mut loss) = (buffer(len), buffer(1));
                    seat.sum(vec![&mut gradient], &mut loss).unwrap();
                    let expected: Vec<f32> = values(0, len).iter().zip(values(1, len)).map(|(a, b)| a + b).collect();
                    assert!(engine.read(&gradient).unwrap() == expected, "{len}");
                    assert_eq!(engine.read(&loss).unwrap(), [expected[0]]);
                }
            });
        }
    });
}

#[test]
fn a_gpu_whose_rank_fails_stops_the_other_within_a_minute() {
    let Some(members) = members(DataType::BF16) else { return };
    let begin = make(&SparsityPlan::dense(), None);
    let main = thread::current().id();
    let failing: Make = Arc::new(move |engine| {
        if thread::current().id() != main {
            thread::sleep(Duration::from_secs(2));
            return Err(twofour_transformer::Error::Length { what: "memory of a rank", expected: 2, found: 1 }.into());
        }
        begin(engine)
    });
    let begun = Instant::now();
    let error = lead(members, failing, |trainer| trainer.step().map(drop)).unwrap_err();
    assert!(matches!(&error, Error::Rank { rank: 1, .. }), "{error}");
    assert!(begun.elapsed() < Duration::from_secs(60));
}

/// Rank 1 never begins a sum that rank 0 waits for on its device.
#[test]
fn a_sum_that_another_rank_never_begins_is_aborted() {
    let Some(members) = members(DataType::BF16) else { return };
    let (engines, sums): (Vec<_>, Vec<_>) = members.into_iter().unzip();
    let mut seats = Seat::group(sums);
    let (second, mut first) = (seats.pop().unwrap(), seats.pop().unwrap());
    let begun = Instant::now();
    thread::scope(|scope| {
        let engine = &engines[0];
        let waiting = scope.spawn(move || {
            let mut gradient = engine.zeros(Kind::Wide, 1 << 20).unwrap();
            let mut loss = engine.zeros(Kind::Wide, 1).unwrap();
            // It may be aborted while it is launched, or while the device waits.
            let launched = first.sum(vec![&mut gradient], &mut loss).and_then(|()| Ok(engine.read(&loss)?));
            launched.and_then(|_| first.check())
        });
        thread::sleep(Duration::from_secs(3));
        assert!(!waiting.is_finished());
        second.fail("on purpose");
        assert!(waiting.join().unwrap().is_err());
    });
    assert!(begun.elapsed() < Duration::from_secs(60));
}
