//! Loss, size and speed of the two models, side by side.

use std::{fs, ops::ControlFlow, time::Duration};

use anyhow::Result;
use half::bf16;
use twofour::{
    DType,
    file::{Overwrite, Reader},
};
use twofour_candle::{
    gpt::{Gpt, Inference, Sampling},
    train::Trainer,
};

use super::{Folder, Plan, Report, Side, TEXT, Training, VALIDATION_SEQUENCES};
use crate::measure;

/// What the sample goes on from.
const PROMPT: &str = "/// The ";

/// Bytes of the sample.
const SAMPLE_BYTES: usize = 300;

/// Time for the decode and for the prefill measurement each; short runs take less.
fn budget(plan: &Plan) -> Duration {
    Duration::from_secs_f64((plan.minutes * 60.0 * 0.03).clamp(0.5, 8.0))
}

/// Writes both models as bf16 files, the 2:4 one compressed, and measures them.
pub(crate) fn compare(plan: &Plan, folder: &Folder, training: &mut Training) -> Result<Report> {
    let (dense_loss, sparse_loss) =
        (training.dense.validate(VALIDATION_SEQUENCES)?, training.sparse.validate(VALIDATION_SEQUENCES)?);
    let [dense_file, sparse_file] = ["dense.safetensors", "sparse.safetensors"].map(|name| folder.file(name));
    training.dense.model().save(&dense_file, Overwrite::Yes, DType::BF16)?;
    training.sparse.model().save(&sparse_file, Overwrite::Yes, DType::BF16)?;
    let reader = Reader::open(&sparse_file)?;
    let sparse_bytes = reader.compressed_weights().map(|w| w.bytes()).sum();
    let dense_bytes = reader.compressed_weights().map(|w| w.rows * w.cols * w.dtype.size()).sum();

    let inference = |trainer: &Trainer| Inference::<bf16>::new(trainer.model());
    let (dense, sparse) = (inference(&training.dense)?, inference(&training.sparse)?);
    let decode = decode(&dense, &sparse, budget(plan))?;
    let prefill = prefill(&dense, &sparse, budget(plan))?;

    let losses = &training.losses;
    let side =
        |which: usize, val_loss, weight_bytes, file: &std::path::Path, seconds: f64, steps: usize| -> Result<Side> {
            Ok(Side {
                val_loss,
                weight_bytes,
                file_bytes: fs::metadata(file)?.len(),
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
        text_bytes: TEXT.len(),
        prompt: PROMPT.to_owned(),
        sample: sample(&sparse_file, plan.seed)?,
    })
}

/// Tokens a second, one at a time, each model in a sequence of its own that begins anew when its context is full.
fn decode(dense: &Inference<bf16>, sparse: &Inference<bf16>, budget: Duration) -> Result<[f64; 2]> {
    let runner = |model| {
        let model: &Inference<bf16> = model;
        let mut session = model.session();
        move || {
            if session.remaining() == 0 {
                session = model.session();
            }
            session.feed(b"e")?;
            anyhow::Ok(())
        }
    };
    let (mut run_dense, mut run_sparse) = (runner(dense), runner(sparse));
    let times = measure::medians(&mut [&mut run_dense, &mut run_sparse], budget)?;
    Ok([times[0], times[1]].map(|time| 1.0 / time.as_secs_f64()))
}

/// Tokens a second, a whole context at once.
fn prefill(dense: &Inference<bf16>, sparse: &Inference<bf16>, budget: Duration) -> Result<[f64; 2]> {
    let text = &TEXT[..dense.config().context];
    let runner = |model| {
        let model: &Inference<bf16> = model;
        move || {
            model.session().feed(text)?;
            anyhow::Ok(())
        }
    };
    let (mut run_dense, mut run_sparse) = (runner(dense), runner(sparse));
    let times = measure::medians(&mut [&mut run_dense, &mut run_sparse], budget)?;
    Ok([times[0], times[1]].map(|time| text.len() as f64 / time.as_secs_f64()))
}

/// What the compressed model, read back from its file, writes.
fn sample(file: &std::path::Path, seed: u64) -> Result<String> {
    let model = Gpt::load(file)?;
    let mut bytes = Vec::with_capacity(SAMPLE_BYTES);
    model.generate(PROMPT.as_bytes(), SAMPLE_BYTES, Sampling { seed, ..Sampling::default() }, |byte| {
        bytes.push(byte);
        ControlFlow::Continue(())
    })?;
    Ok(String::from_utf8_lossy(&bytes).into_owned())
}
