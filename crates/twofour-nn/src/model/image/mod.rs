//! Image encoders for inference: ViT, DINOv2, and SAM's image encoder.

mod checkpoint;
#[cfg(feature = "cuda")]
mod cuda;
mod embeddings;
mod neck;
mod random;
#[cfg(test)]
mod tests;

use std::path::Path;

use twofour::{
    file::StoredElement,
    kernel::{Activation, KernelElement},
};

#[cfg(feature = "cuda")]
pub use self::cuda::{CudaImageBatch, CudaImageEncoder};
pub use self::random::{ImageWeights, WeightForm};
use self::{embeddings::PatchEmbeddings, neck::Neck};
use super::{
    checkpoint::ImageCheckpoint,
    config::{ImageHeadInput, ModelOutput, NormKind, TransformerConfig},
    inference::{
        attention::Seen,
        layer::{Layer, unobserved},
        linear::Linear,
        norm::Norm,
        parts::Parts,
        passes::{narrowed, widened},
    },
};
use crate::{Error, Result};

/// An image encoder's weights packed for the CPU kernels in `T`: dense layers for the dense kernel, 2:4 and compressed
/// ones for the 2:4 kernel. The hidden states, the norms and
/// attention are f32; the embedding of patches, the neck and the head are dense.
///
/// ```no_run
/// use twofour_nn::model::ImageEncoder;
/// let encoder = ImageEncoder::<f32>::load("dinov2-base")?;
/// let image = vec![0.0; encoder.config().image()?.image_len()];
/// let hidden = encoder.forward(&image)?;
/// let [tokens, width] = encoder.config().hidden_shape();
/// assert_eq!(hidden[0].len(), tokens * width);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct ImageEncoder<T: KernelElement> {
    config: TransformerConfig,
    embeddings: PatchEmbeddings<T>,
    layers: Vec<Layer<T>>,
    end: End<T>,
}

/// What follows the last layer.
#[derive(Debug)]
enum End<T: KernelElement> {
    Norm { norm: Norm, head: Option<Linear<T>> },
    Neck(Box<Neck<T>>),
}

impl<T: KernelElement + StoredElement> ImageEncoder<T> {
    /// Reads a directory with `config.json` of `model_type` `vit`, `dinov2`, `dinov2_with_registers`, `sam` or
    /// `sam_vision_model` and safetensors, as [`ImageCheckpoint::open`] does.
    ///
    /// # Errors
    /// [`CheckpointError`](super::CheckpointError) for a configuration or tensors that do not fit; those of reading and
    /// packing.
    pub fn load(directory: impl AsRef<Path>) -> Result<Self> {
        ImageCheckpoint::open(directory)?.inference()
    }
}

impl<T: KernelElement> ImageEncoder<T> {
    pub(super) fn build(config: TransformerConfig, parts: &impl Parts<T>) -> Result<Self> {
        config.validate()?;
        let embeddings = PatchEmbeddings::build(&config, parts)?;
        let layers = (0..config.layers).map(|layer| Layer::build(&config, parts, layer)).collect::<Result<_>>()?;
        let end = match config.output {
            ModelOutput::Hidden { head } => End::Norm {
                norm: Norm::read(NormKind::Layer, config.norm.epsilon, |part| {
                    parts.vector(&format!("norm.{part}"), config.width)
                })?,
                head: head
                    .map(|head| parts.linear("head", (head.classes, head.input.elements(config.width))))
                    .transpose()?,
            },
            ModelOutput::Neck { channels } => End::Neck(Box::new(Neck::build(&config, parts, channels)?)),
            ModelOutput::Vocabulary { .. } => {
                let (found, expected) = ("with scores of tokens".to_owned(), "one of images");
                return Err(Error::Setting { what: "the encoder", found, expected });
            }
        };
        Ok(ImageEncoder { config, embeddings, layers, end })
    }

    /// The encoder's description.
    pub fn config(&self) -> &TransformerConfig {
        &self.config
    }

    /// Bytes of the layers' linear weights in memory.
    pub fn weight_bytes(&self) -> usize {
        self.layers.iter().map(Layer::bytes).sum()
    }

    /// The last hidden states of each image of `pixels`, `[images, channels, height, width]`: of ViT and DINOv2 behind
    /// the last norm, `[tokens, width]`, the class token first, then registers; of SAM
    /// behind the neck, `[rows · columns, channels]`, row by row. Pixel values are as the model's preprocessing makes
    /// them: scaled to the model's size and normalized.
    ///
    /// # Errors
    /// Values that are no whole number of images of the model's size; those of the products.
    pub fn forward(&self, pixels: &[f32]) -> Result<Vec<Vec<f32>>> {
        let mut x = self.embeddings.forward(&self.config, pixels)?;
        let lengths = vec![self.config.context(); x.len() / (self.config.context() * self.config.width)];
        for layer in &self.layers {
            layer.forward(&self.config, &mut x, Seen::Sequences(&lengths), &mut unobserved)?;
        }
        let hidden = match &self.end {
            End::Norm { norm, .. } => norm.normalized(&x),
            End::Neck(neck) => neck.forward(&self.config, &x)?,
        };
        let [tokens, width] = self.config.hidden_shape();
        Ok(hidden.chunks_exact(tokens * width).map(<[f32]>::to_vec).collect())
    }

    /// The scores of classes for one image's hidden states, [`ImageEncoder::forward`]'s; none where the checkpoint has
    /// no head for classes.
    ///
    /// # Errors
    /// Hidden states of another number; those of the product.
    pub fn classify(&self, hidden: &[f32]) -> Result<Option<Vec<f32>>> {
        let (End::Norm { head: Some(linear), .. }, ModelOutput::Hidden { head: Some(head) }) =
            (&self.end, self.config.output)
        else {
            return Ok(None);
        };
        let [tokens, width] = self.config.hidden_shape();
        if hidden.len() != tokens * width {
            let (expected, found) = (tokens * width, hidden.len());
            return Err(Error::length("an image's hidden states", expected, found));
        }
        let input: Vec<T> = narrowed(&head_input(head.input, hidden, &self.config)?);
        Ok(Some(widened(&linear.forward(&input, 1, Activation::Identity)?)))
    }
}

/// What a head reads of one image's hidden states.
fn head_input(input: ImageHeadInput, hidden: &[f32], config: &TransformerConfig) -> Result<Vec<f32>> {
    let width = config.width;
    let (learned, patches) = hidden.split_at(config.image()?.learned_tokens() * width);
    let mut read = match input {
        ImageHeadInput::ClassToken | ImageHeadInput::ClassTokenAndMean => learned[..width].to_vec(),
        ImageHeadInput::Mean => vec![],
    };
    if input != ImageHeadInput::ClassToken {
        let mut mean = vec![0f32; width];
        patches.chunks_exact(width).for_each(|row| mean.iter_mut().zip(row).for_each(|(mean, x)| *mean += x));
        let count = (patches.len() / width).max(1) as f32;
        read.extend(mean.into_iter().map(|sum| sum / count));
    }
    Ok(read)
}
