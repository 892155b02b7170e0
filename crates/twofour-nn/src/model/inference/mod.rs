//! Inference: weights packed for the CPU kernels, and a key-value cache.

mod alibi;
pub(super) mod attention;
mod batch;
mod build;
pub(super) mod cache;
#[cfg(feature = "cuda")]
pub(super) mod cuda;
pub(super) mod entry;
pub(super) mod experts;
mod feed_forward;
mod few;
mod gpt;
mod hidden_layer;
pub(super) mod latent;
pub(super) mod layer;
pub(super) mod linear;
pub(super) mod norm;
pub(super) mod parts;
pub(super) mod passes;
mod random;
mod relative;
pub(super) mod rotation;
mod scores;
mod session;
#[cfg(test)]
mod tests;
pub(super) mod weight;
mod windows;

use std::{borrow::Cow, ops::ControlFlow};

use twofour::kernel::{Activation, KernelElement};

#[cfg(feature = "cuda")]
pub use self::cuda::{CudaInference, CudaRandomWeights, CudaSession};
use self::{
    entry::Entry,
    layer::Layer,
    linear::Linear,
    norm::Norm,
    passes::{narrowed, widened},
    rotation::Rotations,
    scores::bound,
};
pub use self::{random::RandomWeights, session::Session};
#[cfg(doc)]
use super::Gpt;
use super::{
    Decoder, EncoderInput, HiddenStates, Perplexity, SampledTexts, Sampling, Sequence, Windows,
    config::TransformerConfig,
};

use crate::{Error, Result};

/// A decoder's weights packed for the CPU kernels in `T`: dense layers for the dense kernel, 2:4 and compressed ones
/// for the 2:4 kernel. Of a [`Gpt`] it is a
/// copy: training the model further does not change it.
///
/// GEMMs run in `T`, and the cache is in `T`; the residual stream and the sums of norms and of attention are f32.
///
/// ```
/// use std::ops::ControlFlow;
/// use twofour_nn::model::{Gpt, GptConfig, Inference, Sampling, Tokenizer};
/// use twofour_transformer::engine::cpu::CpuEngine;
/// let config = GptConfig { layers: 2, width: 32, heads: 2, context: 16, feed_forward: 64 };
/// let model = Gpt::new(&CpuEngine, &config, 0)?;
/// let mut text = vec![];
/// let prompt = Tokenizer::Bytes.encode("two of ")?;
/// Inference::<f32>::new(&CpuEngine, &model)?.generate(&prompt, 20, Sampling::default(), |token| {
///     text.push(token);
///     ControlFlow::Continue(())
/// })?;
/// assert_eq!(text.len(), 20);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Inference<T: KernelElement> {
    config: TransformerConfig,
    entry: Entry<T>,
    layers: Vec<Layer<T>>,
    /// The norm behind the last layer; none where blocks end in norms.
    norm: Option<Norm>,
    /// What leads to the width of the table of tokens, where that is another.
    projected: Option<Linear<T>>,
    head: Linear<T>,
    rotations: Option<Rotations>,
}

impl<T: KernelElement> Inference<T> {
    /// The model's description.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// Bytes of the linear layers' weights in memory: values, and metadata where they are 2:4; without biases.
    pub fn weight_bytes(&self) -> usize {
        self.layers.iter().map(Layer::bytes).sum::<usize>() + self.head.bytes()
    }

    /// Begins a sequence.
    #[must_use]
    pub fn session(&self) -> Session<'_, T> {
        Session::new(self)
    }

    /// [`Decoder::generate`].
    ///
    /// # Errors
    /// As there.
    pub fn generate(
        &self,
        prompt: &[u32],
        count: usize,
        sampling: Sampling,
        mut f: impl FnMut(u32) -> ControlFlow<()>,
    ) -> Result<()> {
        Decoder::generate(self, prompt, count, sampling, &mut f)
    }

    /// [`Decoder::perplexity`].
    ///
    /// # Errors
    /// As there.
    pub fn perplexity(
        &self,
        tokens: &[u32],
        windows: Windows,
        mut progress: impl FnMut(usize, usize),
    ) -> Result<Perplexity> {
        Decoder::perplexity(self, tokens, windows, &mut progress)
    }

    /// The residual stream of tokens at `position` and after, before the first layer.
    fn embed(&self, tokens: &[u32], position: usize) -> Result<Vec<f32>> {
        self.entry.embed((&self.config, Some(&self.head)), tokens, position)
    }

    /// What the last layer made of tokens, `[tokens, width]`, behind the last norm.
    fn last_norm<'x>(&self, x: &'x [f32]) -> Cow<'x, [f32]> {
        match &self.norm {
            Some(norm) => Cow::Owned(norm.normalized(x)),
            None => Cow::Borrowed(x),
        }
    }

    /// The scores of the token that follows each of those whose last hidden states are `x: [tokens, width]`.
    pub(crate) fn head_of(&self, x: &[f32]) -> Result<Vec<f32>> {
        let tokens = x.len() / self.config.width;
        let mut x = narrowed::<T>(&self.last_norm(x));
        if let Some(projected) = &self.projected {
            x = projected.forward(&x, tokens, Activation::Identity)?;
        }
        let mut scores = widened(&self.head.forward(&x, tokens, Activation::Identity)?);
        bound(&mut scores, self.config.logit_soft_cap());
        Ok(scores)
    }

    /// Whether queries and keys of a text of so many tokens are rotated by other angles than those of shorter ones.
    fn is_stretched(&self, tokens: usize) -> bool {
        self.rotations.as_ref().is_some_and(|rotations| rotations.is_stretched(tokens))
    }

    /// An error for the first token that is not in the vocabulary.
    fn expect_tokens(&self, tokens: &[u32]) -> Result<()> {
        match tokens.iter().enumerate().find(|(_, token)| **token as usize >= self.config.vocabulary()) {
            None => Ok(()),
            Some((index, &token)) => Err(no_token(token, index, self.config.vocabulary())),
        }
    }
}

impl<T: KernelElement> Decoder for Inference<T> {
    fn config(&self) -> &TransformerConfig {
        self.config()
    }

    fn weight_bytes(&self) -> usize {
        self.weight_bytes()
    }

    fn begin(&self, _: usize) -> Result<Box<dyn Sequence + '_>> {
        Ok(Box::new(self.session()))
    }

    fn sample(&self, texts: &SampledTexts<'_>, progress: &mut dyn FnMut(usize) -> Result<()>) -> Result<Vec<Vec<u32>>> {
        self.sample_batch(texts, progress)
    }
}

impl<T: KernelElement> HiddenStates for Inference<T> {
    fn config(&self) -> &TransformerConfig {
        self.config()
    }

    fn hidden(&self, inputs: &[EncoderInput<'_>]) -> Result<Vec<Vec<f32>>> {
        inputs.iter().map(|input| self.session().last_hidden(input.tokens)).collect()
    }
}

fn no_token(token: u32, position: usize, vocabulary: usize) -> Error {
    Error::token("inputs", token, position, vocabulary)
}
