//! Training as a whole: it learns, and it resumes bit for bit.

use std::{collections::BTreeMap, fs, path::Path, sync::Arc};

use candle_core::Device;
use proptest::prelude::*;
use twofour::file::{TEMP_PREFIX, TEMP_SUFFIX};

use super::{CHECKPOINT_FILE, Corpus, StepReport, TrainConfig, Trainer};
use crate::{
    Error, Result,
    gpt::{Config, Gpt},
    linear::{HasLinears, Refresh, SparseSettings},
};

const SMALL: Config = Config { layers: 2, width: 32, heads: 2, context: 16, feed_forward: 64 };
const TRAINING: TrainConfig = TrainConfig {
    batch: 3,
    steps: 60,
    learning_rate: 3e-3,
    final_learning_rate: 3e-4,
    warm_up: 4,
    weight_decay: 0.1,
    clip_norm: 1.0,
    seed: 9,
};

#[derive(Debug, Clone, Copy, PartialEq)]
enum Form {
    Dense,
    /// 2:4, the mask chosen anew every that many steps.
    Sparse(u64),
}

fn trainer(form: Form) -> Result<Trainer> {
    trainer_from(form, 2)
}

fn trainer_from(form: Form, seed: u64) -> Result<Trainer> {
    let text = b"Two of every four weights are kept, and the others are zero. ".repeat(30);
    let mut model = Gpt::new(&SMALL, seed, &Device::Cpu)?;
    if let Form::Sparse(every) = form {
        let refresh = every.try_into().map_or(Refresh::OnRequest, Refresh::Every);
        let settings = SparseSettings { refresh, ..Default::default() };
        model.visit_linears(&mut |name, linear| {
            if name != "head" {
                *linear = linear.sparse(settings)?;
            }
            Ok(())
        })?;
    }
    Trainer::new(model, Arc::new(Corpus::new(text, 0.1)?), TRAINING)
}

fn steps(trainer: &mut Trainer, count: usize) -> Result<Vec<StepReport>> {
    (0..count).map(|_| trainer.step()).collect()
}

fn bits(trainer: &Trainer) -> Result<Vec<u32>> {
    let moments: BTreeMap<_, _> = trainer.optimizer.state()?.into_iter().filter(|(name, _)| name != "steps").collect();
    let variables = trainer.model.variables()?.into_iter().map(|(_, var)| var.into_inner());
    let mut all = vec![];
    for tensor in variables.chain(moments.into_values()) {
        all.extend(tensor.flatten_all()?.to_vec1::<f32>()?.iter().map(|v| v.to_bits()));
    }
    Ok(all)
}

#[test]
fn training_learns_dense_and_sparse() -> Result<()> {
    for form in [Form::Dense, Form::Sparse(1)] {
        let mut trainer = trainer(form)?;
        let before = trainer.validate(100)?;
        assert!((before - 256f32.ln()).abs() < 0.2, "{form:?}: an untrained model knows nothing, found {before}");
        let reports = steps(&mut trainer, 60)?;
        let after = trainer.validate(100)?;
        assert!(after < 2.8, "{form:?}: {before} before, {after} after");
        assert!(trainer.is_finished() && reports.iter().all(|r| r.tokens == 48 && r.gradient_norm > 0.0));
        assert_eq!(trainer.validate(100)?, after, "validation changes nothing");
    }
    Ok(())
}

#[test]
fn ten_steps_are_five_a_checkpoint_and_five_more() -> Result<()> {
    for form in [Form::Dense, Form::Sparse(1), Form::Sparse(3)] {
        let directory = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
        let mut whole = trainer(form)?;
        let expected = steps(&mut whole, 10)?;

        let mut first = trainer(form)?;
        let mut found = steps(&mut first, 5)?;
        first.save(directory.path())?;
        // What the first does after the checkpoint must not matter.
        steps(&mut first, 2)?;
        drop(first);

        // It begins with other weights, which the checkpoint replaces.
        let mut second = trainer_from(form, 3)?;
        second.resume(directory.path())?;
        assert_eq!(second.steps_done(), 5);
        found.extend(steps(&mut second, 5)?);
        assert_eq!(found, expected, "{form:?}");
        assert!(bits(&second)? == bits(&whole)?, "{form:?}: parameters or moments differ");
        assert_eq!(second.validate(10)?.to_bits(), whole.validate(10)?.to_bits());
    }
    Ok(())
}

#[test]
fn the_same_state_gives_the_same_file() -> Result<()> {
    let directory = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
    let mut trainer = trainer(Form::Sparse(2))?;
    steps(&mut trainer, 3)?;
    let mut save = |name: &str| -> Result<Vec<u8>> {
        let directory = directory.path().join(name);
        trainer.save(&directory)?;
        Ok(fs::read(directory.join(CHECKPOINT_FILE)).map_err(candle_core::Error::wrap)?)
    };
    assert!(save("a")? == save("b/c")?);
    Ok(())
}

fn file_names(directory: &Path) -> Vec<String> {
    fs::read_dir(directory).unwrap().map(|e| e.unwrap().file_name().to_string_lossy().into_owned()).collect()
}

#[test]
fn a_killed_save_leaves_the_last_checkpoint_and_the_next_save_cleans_up() -> Result<()> {
    let directory = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
    let mut saved = trainer(Form::Dense)?;
    steps(&mut saved, 2)?;
    saved.save(directory.path())?;
    // What kill -9 in the middle of the next save leaves: the old file, and a truncated temporary one.
    let leftover = format!("{TEMP_PREFIX}killed{TEMP_SUFFIX}");
    fs::write(directory.path().join(&leftover), b"half a checkpoint").map_err(candle_core::Error::wrap)?;

    let mut resumed = trainer(Form::Dense)?;
    resumed.resume(directory.path())?;
    assert_eq!(resumed.steps_done(), 2);
    assert!(bits(&resumed)? == bits(&saved)?);
    resumed.save(directory.path())?;
    assert_eq!(file_names(directory.path()), [CHECKPOINT_FILE]);
    Ok(())
}

#[test]
fn checkpoints_of_another_run_are_refused() -> Result<()> {
    let directory = tempfile::tempdir().map_err(candle_core::Error::wrap)?;
    let mut dense = trainer(Form::Dense)?;
    assert!(dense.resume(directory.path()).is_err(), "there is none yet");
    dense.save(directory.path())?;
    let before = bits(&dense)?;
    let refused = |mut other: Trainer, word: &str| {
        let error = other.resume(directory.path()).unwrap_err();
        assert!(matches!(&error, Error::State { reason } if reason.contains(word)), "{word}: {error}");
    };
    refused(trainer(Form::Sparse(1))?, "sparse layers");
    let model = || Gpt::new(&SMALL, 2, &Device::Cpu);
    let corpus = dense.corpus.clone();
    refused(Trainer::new(model()?, corpus.clone(), TrainConfig { seed: 10, ..TRAINING })?, "settings");
    refused(Trainer::new(model()?, Arc::new(Corpus::new(vec![b'x'; 2000], 0.1)?), TRAINING)?, "text");
    let wider = Gpt::new(&Config { width: 64, ..SMALL }, 2, &Device::Cpu)?;
    refused(Trainer::new(wider, corpus, TRAINING)?, "sizes");

    let file = directory.path().join(CHECKPOINT_FILE);
    let bytes = fs::read(&file).map_err(candle_core::Error::wrap)?;
    fs::write(&file, &bytes[..bytes.len() / 2]).map_err(candle_core::Error::wrap)?;
    assert!(dense.resume(directory.path()).is_err(), "a truncated file");
    assert!(bits(&dense)? == before);
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: ProptestConfig::default().cases / 4, ..Default::default() })]
    /// Bytes changed in the header, or the end cut off: what is refused leaves the trainer as it was.
    #[test]
    fn damaged_checkpoints_change_nothing(
        edits in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..4),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        let directory = tempfile::tempdir().unwrap();
        let mut trainer = trainer(Form::Sparse(1)).unwrap();
        trainer.save(directory.path()).unwrap();
        let file = directory.path().join(CHECKPOINT_FILE);
        let mut bytes = fs::read(&file).unwrap();
        let header = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        for (place, value) in edits {
            bytes[place.index(header)] = value;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        fs::write(&file, bytes).unwrap();
        steps(&mut trainer, 1).unwrap();
        let before = bits(&trainer).unwrap();
        if trainer.resume(directory.path()).is_err() {
            prop_assert!(bits(&trainer).unwrap() == before);
        }
        steps(&mut trainer, 1).unwrap();
    }
}
