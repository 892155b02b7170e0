//! NVIDIA's own products, found at run time: what ours are measured against, and engines that may be chosen.
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

use crate::{Device, Element};

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
fn data_type(element: Element) -> u32 {
    match element {
        Element::F32 => 0,
        Element::F16 => 2,
        Element::BF16 => 14,
        Element::I8 => 3,
        Element::I32 => 10,
        Element::E4M3 => 28,
        Element::E5M2 => 29,
    }
}
