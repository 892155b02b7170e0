//! `twofour eval`.

use std::{fs, path::PathBuf, time::Instant};

use anyhow::{Context, Result};
use clap::Args;
use serde::Serialize;
use twofour_nn::model::Windows;

use super::model::ModelArguments;
use crate::{exit::Verdict, present::Screen};

/// Measure a model's perplexity on a text
///
/// The text is encoded whole and cut into windows. Every token is scored once, in the first window that holds it, given the tokens before it in that window; a
/// window's first token has none and is not scored. A stride below the window gives every token at least WINDOW - STRIDE tokens before it.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour eval model/ --text wikitext.txt
  twofour eval model/ --text wikitext.txt --window 1024 --stride 512 --json
  twofour eval model/ --text wikitext.txt --device cuda:1 --dtype bf16")]
pub(crate) struct Eval {
    #[command(flatten)]
    model: ModelArguments,

    /// The text, UTF-8
    #[arg(long, value_name = "FILE")]
    text: PathBuf,

    /// Tokens of a window [default: the model's context, at most 2048]
    #[arg(long, value_name = "N")]
    window: Option<usize>,

    /// Tokens from one window to the next [default: the window]
    #[arg(long, value_name = "N")]
    stride: Option<usize>,
}

#[derive(Debug, Serialize)]
struct Answer {
    perplexity: f64,
    tokens: usize,
    window: usize,
    stride: usize,
    dtype: String,
    seconds: f64,
}

/// The window where none is given, for models of a longer context.
const WINDOW: usize = 2048;

impl Eval {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let text = fs::read_to_string(&self.text).with_context(|| format!("reading {}", self.text.display()))?;
        let model = self.model.load()?;
        let window = self.window.unwrap_or(model.decoder.config().context.min(WINDOW));
        let windows = Windows { window, stride: self.stride.unwrap_or(window) };
        windows.validate(model.decoder.config().context)?;
        let tokens = model.tokenizer.encode(&text)?;
        let (begin, mut progress) = (Instant::now(), screen.progress());
        let found = model.decoder.perplexity(&tokens, windows, &mut |done, total| {
            progress.steps("tokens", done as u64, total as u64);
        })?;
        drop(progress);
        let answer = Answer {
            perplexity: found.perplexity,
            tokens: found.tokens,
            window: windows.window,
            stride: windows.stride,
            dtype: model.dtype.to_string(),
            seconds: begin.elapsed().as_secs_f64(),
        };
        screen.line(format_args!("perplexity {:.4} over {} tokens", answer.perplexity, answer.tokens))?;
        screen.json(&answer)?;
        Ok(Verdict::Yes)
    }
}
