//! Encoders for inference: BERT.

mod checkpoint;
#[cfg(feature = "cuda")]
mod cuda;
mod embeddings;
mod masked;
mod masked_head;
mod modules;
mod sentence;
mod similarity;
#[cfg(test)]
mod tests;

use std::{ops::ControlFlow, path::Path};

use twofour::{
    file::StoredElement,
    kernel::{Activation, KernelElement},
};

#[cfg(feature = "cuda")]
pub use self::cuda::CudaEncoder;
pub(super) use self::embeddings::Embeddings;
pub use self::{masked::MaskedEncoder, sentence::SentenceEncoder, similarity::Similarity};
use super::{
    BlockInput, EncoderInput, HiddenStates, Observation,
    checkpoint::{EncoderCheckpoint, StoredParts},
    config::TransformerConfig,
    inference::{
        attention::Seen,
        layer::{Layer, Role},
        linear::Linear,
        parts::Parts,
        passes::widened,
    },
};
use crate::{Error, Result};

impl<T: KernelElement> HiddenStates for Encoder<T> {
    fn config(&self) -> &TransformerConfig {
        self.config()
    }

    fn hidden(&self, inputs: &[EncoderInput<'_>]) -> Result<Vec<Vec<f32>>> {
        self.forward(inputs)
    }
}

/// The hidden states of sequences that lie one after the other.
fn split(mut all: &[f32], inputs: &[EncoderInput<'_>], width: usize) -> Vec<Vec<f32>> {
    let of = |input: &EncoderInput<'_>| {
        let (own, others) = all.split_at(input.tokens.len() * width);
        all = others;
        own.to_vec()
    };
    inputs.iter().map(of).collect()
}

/// An encoder's weights packed for the CPU kernels in `T`: dense layers for the dense kernel, 2:4 and compressed ones
/// for the 2:4 kernel. The hidden states, the
/// norms and attention are f32.
///
/// ```no_run
/// use twofour_nn::model::{Encoder, EncoderInput, Tokenizer};
/// let encoder = Encoder::<f32>::load("bert")?;
/// let tokens = Tokenizer::read("bert/tokenizer.json".as_ref())?.encode("two of every four")?;
/// let hidden = encoder.forward(&[EncoderInput { tokens: &tokens, types: None }])?;
/// assert_eq!(hidden[0].len(), tokens.len() * encoder.config().width);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Encoder<T: KernelElement> {
    config: TransformerConfig,
    embeddings: Embeddings<T>,
    layers: Vec<Layer<T>>,
    pooler: Option<Linear<T>>,
    /// The stored weights of each layer's linear layers, as an observer is told.
    stored: Vec<[BlockInput; 4]>,
}

impl<T: KernelElement + StoredElement> Encoder<T> {
    /// Reads a directory with `config.json` of `model_type` `bert` and safetensors. Heads for tasks, whose names begin
    /// with `cls.`, `classifier.` or `qa_outputs.`, are
    /// ignored; the pooler is read where it is stored.
    ///
    /// # Errors
    /// [`CheckpointError`](super::CheckpointError) for a configuration or tensors that do not fit; those of reading and
    /// packing.
    pub fn load(directory: impl AsRef<Path>) -> Result<Self> {
        EncoderCheckpoint::open(directory)?.inference()
    }

    pub(super) fn build(config: TransformerConfig, parts: &StoredParts<'_>) -> Result<Self> {
        let width = config.width;
        let embeddings = Embeddings::build(&config, parts)?;
        let layers = (0..config.layers).map(|layer| Layer::build(&config, parts, layer));
        let layers = layers.collect::<Result<_>>()?;
        let pooler = match parts.has_linear("pooler") {
            true => Some(parts.linear("pooler", (width, width))?),
            false => None,
        };
        let input = |layer: usize, role: Role| {
            let weights = parts.weights_of(&format!("blocks.{layer}.{}", role.name()));
            BlockInput { weights, is_transposed: false }
        };
        let stored = (0..config.layers).map(|layer| Role::ALL.map(|role| input(layer, role))).collect();
        Ok(Encoder { embeddings, layers, pooler, stored, config })
    }
}

impl<T: KernelElement> Encoder<T> {
    /// The encoder's description.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// Bytes of the layers' linear weights in memory.
    pub fn weight_bytes(&self) -> usize {
        self.layers.iter().map(Layer::bytes).sum()
    }

    /// The last hidden states of each sequence, `[tokens, width]`. Sequences are not padded: those of a batch go
    /// through the linear layers together, and attend to
    /// themselves alone.
    ///
    /// # Errors
    /// A sequence that is empty or longer than the context, tokens or types that do not exist or of another number;
    /// those of the products.
    pub fn forward(&self, inputs: &[EncoderInput<'_>]) -> Result<Vec<Vec<f32>>> {
        self.run(inputs, None)
    }

    /// [`Encoder::forward`], showing the inputs of all linear layers but the pooler's to `observe`.
    ///
    /// # Errors
    /// Those of [`Encoder::forward`].
    pub fn forward_observed(
        &self,
        inputs: &[EncoderInput<'_>],
        observe: &mut dyn FnMut(Observation<'_>),
    ) -> Result<Vec<Vec<f32>>> {
        self.run(inputs, Some(observe))
    }

    fn run(
        &self,
        inputs: &[EncoderInput<'_>],
        mut observe: Option<&mut dyn FnMut(Observation<'_>)>,
    ) -> Result<Vec<Vec<f32>>> {
        let mut x = self.embeddings.forward(&self.config, inputs)?;
        let lengths: Vec<usize> = inputs.iter().map(|input| input.tokens.len()).collect();
        let tokens = lengths.iter().sum();
        for (layer, stored) in self.layers.iter().zip(&self.stored) {
            layer.forward(&self.config, &mut x, Seen::Sequences(&lengths), &mut |role: Role, x: &[T]| {
                // Inputs are widened for an observer alone.
                let input = Role::ALL.iter().position(|own| *own == role).map(|at| &stored[at]);
                if let (Some(input), Some(observe)) = (input, &mut observe) {
                    observe(Observation { input, x: &widened(x), tokens });
                }
                ControlFlow::Continue(())
            })?;
        }
        Ok(split(&x, inputs, self.config.width))
    }

    /// The pooler's output for the hidden states of one sequence, `[width]`: `tanh` of a linear layer of the first
    /// token's; none where the checkpoint has no pooler.
    ///
    /// # Errors
    /// Hidden states of fewer elements than one token has; those of the product.
    pub fn pooled(&self, hidden: &[f32]) -> Result<Option<Vec<f32>>> {
        let Some(pooler) = &self.pooler else { return Ok(None) };
        let width = self.config.width;
        let first = hidden.get(..width).ok_or(Error::length("hidden states to pool", width, hidden.len()))?;
        let first: Vec<T> = first.iter().map(|value| T::from_f32(*value)).collect();
        let pooled = widened(&pooler.forward(&first, 1, Activation::Identity)?);
        Ok(Some(pooled.into_iter().map(f32::tanh).collect()))
    }
}
