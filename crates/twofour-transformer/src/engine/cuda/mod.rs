//! NVIDIA GPUs, over [`twofour_cuda`]. Activations and GEMM operands are f32, f16 or bf16; 2:4 layers require f16 or
//! bf16.

mod activation;
mod attention;
mod buffer;
mod control;
pub mod functions;
mod guard;
mod layers;
mod linear;
mod memory;
mod norm;
mod optimizer;
mod repeat;
mod sgd;
mod sparse;
mod step;

use std::sync::Mutex;

pub use activation::CudaPackedActivation;
pub use attention::{CudaAttention, CudaRotary};
pub use buffer::CudaBuffer;
use buffer::Pool;
pub use guard::CudaStepGuard;
use optimizer::Optimizer;
use repeat::Repeats;
pub use sparse::CudaSparseLinear;
use twofour::DataType;
use twofour_cuda::{Device, PhaseMarks, layer::LayerContext};

use super::{Buffer as _, Engine, Kind};
use crate::{Result, cuda as kernels};

/// A GPU and a stream of it.
#[derive(Debug)]
pub struct CudaEngine {
    context: LayerContext,
    compute: DataType,
    optimizer: Mutex<Optimizer>,
    pool: Pool,
    /// Where phases begin, while they are measured.
    phases: Mutex<Option<PhaseMarks>>,
    repeats: Mutex<Repeats>,
}

impl CudaEngine {
    /// The engine on a device, with activations and GEMMs in `compute`: f32, f16 or bf16. It times no GEMMs to choose
    /// among them, so that a run that is resumed by another process repeats bit for bit; [`CudaEngine::on`] with
    /// another context does otherwise.
    ///
    /// # Errors
    /// Another type; those of creating a stream and of loading kernels.
    pub fn new(device: &Device, compute: DataType) -> Result<Self> {
        let stream = LayerContext::new(device)?.stream().clone();
        Self::on(LayerContext::repeatable(device, stream), compute)
    }

    /// The engine on an existing context.
    ///
    /// # Errors
    /// Those of [`CudaEngine::new`].
    pub fn on(context: LayerContext, compute: DataType) -> Result<Self> {
        kernels::prepare(&context, compute)?;
        let optimizer = Mutex::new(Optimizer::new(&context)?);
        Ok(CudaEngine {
            context,
            compute,
            optimizer,
            pool: Pool::default(),
            phases: Mutex::default(),
            repeats: Mutex::default(),
        })
    }

    /// The context that work is launched on.
    pub fn context(&self) -> &LayerContext {
        &self.context
    }

    fn dtype(&self, kind: Kind) -> DataType {
        match kind {
            Kind::Wide => DataType::F32,
            Kind::Compute => self.compute,
            Kind::Index => DataType::I32,
        }
    }
}

/// Rows of `width` elements in a buffer; the operations check that there is no rest.
fn rows_of(buffer: &CudaBuffer, width: usize) -> usize {
    buffer.len().checked_div(width).unwrap_or(0)
}

impl Engine for CudaEngine {}
