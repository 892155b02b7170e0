//! Attention and its gradients in f16 and bf16 without scores in memory, by `wgmma` on Hopper and by `mma.sync` from Ampere on.

mod products;

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

/// Tiles in shared memory.
const TILES: File = File::new("attention/tiles.cuh", include_str!("tiles.cuh"));

/// Elements of a head that there are kernels for.
const DIMS: [u32; 3] = [32, 64, 128];

/// Rows of a CTA's tile in the backward pass; it has two threads for each.
const BACKWARD_ROWS: u32 = 64;

/// Columns of a tile of the forward pass.
const COLUMNS: u32 = 64;

/// Shared memory that is lost to alignment.
const ALIGNMENT: u32 = 1024;

/// What multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Instruction {
    /// `mma.sync`: a warp multiplies 16 rows.
    Warp,
    /// `wgmma`: four warps multiply 64 rows, and columns come straight from shared memory.
    Warpgroup,
}

impl Instruction {
    const ALL: [Self; 2] = [Instruction::Warp, Instruction::Warpgroup];

    /// The faster one on an architecture.
    fn on(device: &Device) -> Self {
        match device.architecture().capability() {
            (9, 0) => Instruction::Warpgroup,
            _ => Instruction::Warp,
        }
    }

    /// Rows of a CTA in the forward pass. `wgmma` is so fast that copies of keys and values would be the limit: 128 rows share them.
    fn forward_rows(self) -> u32 {
        match self {
            Instruction::Warp => 64,
            Instruction::Warpgroup => 128,
        }
    }
}

/// The kernels for one data type and size of heads, on one device.
#[derive(Debug, Clone)]
pub(crate) struct FusedAttention {
    instruction: Instruction,
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

/// Columns of a tile of the backward pass.
fn backward_columns(dim: u32) -> u32 {
    if dim > 64 { 32 } else { 64 }
}

fn source(instruction: Instruction, dtype: DataType, dim: u32) -> Source {
    let file = File::new;
    // CTAs that an SM holds at least: what the compiler's registers are bounded by.
    let (name, support, files, ctas) = match instruction {
        Instruction::Warp => {
            let files = vec![headers::DENSE_PRODUCT, TILES, file("attention/mma.cuh", include_str!("mma.cuh"))];
            ("attention", Support::ALL, files, [1; 3])
        }
        Instruction::Warpgroup => {
            let products = products::products(dtype, &[COLUMNS, backward_columns(dim), dim]);
            let wgmma = file("attention/wgmma.cuh", include_str!("wgmma.cuh"));
            let files = vec![headers::DENSE_PRODUCT, headers::HOPPER, products, TILES, wgmma];
            let ctas = if dim > 64 { [1, 2, 2] } else { [2, 2, 3] };
            ("attention-wgmma", Support::Only((9, 0)), files, ctas)
        }
    };
    let definitions = format!(
        "#define ELEMENT {}\n#define DIM {dim}\n#define FORWARD_ROWS {}\n#define FORWARD_CTAS {}\n#define KEYS_CTAS {}\n#define QUERIES_CTAS {}\n",
        dtype.definition(),
        instruction.forward_rows(),
        ctas[0],
        ctas[1],
        ctas[2],
    );
    Source::new(format!("{name}-{dtype}-{dim}"), support)
        .define(definitions)
        .with([headers::COMMON])
        .with(files)
        .with([file("attention/kernel.cu", include_str!("kernel.cu"))])
        .with_fma()
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    let of = |instruction, dtype| DIMS.into_iter().map(move |dim| source(instruction, dtype, dim));
    Instruction::ALL.into_iter().flat_map(|with| TYPES.into_iter().flat_map(move |dtype| of(with, dtype))).collect()
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
        let instruction = Instruction::on(device);
        let source = source(instruction, dtype, dim);
        let kernels = Self {
            instruction,
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
        ALIGNMENT + (self.instruction.forward_rows() + 4 * COLUMNS) * self.dim * 2
    }

    /// Bytes of shared memory: two tiles of rows, and two stages of two tiles of columns.
    fn backward_bytes(&self) -> u32 {
        ALIGNMENT + (2 * BACKWARD_ROWS + 4 * backward_columns(self.dim)) * self.dim * 2
    }

    /// CTAs of `rows` rows for all positions of all heads.
    fn launch(rows: u32, heads: u32, parameters: &FusedAttentionParameters, shared: u32) -> Result<Launch> {
        let FusedAttentionParameters { batch, positions, .. } = *parameters;
        let (all, tiles) = (u64::from(batch) * u64::from(heads), u64::from(positions.div_ceil(rows)));
        let blocks = all.checked_mul(tiles).filter(|blocks| *blocks <= i32::MAX as u64);
        let blocks = blocks.ok_or(Error::TooLarge { rows: all as usize, cols: positions as usize })?;
        Ok(Launch { grid: (blocks as u32, 1), block: 2 * rows, shared, cluster: 1 })
    }

    /// Launches attention, for at least one query.
    ///
    /// # Safety
    /// The pointers are valid, with the lengths of the parameters' documentation, until the stream has passed this call, and aligned to 16 bytes; the stream is of
    /// this device.
    pub(crate) unsafe fn forward(&self, stream: Stream, parameters: &FusedAttentionParameters) -> Result<()> {
        let launch = Self::launch(self.instruction.forward_rows(), parameters.heads, parameters, self.forward_bytes())?;
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
        let by_keys = Self::launch(BACKWARD_ROWS, kv_heads, parameters, self.backward_bytes())?;
        let by_queries = Self::launch(BACKWARD_ROWS, heads, parameters, self.backward_bytes())?;
        // SAFETY: the structure has the kernels' layout, and its pointers are valid, as this function requires.
        unsafe {
            self.sum_products.launch(stream, warps, parameters)?;
            self.backward_keys.launch(stream, by_keys, parameters)?;
            self.backward_queries.launch(stream, by_queries, parameters)
        }
    }
}
