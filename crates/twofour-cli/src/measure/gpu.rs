//! The GPU's description.

use anyhow::Result;
use serde::{Deserialize, Serialize};
use twofour_cuda::{Device, compiler::Compiler};

/// The GPU that was measured.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Gpu {
    /// The GPU's name, as the driver reports it.
    pub gpu: String,
    /// The architecture that kernels are compiled for.
    pub architecture: String,
    /// Number of SMs.
    pub multiprocessors: u32,
    /// The CUDA version that the driver supports.
    pub driver: String,
    /// The compiler's version; null where kernels came from the cache.
    pub nvrtc: Option<String>,
}

/// Returns the description of a GPU.
///
/// # Errors
/// The driver's.
pub fn gpu(device: &Device) -> Result<Gpu> {
    let (major, minor) = device.driver_version()?;
    Ok(Gpu {
        gpu: device.name()?,
        architecture: device.architecture().to_string(),
        multiprocessors: device.sms(),
        driver: format!("{major}.{minor}"),
        nvrtc: Compiler::find().map(|compiler| format!("{}.{}", compiler.version().0, compiler.version().1)),
    })
}
