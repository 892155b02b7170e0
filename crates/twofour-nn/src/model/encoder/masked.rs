//! Predicting masked tokens.

use twofour::{
    DataType,
    file::StoredElement,
    kernel::{Activation, KernelElement},
};
#[cfg(feature = "cuda")]
use twofour_cuda::Device;

#[cfg(feature = "cuda")]
use super::cuda::{CudaEncoder, CudaMaskedHead};
use super::{
    EncoderInput, HiddenStates,
    masked_head::{MaskedHead, masked_decoder},
};
use crate::{
    Error, Result,
    cpu::{cross_entropy, nonlinearity},
    engine::Nonlinearity,
    model::{
        CheckpointError, EncoderCheckpoint, Perplexity,
        config::NormKind,
        expect_below,
        families::bert::MASKED_TRANSFORM,
        float::match_float,
        inference::{
            linear::Linear,
            norm::Norm,
            parts::Parts,
            passes::{narrowed, widened},
        },
    },
    text::SpecialTokens,
};

/// An encoder with the head that scores the vocabulary for masked tokens: transformers' `BertForMaskedLM`, on the CPU
/// or on a GPU.
#[derive(Debug)]
pub struct MaskedEncoder {
    encoder: Box<dyn HiddenStates>,
    head: Box<dyn MaskedHead>,
    special: SpecialTokens,
}

impl MaskedEncoder {
    /// Reads an encoder with its tokenizer and its head, to compute on the CPU in `dtype`: f32, bf16 or f16.
    ///
    /// # Errors
    /// [`CheckpointError::NoMaskedHead`]; a tokenizer without a mask token; another type; those of reading and packing.
    pub fn load(checkpoint: &EncoderCheckpoint, dtype: DataType) -> Result<Self> {
        Self::loaded(checkpoint, || {
            Ok((
                checkpoint.hidden_states(dtype)?,
                match_float!(dtype, |T| Ok(Box::new(CpuMaskedHead::<T>::read(checkpoint)?) as Box<dyn MaskedHead>))?,
            ))
        })
    }

    /// [`MaskedEncoder::load`], onto an NVIDIA GPU.
    ///
    /// # Errors
    /// Those of [`MaskedEncoder::load`] and of [`CudaEncoder::of_checkpoint`].
    #[cfg(feature = "cuda")]
    pub fn load_on(device: &Device, checkpoint: &EncoderCheckpoint, dtype: DataType) -> Result<Self> {
        Self::loaded(checkpoint, || {
            let encoder = CudaEncoder::of_checkpoint(device, checkpoint, dtype)?;
            let head = CudaMaskedHead::new(&encoder, &checkpoint.parts())?;
            Ok((Box::new(encoder), Box::new(head)))
        })
    }

    fn loaded(
        checkpoint: &EncoderCheckpoint,
        read: impl FnOnce() -> Result<(Box<dyn HiddenStates>, Box<dyn MaskedHead>)>,
    ) -> Result<Self> {
        if !checkpoint.has_masked_head() {
            return Err(CheckpointError::NoMaskedHead { path: checkpoint.reader().path().to_owned() }.into());
        }
        let special = checkpoint.tokenizer()?.special()?;
        let (encoder, head) = read()?;
        Ok(MaskedEncoder { encoder, head, special })
    }

    /// How many times a window is read: in each pass every so manieth token is masked, one of seven, which is close to
    /// the 15 % of BERT's training.
    pub const PASSES: usize = 7;

    /// Rows of hidden states whose scores are in memory at once.
    const ROWS: usize = 64;

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
        expect_below("the text", tokens, self.encoder.config().vocabulary())?;
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
        for (pass, hidden) in self.encoder.hidden(&inputs)?.iter().enumerate() {
            let places: Vec<usize> = masked(pass).collect();
            for places in places.chunks(Self::ROWS) {
                let rows: Vec<f32> =
                    places.iter().flat_map(|place| &hidden[place * width..][..width]).copied().collect();
                let targets: Vec<u32> = places.iter().map(|place| tokens[*place]).collect();
                sum += self.head.loss(&rows, &targets)?;
            }
        }
        Ok(sum)
    }
}

/// The head on the CPU.
#[derive(Debug)]
struct CpuMaskedHead<T: KernelElement> {
    transform: Linear<T>,
    function: Nonlinearity,
    norm: Norm,
    decoder: Linear<T>,
    vocabulary: usize,
}

impl<T: KernelElement + StoredElement> CpuMaskedHead<T> {
    fn read(checkpoint: &EncoderCheckpoint) -> Result<Self> {
        let (parts, config) = (checkpoint.parts(), checkpoint.config());
        let width = config.width;
        Ok(CpuMaskedHead {
            transform: parts.linear(MASKED_TRANSFORM, (width, width))?,
            function: config.feed_forward.activation,
            norm: Norm::read(NormKind::Layer, config.norm.epsilon, |part| {
                Parts::<T>::vector(&parts, &format!("head.norm.{part}"), width)
            })?,
            decoder: Linear::new(vec![masked_decoder(&parts, config)?])?,
            vocabulary: config.vocabulary(),
        })
    }
}

impl<T: KernelElement> MaskedHead for CpuMaskedHead<T> {
    fn loss(&self, rows: &[f32], targets: &[u32]) -> Result<f64> {
        let count = targets.len();
        let transformed = self.transform.forward(&narrowed::<T>(rows), count, Activation::Identity)?;
        let mut transformed = widened(&transformed);
        nonlinearity::in_place(self.function, &mut transformed);
        let normalized: Vec<T> = self.norm.forward(&transformed);
        let scores = widened(&self.decoder.forward(&normalized, count, Activation::Identity)?);
        Ok(cross_entropy::loss(&scores, self.vocabulary, targets))
    }
}
