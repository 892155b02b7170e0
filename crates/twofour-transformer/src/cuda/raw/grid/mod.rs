//! A weight rounded to integers times scales: what a quantized layer computes with, while it is tuned.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream, device::Kernel, raw::float_types::FloatSource, source::File,
};

/// The kernel for results of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct Grid {
    kernel: Kernel,
}

/// The kernel's parameters, in its memory layout.
#[repr(C)]
pub(crate) struct GridParameters {
    pub(crate) weight: DevicePtr,
    pub(crate) scales: DevicePtr,
    pub(crate) rounded: DevicePtr,
    pub(crate) elements: u64,
    pub(crate) largest: f32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "grid",
    operation: "rounding a weight to integers",
    contracts_fma: true,
    files: &[File::new("grid/kernel.cu", include_str!("kernel.cu"))],
};

impl Grid {
    /// Loads the kernel for results of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        Ok(Self { kernel: SOURCE.load(device, dtype)?("round_to_grid")? })
    }

    /// Launches the kernel.
    ///
    /// # Safety
    /// The pointers are valid for the elements until the stream has passed this call; the stream is of this device.
    pub(crate) unsafe fn run(&self, stream: Stream, parameters: &GridParameters) -> Result<()> {
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.kernel.launch_over(stream, (parameters.elements, 1), parameters) }
    }
}
