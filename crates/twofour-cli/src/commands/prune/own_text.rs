//! Text that the model writes itself, to be calibrated on.

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use twofour_nn::{
    Error,
    model::{BlockwiseCheckpoint, EncoderCheckpoint, LanguageModel, SampledTexts, Sampling as Chosen, SavedModel},
    text::TextError,
};

use super::sampling::Sampling;
use crate::{exit::Usage, interrupt, memory, present::Screen};

/// What `--calibration` has in a text's place.
const SELF: &str = "self";

/// Tokens of a piece where no length is given, in models of a longer context.
const LENGTH: usize = 512;

/// Pieces of tokens that a model is calibrated on.
#[derive(Debug)]
pub(in super::super) struct Pieces {
    pub(in super::super) tokens: Vec<Vec<u32>>,
    /// The first tokens of each that the model read and did not write: they are left out of statistics.
    pub(in super::super) prompt: usize,
}

impl Pieces {
    /// Pieces of texts, or, where `self` stands in their place, what the model in `input` writes.
    pub(in super::super) fn of(
        screen: &Screen,
        (checkpoint, input): (&dyn BlockwiseCheckpoint, &Path),
        sampling: &Sampling,
    ) -> Result<Self> {
        let is_own = |text: &PathBuf| text == Path::new(SELF);
        match sampling.texts.as_slice() {
            [own] if is_own(own) => return written(screen, &SavedModel::locate(input), sampling),
            texts if texts.iter().any(is_own) => {
                bail!(Usage("--calibration self: stands alone; give it, or text files".to_owned()))
            }
            _ => {}
        }
        let tokenizer = checkpoint.tokenizer()?;
        let framing = checkpoint.framing(&tokenizer)?;
        let tokens = sampling.pieces(&tokenizer, &framing, checkpoint.context(), screen)?;
        Ok(Pieces { tokens, prompt: 0 })
    }
}

/// What a model writes at temperature 1, from where its chat template has a user begin, or else from the token that
/// texts begin with.
fn written(screen: &Screen, path: &Path, sampling: &Sampling) -> Result<Pieces> {
    if EncoderCheckpoint::is_at(path) {
        bail!(Usage("--calibration self: an encoder writes no text; give a text file".to_owned()));
    }
    let saved = SavedModel::open(path)?;
    memory::expect_room_for_weights(saved.reader(), saved.dtype())?;
    let template = match saved.chat_template() {
        Ok(template) => Some(template),
        Err(Error::Text(TextError::NoTemplate { .. })) => None,
        Err(error) => return Err(error.into()),
    };
    drop(saved);
    let model = LanguageModel::load(path)?;
    let before = match &template {
        Some(template) => {
            let text = template.before_user()?;
            template.expect_special(&model.tokenizer, &text)?;
            model.tokenizer.encode_with_places(&text)?.0
        }
        None => vec![],
    };
    let prompt = match (before.is_empty(), model.begin) {
        (false, _) => before,
        (true, Some(begin)) => vec![begin],
        (true, None) => bail!(Usage(
            "--calibration self: the model has neither a chat template nor a token that texts begin with; give a text \
             file"
                .to_owned()
        )),
    };
    let context = model.decoder.config().context();
    let length = sampling.length.unwrap_or(LENGTH.min(context));
    if length > context {
        bail!(Usage(format!("--length {length}: the model's context is {context} tokens")));
    }
    if length <= prompt.len() {
        let tokens = prompt.len();
        bail!(Usage(format!("--length {length}: the model writes after {tokens} tokens; give a larger number")));
    }
    let chosen = Chosen { temperature: 1.0, seed: sampling.seed };
    let texts = SampledTexts { prompt: &prompt, count: sampling.samples, length, sampling: chosen };
    let (total, mut done, mut progress) = (sampling.samples * (length - prompt.len()), 0, screen.progress());
    let tokens = model.decoder.sample(&texts, &mut |more| {
        done += more;
        progress.steps("writing text", done as u64, total as u64);
        if interrupt::requested() { Err(twofour::Error::Interrupted.into()) } else { Ok(()) }
    })?;
    Ok(Pieces { tokens, prompt: prompt.len() })
}
