//! Rows of a table by ids, and the table's gradient.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        float_types::FloatSource,
        grid::{BLOCK, threads_of_row},
    },
    source::File,
};

/// The kernels for tables of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct Embeddings {
    dtype: DataType,
    gather: Kernel,
    count: Kernel,
    allocate: Kernel,
    fill_buckets: Kernel,
    order: Kernel,
    sum_buckets: Kernel,
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[derive(Default)]
#[repr(C)]
pub(crate) struct EmbeddingParameters {
    pub(crate) ids: DevicePtr,
    pub(crate) table: DevicePtr,
    pub(crate) positions: DevicePtr,
    pub(crate) out: DevicePtr,
    pub(crate) dy: DevicePtr,
    pub(crate) gradient: DevicePtr,
    pub(crate) counts: DevicePtr,
    pub(crate) starts: DevicePtr,
    pub(crate) filled: DevicePtr,
    pub(crate) cursor: DevicePtr,
    pub(crate) unordered: DevicePtr,
    pub(crate) ordered: DevicePtr,
    pub(crate) status: DevicePtr,
    pub(crate) tokens: u32,
    pub(crate) width: u32,
    pub(crate) vocabulary: u32,
    pub(crate) position_count: u32,
    pub(crate) adds: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "embedding",
    operation: "an embedding",
    contracts_fma: true,
    files: &[File::new("embedding/kernel.cu", include_str!("kernel.cu"))],
};

impl Embeddings {
    /// Loads the kernels for tables of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        Ok(Self {
            dtype,
            gather: kernel("gather")?,
            count: kernel("count")?,
            allocate: kernel("allocate")?,
            fill_buckets: kernel("fill_buckets")?,
            order: kernel("order")?,
            sum_buckets: kernel("sum_buckets")?,
        })
    }

    /// Launches the copy of rows, for at least one token and a width of at least 1.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn gather(&self, stream: Stream, parameters: &EmbeddingParameters) -> Result<()> {
        let threads = threads_of_row(parameters.width as usize * self.dtype.bytes(), 1024);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.gather.launch(stream, Launch::simple((parameters.tokens, 1), threads), parameters) }
    }

    /// Launches the table's gradient, for a vocabulary and a width of at least 1.
    ///
    /// # Safety
    /// That of [`Embeddings::gather`]. `counts`, `filled` and `cursor` are zeros.
    pub(crate) unsafe fn gradient(&self, stream: Stream, parameters: &EmbeddingParameters) -> Result<()> {
        let threads = |count: u32| Launch::simple((count.div_ceil(BLOCK), 1), BLOCK);
        let (tokens, ids) = (threads(parameters.tokens), threads(parameters.vocabulary));
        if parameters.tokens > 0 {
            let passes =
                [(&self.count, tokens), (&self.allocate, ids), (&self.fill_buckets, tokens), (&self.order, tokens)];
            for (kernel, launch) in passes {
                // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
                unsafe { kernel.launch(stream, launch, parameters) }?;
            }
        }
        let columns = 32 * 16 / self.dtype.bytes() as u32;
        let launch = Launch::simple((parameters.vocabulary, parameters.width.div_ceil(columns)), BLOCK);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.sum_buckets.launch(stream, launch, parameters) }
    }
}
