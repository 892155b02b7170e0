//! A weight under a mask in one pass: what a dense GEMM reads where masks follow no pattern that sparse GEMMs have.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream, device::Kernel, raw::float_types::FloatSource, source::File,
};

/// The kernel for results of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct Masking {
    kernel: Kernel,
}

/// The kernel's parameters, in its memory layout.
#[repr(C)]
pub(crate) struct MaskingParameters {
    pub(crate) weight: DevicePtr,
    pub(crate) mask: DevicePtr,
    pub(crate) masked: DevicePtr,
    pub(crate) groups: u64,
    pub(crate) cols: u32,
    pub(crate) groups_of_row: u32,
    pub(crate) words_of_row: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "masking",
    operation: "applying a mask",
    contracts_fma: true,
    files: &[File::new("masking/kernel.cu", include_str!("kernel.cu"))],
};

impl Masking {
    /// Loads the kernel for results of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        Ok(Self { kernel: SOURCE.load(device, dtype)?("mask")? })
    }

    /// Launches the kernel.
    ///
    /// # Safety
    /// The pointers are valid for the groups' elements and for the mask's words of their rows until the stream has
    /// passed this call; the stream is of this device. `masked` overlaps `weight` only where it is the same f32 memory.
    pub(crate) unsafe fn run(&self, stream: Stream, parameters: &MaskingParameters) -> Result<()> {
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.kernel.launch_over(stream, (parameters.groups, 1), parameters) }
    }
}
