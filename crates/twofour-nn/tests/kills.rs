//! A run that is killed at random moments, and goes on from its checkpoint each time, ends with the bytes of a run that was left alone.

use std::{
    env, fs,
    path::Path,
    process::{Command, Stdio},
    sync::Arc,
    thread,
    time::Duration,
};

use twofour_nn::{
    engine::cpu::CpuEngine,
    recipe::{Method, ModelKind, ModelSettings, TrainingSettings},
    train::{CHECKPOINT_FILE, Corpus, SparsityPlan, Trainer},
};

/// The child's folder; without it, the child's test does nothing.
const FOLDER: &str = "TWOFOUR_NN_KILLED_RUN";

fn trainer() -> Trainer<CpuEngine> {
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
    let layers = ["up", "down"].map(|part| format!("blocks.0.mlp.{part}")).to_vec();
    let plan = SparsityPlan { mask_every: 3, ..SparsityPlan::of_method(Method::Fst, layers, training.steps) };
    let text = b"Two of every four weights are kept, and the others are zero. ".repeat(30);
    Trainer::new(CpuEngine, &model, &training, plan, Arc::new(Corpus::new(text, 0.1).unwrap())).unwrap()
}

/// Trains to the end, from the checkpoint if there is one, and saves after every step.
fn run(folder: &Path) {
    let mut trainer = trainer();
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
        run(Path::new(&folder));
    }
}

#[test]
fn a_run_that_is_killed_ends_as_one_that_is_not() {
    let directory = tempfile::tempdir().unwrap();
    let (whole, killed) = (directory.path().join("whole"), directory.path().join("killed"));
    run(&whole);
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
