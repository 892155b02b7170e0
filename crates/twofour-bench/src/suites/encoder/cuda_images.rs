//! Forward passes of image encoders on a GPU.

use std::time::Instant;

use anyhow::Result;
use twofour::DataType;
use twofour_cuda::{Device, layer::LayerContext};
use twofour_nn::model::{CudaImageBatch, CudaImageEncoder};

use super::images::{ImageContenders, ImagePass, ImageSource, random_pixels};

/// Seconds of the passes between two readings of the clock.
const SAMPLE: f64 = 0.02;

/// Passes before the first reading: the first plans.
const WARM_UP: usize = 2;

/// On a GPU. Each contender has a context of its own, and so a workspace of its own.
pub(crate) struct CudaImages {
    device: Device,
    /// With the bytes of device memory that were allocated for the weights.
    encoders: Vec<(CudaImageEncoder, usize)>,
}

impl CudaImages {
    /// Brings the weights of every contender to the device.
    pub(crate) fn new(
        device: &Device,
        source: ImageSource<'_>,
        dtype: DataType,
        progress: &mut dyn FnMut(usize),
    ) -> Result<Self> {
        let mut encoders = vec![];
        let mut add = |encoder: &dyn Fn(LayerContext) -> Result<CudaImageEncoder>| -> Result<()> {
            let context = LayerContext::new(device)?;
            context.synchronize()?;
            let before = device.pooled_memory()?.in_use;
            let encoder = encoder(context)?;
            encoder.context().synchronize()?;
            encoders.push((encoder, device.pooled_memory()?.in_use.saturating_sub(before)));
            Ok(())
        };
        match source {
            ImageSource::Checkpoint(checkpoint) => {
                add(&|_| Ok(CudaImageEncoder::dense_of_checkpoint(device, checkpoint, dtype)?))?;
                add(&|_| Ok(CudaImageEncoder::of_checkpoint(device, checkpoint, dtype)?))?;
            }
            ImageSource::Random(config, weights) => {
                for (index, weights) in weights.iter().enumerate() {
                    progress(index);
                    add(&|context| Ok(CudaImageEncoder::random(context, config, *weights, dtype, 0)?))?;
                }
            }
        }
        Ok(CudaImages { device: device.clone(), encoders })
    }
}

impl ImageContenders for CudaImages {
    fn begin<'a>(&'a self, images: usize, progress: &mut dyn FnMut(usize)) -> Result<Vec<ImagePass<'a>>> {
        let (mut ready, mut longest) = (vec![], 0f64);
        for (index, (encoder, of_weights)) in self.encoders.iter().enumerate() {
            progress(index);
            let before = self.device.pooled_memory()?.in_use;
            let mut batch = encoder.batch(images)?;
            batch.write(&random_pixels(encoder.config(), images))?;
            for _ in 0..WARM_UP {
                seconds(encoder, &mut batch, 1)?;
            }
            longest = longest.max(seconds(encoder, &mut batch, 1)?);
            // The pool keeps what it took for other batches: what is allocated is counted.
            let memory = of_weights + self.device.pooled_memory()?.in_use.saturating_sub(before);
            ready.push((encoder, batch, memory));
        }
        let passes = (SAMPLE / longest.max(1e-6)).ceil().clamp(1.0, 1000.0) as usize;
        let pass = |(encoder, mut batch, memory): (&'a CudaImageEncoder, CudaImageBatch<'a>, usize)| ImagePass {
            seconds: Box::new(move || Ok(seconds(encoder, &mut batch, passes)? / passes as f64)),
            allocated_bytes: Some(memory),
        };
        Ok(ready.into_iter().map(pass).collect())
    }

    fn weight_bytes(&self) -> Vec<usize> {
        self.encoders.iter().map(|(encoder, _)| encoder.weight_bytes()).collect()
    }
}

/// Seconds of so many passes together.
fn seconds(encoder: &CudaImageEncoder, batch: &mut CudaImageBatch<'_>, passes: usize) -> Result<f64> {
    encoder.context().synchronize()?;
    let begun = Instant::now();
    for _ in 0..passes {
        batch.run()?;
    }
    encoder.context().synchronize()?;
    Ok(begun.elapsed().as_secs_f64())
}
