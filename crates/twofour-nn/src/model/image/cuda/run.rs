//! Batches of images through an encoder on a GPU.

use half::{bf16, f16};
use twofour::DataType;
use twofour_cuda::layer::DeviceBuffer;

use super::{super::embeddings::patch_rows, CudaImageEncoder, work::Work};
use crate::{
    Error, Result,
    model::inference::passes::{narrowed, widened},
};

/// Tokens that go through the layers together, about: enough to fill a GPU. More images of a batch follow them.
const TOKENS: usize = 1 << 14;

/// A batch of images on a GPU with room for what lies between an encoder's layers.
#[derive(Debug)]
pub struct CudaImageBatch<'a> {
    encoder: &'a CudaImageEncoder,
    images: usize,
    /// Images that go through the layers together.
    group: usize,
    /// The patches, in the type to compute in.
    patches: DeviceBuffer,
    /// The hidden states of all images behind the last norm or the neck.
    hidden: DeviceBuffer,
    work: Work,
}

impl CudaImageEncoder {
    /// Room for batches of so many images.
    ///
    /// # Errors
    /// [`Error::Setting`] for no images; those of the device's memory.
    pub fn batch(&self, images: usize) -> Result<CudaImageBatch<'_>> {
        if images == 0 {
            return Err(Error::Setting { what: "images of a batch", found: "0".into(), expected: "one or more" });
        }
        let (config, context) = (&self.config, &self.context);
        let group = (TOKENS / config.image()?.tokens()).clamp(1, images);
        let [tokens, width] = config.hidden_shape();
        Ok(CudaImageBatch {
            images,
            group,
            patches: DeviceBuffer::zeros(
                context,
                self.dtype,
                images * config.image()?.tokens() * config.image()?.patch_len(),
            )?,
            hidden: DeviceBuffer::zeros(context, self.dtype, images * tokens * width)?,
            work: Work::new(self, group)?,
            encoder: self,
        })
    }
}

impl CudaImageBatch<'_> {
    /// Images of the batch.
    pub fn images(&self) -> usize {
        self.images
    }

    /// Brings images to the device: `[images, channels, height, width]`, as
    /// [`ImageEncoder::forward`](super::super::ImageEncoder::forward) takes them.
    ///
    /// # Errors
    /// Values that are not those of all images; those of copying.
    pub fn write(&mut self, pixels: &[f32]) -> Result<()> {
        let expected = self.images * self.encoder.config.image()?.image_len();
        if pixels.len() != expected {
            return Err(Error::Length { what: "the images of a batch", expected, found: pixels.len() });
        }
        let rows = patch_rows(&self.encoder.config, pixels)?;
        match self.encoder.dtype {
            DataType::BF16 => self.patches.write(&narrowed::<bf16>(&rows))?,
            DataType::F16 => self.patches.write(&narrowed::<f16>(&rows))?,
            _ => self.patches.write(&rows)?,
        }
        Ok(())
    }

    /// Launches the way of the images from their patches to their hidden states, and returns before it is done:
    /// [`LayerContext::synchronize`](twofour_cuda::layer::LayerContext::synchronize) waits.
    ///
    /// # Errors
    /// Those of the kernels and of cuBLASLt.
    pub fn run(&mut self) -> Result<()> {
        let (config, group) = (&self.encoder.config, self.group);
        let patches = config.image()?.tokens() * config.image()?.patch_len();
        let hidden: usize = config.hidden_shape().iter().product();
        for begin in (0..self.images).step_by(group) {
            let count = group.min(self.images - begin);
            let mut all = self.hidden.as_slice_mut();
            let to = all.part(begin * hidden..(begin + count) * hidden)?;
            let from = self.patches.as_slice().part(begin * patches..(begin + count) * patches)?;
            self.work.run(self.encoder, count, from, to)?;
        }
        Ok(())
    }

    /// The hidden states of each image, as [`ImageEncoder::forward`](super::super::ImageEncoder::forward) returns them,
    /// after waiting for [`CudaImageBatch::run`].
    ///
    /// # Errors
    /// Those of copying.
    pub fn hidden(&self) -> Result<Vec<Vec<f32>>> {
        let hidden: Vec<f32> = match self.encoder.dtype {
            DataType::BF16 => widened(&self.hidden.to_host::<bf16>()?),
            DataType::F16 => widened(&self.hidden.to_host::<f16>()?),
            _ => self.hidden.to_host()?,
        };
        let len: usize = self.encoder.config.hidden_shape().iter().product();
        Ok(hidden.chunks_exact(len).map(<[f32]>::to_vec).collect())
    }
}
