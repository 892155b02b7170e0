//! Forward passes of image encoders that are compared.

use std::time::Instant;

use anyhow::Result;
use twofour::{file::StoredElement, kernel::KernelElement};
use twofour_cli::measure::random::Random;
use twofour_nn::model::{ImageCheckpoint, ImageEncoder, ImageInput, ImageWeights, TransformerConfig};

/// Where the weights of the contenders come from.
#[derive(Clone, Copy)]
pub(crate) enum ImageSource<'a> {
    /// A checkpoint: with every linear layer dense, and as it is stored.
    Checkpoint(&'a ImageCheckpoint),
    /// Random weights of a shape, in several forms.
    Random(&'a TransformerConfig, &'a [ImageWeights]),
}

/// A contender with a batch of images.
pub(crate) struct ImagePass<'a> {
    /// Seconds of a forward pass of the batch.
    pub(crate) seconds: Box<dyn FnMut() -> Result<f64> + 'a>,
    /// Bytes of the device's memory that are allocated for the contender, where it is known.
    pub(crate) allocated_bytes: Option<usize>,
}

/// Encoders of one description.
pub(crate) trait ImageContenders {
    /// Makes a batch of so many images for each.
    fn begin<'a>(&'a self, images: usize, progress: &mut dyn FnMut(usize)) -> Result<Vec<ImagePass<'a>>>;

    /// Bytes of the blocks' linear weights of each.
    fn weight_bytes(&self) -> Vec<usize>;
}

/// Random pixel values, the same in every run.
pub(crate) fn random_pixels(config: &TransformerConfig, images: usize) -> Vec<f32> {
    let mut random = Random::new();
    (0..images * config.image().map_or(0, ImageInput::image_len)).map(|_| random.float()).collect()
}

/// On the CPU.
pub(crate) struct CpuImages<T: KernelElement> {
    encoders: Vec<ImageEncoder<T>>,
}

impl<T: KernelElement + StoredElement> CpuImages<T> {
    /// Packs the weights of every contender.
    pub(crate) fn new(source: ImageSource<'_>, progress: &mut dyn FnMut(usize)) -> Result<Self> {
        let encoders = match source {
            ImageSource::Checkpoint(checkpoint) => vec![checkpoint.dense_inference()?, checkpoint.inference()?],
            ImageSource::Random(config, weights) => {
                let mut encoders = vec![];
                for (index, weights) in weights.iter().enumerate() {
                    progress(index);
                    encoders.push(ImageEncoder::random(config.clone(), *weights, 0)?);
                }
                encoders
            }
        };
        Ok(CpuImages { encoders })
    }
}

impl<T: KernelElement> ImageContenders for CpuImages<T> {
    fn begin<'a>(&'a self, images: usize, progress: &mut dyn FnMut(usize)) -> Result<Vec<ImagePass<'a>>> {
        let mut passes = vec![];
        for (index, encoder) in self.encoders.iter().enumerate() {
            progress(index);
            let pixels = random_pixels(encoder.config(), images);
            let seconds = Box::new(move || {
                let begun = Instant::now();
                std::hint::black_box(encoder.forward(&pixels)?);
                Ok(begun.elapsed().as_secs_f64())
            });
            passes.push(ImagePass { seconds, allocated_bytes: None });
        }
        Ok(passes)
    }

    fn weight_bytes(&self) -> Vec<usize> {
        self.encoders.iter().map(ImageEncoder::weight_bytes).collect()
    }
}
