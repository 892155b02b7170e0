//! The vision transformer that trains.

mod config;
mod file;
mod images;
mod task;
#[cfg(test)]
mod tests;

use super::Transformer;
use crate::{Result, block::BatchShape, engine::Engine};

pub use config::{Pooling, VitConfig};
pub use task::ImageClasses;

/// A vision transformer for classification (Dosovitskiy et al., "An Image is Worth 16x16 Words", 2021), pre-norm as
/// DINOv2's: patches go through a linear layer, learned positions are added, and after layers of full attention and
/// GELU feed-forward blocks the head reads the norm of the class token, or the mean over the patches.
///
/// The class token is a patch of zeros before the patches: what it is, its position learns. The images are in the
/// engine's memory, and samples name their patches by number.
pub type Vit<E> = Transformer<E, ImageClasses<E>>;

impl<E: Engine> Vit<E> {
    /// Brings images to the engine's memory, `[height, width, channels]` each, one after the other: batches name their
    /// tokens by number.
    ///
    /// # Errors
    /// Images of another shape than the model's, a class that the model does not have; not enough memory.
    pub fn set_images<'a>(
        &mut self,
        engine: &E,
        shape: [usize; 3],
        images: impl Iterator<Item = &'a [u8]>,
        classes: &[u8],
    ) -> Result<()> {
        let images = self.config().uploaded(engine, shape, images, classes)?;
        self.task_mut().set_images(images);
        Ok(())
    }

    /// The features that the head reads and the scores of the classes, `[images, width]` and `[images, classes]`, of
    /// images by their tokens `[images, tokens]`.
    ///
    /// # Errors
    /// A model that is not prepared; tokens of images that it does not have.
    pub fn features(&mut self, engine: &E, inputs: &[u32], shape: BatchShape) -> Result<[Vec<f32>; 2]> {
        let classes = vec![0; shape.batch];
        match self.uploaded(engine, (inputs, &classes), shape)? {
            Some(batch) => self.with_scores(engine, &batch, shape, |pooled, scores| {
                Ok([engine.read(pooled.features())?, engine.read(scores)?])
            }),
            None => Ok([vec![], vec![]]),
        }
    }

    /// Adds the sum of the cross-entropies, in nats, of the images' classes to `loss`; returns how many images are
    /// classified as their targets say.
    ///
    /// # Errors
    /// Those of [`Vit::features`]; a class that the model does not have.
    pub fn loss(
        &mut self,
        engine: &E,
        batch: (&[u32], &[u32]),
        shape: BatchShape,
        loss: &mut E::Buffer,
    ) -> Result<usize> {
        Ok(self.evaluate(engine, batch, shape, loss)?.unwrap_or(0))
    }
}
