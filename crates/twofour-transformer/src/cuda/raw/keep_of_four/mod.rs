//! Pruning to `N:4` in one pass: what a dense GEMM reads in the stages of gradual pruning that are not 2:4 yet.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream, device::Kernel, raw::float_types::FloatSource, source::File,
};

/// The kernel for results of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct KeepOfFour {
    kernel: Kernel,
}

/// The kernel's parameters, in its memory layout.
#[repr(C)]
pub(crate) struct KeepOfFourParameters {
    pub(crate) weight: DevicePtr,
    pub(crate) kept: DevicePtr,
    pub(crate) groups: u64,
    pub(crate) cols: u32,
    pub(crate) groups_of_row: u32,
    pub(crate) count: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "keep-of-four",
    operation: "pruning to N:4",
    contracts_fma: true,
    files: &[File::new("keep_of_four/kernel.cu", include_str!("kernel.cu"))],
};

impl KeepOfFour {
    /// Loads the kernel for results of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        Ok(Self { kernel: SOURCE.load(device, dtype)?("keep")? })
    }

    /// Launches the kernel.
    ///
    /// # Safety
    /// The pointers are valid for the groups' elements until the stream has passed this call; the stream is of this
    /// device.
    pub(crate) unsafe fn run(&self, stream: Stream, parameters: &KeepOfFourParameters) -> Result<()> {
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.kernel.launch_over(stream, (parameters.groups, 1), parameters) }
    }
}
