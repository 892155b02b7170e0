//! Predicting masked tokens on the CPU.

use twofour::{
    file::StoredElement,
    kernel::{Activation, KernelElement},
};

use super::{Encoder, EncoderInput};
use crate::{
    Error, Result,
    cpu::nonlinearity,
    model::{
        CheckpointError, EncoderCheckpoint, Perplexity,
        config::NormKind,
        families::bert::{MASKED_TRANSFORM, OWN_DECODER},
        inference::{
            build::Parts,
            linear::{Linear, LinearPart},
            norm::Norm,
            passes::{narrowed, widened},
            weight::Weight,
        },
    },
    text::SpecialTokens,
};

/// An encoder with the head that scores the vocabulary for masked tokens: transformers' `BertForMaskedLM`.
#[derive(Debug)]
pub struct MaskedEncoder<T: KernelElement> {
    encoder: Encoder<T>,
    special: SpecialTokens,
    transform: Linear<T>,
    norm: Norm,
    decoder: Linear<T>,
}

impl<T: KernelElement + StoredElement> MaskedEncoder<T> {
    /// Reads an encoder with its tokenizer and its head.
    ///
    /// # Errors
    /// [`CheckpointError::NoMaskedHead`]; a tokenizer without a mask token; those of reading and packing.
    pub fn load(checkpoint: &EncoderCheckpoint) -> Result<Self> {
        let parts = checkpoint.parts();
        if !checkpoint.has_masked_head() {
            return Err(CheckpointError::NoMaskedHead { path: checkpoint.reader().path().to_owned() }.into());
        }
        let special = checkpoint.tokenizer()?.special()?;
        let (width, vocabulary) = (checkpoint.config().width, checkpoint.config().vocabulary());
        let vector = |name: &str, len: usize| Parts::<T>::vector(&parts, name, len);
        let values: Vec<T> = match parts.has_linear(OWN_DECODER) {
            true => narrowed(&parts.values(&format!("{OWN_DECODER}.weight"))?),
            false => parts.table("embedding.weight", [vocabulary, width])?,
        };
        let bias = Some(vector("embedding.bias", vocabulary)?);
        let decoder = LinearPart::of(Weight::Dense(values), (vocabulary, width), bias);
        Ok(MaskedEncoder {
            special,
            transform: parts.linear(MASKED_TRANSFORM, (width, width))?,
            norm: Norm::read(NormKind::Layer, checkpoint.config().norm.epsilon, |part| {
                vector(&format!("head.norm.{part}"), width)
            })?,
            decoder: Linear::new(vec![decoder])?,
            encoder: checkpoint.inference()?,
        })
    }
}

impl<T: KernelElement> MaskedEncoder<T> {
    /// How many times a window is read: in each pass every so manieth token is masked, one of seven, which is close to
    /// the 15 % of BERT's training.
    pub const PASSES: usize = 7;

    /// Rows of hidden states whose scores are in memory at once.
    const ROWS: usize = 64;

    /// The encoder.
    pub fn encoder(&self) -> &Encoder<T> {
        &self.encoder
    }

    /// The perplexity of the masked tokens of a text: the exponential of the mean of `-log p` over all of its tokens,
    /// each of which is masked once, together with every seventh token
    /// before and after it, in a window of `window` tokens with those that frame a text. Windows do not overlap.
    /// `tokens` is the text as its tokenizer encodes it.
    /// `progress(done, total)` receives the tokens that are scored.
    ///
    /// # Errors
    /// A window beyond the context or in which no token fits; a text without tokens, tokens outside the vocabulary;
    /// [`Error::NotFinite`]; those of the products.
    pub fn perplexity(
        &self,
        tokens: &[u32],
        window: usize,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Perplexity> {
        let [before, after] = &self.special.framing;
        let text = self.special.inner(tokens);
        let context = self.encoder.config().context();
        let room = window.checked_sub(before.len() + after.len()).filter(|room| *room > 0 && window <= context);
        let Some(room) = room else {
            let found = format!("{window} for a context of {context}");
            let expected = "at most the context, and more than the tokens that frame a text";
            return Err(Error::Setting { what: "window", found, expected });
        };
        if text.is_empty() {
            return Err(Error::Setting { what: "tokens of the text", found: "0".to_owned(), expected: "one or more" });
        }
        let (mut sum, mut scored) = (0.0, 0);
        for part in text.chunks(room) {
            let framed = [before, part, after].concat();
            sum += self.negative_log_likelihood(&framed, before.len()..before.len() + part.len())?;
            scored += part.len();
            progress(scored, text.len());
        }
        Perplexity::of(sum, scored)
    }

    /// The sum of `-log p` of the tokens at `places`, each masked in one of the passes.
    fn negative_log_likelihood(&self, tokens: &[u32], places: std::ops::Range<usize>) -> Result<f64> {
        let masked = |pass: usize| places.clone().skip(pass).step_by(Self::PASSES);
        let passes: Vec<Vec<u32>> = (0..Self::PASSES.min(places.len()))
            .map(|pass| {
                let mut tokens = tokens.to_vec();
                masked(pass).for_each(|place| tokens[place] = self.special.mask);
                tokens
            })
            .collect();
        let inputs: Vec<_> = passes.iter().map(|tokens| EncoderInput { tokens, types: None }).collect();
        let (width, mut sum) = (self.encoder.config().width, 0.0);
        for (pass, hidden) in self.encoder.forward(&inputs)?.iter().enumerate() {
            let places: Vec<usize> = masked(pass).collect();
            for places in places.chunks(Self::ROWS) {
                let rows: Vec<f32> =
                    places.iter().flat_map(|place| &hidden[place * width..][..width]).copied().collect();
                let targets = places.iter().map(|place| tokens[*place]);
                sum += self.loss(&rows, targets)?;
            }
        }
        Ok(sum)
    }

    /// The sum of `-log p` of the tokens that belong to rows of hidden states.
    fn loss(&self, rows: &[f32], targets: impl ExactSizeIterator<Item = u32>) -> Result<f64> {
        let (config, count) = (self.encoder.config(), targets.len());
        let transformed = self.transform.forward(&narrowed::<T>(rows), count, Activation::Identity)?;
        let mut transformed = widened(&transformed);
        nonlinearity::in_place(config.feed_forward.activation, &mut transformed);
        let normalized: Vec<T> = self.norm.forward(&transformed);
        let scores = widened(&self.decoder.forward(&normalized, count, Activation::Identity)?);
        let mut sum = 0.0;
        for (scores, target) in scores.chunks_exact(config.vocabulary()).zip(targets) {
            let most = scores.iter().fold(f32::NEG_INFINITY, |most, score| most.max(*score));
            let total: f64 = scores.iter().map(|score| f64::from(score - most).exp()).sum();
            let own = scores.get(target as usize).ok_or(Error::Token {
                what: "the text",
                token: target,
                position: 0,
                vocabulary: config.vocabulary(),
            })?;
            sum += total.ln() - f64::from(own - most);
        }
        Ok(sum)
    }
}
