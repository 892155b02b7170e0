//! A run that is killed at random moments, and goes on from its checkpoint each time, ends with the bytes of a run that
//! was left alone.

#[cfg(feature = "cuda")]
mod support;

use std::{
    env, fs,
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use twofour_nn::{
    model::CHECKPOINT_FILE,
    recipe::{Method, ModelKind, ModelSettings, TrainingSettings},
    train::{BlockNorm, Corpus, LevelSchedule, SparseBegin, SparsifierPlan, SparsifierRule, SparsityPlan, Trainer},
};
use twofour_transformer::engine::{Engine, cpu::CpuEngine};

/// The child's folder; without it, the child's test does nothing.
const FOLDER: &str = "TWOFOUR_NN_KILLED_RUN";

fn trainer<E: Engine>(engine: E) -> Trainer<E> {
    let model = ModelSettings {
        kind: ModelKind::Gpt,
        layers: 1,
        width: 32,
        heads: 2,
        kv_heads: None,
        context: 16,
        feed_forward: Some(64),
        ..Default::default()
    };
    let training = TrainingSettings { batch: 4, steps: 150, warm_up: 4, seed: 3, ..Default::default() };
    // One layer is 2:4, with MVUE gradients; the other has masks of a sparsifier, whose level rises until step 100.
    let of = |method, part: &str| SparsityPlan::of_method(method, vec![format!("blocks.0.mlp.{part}")], training.steps);
    let rule = SparsifierRule::WeightNorm { block: [2, 4], zeros: 6, norm: BlockNorm::L1 };
    let schedule = LevelSchedule::Cubic { start_level: 0.0, start: 10, steps: 90 };
    let masks = SparsifierPlan { rule, level: 0.8, schedule, ..SparsifierPlan::TWO_OF_FOUR };
    let begin = SparseBegin::Step(10);
    let own = SparsityPlan { sparsifier: Some(masks), mask_every: 4, begin, ..of(Method::SPARSIFIER, "down") };
    let plan = SparsityPlan { mask_every: 3, overrides: vec![own], ..of(Method::FST, "up") };
    let text = b"Two of every four weights are kept, and the others are zero. ".repeat(30);
    Trainer::new(engine, &model, &training, plan, Arc::new(Corpus::new(text, 0.1).unwrap())).unwrap()
}

/// Trains to the end, from the checkpoint if there is one, and saves after every step.
fn run<E: Engine>(engine: E, folder: &Path) {
    let mut trainer = trainer(engine);
    if folder.join(CHECKPOINT_FILE).exists() {
        trainer.resume(folder).unwrap();
    }
    while !trainer.is_finished() {
        trainer.step().unwrap();
        trainer.save(folder).unwrap();
    }
}

#[test]
fn child() {
    if let Some(folder) = env::var_os(FOLDER) {
        run(CpuEngine, Path::new(&folder));
    }
}

#[test]
fn a_run_that_is_killed_ends_as_one_that_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let (whole, killed) = (directory.path().join("whole"), directory.path().join("killed"));
    run(CpuEngine, &whole);
    let start = || {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "child"]).env(FOLDER, &killed).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    };
    let mut kills = 0;
    for round in 0u64..20 {
        let mut child = start();
        // From a few milliseconds, while it starts or writes its first checkpoint, to some steps later.
        thread::sleep(Duration::from_millis(5 + round * 37 % 90));
        kills += u32::from(child.try_wait().unwrap().is_none());
        child.kill().unwrap();
        child.wait().unwrap();
    }
    assert!(kills > 0, "every child was done before it could be killed");
    assert!(start().wait().unwrap().success());
    let read = |folder: &Path| fs::read(folder.join(CHECKPOINT_FILE)).unwrap();
    assert!(read(&whole) == read(&killed));
    let names: Vec<_> = fs::read_dir(&killed).unwrap().map(|entry| entry.unwrap().file_name()).collect();
    assert_eq!(names, [CHECKPOINT_FILE]);
}

/// On a GPU: without a device the test skips; with `TWOFOUR_REQUIRE_GPU` set it fails.
#[cfg(feature = "cuda")]
mod cuda {
    use std::{process::Child, time::Instant};

    use super::*;
    use twofour::DataType;
    use twofour_transformer::engine::cuda::CudaEngine;

    const KILLS: u32 = 100;
    /// Runs that are killed side by side, each in a folder of its own.
    const LANES: u32 = 4;

    fn engine() -> Option<CudaEngine> {
        support::engine(DataType::BF16)
    }

    #[test]
    fn child() {
        if let Some(folder) = env::var_os(FOLDER) {
            run(engine().unwrap(), Path::new(&folder));
        }
    }

    fn start(folder: &Path) -> Child {
        let mut command = Command::new(env::current_exe().unwrap());
        command.args(["--exact", "cuda::child"]).env(FOLDER, folder).stdout(Stdio::null()).stderr(Stdio::null());
        command.spawn().unwrap()
    }

    /// Kills a run again and again, and lets it end; returns how many of its processes were alive when they were
    /// killed. A run that ends before is compared and begun anew.
    fn kill_repeatedly(lane: u32, startup: Duration, folder: &Path, whole: &[u8]) -> u32 {
        let checkpoint = folder.join(CHECKPOINT_FILE);
        let (mut kills, mut random) = (0, u64::from(lane) + 1);
        while kills < KILLS / LANES {
            let mut child = start(folder);
            // xorshift: from half of the time that a process takes to its first checkpoint to one and a half of it.
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            thread::sleep(startup.mul_f64(0.5 + (random >> 11) as f64 / (1u64 << 53) as f64));
            if child.try_wait().unwrap().is_none() {
                child.kill().unwrap();
                kills += 1;
            }
            if child.wait().unwrap().success() {
                assert!(fs::read(&checkpoint).unwrap() == whole, "lane {lane} after {kills} kills");
                fs::remove_file(&checkpoint).unwrap();
            }
        }
        assert!(start(folder).wait().unwrap().success(), "lane {lane}");
        assert!(fs::read(&checkpoint).unwrap() == whole, "lane {lane}");
        let names: Vec<_> = fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().file_name()).collect();
        assert_eq!(names, [CHECKPOINT_FILE], "lane {lane}");
        kills
    }

    #[test]
    fn a_run_on_a_gpu_that_is_killed_a_hundred_times_ends_as_one_that_is_not() {
        let Some(engine) = engine() else { return };
        let directory = tempfile::tempdir().unwrap();
        let whole = directory.path().join("whole");
        run(engine, &whole);
        let whole = fs::read(whole.join(CHECKPOINT_FILE)).unwrap();
        // How long a process takes to its first checkpoint, with compiled kernels, as beside the others.
        let (begun, first) = (Instant::now(), directory.path().join("first"));
        let mut children: Vec<_> = (0..LANES).map(|lane| start(&first.with_extension(lane.to_string()))).collect();
        while !first.with_extension("0").join(CHECKPOINT_FILE).exists() {
            assert!(begun.elapsed() < Duration::from_secs(60), "no checkpoint after a minute");
            thread::sleep(Duration::from_millis(2));
        }
        let startup = begun.elapsed();
        for child in &mut children {
            child.kill().unwrap();
            child.wait().unwrap();
        }
        let whole = &whole;
        let kills: u32 = thread::scope(|scope| {
            let lanes: Vec<_> = (0..LANES)
                .map(|lane| {
                    let folder = directory.path().join(format!("killed-{lane}"));
                    scope.spawn(move || kill_repeatedly(lane, startup, &folder, whole))
                })
                .collect();
            lanes.into_iter().map(|lane| lane.join().unwrap()).sum()
        });
        assert_eq!(kills, KILLS);
        eprintln!("{kills} kills in {:?}; a process takes {startup:?} to its first checkpoint", begun.elapsed());
    }
}
