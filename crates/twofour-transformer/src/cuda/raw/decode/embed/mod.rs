//! The first residual stream of new tokens.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::float_types::FloatSource,
    source::File,
};

/// The kernel for tables of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct Embeds(Kernel);

/// The kernel's parameters, in their memory layout; `kernel.cu` says what each is.
#[repr(C)]
pub(crate) struct EmbedParameters {
    pub(crate) ids: DevicePtr,
    pub(crate) positions: DevicePtr,
    pub(crate) table: DevicePtr,
    pub(crate) learned: DevicePtr,
    pub(crate) x: DevicePtr,
    pub(crate) count: u32,
    pub(crate) width: u32,
    pub(crate) vocabulary: u32,
    pub(crate) context: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "decode-embed",
    operation: "an embedding",
    contracts_fma: true,
    files: &[File::new("decode/embed/kernel.cu", include_str!("kernel.cu"))],
};

impl Embeds {
    /// Loads the kernel for tables of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        Ok(Self(SOURCE.load(device, dtype)?("embed")?))
    }

    /// Launches the copy of `tokens` rows, at least one.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn run(&self, stream: Stream, tokens: u32, parameters: &EmbedParameters) -> Result<()> {
        let threads = parameters.width.div_ceil(4).next_multiple_of(32).clamp(32, 1024);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.0.launch(stream, Launch::simple((tokens, 1), threads), parameters) }
    }
}
