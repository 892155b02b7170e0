//! Perplexity before and after pruning.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use twofour::DataType;
use twofour_nn::model::{Checkpoint, EncoderCheckpoint, LanguageModel, Replace, SavedModel, Windows};

use super::super::{eval, text};
use crate::{exit::Usage, present::Screen};

/// The text on which perplexity is measured.
#[derive(Debug, Clone, Args)]
pub(super) struct EvaluationOptions {
    /// A text on which perplexity is measured before and after, as `twofour eval` does
    #[arg(long, value_name = "TEXT")]
    eval: Option<PathBuf>,

    /// Tokens of a window of --eval [default: the model's context, at most 2048]
    #[arg(long, value_name = "N", requires = "eval")]
    window: Option<usize>,

    /// Tokens from one window of --eval to the next [default: the window]
    #[arg(long, value_name = "N", requires = "eval")]
    stride: Option<usize>,
}

/// Perplexities of the dense and of the pruned model.
#[derive(Debug, Serialize)]
pub(super) struct PerplexityAnswer {
    pub(super) before: f64,
    pub(super) after: f64,
    /// Tokens that were scored.
    pub(super) tokens: usize,
    window: usize,
    stride: usize,
    dtype: String,
    #[serde(serialize_with = "crate::commands::output::path")]
    text: PathBuf,
}

/// A measurement before pruning, to be repeated after it.
pub(super) struct Before {
    text: PathBuf,
    tokens: Vec<u32>,
    windows: Windows,
    dtype: DataType,
    perplexity: f64,
}

impl EvaluationOptions {
    /// The text, where one is given.
    pub(super) fn text(&self) -> Option<&Path> {
        self.eval.as_deref()
    }

    /// Measures the input, where a text is given.
    pub(super) fn before(&self, screen: &Screen, (input, output): (&Path, &Path)) -> Result<Option<Before>> {
        let Some(path) = &self.eval else { return Ok(None) };
        let is_file = output.extension().is_some_and(|extension| extension == "safetensors");
        if is_file && Checkpoint::is_at(SavedModel::locate(input)) {
            let reason = "--eval runs the model that was written, for which its config.json and tokenizer have to be \
                          beside it; name a directory to write";
            bail!(Usage(reason.to_owned()));
        }
        if EncoderCheckpoint::is_at(SavedModel::locate(input)) {
            bail!(Usage(format!(
                "--eval measures decoders, and {} is an encoder; prune it without, and then: twofour eval {} --text {} \
                 --against {}",
                input.display(),
                output.display(),
                path.display(),
                input.display()
            )));
        }
        let text = text::read(path)?;
        let model = LanguageModel::load(SavedModel::locate(input))?;
        let windows = eval::windows((self.window, self.stride), model.decoder.config(), &model.tokenizer)?;
        let (tokens, dtype) = (text::encode(&model.tokenizer, &text, screen)?, model.dtype);
        let (perplexity, _) = measure(screen, &model, &tokens, windows)?;
        Ok(Some(Before { text: path.clone(), tokens, windows, dtype, perplexity }))
    }
}

impl Before {
    /// Measures the output, in the type that the input was measured in, with the weights that `replace` returns in
    /// place of the written ones.
    pub(super) fn after(
        self,
        screen: &Screen,
        output: &Path,
        replace: Option<Replace<'_>>,
    ) -> Result<PerplexityAnswer> {
        let model = match replace {
            Some(replace) => LanguageModel::load_with(output, Some(self.dtype), replace)?,
            None => LanguageModel::load_as(output, Some(self.dtype))?,
        };
        let (after, tokens) = measure(screen, &model, &self.tokens, self.windows)?;
        let Windows { window, stride, .. } = self.windows;
        let dtype = self.dtype.to_string();
        Ok(PerplexityAnswer { before: self.perplexity, after, tokens, window, stride, dtype, text: self.text })
    }
}

/// Perplexity, and the number of tokens scored.
fn measure(screen: &Screen, model: &LanguageModel, tokens: &[u32], windows: Windows) -> Result<(f64, usize)> {
    let mut progress = screen.progress();
    let found = model.decoder.perplexity(tokens, windows, &mut |done, total| {
        progress.steps("perplexity", done as u64, total as u64);
    })?;
    Ok((found.perplexity, found.tokens))
}
