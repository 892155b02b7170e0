//! Column sums of a matrix: the bias gradient of a layer, `db = Σ dy` over tokens.
//!
//! CTAs sum chunks of rows, and a second kernel adds the chunks in a fixed order, without atomics: results are bit for
//! bit the same at every run on one kind of device. Calls only launch kernels: they neither allocate nor synchronize,
//! and a CUDA graph can capture them.

use crate::{
    Activation, DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    raw::{
        float_types::{FloatSource, expect_float_type},
        grid::{BLOCK, MAX_GRID_ROWS},
        headers,
    },
    source::File,
};

/// Columns whose chunks a CTA adds.
const COLUMNS_OF_CHUNKS: u32 = 32;

/// The fewest rows of a chunk.
const MIN_CHUNK: usize = 64;

/// Columns that a CTA sums: 16 bytes for each of 32 lanes.
fn columns(dtype: DataType) -> usize {
    32 * 16 / dtype.bytes()
}

/// The kernels for matrices of one data type, on one device.
#[derive(Debug, Clone)]
pub struct ColumnSums {
    dtype: DataType,
    /// CTAs that fill the device.
    blocks: usize,
    sum_chunks: Kernel,
    /// Through ReLU, GELU and SiLU.
    gradient_chunks: [Kernel; 3],
    sum_of_chunks: Kernel,
}

/// The kernels' parameters, in their memory layout.
#[repr(C)]
struct ColumnSumsParameters {
    matrix: DevicePtr,
    input: DevicePtr,
    partial: DevicePtr,
    out: DevicePtr,
    rows: u32,
    cols: u32,
    chunk: u32,
    chunks: u32,
    output: u32,
    accumulate: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "column-sums",
    operation: "sums of columns",
    contracts_fma: false,
    files: &[headers::FUNCTIONS, File::new("column_sums/kernel.cu", include_str!("kernel.cu"))],
};

/// The destination of column sums.
#[derive(Debug, Clone, Copy)]
pub struct ColumnSumsTarget {
    /// The sums, `[cols]`.
    pub sums: DevicePtr,
    /// Data type of the sums: f32, f16 or bf16.
    pub dtype: DataType,
    /// Whether sums are added to the destination.
    pub accumulate: bool,
    /// Workspace of [`ColumnSums::workspace_bytes`] bytes, aligned to 4.
    pub workspace: DevicePtr,
}

impl ColumnSums {
    /// Loads the kernels for matrices of f32, f16 or bf16.
    ///
    /// # Errors
    /// [`Error::DataType`] for other types; those of compiling and loading.
    pub fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        Ok(Self {
            dtype,
            blocks: 8 * device.sms() as usize,
            sum_chunks: kernel("sum_chunks")?,
            gradient_chunks: [kernel("relu_chunks")?, kernel("gelu_chunks")?, kernel("silu_chunks")?],
            sum_of_chunks: kernel("sum_of_chunks")?,
        })
    }

    /// Returns the rows of a chunk, and the number of chunks.
    fn chunks(&self, rows: usize, cols: usize) -> (usize, usize) {
        let wanted = self.blocks.div_ceil(cols.div_ceil(columns(self.dtype)).max(1));
        let chunk = rows.div_ceil(wanted).next_multiple_of(8).max(MIN_CHUNK).max(rows.div_ceil(MAX_GRID_ROWS));
        (chunk, rows.div_ceil(chunk))
    }

    /// Returns the bytes of workspace for a `[rows, cols]` matrix.
    pub fn workspace_bytes(&self, rows: usize, cols: usize) -> usize {
        self.chunks(rows, cols).1 * cols * 4
    }

    /// Sums the columns of a row-major `[rows, cols]` matrix in f32.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to their elements, [`Error::DataType`] for sums of
    /// another type than f32, f16 and bf16, [`Error::TooLarge`], [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has passed this call, and nothing else
    /// writes there; the stream is of this device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        matrix: DevicePtr,
        rows: usize,
        cols: usize,
        to: ColumnSumsTarget,
    ) -> Result<()> {
        // SAFETY: this function requires the same; there is no activation.
        unsafe { self.launch(stream, matrix, None, (rows, cols), to) }
    }

    /// Multiplies a gradient, a row-major `[rows, cols]` matrix, by the derivative of an activation at `input`, of the
    /// same shape, in place, and sums the columns of the result as [`ColumnSums::run`] does: one pass for what
    /// [`Elementwise::gradient`](super::elementwise::Elementwise::gradient) and [`ColumnSums::run`] do, with the same
    /// bits.
    ///
    /// # Errors
    /// Those of [`ColumnSums::run`], for `input` too.
    ///
    /// # Safety
    /// That of [`ColumnSums::run`]; the matrix is written, too.
    pub unsafe fn run_through(
        &self,
        stream: Stream,
        activation: Activation,
        (input, gradient): (DevicePtr, DevicePtr),
        (rows, cols): (usize, usize),
        to: ColumnSumsTarget,
    ) -> Result<()> {
        let kernel = match activation {
            Activation::Identity => None,
            Activation::Relu => Some((&self.gradient_chunks[0], input)),
            Activation::Gelu => Some((&self.gradient_chunks[1], input)),
            Activation::Silu => Some((&self.gradient_chunks[2], input)),
        };
        // SAFETY: the pointers are valid for what is read and written, as this function requires.
        unsafe { self.launch(stream, gradient, kernel, (rows, cols), to) }
    }

    /// # Safety
    /// That of [`ColumnSums::run`], or of [`ColumnSums::run_through`] where there is a kernel with the address of its
    /// input.
    unsafe fn launch(
        &self,
        stream: Stream,
        matrix: DevicePtr,
        through: Option<(&Kernel, DevicePtr)>,
        (rows, cols): (usize, usize),
        to: ColumnSumsTarget,
    ) -> Result<()> {
        let too_large = || Error::TooLarge { rows, cols };
        let side = |n: usize| i32::try_from(n).map(|n| n as u32).map_err(|_| too_large());
        let (chunk, chunks) = self.chunks(rows, cols);
        let (raw_rows, raw_cols) = (side(rows)?, side(cols)?);
        expect_float_type("sums of columns", to.dtype)?;
        if cols == 0 {
            return Ok(());
        }
        expect_pointers(&[("sums", to.sums, to.dtype.bytes() as u64)])?;
        if chunks > 0 {
            expect_pointers(&[("matrix", matrix, self.dtype.bytes() as u64), ("workspace", to.workspace, 4)])?;
            if let Some((_, input)) = through {
                expect_pointers(&[("the activation's argument", input, self.dtype.bytes() as u64)])?;
            }
        }
        let parameters = ColumnSumsParameters {
            matrix,
            input: through.map_or(0, |(_, input)| input),
            partial: to.workspace,
            out: to.sums,
            rows: raw_rows,
            cols: raw_cols,
            chunk: side(chunk)?,
            chunks: chunks as u32,
            output: to.dtype as u32,
            accumulate: u32::from(to.accumulate),
        };
        if chunks > 0 {
            let launch = Launch::simple((cols.div_ceil(columns(self.dtype)) as u32, chunks as u32), BLOCK);
            // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
            unsafe { through.map_or(&self.sum_chunks, |(kernel, _)| kernel).launch(stream, launch, &parameters) }?;
        }
        let launch = Launch::simple((raw_cols.div_ceil(COLUMNS_OF_CHUNKS), 1), BLOCK);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.sum_of_chunks.launch(stream, launch, &parameters) }
    }
}
