//! `twofour eval`.

mod encoder;
mod questions;
mod task;

use std::{path::PathBuf, time::Instant};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use twofour::DataType;
use twofour_cuda::Device;
use twofour_nn::model::{EncoderCheckpoint, Perplexity, SavedModel, Tokenizer, TransformerConfig, Windows};
use twofour_transformer::engine::cuda::CudaEngine;

use super::{model::ModelArguments, next, text};
use crate::{
    device::ComputeDevice,
    exit::{Usage, Verdict},
    present::Screen,
};

/// Measure a model: perplexity of a text, answers to questions, embeddings
///
/// --text, for a decoder: The text is encoded whole and cut into windows. Every token is scored once, in the first
/// window that holds it, given the tokens before it in that window; a window's first token has none and is not scored.
/// A stride below the window gives every token at least WINDOW - STRIDE tokens before it. Of Gemma, which predicts
/// badly without it, each window begins with <bos>.
///
/// --text, for a BERT with a head for masked tokens: every token is masked once, together with every seventh token
/// before and after it, and predicted from the others. The perplexity is that of these predictions; it is no decoder's.
///
/// --text with --against, for any two models that run here, encoders and decoders, with or without a head: the lines of
/// the text are sentences. Of each, both make an embedding: the mean of the last hidden states, or what the modules of
/// sentence-transformers in the directory say (Pooling, Dense, Normalize). Shown are the cosine between both embeddings
/// of a sentence, its mean and the lowest, and the rank correlation of the cosines of all pairs of sentences: 1 where
/// both models find the same sentences near.
///
/// --task, for a decoder: a file of JSON lines, {"context": TEXT, "choices": [TEXT, TEXT], "answer": INDEX} with
/// "question" beside "context" or in its place, or {"context": TEXT, "target": TEXT}. Of choices the most likely one is
/// taken; a target is right where each of its tokens is the most likely one. Shown is the share of right answers with
/// its standard error, for choices also by the log-likelihood of a byte: acc and acc_norm of lm-evaluation-harness.
/// With --chat the context is what a user says, and the answer the beginning of the reply.
///
/// --task, for a BERT with a head for answers: a file in SQuAD's JSON format; the model finds each answer in its text.
/// Answers are scored by exact match and by F1 over words, in percent, after the normalization of SQuAD's evaluation. A
/// text longer than a window is read in windows that overlap by half.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour eval model/ --text wikitext.txt
  twofour eval model/ --text wikitext.txt --window 1024 --stride 512 --json
  twofour eval model/ --text wikitext.txt --device cuda
  twofour eval pruned-bert/ --text text.txt --against bert/
  twofour eval model/ --task questions.jsonl --limit 500
  twofour eval model/ --task questions.jsonl --chat --device cuda
  twofour eval answers/ --task dev-v1.1.json

On a GPU, a decoder's perplexity is that of its weights expanded to dense bf16
or f16; that of a decoder with experts is computed as `generate` computes.")]
pub(crate) struct Eval {
    #[command(flatten)]
    model: ModelArguments,

    /// The text, UTF-8
    #[arg(long, value_name = "FILE", required_unless_present = "task")]
    text: Option<PathBuf>,

    /// Questions: JSON lines, for a BERT SQuAD's JSON format
    #[arg(long, alias = "questions", value_name = "FILE", conflicts_with_all = ["text", "stride"])]
    task: Option<PathBuf>,

    /// Put the questions as a user's messages, by the model's chat template
    #[arg(long, requires = "task")]
    chat: bool,

    /// What the system says before each message
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,

    /// A model whose sentence embeddings the model's are compared with, such as the one that it was pruned from
    #[arg(long, value_name = "MODEL", requires = "text", conflicts_with = "stride")]
    against: Option<PathBuf>,

    /// Ask the first N questions, or compare N lines from all over the text [default: all questions, 1000 lines]
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    limit: Option<u32>,

    /// Tokens of a window, or the most of a line or a question [default: the model's context, of a text at most 2048,
    /// of a BERT's questions at most 384]
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
    device: String,
    seconds: f64,
}

/// What was measured, how, in which type, and when it began.
type Found = (Perplexity, Windows, DataType, Instant);

/// What perplexity is, for people.
pub(super) const PERPLEXITY: &str =
    "perplexity: as unsure as a guess among so many tokens, e to the mean loss; less is better";

/// The window where none is given, for models of a longer context.
const WINDOW: usize = 2048;

/// The windows that the options ask for. Each begins with the token that the tokenizer puts before a text, where the
/// model needs it.
pub(super) fn windows(
    (window, stride): (Option<usize>, Option<usize>),
    model: &TransformerConfig,
    tokenizer: &Tokenizer,
) -> Result<Windows> {
    let context = model.context();
    let window = window.unwrap_or(context.min(WINDOW));
    let begin = if model.begins_windows() { tokenizer.framing()?[0].first().copied() } else { None };
    let windows = Windows { window, stride: stride.unwrap_or(window), begin };
    windows.validate(context).map_err(|error| Usage(error.to_string()))?;
    Ok(windows)
}

impl Eval {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let given = self.model.directory().to_owned();
        self.model = self.model.located(screen)?;
        self.measure(screen)?;
        screen.next(&next::after_measuring(&given, self.model.directory()))?;
        Ok(Verdict::Yes)
    }

    fn measure(&self, screen: &mut Screen) -> Result<()> {
        let limit = self.limit.map(|limit| limit as usize);
        let directory = SavedModel::locate(self.model.directory());
        let text = match (&self.text, &self.task) {
            (_, Some(file)) if EncoderCheckpoint::is_at(&directory) => {
                if self.chat {
                    bail!(Usage("a BERT answers without --chat".to_owned()));
                }
                return questions::answer(screen, &self.model, file, (self.window, limit));
            }
            (_, Some(file)) => {
                let chat = self.chat.then_some(task::Chat { system: self.system.as_deref() });
                return task::answer(screen, &self.model, file, chat, (self.window, limit));
            }
            (Some(text), None) => text,
            (None, None) => bail!(Usage("give --text FILE or --task FILE".to_owned())),
        };
        if limit.is_some() && self.against.is_none() {
            bail!(Usage("--limit is for --task, and for --text with --against".to_owned()));
        }
        if self.against.is_some() || EncoderCheckpoint::is_at(&directory) {
            if self.stride.is_some() {
                bail!(Usage(
                    "encoders and embeddings are measured in windows that do not overlap: leave out --stride"
                        .to_owned()
                ));
            }
            return match &self.against {
                Some(other) => encoder::compare(screen, &self.model, (text, other), (self.window, limit)),
                None => encoder::perplexity(screen, &self.model, text, self.window),
            };
        }
        let opened = match self.model.device() {
            ComputeDevice::Cpu => None,
            // Training has no experts.
            ComputeDevice::Cuda(_) => Some(self.model.open()?).filter(|(saved, _)| saved.config().experts.is_none()),
        };
        let (found, windows, dtype, begin) = match opened {
            Some(opened) => self.expanded(self.model.gpu()?, opened, &text::read(text)?, screen)?,
            None => self.as_stored(&text::read(text)?, screen)?,
        };
        let answer = Answer {
            perplexity: found.perplexity,
            tokens: found.tokens,
            window: windows.window,
            stride: windows.stride,
            dtype: dtype.to_string(),
            device: self.model.device().to_string(),
            seconds: begin.elapsed().as_secs_f64(),
        };
        screen.line(format_args!("perplexity {:.4} over {} tokens", answer.perplexity, answer.tokens))?;
        screen.note(PERPLEXITY)?;
        screen.json(&answer)
    }

    /// Scores text as `generate` computes.
    fn as_stored(&self, text: &str, screen: &Screen) -> Result<Found> {
        let model = self.model.load()?;
        let windows = windows((self.window, self.stride), model.decoder.config(), &model.tokenizer)?;
        let tokens = text::encode(&model.tokenizer, text, screen)?;
        let (begin, mut progress) = (Instant::now(), screen.progress());
        let found = model.decoder.perplexity(&tokens, windows, &mut |done, total| {
            progress.steps("tokens", done as u64, total as u64);
        })?;
        Ok((found, windows, model.dtype, begin))
    }

    /// Scores text on a GPU by the training engine, with dense weights.
    fn expanded(
        &self,
        number: usize,
        (saved, dtype): (SavedModel, DataType),
        text: &str,
        screen: &Screen,
    ) -> Result<Found> {
        let tokenizer = saved.tokenizer()?;
        let windows = windows((self.window, self.stride), saved.config(), &tokenizer)?;
        let tokens = text::encode(&tokenizer, text, screen)?;
        let engine = CudaEngine::new(&Device::open(number)?, dtype)?;
        let mut model = saved.model(&engine, windows.window)?;
        let (begin, mut progress) = (Instant::now(), screen.progress());
        let found = model.perplexity(&engine, &tokens, windows, |done, total| {
            progress.steps("tokens", done as u64, total as u64);
        })?;
        Ok((found, windows, dtype, begin))
    }
}
