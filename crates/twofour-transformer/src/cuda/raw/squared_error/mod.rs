//! The error of rows that are to be others, and its gradient.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{float_types::FloatSource, grid::threads_of_row},
    source::File,
};

use super::cross_entropy::SUM;

/// The kernels for rows of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct SquaredError {
    dtype: DataType,
    rows: Kernel,
    sum_errors: Kernel,
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[repr(C)]
pub(crate) struct SquaredErrorParameters {
    pub(crate) x: DevicePtr,
    pub(crate) target: DevicePtr,
    pub(crate) dx: DevicePtr,
    pub(crate) errors: DevicePtr,
    pub(crate) loss: DevicePtr,
    pub(crate) rows: u32,
    pub(crate) width: u32,
    pub(crate) weight: f32,
    pub(crate) factor: f32,
    pub(crate) is_relative: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "squared-error",
    operation: "the error of rows",
    contracts_fma: true,
    files: &[SUM, File::new("squared_error/kernel.cu", include_str!("kernel.cu"))],
};

impl SquaredError {
    /// Loads the kernels for rows of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let (rows, sum_errors) = (kernel("rows")?, kernel("sum_errors")?);
        Ok(Self { dtype, rows, sum_errors })
    }

    /// Launches the rows' errors and gradients, and the sum of the errors.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn run(&self, stream: Stream, parameters: &SquaredErrorParameters) -> Result<()> {
        if parameters.rows > 0 {
            let threads = threads_of_row(parameters.width as usize * self.dtype.bytes(), 1024);
            let launch = Launch::simple((parameters.rows, 1), threads);
            // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
            unsafe { self.rows.launch(stream, launch, parameters) }?;
        }
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.sum_errors.launch(stream, Launch::simple((1, 1), 1024), parameters) }
    }
}
