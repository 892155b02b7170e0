//! NVIDIA's libraries, loaded at run time. Those for GEMMs are baselines of measurements, and engines that the dispatcher can choose.
//!
//! | library | task | module |
//! |---|---|---|
//! | cuBLASLt | GEMMs with dense weights | [`cublaslt`] |
//! | cuSPARSELt | GEMMs with 2:4 weights, in opaque buffers that are valid in this process only and are never written to disk | [`cusparselt`] |
//! | NCCL | sums over several GPUs | [`nccl`] |

pub mod cublaslt;
pub mod cusparselt;
pub(crate) mod loader;
pub mod nccl;
pub(crate) mod nvrtc;

pub use loader::add_site_packages;

use cublaslt::CublasLt;
use cusparselt::CusparseLt;

use crate::{DataType, Device};

/// NVIDIA's libraries for GEMMs that are installed.
#[derive(Debug, Clone)]
pub struct Libraries {
    /// For dense weights.
    pub dense: Option<CublasLt>,
    /// For 2:4 weights.
    pub sparse: Option<CusparseLt>,
}

impl Libraries {
    /// Opens the libraries that are installed and support the device.
    pub fn found(device: &Device) -> Self {
        Self { dense: CublasLt::open(device).ok(), sparse: CusparseLt::open(device).ok() }
    }
}

/// Returns the libraries' number of a data type (`cudaDataType`).
fn data_type(element: DataType) -> u32 {
    match element {
        DataType::F32 => 0,
        DataType::F16 => 2,
        DataType::BF16 => 14,
        DataType::I8 => 3,
        DataType::I32 => 10,
        DataType::E4M3 => 28,
        DataType::E5M2 => 29,
    }
}
