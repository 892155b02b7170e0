//! Normalization of the residual stream of a few tokens.

use twofour_cuda::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    device::{Kernel, Launch},
    raw::{float_types::FloatSource, headers},
    source::File,
};

/// Elements of a thread, and most threads of a CTA: of more elements there are fewer threads, which have more
/// registers.
const SIZES: [(u32, u32); 2] = [(4, 1024), (16, 512)];

/// Most elements of a row.
pub(crate) const MAX_WIDTH: usize = 16 * 512;

/// The kernels for up to four and up to 16 elements a thread.
type BySize = [Kernel; 2];

/// The kernels for normalized tokens of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct TokenNorms {
    /// RMS and layer normalization.
    plain: [BySize; 2],
    to_i8: [BySize; 2],
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[derive(Default)]
#[repr(C)]
pub(crate) struct TokenNormParameters {
    pub(crate) x: DevicePtr,
    pub(crate) delta: DevicePtr,
    pub(crate) gain: DevicePtr,
    pub(crate) bias: DevicePtr,
    pub(crate) y: DevicePtr,
    pub(crate) scales: DevicePtr,
    pub(crate) width: u32,
    pub(crate) first: u32,
    pub(crate) stride: u32,
    pub(crate) epsilon: f32,
    pub(crate) replaces: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "decode-norm",
    operation: "normalization",
    contracts_fma: true,
    files: &[headers::ROW_SCALE, File::new("decode/norm/kernel.cu", include_str!("kernel.cu"))],
};

impl TokenNorms {
    /// Loads the kernels for f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let sizes =
            |name: &str| -> Result<BySize> { Ok([kernel(&format!("{name}_4"))?, kernel(&format!("{name}_16"))?]) };
        Ok(Self { plain: [sizes("rms")?, sizes("layer")?], to_i8: [sizes("rms_to_i8")?, sizes("layer_to_i8")?] })
    }

    /// Launches the normalization of `rows` rows, at least one: to integers where there are scales.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn run(
        &self,
        stream: Stream,
        centered: bool,
        rows: u32,
        parameters: &TokenNormParameters,
    ) -> Result<()> {
        let width = parameters.width as usize;
        if width > MAX_WIDTH {
            return Err(Error::Dimension { what: "the width of a normalization", size: width, most: MAX_WIDTH });
        }
        let large = width > (SIZES[0].0 * SIZES[0].1) as usize;
        let (each, most) = SIZES[usize::from(large)];
        let threads = parameters.width.div_ceil(each).next_multiple_of(32).min(most);
        let kernels = if parameters.scales == 0 { &self.plain } else { &self.to_i8 };
        let kernel = &kernels[usize::from(centered)][usize::from(large)];
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { kernel.launch(stream, Launch::simple((rows, 1), threads), parameters) }
    }
}
