//! Sums over GPUs.

use twofour_cuda::nccl::{Communicator, StreamedSums};

use super::{GradientReduction, Rank};
use crate::{
    Error, Result,
    engine::cuda::{CudaBuffer, CudaEngine},
};

/// Sums by NCCL on a stream of their own, beside the backward pass. What the model completes at once is one bucket: the
/// gradients of half a transformer block.
#[derive(Debug)]
pub struct NcclReduction {
    sums: StreamedSums,
}

impl NcclReduction {
    /// The reductions of a group of engines, each on its own GPU, in the order of the engines.
    ///
    /// # Errors
    /// No NCCL; GPUs that cannot reach each other.
    pub fn group(engines: &[CudaEngine]) -> Result<Vec<Self>> {
        let devices: Vec<_> = engines.iter().map(|engine| engine.context().device().clone()).collect();
        let communicators = Communicator::of_devices(&devices)?;
        let of = |(engine, communicator): (&CudaEngine, Communicator)| {
            Ok(NcclReduction { sums: StreamedSums::new(communicator, engine.context())? })
        };
        engines.iter().zip(communicators).map(of).collect()
    }
}

impl GradientReduction<CudaEngine> for NcclReduction {
    fn ready(&mut self, _: &Rank, gradients: Vec<&mut CudaBuffer>) -> Result<()> {
        let mut slices: Vec<_> = gradients.into_iter().map(CudaBuffer::slice_mut).collect();
        Ok(self.sums.begin(&mut slices)?)
    }

    fn finish(&mut self, _: &Rank, loss: &mut CudaBuffer) -> Result<()> {
        self.sums.begin(&mut [loss.slice_mut()])?;
        Ok(self.sums.finish()?)
    }

    fn refuse(&mut self, _: &Rank) -> Result<()> {
        Err(Error::Unsupported {
            engine: "cuda",
            what: "refusing gradients on one of several GPUs".to_owned(),
            remedy: "train on one GPU",
        })
    }

    fn abort_handle(&self) -> Option<Box<dyn Fn() + Send + Sync>> {
        let communicator = self.sums.communicator().clone();
        Some(Box::new(move || communicator.abort()))
    }
}
