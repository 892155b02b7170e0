//! The most likely token of each sequence.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::float_types::FloatSource,
    source::File,
};

/// The kernel for logits of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct Choices(Kernel);

/// The kernel's parameters, in their memory layout; `kernel.cu` says what each is.
#[repr(C)]
pub(crate) struct ChoiceParameters {
    pub(crate) logits: DevicePtr,
    pub(crate) ids: DevicePtr,
    pub(crate) positions: DevicePtr,
    pub(crate) history: DevicePtr,
    pub(crate) vocabulary: u32,
    pub(crate) capacity: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "decode-choice",
    operation: "choosing a token",
    contracts_fma: true,
    files: &[File::new("decode/choice/kernel.cu", include_str!("kernel.cu"))],
};

impl Choices {
    /// Loads the kernel for logits of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        Ok(Self(SOURCE.load(device, dtype)?("choose")?))
    }

    /// Launches the choice for `batch` sequences, at least one.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn run(&self, stream: Stream, batch: u32, parameters: &ChoiceParameters) -> Result<()> {
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.0.launch(stream, Launch::simple((batch, 1), 1024), parameters) }
    }
}
