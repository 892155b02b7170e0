//! `twofour eval --text` of encoders, and of any two models that are compared.

use std::{path::Path, time::Instant};

use anyhow::{Result, bail};
use serde::Serialize;
use twofour::DataType;
use twofour_cuda::Device;
use twofour_nn::model::{Checkpoint, EncoderCheckpoint, MaskedEncoder, SavedModel, SentenceEncoder, Similarity};

use super::super::{model::ModelArguments, text};
use crate::{
    exit::Usage,
    hub, interrupt, memory,
    present::{Screen, units},
};

/// The lines that are compared where no limit is given.
const LINES: usize = 1000;

#[derive(Debug, Serialize)]
struct PerplexityAnswer {
    perplexity: f64,
    tokens: usize,
    /// How many times each window was read, every token masked in one of them.
    passes: usize,
    window: usize,
    dtype: String,
    device: String,
    seconds: f64,
}

#[derive(Debug, Serialize)]
struct SimilarityAnswer<'a> {
    #[serde(flatten)]
    similarity: Similarity,
    against: &'a Path,
    window: usize,
    dtype: String,
    device: String,
    seconds: f64,
}

/// Measures the perplexity of a text's masked tokens.
pub(super) fn perplexity(
    screen: &mut Screen,
    model: &ModelArguments,
    path: &Path,
    window: Option<usize>,
) -> Result<()> {
    let checkpoint = EncoderCheckpoint::open(SavedModel::locate(model.directory()))?;
    if !checkpoint.has_masked_head() {
        bail!(Usage(format!(
            "{}: the model has no head for masked tokens (`cls.predictions`), so it gives a text no perplexity; \
             compare its sentence embeddings with those of the model that it comes from: --against MODEL",
            checkpoint.reader().path().display()
        )));
    }
    let window = within(window, checkpoint.config().context())?;
    let text = text::read(path)?;
    let tokens = text::encode(&checkpoint.tokenizer()?, &text, screen)?;
    let (dtype, begin) = (model.dtype().unwrap_or_else(|| checkpoint.dtype()), Instant::now());
    let encoder = match model.opened_gpu()? {
        Some(device) => MaskedEncoder::load_on(&device, &checkpoint, dtype)?,
        None => {
            memory::expect_room_for_weights(checkpoint.reader(), dtype)?;
            MaskedEncoder::load(&checkpoint, dtype)?
        }
    };
    let mut progress = screen.progress();
    let found =
        encoder.perplexity(&tokens, window, &mut |done, total| progress.steps("tokens", done as u64, total as u64))?;
    let answer = PerplexityAnswer {
        perplexity: found.perplexity,
        tokens: found.tokens,
        passes: MaskedEncoder::PASSES,
        window,
        dtype: dtype.to_string(),
        device: model.device().to_string(),
        seconds: begin.elapsed().as_secs_f64(),
    };
    screen.line(format_args!("perplexity of masked tokens {:.4} over {} tokens", answer.perplexity, answer.tokens))?;
    screen.json(&answer)
}

/// Compares the sentence embeddings of two models.
pub(super) fn compare(
    screen: &mut Screen,
    model: &ModelArguments,
    (path, other): (&Path, &Path),
    (window, limit): (Option<usize>, Option<usize>),
) -> Result<()> {
    let directories = [SavedModel::locate(model.directory()), SavedModel::locate(hub::locate(other, screen)?)];
    let [(context, stored), (other_context, other_stored)] = [facts(&directories[0])?, facts(&directories[1])?];
    let window = within(window, context.min(other_context))?;
    let text = text::read(path)?;
    let lines: Vec<&str> = text.lines().map(str::trim).filter(|line| !line.is_empty()).collect();
    if lines.len() < 3 {
        bail!(Usage(format!(
            "{}: {} with text; sentences are lines, and three or more are compared",
            path.display(),
            units::plural(lines.len(), "line")
        )));
    }
    // From all over the text: neighbours are alike.
    let count = limit.unwrap_or(LINES).clamp(3, lines.len());
    let lines: Vec<&str> = (0..count).map(|index| lines[index * lines.len() / count]).collect();
    let (device, begin) = (model.opened_gpu()?, Instant::now());
    let device = device.as_ref();
    let [dtype, other_dtype] = [stored, other_stored].map(|stored| model.dtype().unwrap_or(stored));
    let one = embeddings(screen, (&directories[0], dtype, device), &lines, window)?;
    let similarity =
        Similarity::between(&one, &embeddings(screen, (&directories[1], other_dtype, device), &lines, window)?)?;
    let answer = SimilarityAnswer {
        similarity,
        against: other,
        window,
        dtype: dtype.to_string(),
        device: model.device().to_string(),
        seconds: begin.elapsed().as_secs_f64(),
    };
    let Similarity { mean_cosine, lowest_cosine, rank_correlation, sentences } = similarity;
    screen.line(format_args!(
        "cosine between both embeddings of a line: {mean_cosine:.4} in the mean, {lowest_cosine:.4} at the \
         lowest\nrank correlation of the similarities of all pairs of {sentences} lines: {rank_correlation:.4}"
    ))?;
    screen.json(&answer)
}

/// The context of a model, and the type of its weights.
fn facts(model: &Path) -> Result<(usize, DataType)> {
    if EncoderCheckpoint::is_at(model) {
        let checkpoint = EncoderCheckpoint::open(model)?;
        Ok((checkpoint.config().context(), checkpoint.dtype()))
    } else if Checkpoint::is_at(model) {
        // One without a head has embeddings all the same.
        let checkpoint = Checkpoint::open(model)?;
        Ok((checkpoint.config().context(), checkpoint.dtype()))
    } else {
        let saved = SavedModel::open(model)?;
        Ok((saved.config().context(), saved.dtype()))
    }
}

fn embeddings(
    screen: &Screen,
    (directory, dtype, device): (&Path, DataType, Option<&Device>),
    lines: &[&str],
    window: usize,
) -> Result<Vec<Vec<f64>>> {
    let model = match device {
        Some(device) => SentenceEncoder::load_on(device, directory, dtype)?,
        None => SentenceEncoder::load(directory, dtype)?,
    };
    let mut progress = screen.progress();
    let mut found = vec![];
    for line in lines {
        interrupt::check()?;
        found.push(model.embedding(line, window)?);
        progress.steps("lines", found.len() as u64, lines.len() as u64);
    }
    Ok(found)
}

/// The window that is asked for, or the context.
fn within(window: Option<usize>, context: usize) -> Result<usize, Usage> {
    match window {
        Some(window) if window > context => {
            Err(Usage(format!("--window {window}: the model's context is {context} tokens")))
        }
        window => Ok(window.unwrap_or(context)),
    }
}
