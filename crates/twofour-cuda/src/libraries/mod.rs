//! NVIDIA's own GEMM, found at run time: what ours are measured against, and engines that may be chosen.
//!
//! | library | what | module |
//! |---|---|---|
//! | cuBLASLt | dense weights | [`cublaslt`] |
//! | cuSPARSELt | 2:4 weights, in buffers of its own that mean nothing elsewhere and are never written to disk | [`cusparselt`] |

pub mod cublaslt;
pub mod cusparselt;
pub(crate) mod loader;
pub(crate) mod nvrtc;

use cublaslt::CublasLt;
use cusparselt::CusparseLt;

use crate::{DataType, Device};

/// NVIDIA's libraries, as far as they are there.
#[derive(Debug, Clone)]
pub struct Libraries {
    /// For dense weights.
    pub dense: Option<CublasLt>,
    /// For 2:4 weights.
    pub sparse: Option<CusparseLt>,
}

impl Libraries {
    /// Those that are found and take the device.
    pub fn found(device: &Device) -> Self {
        Self { dense: CublasLt::open(device).ok(), sparse: CusparseLt::open(device).ok() }
    }
}

/// As the libraries number element types.
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
