//! Attention by CTAs whose threads copy tiles themselves: `mma.sync` from Ampere on, and `wgmma` on Hopper.

use twofour_cuda::{
    DataType, Device, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        grid::{BLOCK, blocks_of_elements},
        headers,
    },
    source::{File, Source, Support},
};

use super::{ALIGNMENT, DIMS, FusedAttentionParameters, TYPES, launch, products};

/// Tiles in shared memory.
pub(super) const TILES: File = File::new("attention/tiles.cuh", include_str!("tiles.cuh"));

/// What the kernels share of the softmax and of storing results.
pub(super) const SOFTMAX: File = File::new("attention/softmax.cuh", include_str!("softmax.cuh"));

/// Rows of a CTA's tile in the backward pass; it has two threads for each.
const BACKWARD_ROWS: u32 = 64;

/// Columns of a tile of the forward pass.
const COLUMNS: u32 = 64;

/// What multiplies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Instruction {
    /// `mma.sync`: a warp multiplies 16 rows.
    Warp,
    /// `wgmma`: four warps multiply 64 rows, and columns come straight from shared memory.
    Warpgroup,
}

impl Instruction {
    const ALL: [Self; 2] = [Instruction::Warp, Instruction::Warpgroup];

    /// Rows of a CTA in the forward pass. `wgmma` is so fast that copies of keys and values would be the limit: 128
    /// rows share them.
    fn forward_rows(self) -> u32 {
        match self {
            Instruction::Warp => 64,
            Instruction::Warpgroup => 128,
        }
    }
}

/// The kernels for one data type and size of heads, on one device.
#[derive(Debug, Clone)]
pub(super) struct TileAttention {
    instruction: Instruction,
    dim: u32,
    forward: Kernel,
    sum_products: Kernel,
    backward_keys: Kernel,
    backward_queries: Kernel,
}

/// Columns of a tile of the backward pass.
fn backward_columns(dim: u32) -> u32 {
    if dim > 64 { 32 } else { 64 }
}

fn source(instruction: Instruction, dtype: DataType, (dim, options): (u32, bool)) -> Source {
    let file = File::new;
    // CTAs that an SM holds at least: what the compiler's registers are bounded by. Options take registers.
    let (name, support, files, ctas) = match instruction {
        Instruction::Warp => {
            let files = vec![headers::DENSE_PRODUCT, TILES, file("attention/mma.cuh", include_str!("mma.cuh"))];
            ("attention", Support::ALL, files, [1; 3])
        }
        Instruction::Warpgroup => {
            let products = products::products(dtype, &[COLUMNS, backward_columns(dim), dim]);
            let wgmma = file("attention/wgmma.cuh", include_str!("wgmma.cuh"));
            let files = vec![headers::DENSE_PRODUCT, headers::HOPPER, products, TILES, wgmma];
            let ctas = if options {
                [1; 3]
            } else if dim > 64 {
                [1, 2, 2]
            } else {
                [2, 2, 3]
            };
            ("attention-wgmma", Support::WGMMA, files, ctas)
        }
    };
    let definitions = format!(
        "#define ELEMENT {}\n#define DIM {dim}\n#define OPTIONS {options}\n#define FORWARD_ROWS {}\n#define \
         FORWARD_CTAS {}\n#define KEYS_CTAS {}\n#define QUERIES_CTAS {}\n",
        dtype.definition(),
        instruction.forward_rows(),
        ctas[0],
        ctas[1],
        ctas[2],
    );
    let suffix = if options { "-options" } else { "" };
    Source::new(format!("{name}-{dtype}-{dim}{suffix}"), support)
        .define(definitions)
        .with([headers::COMMON])
        .with(files)
        .with([SOFTMAX, file("attention/kernel.cu", include_str!("kernel.cu"))])
        .with_fma()
}

/// Returns every source.
pub(super) fn sources() -> impl Iterator<Item = Source> {
    let kinds = || DIMS.into_iter().flat_map(|dim| [(dim, false), (dim, true)]);
    let of = move |instruction, dtype| kinds().map(move |kind| source(instruction, dtype, kind));
    Instruction::ALL.into_iter().flat_map(move |with| TYPES.into_iter().flat_map(move |dtype| of(with, dtype)))
}

impl TileAttention {
    /// Loads the kernels, those with windows and soft caps or those without.
    pub(super) fn new(
        device: &Device,
        instruction: Instruction,
        dtype: DataType,
        (dim, options): (u32, bool),
    ) -> Result<Self> {
        let source = source(instruction, dtype, (dim, options));
        let kernels = Self {
            instruction,
            dim,
            forward: device.kernel(&source, "forward")?,
            sum_products: device.kernel(&source, "sum_products")?,
            backward_keys: device.kernel(&source, "backward_keys")?,
            backward_queries: device.kernel(&source, "backward_queries")?,
        };
        kernels.forward.allow_shared()?;
        kernels.backward_keys.allow_shared()?;
        kernels.backward_queries.allow_shared()?;
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

    /// Launches attention.
    ///
    /// # Safety
    /// That of [`FusedAttention::forward`](super::FusedAttention::forward).
    pub(super) unsafe fn forward(&self, stream: Stream, parameters: &FusedAttentionParameters) -> Result<()> {
        let rows = self.instruction.forward_rows();
        let launch = launch(parameters, parameters.heads, (rows, 2 * rows), self.forward_bytes())?;
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.forward.launch(stream, launch, parameters) }
    }

    /// Launches the gradients.
    ///
    /// # Safety
    /// That of [`FusedAttention::forward`](super::FusedAttention::forward).
    pub(super) unsafe fn backward(&self, stream: Stream, parameters: &FusedAttentionParameters) -> Result<()> {
        let FusedAttentionParameters { batch, positions, heads, kv_heads, .. } = *parameters;
        let queries = u64::from(batch) * u64::from(heads) * u64::from(positions);
        // A warp for each query.
        let warps = Launch::simple((blocks_of_elements(queries * 32, 1)?, 1), BLOCK);
        let (size, shared) = ((BACKWARD_ROWS, 2 * BACKWARD_ROWS), self.backward_bytes());
        let by_keys = launch(parameters, kv_heads, size, shared)?;
        let by_queries = launch(parameters, heads, size, shared)?;
        // SAFETY: the structure has the kernels' layout, and its pointers are valid, as this function requires.
        unsafe {
            self.sum_products.launch(stream, warps, parameters)?;
            self.backward_keys.launch(stream, by_keys, parameters)?;
            self.backward_queries.launch(stream, by_queries, parameters)
        }
    }
}
