//! Layer and RMS normalization of rows, and their gradients.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        float_types::FloatSource,
        grid::{BLOCK, MAX_GRID_ROWS, threads_of_row},
    },
    source::File,
};

/// Columns whose chunks a CTA adds.
const COLUMNS_OF_CHUNKS: u32 = 32;

/// The fewest rows of a chunk.
const MIN_CHUNK: usize = 64;

/// The kernels of one normalization.
#[derive(Debug, Clone)]
struct NormKernels {
    forward: Kernel,
    backward: Kernel,
    parameters: Kernel,
}

/// The kernels for tensors of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct Norms {
    dtype: DataType,
    /// CTAs that fill the device.
    blocks: usize,
    layer: NormKernels,
    rms: NormKernels,
    add_chunks: Kernel,
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[derive(Default)]
#[repr(C)]
pub(crate) struct NormParameters {
    pub(crate) x: DevicePtr,
    pub(crate) sum: DevicePtr,
    pub(crate) gain: DevicePtr,
    pub(crate) bias: DevicePtr,
    pub(crate) y: DevicePtr,
    pub(crate) mean: DevicePtr,
    pub(crate) rstd: DevicePtr,
    pub(crate) dy: DevicePtr,
    pub(crate) dx: DevicePtr,
    pub(crate) partial: DevicePtr,
    pub(crate) dgain: DevicePtr,
    pub(crate) dbias: DevicePtr,
    pub(crate) rows: u32,
    pub(crate) width: u32,
    pub(crate) chunk: u32,
    pub(crate) chunks: u32,
    pub(crate) wide: u32,
    pub(crate) adds_dx: u32,
    pub(crate) adds_parameters: u32,
    pub(crate) epsilon: f32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "norm",
    operation: "normalization",
    contracts_fma: true,
    files: &[File::new("norm/kernel.cu", include_str!("kernel.cu"))],
};

impl Norms {
    /// Loads the kernels for tensors of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let kernels = |name: &str| -> Result<NormKernels> {
            let kernel = |part: &str| kernel(&format!("{name}_{part}"));
            Ok(NormKernels {
                forward: kernel("forward")?,
                backward: kernel("backward")?,
                parameters: kernel("parameters")?,
            })
        };
        let blocks = 8 * device.sms() as usize;
        let (layer, rms) = (kernels("layer")?, kernels("rms")?);
        Ok(Self { dtype, blocks, layer, rms, add_chunks: kernel("add_chunks")? })
    }

    fn kernels(&self, centered: bool) -> &NormKernels {
        if centered { &self.layer } else { &self.rms }
    }

    fn rows(&self, parameters: &NormParameters) -> Launch {
        let threads = threads_of_row(parameters.width as usize * self.dtype.bytes(), 1024);
        Launch::simple((parameters.rows, 1), threads)
    }

    /// Returns the columns of a CTA that sums chunks: 16 bytes for each of 32 lanes.
    fn columns(&self) -> usize {
        32 * 16 / self.dtype.bytes()
    }

    /// Returns the rows of a chunk, and the number of chunks.
    fn chunks(&self, rows: usize, width: usize) -> (usize, usize) {
        let wanted = self.blocks.div_ceil(width.div_ceil(self.columns()).max(1));
        let chunk = rows.div_ceil(wanted).next_multiple_of(8).max(MIN_CHUNK).max(rows.div_ceil(MAX_GRID_ROWS));
        (chunk, rows.div_ceil(chunk))
    }

    /// Returns the bytes of the partial gradients of gain and bias.
    pub(crate) fn partial_bytes(&self, rows: usize, width: usize) -> usize {
        self.chunks(rows, width).1 * width * 8
    }

    /// Launches the normalization of rows, of which there is at least one.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn forward(&self, stream: Stream, centered: bool, parameters: &NormParameters) -> Result<()> {
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.kernels(centered).forward.launch(stream, self.rows(parameters), parameters) }
    }

    /// Launches the gradient of the rows, of which there is at least one.
    ///
    /// # Safety
    /// That of [`Norms::forward`].
    pub(crate) unsafe fn backward(&self, stream: Stream, centered: bool, parameters: &NormParameters) -> Result<()> {
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.kernels(centered).backward.launch(stream, self.rows(parameters), parameters) }
    }

    /// Launches the gradients of gain and bias.
    ///
    /// # Safety
    /// That of [`Norms::forward`]; `partial` has room for [`Norms::partial_bytes`].
    pub(crate) unsafe fn parameters(
        &self,
        stream: Stream,
        centered: bool,
        mut parameters: NormParameters,
    ) -> Result<()> {
        let (chunk, chunks) = self.chunks(parameters.rows as usize, parameters.width as usize);
        (parameters.chunk, parameters.chunks) = (chunk as u32, chunks as u32);
        if chunks > 0 {
            let launch = Launch::simple((parameters.width.div_ceil(self.columns() as u32), chunks as u32), BLOCK);
            // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
            unsafe { self.kernels(centered).parameters.launch(stream, launch, &parameters) }?;
        }
        let launch = Launch::simple((parameters.width.div_ceil(COLUMNS_OF_CHUNKS), 2), BLOCK);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.add_chunks.launch(stream, launch, &parameters) }
    }
}
