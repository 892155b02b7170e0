//! NVIDIA's libraries, loaded at run time.
//!
//! | library | task | module |
//! |---|---|---|
//! | cuBLASLt | GEMMs with dense weights | [`cublaslt`] |
//! | NCCL | sums over several GPUs | [`nccl`] |

pub mod cublaslt;
pub(crate) mod loader;
pub mod nccl;
pub(crate) mod nvrtc;

pub use loader::add_site_packages;

use crate::DataType;

/// Returns the libraries' number of a data type (`cudaDataType`).
pub(crate) fn data_type(element: DataType) -> u32 {
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
