//! Attention and its gradients in f16 and bf16 without scores in memory.

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        grid::{BLOCK, blocks_of_elements},
        headers,
    },
    source::{File, Source, Support},
};

/// Data types of the kernels.
const TYPES: [DataType; 2] = [DataType::F16, DataType::BF16];

/// Elements of a head that there are kernels for.
const DIMS: [u32; 3] = [32, 64, 128];

/// Columns of a tile of the forward pass, and of the backward pass.
const COLUMNS: [u32; 2] = [64, 32];

/// Returns the rows of a CTA's tile for heads of `dim` elements.
fn rows(dim: u32) -> u32 {
    if dim > 64 { 64 } else { 128 }
}

/// Threads of a CTA.
const THREADS: u32 = 128;

/// The kernels for one data type and size of heads, on one device.
#[derive(Debug, Clone)]
pub(crate) struct FusedAttention {
    dim: u32,
    forward: Kernel,
    sum_products: Kernel,
    backward_keys: Kernel,
    backward_queries: Kernel,
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[derive(Default)]
#[repr(C)]
pub(crate) struct FusedAttentionParameters {
    pub(crate) q: DevicePtr,
    pub(crate) k: DevicePtr,
    pub(crate) v: DevicePtr,
    pub(crate) out: DevicePtr,
    pub(crate) dout: DevicePtr,
    pub(crate) lse: DevicePtr,
    pub(crate) delta: DevicePtr,
    pub(crate) to_out: DevicePtr,
    pub(crate) dq: DevicePtr,
    pub(crate) dk: DevicePtr,
    pub(crate) dv: DevicePtr,
    pub(crate) to_lse: DevicePtr,
    pub(crate) to_delta: DevicePtr,
    pub(crate) batch: u32,
    pub(crate) positions: u32,
    pub(crate) heads: u32,
    pub(crate) kv_heads: u32,
    pub(crate) causal: u32,
    pub(crate) scale: f32,
    pub(crate) out_row: u32,
    pub(crate) out_head: u64,
    pub(crate) out_sequence: u64,
}

fn source(dtype: DataType, dim: u32) -> Source {
    let kernel = File::new("attention/kernel.cu", include_str!("kernel.cu"));
    Source::new(format!("attention-{dtype}-{dim}"), Support::ALL)
        .define(format!("#define ELEMENT {}\n#define DIM {dim}\n", dtype.definition()))
        .with([headers::COMMON, headers::DENSE_PRODUCT, kernel])
        .with_fma()
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    TYPES.into_iter().flat_map(|dtype| DIMS.into_iter().map(move |dim| source(dtype, dim))).collect()
}

impl FusedAttention {
    /// Returns whether there are kernels for heads of this type and size.
    pub(crate) fn computes(dtype: DataType, dim: usize) -> bool {
        TYPES.contains(&dtype) && DIMS.iter().any(|size| *size as usize == dim)
    }

    /// Loads the kernels.
    pub(crate) fn new(device: &Device, dtype: DataType, dim: usize) -> Result<Self> {
        if !Self::computes(dtype, dim) {
            let (operation, supported) = ("attention in one kernel", "f16 and bf16, with a head_dim of 32, 64 or 128");
            return Err(Error::DataType { operation, dtype, supported });
        }
        let dim = dim as u32;
        let source = source(dtype, dim);
        let kernels = Self {
            dim,
            forward: device.kernel(&source, "forward")?,
            sum_products: device.kernel(&source, "sum_products")?,
            backward_keys: device.kernel(&source, "backward_keys")?,
            backward_queries: device.kernel(&source, "backward_queries")?,
        };
        kernels.forward.allow_shared(kernels.forward_bytes())?;
        kernels.backward_keys.allow_shared(kernels.backward_bytes())?;
        kernels.backward_queries.allow_shared(kernels.backward_bytes())?;
        Ok(kernels)
    }

    /// Bytes of shared memory: queries, and two stages of keys and values.
    fn forward_bytes(&self) -> u32 {
        (rows(self.dim) + 4 * COLUMNS[0]) * self.dim * 2
    }

    /// Bytes of shared memory: two tiles of rows, and two stages of two tiles of columns.
    fn backward_bytes(&self) -> u32 {
        (2 * rows(self.dim) + 4 * COLUMNS[1]) * self.dim * 2
    }

    fn launch(&self, heads: u32, parameters: &FusedAttentionParameters, shared: u32) -> Result<Launch> {
        let FusedAttentionParameters { batch, positions, .. } = *parameters;
        let (all, tiles) = (u64::from(batch) * u64::from(heads), u64::from(positions.div_ceil(rows(self.dim))));
        let blocks = all.checked_mul(tiles).filter(|blocks| *blocks <= i32::MAX as u64);
        let blocks = blocks.ok_or(Error::TooLarge { rows: all as usize, cols: positions as usize })?;
        Ok(Launch { grid: (blocks as u32, 1), block: THREADS, shared, cluster: 1 })
    }

    /// Launches attention, for at least one query.
    ///
    /// # Safety
    /// The pointers are valid, with the lengths of the parameters' documentation, until the stream has passed this call, and aligned to 16 bytes; the stream is of
    /// this device.
    pub(crate) unsafe fn forward(&self, stream: Stream, parameters: &FusedAttentionParameters) -> Result<()> {
        let launch = self.launch(parameters.heads, parameters, self.forward_bytes())?;
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.forward.launch(stream, launch, parameters) }
    }

    /// Launches the gradients, for at least one query.
    ///
    /// # Safety
    /// That of [`FusedAttention::forward`].
    pub(crate) unsafe fn backward(&self, stream: Stream, parameters: &FusedAttentionParameters) -> Result<()> {
        let FusedAttentionParameters { batch, positions, heads, kv_heads, .. } = *parameters;
        let queries = u64::from(batch) * u64::from(heads) * u64::from(positions);
        // A warp for each query.
        let warps = Launch::simple((blocks_of_elements(queries * 32, 1)?, 1), BLOCK);
        let by_keys = self.launch(kv_heads, parameters, self.backward_bytes())?;
        let by_queries = self.launch(heads, parameters, self.backward_bytes())?;
        // SAFETY: the structure has the kernels' layout, and its pointers are valid, as this function requires.
        unsafe {
            self.sum_products.launch(stream, warps, parameters)?;
            self.backward_keys.launch(stream, by_keys, parameters)?;
            self.backward_queries.launch(stream, by_queries, parameters)
        }
    }
}
