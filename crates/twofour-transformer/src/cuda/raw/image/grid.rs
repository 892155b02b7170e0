//! Passes over the tokens of a grid: neighbours, and factors of columns.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{float_types::FloatSource, grid::BLOCK},
    source::File,
};

/// The kernels for tensors of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct ImageGrid {
    dtype: DataType,
    /// In vectors, and one by one.
    around: [Kernel; 2],
    scale: Kernel,
}

/// The parameters of passes over a grid, in their memory layout; `grid.cu` says what each is.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct GridParameters {
    pub(crate) x: DevicePtr,
    pub(crate) y: DevicePtr,
    pub(crate) factors: DevicePtr,
    pub(crate) rows: u32,
    pub(crate) columns: u32,
    pub(crate) channels: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "image-grid",
    operation: "a pass over an image's tokens",
    contracts_fma: true,
    files: &[File::new("image/grid.cu", include_str!("grid.cu"))],
};

impl ImageGrid {
    /// Loads the kernels for tensors of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let around = super::vectors_and_one_by_one(&kernel, "around")?;
        Ok(Self { dtype, around, scale: kernel("scale")? })
    }

    /// Launches the gathering of neighbours for so many places, at least one.
    ///
    /// # Safety
    /// The pointers are valid, with the lengths that `grid.cu` has, until the stream has passed this call; the stream
    /// is of this device.
    pub(crate) unsafe fn around(&self, stream: Stream, places: u32, parameters: &GridParameters) -> Result<()> {
        let aligned = super::is_aligned(self.dtype, &[parameters.channels], parameters.x | parameters.y);
        let launch = Launch::simple((places, 1), BLOCK);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.around[usize::from(!aligned)].launch(stream, launch, parameters) }
    }

    /// Launches the multiplication of so many rows, at least one, by factors.
    ///
    /// # Safety
    /// Those of [`ImageGrid::around`].
    pub(crate) unsafe fn scale(&self, stream: Stream, rows: u32, parameters: &GridParameters) -> Result<()> {
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.scale.launch(stream, Launch::simple((rows, 1), BLOCK), parameters) }
    }
}
