//! Device time of GPU kernels: contenders interleaved, between two events, with a cold L2.

mod attention;
mod encoder;
mod gemm;
mod generation;
mod grid;
mod image;
mod layer;
mod overhead;
mod prune;
mod sample;
mod step;
mod train;

use anyhow::Result;
use serde::{Deserialize, Serialize};
use twofour_cuda::{Device, compiler::Compiler};

pub(crate) use attention::{ATTENTION_SHAPES, AttentionRow, attention};
pub(crate) use encoder::CudaEncoderPair;
pub(crate) use gemm::{DECODE_LAYERS, DECODE_TOKENS, DECODE_TYPES, GEMM_SHAPES, GEMM_TYPES, GemmRow, Layer, Libraries};
pub(crate) use generation::{GenerationRow, WEIGHTS, generation, shape};
pub(crate) use grid::{
    CellTimes, Fault, GridCell, GridEpilogue, GridLayer, GridRow, GridTimer, Unsupported, grid_cells, grid_layers,
};
pub(crate) use image::CudaImages;
pub(crate) use layer::layer;
pub(crate) use overhead::{OverheadRow, overhead};
pub(crate) use prune::{PRUNE_SHAPES, PruneRow, prune};
pub(crate) use step::{BLOCK_MODELS, STEP_MODELS, StepModel, StepRow, named, step};
pub(crate) use train::{TRAIN_SHAPES, TRAIN_TYPES, TrainRow, train_linear};

/// The GPU that was measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Gpu {
    /// The GPU's name, as the driver reports it.
    pub(crate) gpu: String,
    /// The architecture that kernels are compiled for.
    pub(crate) architecture: String,
    /// Number of SMs.
    pub(crate) multiprocessors: u32,
    /// The CUDA version that the driver supports.
    pub(crate) driver: String,
    /// The compiler's version; null where kernels came from the cache.
    pub(crate) nvrtc: Option<String>,
}

/// Returns the description of a GPU.
pub(crate) fn gpu(device: &Device) -> Result<Gpu> {
    let (major, minor) = device.driver_version()?;
    Ok(Gpu {
        gpu: device.name()?,
        architecture: device.architecture().to_string(),
        multiprocessors: device.multiprocessors(),
        driver: format!("{major}.{minor}"),
        nvrtc: Compiler::find().map(|compiler| format!("{}.{}", compiler.version().0, compiler.version().1)),
    })
}
