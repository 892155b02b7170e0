//! Sums of rows with weights.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{float_types::FloatSource, grid::threads_of_row},
    source::File,
};

/// The kernel for rows of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct WeightedRows {
    dtype: DataType,
    sum: Kernel,
}

/// The kernel's parameters, in their memory layout; `kernel.cu` says what each is.
#[repr(C)]
pub(crate) struct WeightedRowsParameters {
    pub(crate) rows: DevicePtr,
    pub(crate) places: DevicePtr,
    pub(crate) weights: DevicePtr,
    pub(crate) out: DevicePtr,
    pub(crate) count: u32,
    pub(crate) each: u32,
    pub(crate) width: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "weighted-rows",
    operation: "sums of rows",
    contracts_fma: true,
    files: &[File::new("weighted_rows/kernel.cu", include_str!("kernel.cu"))],
};

impl WeightedRows {
    /// Loads the kernel for rows of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        Ok(Self { dtype, sum: SOURCE.load(device, dtype)?("sum")? })
    }

    /// Launches the sums of so many tokens, at least one, for a width of at least 1.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn run(&self, stream: Stream, tokens: u32, parameters: &WeightedRowsParameters) -> Result<()> {
        let threads = threads_of_row(parameters.width as usize * self.dtype.bytes(), 1024);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.sum.launch(stream, Launch::simple((tokens, 1), threads), parameters) }
    }
}
