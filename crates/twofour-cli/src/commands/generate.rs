//! `twofour generate`.

use std::{
    io::{self, IsTerminal},
    ops::ControlFlow,
    time::Instant,
};

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use twofour_cuda::compile_time;
use twofour_nn::{
    model::{LanguageModel, Sampling, SavedModel},
    text::Message,
};

use super::{model::ModelArguments, next};
use crate::{
    exit::{Usage, Verdict},
    present::Screen,
};

/// Write text with a model
///
/// Prints the text as it is generated, until the length is reached or the model ends it. The text is UTF-8: bytes that
/// are no character become U+FFFD, and a character that the last token does not complete is left out, with a warning,
/// or with `ends_inside_character` in JSON.
///
/// With --chat the prompt is what a user says to the model, written by the chat template of the checkpoint; printed is
/// the reply, up to the token that ends the model's turn.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour generate twofour-quickstart
  twofour generate model/ --prompt 'The capital of France' --temperature 0
  twofour generate twofour-quickstart/dense.safetensors --prompt 'ROMEO:' \\
      --length 1000 --temperature 0.5
  twofour generate model/ --prompt 'The capital of France' --device cuda
  twofour generate model/ --chat --prompt 'What is 2:4 sparsity?'

The same seed gives the same text.")]
pub(crate) struct Generate {
    #[command(flatten)]
    model: ModelArguments,

    /// The text to go on from, or with --chat what a user says
    #[arg(long, default_value = "", value_name = "TEXT", hide_default_value = true)]
    prompt: String,

    /// Reply to the prompt, by the model's chat template
    #[arg(long)]
    chat: bool,

    /// What the system says before the user
    #[arg(long, value_name = "TEXT", requires = "chat")]
    system: Option<String>,

    /// How many tokens to write; those of `quickstart` and `train` are bytes
    #[arg(long, visible_aliases = ["tokens", "bytes"], default_value_t = 400, value_name = "N")]
    length: usize,

    /// 0 takes the most likely token, 1 draws from the model's own distribution
    #[arg(long, default_value_t = 0.8, value_name = "T")]
    temperature: f32,

    /// Another seed gives other text
    #[arg(long, default_value_t = 0, value_name = "S")]
    seed: u64,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    prompt: &'a str,
    text: String,
    /// Whether the last tokens are the beginning of a character, which the text is without.
    ends_inside_character: bool,
    /// Tokens that were generated.
    tokens: usize,
    token_ids: Vec<u32>,
    prompt_tokens: usize,
    /// From the first token to the last, without compiling kernels; reading the prompt and the first token after it
    /// take `prompt_seconds`, with compiling.
    tokens_per_s: Option<f64>,
    prompt_seconds: f64,
    /// Spent on compiling and loading GPU kernels while generating, before the first token and after it.
    compile_seconds: f64,
    dtype: String,
}

impl Generate {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let sampling = Sampling { temperature: self.temperature, seed: self.seed };
        sampling.validate().map_err(|error| Usage(error.to_string()))?;
        let given = self.model.directory().to_owned();
        self.model = self.model.located(screen)?;
        let mut model = self.model.load()?;
        let prompt = match self.chat {
            true => self.conversation(&mut model)?,
            false => model.prompt(&self.prompt)?,
        };
        let context = model.decoder.config().context();
        if prompt.len() > context {
            let lost = prompt.len() - context;
            screen.warn(format_args!(
                "the prompt has {} tokens and the model's context {context}; the first {lost} are left out",
                prompt.len()
            ));
        }
        let (mut text, mut tokens, mut trouble) = (String::new(), Vec::new(), Ok(()));
        let mut decoder = model.tokenizer.decoder(&prompt);
        if !self.chat {
            screen.stream(self.prompt.as_bytes())?;
        }
        // GPU kernels are compiled by the first call that launches them: of decoding, after the first token.
        let (begin, compiled, mut first) = (Instant::now(), compile_time(), None);
        model.decoder.generate(&prompt, self.length, sampling, &mut |token| {
            first.get_or_insert_with(|| (begin.elapsed(), compile_time()));
            if model.end.contains(&token) {
                return ControlFlow::Break(());
            }
            tokens.push(token);
            let new = decoder.push(token);
            trouble = screen.stream(new.as_bytes());
            text.push_str(&new);
            if trouble.is_err() || screen.is_closed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        trouble?;
        let (all, compiled_all) = (begin.elapsed(), compile_time());
        let (first, compiled_first) = first.unwrap_or_default();
        let decoding = all.saturating_sub(first).saturating_sub(compiled_all.saturating_sub(compiled_first));
        let is_incomplete = decoder.is_incomplete();
        let rest = decoder.finish();
        screen.stream(rest.as_bytes())?;
        screen.stream(b"\n")?;
        text.push_str(&rest);
        if is_incomplete && !screen.is_json() {
            let more = if tokens.len() == self.length { "; a larger --length may complete it" } else { "" };
            screen.warn(format_args!("the text ends inside a character of several tokens, which is left out{more}"));
        }
        let answer = Answer {
            prompt: &self.prompt,
            text,
            ends_inside_character: is_incomplete,
            tokens: tokens.len(),
            prompt_tokens: prompt.len(),
            tokens_per_s: (tokens.len() > 1).then(|| (tokens.len() - 1) as f64 / decoding.as_secs_f64()),
            token_ids: tokens,
            prompt_seconds: first.as_secs_f64(),
            compile_seconds: compiled_all.saturating_sub(compiled).as_secs_f64(),
            dtype: model.dtype.to_string(),
        };
        // A file or another program gets the text alone.
        if io::stdout().is_terminal() {
            screen.next(&next::after_generating(&given, self.model.directory()))?;
        }
        screen.json(&answer)?;
        Ok(Verdict::Yes)
    }

    /// The tokens of the conversation up to the reply, whose end is one of the model's ends of a text from here on.
    fn conversation(&self, model: &mut LanguageModel) -> Result<Vec<u32>> {
        if self.prompt.is_empty() {
            bail!(Usage("--chat replies to what a user says: give it with --prompt TEXT".to_owned()));
        }
        let template = SavedModel::open(self.model.directory())?.chat_template()?;
        let system = self.system.as_deref().map(|content| Message { role: "system", content });
        let user = Message { role: "user", content: &self.prompt };
        let messages: Vec<_> = system.into_iter().chain([user]).collect();
        model.end.extend(template.end_of_turn(&model.tokenizer)?);
        Ok(template.encode(&model.tokenizer, &messages, true)?)
    }
}
