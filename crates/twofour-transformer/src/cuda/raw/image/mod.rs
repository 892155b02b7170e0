//! Tokens of images: windows, relative positions, neighbours.

pub(crate) mod grid;
pub(crate) mod windows;

pub(crate) use grid::{GridParameters, ImageGrid};
use twofour_cuda::{DataType, DevicePtr, Result, device::Kernel};
pub(crate) use windows::{ImageWindows, MAX_HEAD_DIM, WindowParameters};

/// Loads a kernel that moves vectors of 16 bytes, and the one for elements one by one.
fn vectors_and_one_by_one(kernel: impl Fn(&str) -> Result<Kernel>, name: &str) -> Result<[Kernel; 2]> {
    Ok([kernel(&format!("{name}_vectors"))?, kernel(&format!("{name}_one_by_one"))?])
}

/// Whether sizes and addresses allow vectors.
fn is_aligned(dtype: DataType, sizes: &[u32], addresses: DevicePtr) -> bool {
    let width = 16 / dtype.bytes() as u32;
    sizes.iter().all(|size| size.is_multiple_of(width)) && addresses.is_multiple_of(16)
}
