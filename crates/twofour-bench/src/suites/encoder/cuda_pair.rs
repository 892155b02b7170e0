//! Forward passes of an encoder on a GPU, dense and 2:4, each a replayed CUDA graph.

use std::time::Instant;

use anyhow::{Context, Result};
use twofour::{DataType, layer::SparseLinearSettings};
use twofour_cuda::Device;
use twofour_nn::{
    block::BatchShape,
    model::{Bert, BertBatch, EncoderCheckpoint, EncoderTask},
};
use twofour_transformer::engine::cuda::CudaEngine;

use super::pair::{EncoderPair, random_tokens};

/// Seconds of the passes between two readings of the clock.
const SAMPLE: f64 = 0.02;

/// Passes before the first reading: the first plans, the second is captured, the third replayed.
const WARM_UP: usize = 3;

/// One of both.
struct GpuEncoder {
    engine: CudaEngine,
    model: Bert<CudaEngine>,
    batch: Option<BertBatch<CudaEngine>>,
}

/// On a GPU, by the forward pass of training.
pub(crate) struct CudaEncoderPair {
    models: [GpuEncoder; 2],
    shape: BatchShape,
    /// Passes between two readings of the clock.
    passes: usize,
    weight_bytes: [usize; 2],
}

impl CudaEncoderPair {
    /// Brings the weights of a checkpoint to the device twice.
    pub(crate) fn new(
        device: &Device,
        checkpoint: &EncoderCheckpoint,
        dtype: DataType,
        positions: usize,
    ) -> Result<Self> {
        let load = || -> Result<GpuEncoder> {
            let engine = CudaEngine::new(device, dtype)?;
            let model = checkpoint.model(&engine, EncoderTask::Answers, positions, 0)?;
            Ok(GpuEncoder { engine, model, batch: None })
        };
        let mut models = [load()?, load()?];
        let GpuEncoder { engine, model, .. } = &mut models[1];
        let (mut dense, mut sparse) = (0, 0);
        for linear in model.linears_mut().filter(|linear| linear.name().starts_with("blocks.")) {
            let elements = linear.out_features() * linear.in_features();
            let bytes = elements * dtype.bytes();
            dense += bytes;
            if checkpoint.violation(linear.name())?.is_some() {
                sparse += bytes;
                continue;
            }
            linear.make_sparse(engine, SparseLinearSettings::default(), 0)?;
            // Four bits of metadata for each group.
            sparse += bytes / 2 + elements / 8;
        }
        let shape = BatchShape { batch: 0, positions };
        Ok(CudaEncoderPair { models, shape, passes: 1, weight_bytes: [dense, sparse] })
    }
}

impl GpuEncoder {
    /// Seconds of so many passes together.
    fn seconds(&mut self, shape: BatchShape, passes: usize) -> Result<f64> {
        let GpuEncoder { engine, model, batch } = self;
        let batch = batch.as_ref().context("a batch is made first")?;
        engine.context().synchronize()?;
        let begun = Instant::now();
        for _ in 0..passes {
            model.encode(engine, batch, shape)?;
        }
        engine.context().synchronize()?;
        Ok(begun.elapsed().as_secs_f64())
    }
}

impl EncoderPair for CudaEncoderPair {
    fn begin(&mut self, batch: usize) -> Result<()> {
        self.shape.batch = batch;
        let (shape, mut longest) = (self.shape, 0f64);
        for GpuEncoder { batch, .. } in &mut self.models {
            *batch = None;
        }
        for own in &mut self.models {
            let tokens = random_tokens(shape.tokens(), own.model.config().encoder.vocabulary());
            let types = vec![0; tokens.len()];
            own.batch = Some(BertBatch::of_sequences(&own.engine, own.model.config(), (&tokens, &types), shape)?);
            for _ in 0..WARM_UP {
                own.seconds(shape, 1)?;
            }
            longest = longest.max(own.seconds(shape, 1)?);
        }
        self.passes = (SAMPLE / longest.max(1e-6)).ceil().clamp(1.0, 1000.0) as usize;
        Ok(())
    }

    fn seconds(&mut self, which: usize) -> Result<f64> {
        Ok(self.models[which].seconds(self.shape, self.passes)? / self.passes as f64)
    }

    fn weight_bytes(&self) -> [usize; 2] {
        self.weight_bytes
    }
}
