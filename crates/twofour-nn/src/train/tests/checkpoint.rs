//! Saving and resuming.

use std::{fs, path::Path, sync::Arc};

use twofour::file::{Overwrite, PlannedTensor, Reader, TEMP_PREFIX, TEMP_SUFFIX, Writer};

use super::{bits, corpus, layers, model, plans, steps, trainer, trainer_with, training};
use crate::{
    Error,
    engine::cpu::CpuEngine,
    model::{CHECKPOINT_FILE, SavedModel},
    recipe::ModelSettings,
    train::{Corpus, SparsityPlan, Trainer, TrainingSettings, checkpoint_steps, methods::Method},
};

#[test]
fn ten_steps_are_some_a_checkpoint_and_the_rest() {
    for (name, plan) in plans() {
        let mut whole = trainer(&plan);
        let expected = steps(&mut whole, 10);
        for first in [0, 1, 5, 9] {
            let directory = tempfile::tempdir().unwrap();
            let mut begun = trainer(&plan);
            steps(&mut begun, first);
            begun.save(directory.path()).unwrap();
            let mut resumed = trainer(&plan);
            // Whatever it did before leaves no trace.
            steps(&mut resumed, if first == 5 { 7 } else { 0 });
            resumed.resume(directory.path()).unwrap();
            assert_eq!(resumed.steps_done(), first as u64);
            assert_eq!(steps(&mut resumed, 10 - first), expected[first..], "{name}, after {first}");
            assert!(bits(&resumed) == bits(&whole), "{name}, after {first}");
        }
    }
}

#[test]
fn the_same_state_gives_the_same_bytes() {
    let directory = tempfile::tempdir().unwrap();
    let save = |name: &str| {
        let mut trainer = trainer(&plans()[7].1);
        steps(&mut trainer, 2);
        trainer.save(directory.path().join(name)).unwrap();
        fs::read(directory.path().join(name).join(CHECKPOINT_FILE)).unwrap()
    };
    assert!(save("a") == save("b/c"));
}

fn file_names(directory: &Path) -> Vec<String> {
    fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_killed_save_leaves_the_last_checkpoint_and_the_next_save_cleans_up() {
    let directory = tempfile::tempdir().unwrap();
    let mut saved = trainer(&SparsityPlan::dense());
    steps(&mut saved, 2);
    saved.save(directory.path()).unwrap();
    // What kill -9 in the middle of the next save leaves: the old file, and a truncated temporary one.
    let leftover = format!("{TEMP_PREFIX}killed{TEMP_SUFFIX}");
    fs::write(directory.path().join(&leftover), b"half a checkpoint").unwrap();
    let mut resumed = trainer(&SparsityPlan::dense());
    resumed.resume(directory.path()).unwrap();
    assert_eq!(resumed.steps_done(), 2);
    assert!(bits(&resumed) == bits(&saved));
    resumed.save(directory.path()).unwrap();
    assert_eq!(file_names(directory.path()), [CHECKPOINT_FILE]);
}

#[test]
fn checkpoints_of_another_run_are_refused() {
    let directory = tempfile::tempdir().unwrap();
    let mut dense = trainer(&SparsityPlan::dense());
    assert!(dense.resume(directory.path()).is_err(), "there is none yet");
    dense.save(directory.path()).unwrap();
    let before = bits(&dense);
    let refused = |mut other: Trainer<CpuEngine>, word: &str| {
        let error = other.resume(directory.path()).unwrap_err();
        assert!(matches!(&error, Error::OtherRun { what, .. } if what.contains(word)), "{word}: {error}");
    };
    let plan = SparsityPlan::of_method(Method::STE, layers(), 60);
    refused(trainer(&plan), "sparsity");
    let dense_plan = SparsityPlan::dense;
    refused(trainer_with(dense_plan(), TrainingSettings { seed: 10, ..training() }), "settings");
    let other = Arc::new(Corpus::new(vec![b'x'; 2000], 0.1).unwrap());
    refused(Trainer::new(CpuEngine, &model(), &training(), dense_plan(), other).unwrap(), "data");
    let wider = ModelSettings { width: 64, ..model() };
    refused(Trainer::new(CpuEngine, &wider, &training(), dense_plan(), corpus()).unwrap(), "sizes");
    // What does not decide the numbers may differ.
    let own = TrainingSettings { validate_every: 7, checkpoint_every: 3, ..training() };
    trainer_with(dense_plan(), own).resume(directory.path()).unwrap();

    let file = directory.path().join(CHECKPOINT_FILE);
    let bytes = fs::read(&file).unwrap();
    fs::write(&file, &bytes[..bytes.len() / 2]).unwrap();
    assert!(dense.resume(directory.path()).is_err(), "a truncated file");
    assert!(bits(&dense) == before);
}

#[test]
fn a_bit_that_flips_in_a_checkpoint_is_found_and_changes_nothing() {
    let directory = tempfile::tempdir().unwrap();
    let plan = SparsityPlan::of_method(Method::STE, layers(), 60);
    let mut saved = trainer(&plan);
    steps(&mut saved, 3);
    saved.save(directory.path()).unwrap();
    assert_eq!(checkpoint_steps(directory.path()).unwrap(), 3);
    let file = directory.path().join(CHECKPOINT_FILE);
    let good = fs::read(&file).unwrap();
    let header = 8 + u64::from_le_bytes(good[..8].try_into().unwrap()) as usize;
    let mut fresh = trainer(&plan);
    let before = bits(&fresh);
    let data = (header..good.len()).step_by((good.len() - header) / 150);
    // A digit of the metadata: JSON as before, with another number of steps.
    let step = br#"\"step\":3,"#;
    let digit = good.windows(step.len()).position(|part| part == step).unwrap() + step.len() - 2;
    for place in data.chain([good.len() - 1, digit]) {
        let mut bytes = good.clone();
        bytes[place] ^= 1;
        fs::write(&file, bytes).unwrap();
        let error = fresh.resume(directory.path()).unwrap_err();
        assert!(matches!(&error, Error::State { reason, .. } if reason.contains("damaged")), "byte {place}: {error}");
        assert!(bits(&fresh) == before);
    }
    fs::write(&file, good).unwrap();
    fresh.resume(directory.path()).unwrap();
    assert!(bits(&fresh) == bits(&saved));
}

#[test]
fn a_checkpoint_of_an_earlier_version_has_no_checksums_and_is_resumed() {
    let directory = tempfile::tempdir().unwrap();
    let mut saved = trainer(&SparsityPlan::dense());
    steps(&mut saved, 2);
    saved.save(directory.path()).unwrap();
    let file = directory.path().join(CHECKPOINT_FILE);
    let reader = Reader::open(&file).unwrap();
    let tensors: Vec<_> = reader.tensors().filter(|tensor| tensor.name != "checksums").cloned().collect();
    let planned: Vec<_> = tensors.iter().map(|t| PlannedTensor::new(&t.name, t.dtype, t.shape.clone())).collect();
    let old = directory.path().join("old");
    fs::create_dir(&old).unwrap();
    let mut writer =
        Writer::create(old.join(CHECKPOINT_FILE), Overwrite::No, planned, reader.metadata().clone()).unwrap();
    for tensor in &tensors {
        writer.write(&tensor.name, &reader.tensor(&tensor.name).unwrap().bytes().unwrap()).unwrap();
    }
    writer.finish().unwrap();
    let mut resumed = trainer(&SparsityPlan::dense());
    resumed.resume(&old).unwrap();
    assert!(bits(&resumed) == bits(&saved) && resumed.steps_done() == 2);
}

#[test]
fn a_checkpoint_is_a_model_that_computes_as_the_trained_one_does() {
    for (name, plan) in plans() {
        let directory = tempfile::tempdir().unwrap();
        let mut trained = trainer(&plan);
        steps(&mut trained, 7);
        trained.save(directory.path()).unwrap();
        let file = directory.path().join("model.safetensors");
        trained.model().save(trained.engine(), &file, Overwrite::No, twofour::DataType::F32).unwrap();
        let [mut expected, mut found] = [file.as_path(), &directory.path().join(CHECKPOINT_FILE)].map(|path| {
            let saved = SavedModel::open(path).unwrap();
            assert!(matches!(saved.tokenizer().unwrap(), crate::model::Tokenizer::Bytes));
            saved.model(&CpuEngine, saved.config().context()).unwrap()
        });
        let tokens: Vec<u32> = (0..8).map(|i| i * 31 % 256).collect();
        let shape = crate::block::BatchShape { batch: 1, positions: 8 };
        let [expected, found] =
            [&mut expected, &mut found].map(|model| model.logits(&CpuEngine, &tokens, shape).unwrap());
        assert_eq!(found, expected, "{name}");
        let language = crate::model::LanguageModel::load_as(directory.path().join(CHECKPOINT_FILE), None).unwrap();
        assert_eq!(language.prompt("").unwrap(), [10], "{name}");
    }
    // One that is damaged is no model.
    let directory = tempfile::tempdir().unwrap();
    trainer(&SparsityPlan::dense()).save(directory.path()).unwrap();
    let file = directory.path().join(CHECKPOINT_FILE);
    let mut bytes = fs::read(&file).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&file, bytes).unwrap();
    assert!(SavedModel::open(&file).unwrap_err().to_string().contains("damaged"));
}
