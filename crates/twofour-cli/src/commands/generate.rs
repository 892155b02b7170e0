//! `twofour generate`.

use std::{ops::ControlFlow, path::PathBuf};

use anyhow::Result;
use clap::Args;
use half::bf16;
use serde::Serialize;
use twofour_nn::model::{Inference, Sampling};

use crate::{exit::Verdict, present::Screen};

/// Write text with a model that `quickstart` or `train` trained
///
/// Prints bytes as they are generated. Computes in bf16, the dtype of their files.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour generate twofour-quickstart
  twofour generate twofour-quickstart/dense.safetensors --prompt 'pub fn ' --bytes 1000 --temperature 0.5

The same seed gives the same text.")]
pub(crate) struct Generate {
    /// The model's file, dense or compressed, or the folder of `train` or of `quickstart`, for its 2:4 model
    model: PathBuf,

    /// The text to go on from
    #[arg(long, default_value = "", value_name = "TEXT", hide_default_value = true)]
    prompt: String,

    /// How many bytes to write
    #[arg(long, visible_alias = "tokens", default_value_t = 400, value_name = "N")]
    bytes: usize,

    /// 0 takes the most likely byte, 1 draws from the model's own distribution
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
}

impl Generate {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let of_folder = ["sparse.safetensors", "model.safetensors"].map(|name| self.model.join(name));
        let path = of_folder.into_iter().find(|file| file.exists()).unwrap_or(self.model);
        let sampling = Sampling { temperature: self.temperature, seed: self.seed };
        sampling.validate()?;
        let model = Inference::<bf16>::load(path)?;
        let mut text = Vec::new();
        let mut trouble = Ok(());
        screen.stream(self.prompt.as_bytes())?;
        model.generate(self.prompt.as_bytes(), self.bytes, sampling, |byte| {
            text.push(byte);
            trouble = screen.stream(&[byte]);
            if trouble.is_err() || screen.is_closed() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
        })?;
        trouble?;
        screen.stream(b"\n")?;
        screen.json(&Answer { prompt: &self.prompt, text: String::from_utf8_lossy(&text).into_owned() })?;
        Ok(Verdict::Yes)
    }
}
