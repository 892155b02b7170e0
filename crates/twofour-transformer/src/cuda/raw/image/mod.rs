//! Tokens of images: windows, relative positions, neighbours.

mod grid;
mod windows;

pub(crate) use grid::{GridParameters, ImageGrid};
use twofour_cuda::{DataType, Device, DevicePtr, Result, device::Kernel, source::Source};
pub(crate) use windows::{ImageWindows, MOST_HEAD_DIM, WindowParameters};

/// Returns every source.
pub(crate) fn sources() -> impl Iterator<Item = Source> {
    windows::sources().into_iter().chain(grid::sources())
}

/// Loads a kernel that moves vectors of 16 bytes, and the one for elements one by one.
fn vectors_and_one_by_one(device: &Device, source: &Source, name: &str) -> Result<[Kernel; 2]> {
    Ok([device.kernel(source, &format!("{name}_vectors"))?, device.kernel(source, &format!("{name}_one_by_one"))?])
}

/// Whether sizes and addresses allow vectors.
fn is_aligned(dtype: DataType, sizes: &[u32], addresses: DevicePtr) -> bool {
    let width = 16 / dtype.bytes() as u32;
    sizes.iter().all(|size| size.is_multiple_of(width)) && addresses.is_multiple_of(16)
}
