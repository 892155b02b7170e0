//! Forward passes of an encoder, dense and 2:4.

use std::time::Instant;

use anyhow::Result;
use twofour::{file::StoredElement, kernel::KernelElement};
use twofour_cli::measure::random::Random;
use twofour_nn::model::{Encoder, EncoderCheckpoint, EncoderInput};

/// An encoder twice: its linear layers dense (0), and those that are 2:4 for the 2:4 kernels (1).
pub(crate) trait EncoderPair {
    /// Makes a batch of so many sequences of the length of all.
    fn begin(&mut self, batch: usize) -> Result<()>;

    /// Seconds of a forward pass of the batch.
    fn seconds(&mut self, which: usize) -> Result<f64>;

    /// Bytes of the linear layers' weights of both.
    fn weight_bytes(&self) -> [usize; 2];
}

/// Random tokens, the same in every run.
pub(crate) fn random_tokens(count: usize, vocabulary: usize) -> Vec<u32> {
    let mut random = Random::new();
    (0..count).map(|_| random.below(vocabulary) as u32).collect()
}

/// On the CPU.
pub(crate) struct CpuEncoderPair<T: KernelElement> {
    models: [Encoder<T>; 2],
    length: usize,
    tokens: Vec<u32>,
}

impl<T: KernelElement + StoredElement> CpuEncoderPair<T> {
    /// Packs the weights of a checkpoint.
    pub(crate) fn new(checkpoint: &EncoderCheckpoint, length: usize) -> Result<Self> {
        let models = [checkpoint.dense_inference()?, checkpoint.inference()?];
        Ok(CpuEncoderPair { models, length, tokens: vec![] })
    }
}

impl<T: KernelElement> EncoderPair for CpuEncoderPair<T> {
    fn begin(&mut self, batch: usize) -> Result<()> {
        self.tokens = random_tokens(batch * self.length, self.models[0].config().vocabulary());
        Ok(())
    }

    fn seconds(&mut self, which: usize) -> Result<f64> {
        let inputs: Vec<_> =
            self.tokens.chunks(self.length).map(|tokens| EncoderInput { tokens, types: None }).collect();
        let begun = Instant::now();
        std::hint::black_box(self.models[which].forward(&inputs)?);
        Ok(begun.elapsed().as_secs_f64())
    }

    fn weight_bytes(&self) -> [usize; 2] {
        [self.models[0].weight_bytes(), self.models[1].weight_bytes()]
    }
}
