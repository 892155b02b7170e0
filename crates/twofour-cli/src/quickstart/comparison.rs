//! Loss, size and speed of the two models, side by side.

use std::{fs, ops::ControlFlow, time::Duration};

use anyhow::Result;
use twofour::{
    DataType,
    file::{Overwrite, Reader},
};
use twofour_nn::{
    model::{Inference, Sampling, Tokenizer},
    train::Trainer,
};
use twofour_transformer::engine::Engine;

use super::{Folder, Plan, Report, Side, Training};
use crate::{interrupt, measure};

/// The prompt of the sample.
const PROMPT: &str = "ROMEO:";

/// Bytes of the sample.
const SAMPLE_BYTES: usize = 300;

/// The sampling temperature. A model that was trained for minutes gives unlikely bytes so much probability that words
/// fall apart at 0.7.
const TEMPERATURE: f32 = 0.5;

/// The fewest and the most sequences that a validation loss is the mean over.
const VALIDATION_SEQUENCES: (f64, f64) = (16.0, 192.0);

/// Time for the decode and for the prefill measurement each.
const BUDGET: (Duration, Duration) = (Duration::from_millis(500), Duration::from_secs(12));

/// What packing, the files and the sample take at the quickstart's size.
const RESERVE: Duration = Duration::from_secs(4);

/// Sequences that can be validated in half of the time that is left, the same for both models. A sequence needs one
/// forward pass: a third of what it takes to train on it.
fn validation_sequences<E: Engine>(plan: &Plan, training: &Training<E>) -> usize {
    let left = plan.length().saturating_sub(training.spent()).saturating_sub(RESERVE).as_secs_f64();
    let losses = &training.losses;
    let of = |seconds: f64, steps: usize| seconds / (3 * steps.max(1) * plan.training.batch) as f64;
    let pair = of(losses.dense_seconds, losses.dense.len()) + of(losses.sparse_seconds, losses.sparse.len());
    (left / 2.0 / pair.max(1e-6)).clamp(VALIDATION_SEQUENCES.0, VALIDATION_SEQUENCES.1) as usize
}

/// Writes both models as bf16 files, the 2:4 one compressed, and measures them, taking about what is left of the time.
pub(crate) fn compare<E: Engine>(
    plan: &Plan,
    folder: &Folder,
    training: &mut Training<E>,
    text: &[u8],
) -> Result<Report> {
    let sequences = validation_sequences(plan, training);
    let dense_loss = training.dense.validate(sequences)? as f32;
    interrupt::check()?;
    let sparse_loss = training.sparse.validate(sequences)? as f32;
    interrupt::check()?;
    let [dense_file, sparse_file] = ["dense.safetensors", "sparse.safetensors"].map(|name| folder.file(name));
    for (trainer, file) in [(&training.dense, &dense_file), (&training.sparse, &sparse_file)] {
        trainer.model().save(trainer.engine(), file, Overwrite::Yes, DataType::BF16)?;
    }
    let reader = Reader::open(&sparse_file)?;
    let sparse_bytes = reader.compressed_weights().map(|w| w.bytes()).sum();
    let dense_bytes = reader.compressed_weights().map(|w| w.dense_bytes()).sum();

    let inference = |trainer: &Trainer<E>| Inference::<f32>::new(trainer.engine(), trainer.model());
    let (dense, sparse) = (inference(&training.dense)?, inference(&training.sparse)?);
    let sample = sample(&sparse_file, plan.seed)?;
    let left = plan.length().saturating_sub(training.spent());
    let budget = (left / 2).clamp(BUDGET.0, BUDGET.1);
    let decode = decode(&dense, &sparse, budget)?;
    let prefill = prefill(&dense, &sparse, &text[..plan.model.context], budget)?;
    let memory = [dense.weight_bytes(), sparse.weight_bytes()];

    let losses = &training.losses;
    let side =
        |which: usize, val_loss, weight_bytes, file: &std::path::Path, seconds: f64, steps: usize| -> Result<Side> {
            Ok(Side {
                val_loss,
                weight_bytes,
                file_bytes: fs::metadata(file)?.len(),
                memory_bytes: memory[which],
                decode_tokens_per_s: decode[which],
                prefill_tokens_per_s: prefill[which],
                train_step_ms: seconds * 1e3 / steps.max(1) as f64,
            })
        };
    Ok(Report {
        dense: side(0, dense_loss, dense_bytes, &dense_file, losses.dense_seconds, losses.dense.len())?,
        sparse: side(1, sparse_loss, sparse_bytes, &sparse_file, losses.sparse_seconds, losses.sparse.len())?,
        machine: measure::machine()?,
        config: plan.clone(),
        steps: training.steps_done(),
        seconds: training.spent().as_secs_f64(),
        validation_bytes: sequences.min(training.dense.data().validation_sequences(plan.model.context))
            * plan.model.context,
        text_bytes: text.len(),
        prompt: PROMPT.to_owned(),
        sample,
    })
}

/// Decode tokens per second, batch 1, each model in its own sequence, which restarts when its context is full.
fn decode(dense: &Inference<f32>, sparse: &Inference<f32>, budget: Duration) -> Result<[f64; 2]> {
    let runner = |model| {
        let model: &Inference<f32> = model;
        let mut session = model.session();
        move || {
            if session.remaining() == 0 {
                session = model.session();
            }
            session.feed(&[u32::from(b'e')])?;
            anyhow::Ok(())
        }
    };
    let (mut run_dense, mut run_sparse) = (runner(dense), runner(sparse));
    let times = measure::medians(&mut [&mut run_dense, &mut run_sparse], budget)?;
    Ok([times[0], times[1]].map(|time| 1.0 / time.as_secs_f64()))
}

/// Prefill tokens per second; `text` is as long as the context.
fn prefill(dense: &Inference<f32>, sparse: &Inference<f32>, text: &[u8], budget: Duration) -> Result<[f64; 2]> {
    let tokens: &[u32] = &text.iter().map(|&byte| byte.into()).collect::<Vec<_>>();
    let runner = |model| {
        let model: &Inference<f32> = model;
        move || {
            model.session().feed(tokens)?;
            anyhow::Ok(())
        }
    };
    let (mut run_dense, mut run_sparse) = (runner(dense), runner(sparse));
    let times = measure::medians(&mut [&mut run_dense, &mut run_sparse], budget)?;
    Ok([times[0], times[1]].map(|time| tokens.len() as f64 / time.as_secs_f64()))
}

/// Returns the continuation that the compressed model, loaded from its file, generates.
fn sample(file: &std::path::Path, seed: u64) -> Result<String> {
    let model = Inference::<f32>::load(file)?;
    let mut bytes = Vec::with_capacity(SAMPLE_BYTES);
    let prompt = Tokenizer::Bytes.encode(PROMPT)?;
    model.generate(&prompt, SAMPLE_BYTES, Sampling { temperature: TEMPERATURE, seed }, |token| {
        bytes.push(token as u8);
        ControlFlow::Continue(())
    })?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
