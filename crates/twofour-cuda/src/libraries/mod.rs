//! NVIDIA's GEMM libraries, loaded at run time: baselines of measurements, and engines that the dispatcher can choose.
//!
//! | library | weights | module |
//! |---|---|---|
//! | cuBLASLt | dense | [`cublaslt`] |
//! | cuSPARSELt | 2:4, in opaque buffers that are valid in this process only and are never written to disk | [`cusparselt`] |

pub mod cublaslt;
pub mod cusparselt;
pub(crate) mod loader;
pub(crate) mod nvrtc;

pub use loader::add_site_packages;

use cublaslt::CublasLt;
use cusparselt::CusparseLt;

use crate::{DataType, Device};

/// NVIDIA's libraries that are installed.
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
