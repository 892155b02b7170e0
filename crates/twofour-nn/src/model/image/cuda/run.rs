//! Batches of images through an encoder on a GPU.

use twofour_cuda::layer::{DenseLinear, DeviceBuffer};
use twofour_transformer::cuda::copy;

use super::{super::embeddings::patch_rows, CudaEnd, CudaImageEncoder, neck::NeckWork};
use crate::{
    Error, Result,
    model::{
        ModelOutput,
        inference::cuda::{FullAttention, Work, download, first, upload},
    },
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
    attention: FullAttention,
    neck: Option<NeckWork>,
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
        let (stack, config, context, dtype) = (&self.stack, self.config(), self.context(), self.dtype());
        let group = (TOKENS / config.image()?.tokens()).clamp(1, images);
        let [tokens, width] = config.hidden_shape();
        Ok(CudaImageBatch {
            images,
            group,
            patches: DeviceBuffer::zeros(
                context,
                dtype,
                images * config.image()?.tokens() * config.image()?.patch_len(),
            )?,
            hidden: DeviceBuffer::zeros(context, dtype, images * tokens * width)?,
            work: Work::new(stack, group * config.context(), false)?,
            attention: FullAttention::new(stack, &vec![config.context(); group])?,
            neck: match config.output {
                ModelOutput::Neck { channels } => {
                    Some(NeckWork::new(context, dtype, (group * config.context(), channels))?)
                }
                ModelOutput::Hidden { .. } | ModelOutput::Vocabulary { .. } => None,
            },
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
        let expected = self.images * self.encoder.config().image()?.image_len();
        if pixels.len() != expected {
            return Err(Error::length("the images of a batch", expected, pixels.len()));
        }
        let rows = patch_rows(self.encoder.config(), pixels)?;
        self.patches = upload(self.encoder.context(), self.encoder.dtype(), &rows)?;
        Ok(())
    }

    /// Launches the way of the images from their patches to their hidden states, and returns before it is done:
    /// [`LayerContext::synchronize`](twofour_cuda::layer::LayerContext::synchronize) waits.
    ///
    /// # Errors
    /// Those of the kernels and of cuBLASLt.
    pub fn run(&mut self) -> Result<()> {
        for begin in (0..self.images).step_by(self.group) {
            self.run_some(begin, self.group.min(self.images - begin))?;
        }
        Ok(())
    }

    /// Launches the way of some of the images through the encoder.
    fn run_some(&mut self, begin: usize, count: usize) -> Result<()> {
        let CudaImageEncoder { stack, patches, table, end } = self.encoder;
        let (config, context, width) = (&stack.config, &stack.context, stack.config.width);
        let (tokens, patch_len) = (config.context(), config.image()?.patch_len());
        let (len, first_token, of_image) = (count * tokens * width, begin * tokens, tokens * width);
        for image in 0..count {
            let mut x = self.work.stream().as_slice_mut();
            copy(context, table.as_slice(), x.part(image * of_image..(image + 1) * of_image)?)?;
        }
        let embedding = DenseLinear { out_features: width, in_features: patch_len };
        let pixels = self.patches.as_slice();
        let pixels = pixels.part(first_token * patch_len..(first_token + count * tokens) * patch_len)?;
        let embedded = first(self.work.added(), len)?;
        embedding.forward(context, (pixels, count * tokens), patches.as_slice(), None, embedded)?;
        let (lengths, attention) = (vec![tokens; count], &mut self.attention);
        self.work.layers(stack, count * tokens, true, &mut |index, qkv, o| {
            attention.launch((stack, index), &lengths, qkv, o)
        })?;
        let hidden: usize = config.hidden_shape().iter().product();
        let mut all = self.hidden.as_slice_mut();
        let to = all.part(begin * hidden..(begin + count) * hidden)?;
        match end {
            CudaEnd::Norm(norm) => self.work.finish_to(stack, norm, count * tokens, to),
            CudaEnd::Neck(neck) => {
                let Some(work) = &mut self.neck else { return Ok(()) };
                neck.run((context, config), work, count, self.work.sum(stack, count * tokens)?, to)
            }
        }
    }

    /// The hidden states of each image, as [`ImageEncoder::forward`](super::super::ImageEncoder::forward) returns them,
    /// after waiting for [`CudaImageBatch::run`].
    ///
    /// # Errors
    /// Those of copying.
    pub fn hidden(&self) -> Result<Vec<Vec<f32>>> {
        let len: usize = self.encoder.config().hidden_shape().iter().product();
        Ok(download(&self.hidden)?.chunks_exact(len).map(<[f32]>::to_vec).collect())
    }
}
