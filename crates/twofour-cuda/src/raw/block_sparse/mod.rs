//! `y = x · Wᵀ` for a weight in square blocks, of which those with a nonzero are stored (BSR).
//!
//! A CTA multiplies a tile of tokens with rows of one row of blocks, whose stored blocks it reads one after the other,
//! by `mma` in f32. Calls only launch a kernel, so a CUDA graph can capture them.

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    raw::{grid::MAX_GRID_ROWS, headers},
    source::{File, Source, Support},
};

/// The rows and columns that a block may have: these, or a multiple of the last.
pub const SIDES: [usize; 3] = [16, 32, 64];

/// The columns of a weight are a multiple of it.
pub const COLUMNS: usize = 8;

/// Stages of a CTA's pipeline of copies: `STAGES` of the kernel.
const STAGES: u32 = 3;
/// Threads of a CTA.
const THREADS: u32 = 128;

/// A weight `[rows, cols]` in device memory.
#[derive(Debug, Clone, Copy)]
pub struct BlockSparseWeight {
    /// `[rows / block, rounded up, + 1]` of i64: where each row of blocks begins.
    pub crow: DevicePtr,
    /// `[blocks]` of i64: the column of each block, in blocks.
    pub col: DevicePtr,
    /// `[blocks, block, block]`: zeros complete the last rows and columns.
    pub values: DevicePtr,
    /// Stored blocks.
    pub blocks: usize,
    /// Rows and columns of a block.
    pub block: usize,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

/// The kernels for one type and one kind of block, on one device.
#[derive(Debug, Clone)]
pub struct BlockSparseProduct {
    unit: usize,
    sms: u32,
    tiles: [(Tile, Kernel); 3],
}

/// What a CTA multiplies at a time.
#[derive(Debug, Clone, Copy)]
struct Tile {
    name: &'static str,
    tokens: u32,
    features: u32,
    /// Units of columns.
    parts: u32,
}

impl Tile {
    fn all(unit: usize) -> [Tile; 3] {
        let features = unit as u32;
        [
            Tile { name: "few", tokens: 16, features: 16, parts: 4 },
            Tile { name: "some", tokens: 64, features, parts: 1 },
            Tile { name: "many", tokens: 128, features, parts: 1 },
        ]
    }

    fn grid(self, rows: usize, tokens: usize) -> (usize, usize) {
        (rows.div_ceil(self.features as usize), tokens.div_ceil(self.tokens as usize))
    }

    fn shared_bytes(self, unit: usize) -> u32 {
        STAGES * self.parts * (self.tokens + self.features) * unit as u32 * 2
    }
}

/// The kernel's parameters, in its memory layout.
#[repr(C)]
struct BlockProductParameters {
    crow: DevicePtr,
    col: DevicePtr,
    values: DevicePtr,
    x: DevicePtr,
    y: DevicePtr,
    blocks: u32,
    block: u32,
    rows: u32,
    cols: u32,
    tokens: u32,
}

fn source(element: DataType, unit: usize) -> Source {
    let kernel = File::new("block_sparse/kernel.cu", include_str!("kernel.cu"));
    Source::new(format!("block-sparse-{element}-{unit}"), Support::ALL)
        .define(format!("#define ELEMENT {}\n#define UNIT {unit}\n", element.definition()))
        .with([headers::COMMON, headers::DENSE_PRODUCT, kernel])
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    let all = |element| SIDES.map(|unit| source(element, unit));
    [DataType::F16, DataType::BF16].into_iter().flat_map(all).collect()
}

/// Whether a kernel multiplies blocks of this side with tokens of so many columns, on any GPU.
pub fn is_supported(block: usize, cols: usize) -> bool {
    unit_of(block).is_some() && cols.is_multiple_of(COLUMNS)
}

/// The columns of a block that are read at a time.
fn unit_of(block: usize) -> Option<usize> {
    let [.., largest] = SIDES;
    let is_multiple = block > 0 && block.is_multiple_of(largest);
    SIDES.into_iter().find(|side| *side == block).or_else(|| is_multiple.then_some(largest))
}

fn wrong_side(block: usize) -> Error {
    let expected = "16, 32 or a multiple of 64";
    Error::Setting { what: "the side of a block", found: block.to_string(), expected }
}

impl BlockSparseProduct {
    /// Loads the kernels for blocks of so many rows and columns.
    ///
    /// # Errors
    /// [`Error::DataType`] for another type than f16 and bf16, [`Error::Setting`] for a side that [`is_supported`]
    /// denies; those of compiling and loading.
    pub fn new(device: &Device, element: DataType, block: usize) -> Result<Self> {
        if !matches!(element, DataType::F16 | DataType::BF16) {
            let (operation, supported) = ("a block-sparse product", "f16, bf16");
            return Err(Error::DataType { operation, dtype: element, supported });
        }
        let unit = unit_of(block).ok_or_else(|| wrong_side(block))?;
        let (source, [few, some, many]) = (source(element, unit), Tile::all(unit));
        let load = |tile: Tile| -> Result<(Tile, Kernel)> {
            let kernel = device.kernel(&source, tile.name)?;
            kernel.allow_shared()?;
            Ok((tile, kernel))
        };
        Ok(Self { unit, sms: device.sms(), tiles: [load(few)?, load(some)?, load(many)?] })
    }

    /// Launches `y = x · Wᵀ` for `x` `[tokens, cols]` and `y` `[tokens, rows]`. Indices that no block or column has
    /// read zeros.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned, [`Error::Multiple`] for columns that are no
    /// multiple of [`COLUMNS`], [`Error::Setting`] for blocks of another side than the kernels are for,
    /// [`Error::TooLarge`], [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has passed this call, and nothing else
    /// writes there; the stream is of this device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        weight: BlockSparseWeight,
        x: DevicePtr,
        tokens: usize,
        y: DevicePtr,
    ) -> Result<()> {
        let BlockSparseWeight { crow, col, values, blocks, block, rows, cols } = weight;
        if tokens == 0 || rows == 0 {
            return Ok(());
        }
        if !cols.is_multiple_of(COLUMNS) {
            let what = "columns of a block-sparse weight";
            return Err(Error::Multiple { what, multiple: COLUMNS, found: cols });
        }
        if unit_of(block) != Some(self.unit) {
            return Err(wrong_side(block));
        }
        let (tile, kernel) = self.tile(rows, tokens);
        // Kernels round rows, columns and tokens up to whole tiles.
        let sizes = [blocks, block, rows + 128, cols + block, tokens + 128];
        if sizes.iter().any(|size| i32::try_from(*size).is_err()) || blocks.saturating_mul(block) > i32::MAX as usize {
            return Err(Error::TooLarge { rows, cols });
        }
        // Of no blocks there may be no memory.
        let (values, x, col) = if blocks == 0 { (crow, crow, crow) } else { (values, x, col) };
        let [alignment, indices] = if blocks == 0 { [8, 8] } else { [16, 8] };
        expect_pointers(&[
            ("where rows of blocks begin", crow, indices),
            ("columns of blocks", col, indices),
            ("blocks", values, alignment),
            ("the input", x, alignment),
            ("the output", y, 4),
        ])?;
        let [blocks, block, ..] = sizes.map(|size| size as u32);
        let shared = tile.shared_bytes(self.unit);
        // A grid has a limited number of tiles of tokens.
        let most = MAX_GRID_ROWS * tile.tokens as usize;
        for first in (0..tokens).step_by(most) {
            let part = most.min(tokens - first);
            let (wide, high) = tile.grid(rows, part);
            let [x, y] = [(x, cols), (y, rows)].map(|(at, features)| at + (first * features * 2) as u64);
            let (rows, cols, tokens) = (rows as u32, cols as u32, part as u32);
            let parameters = BlockProductParameters { crow, col, values, x, y, blocks, block, rows, cols, tokens };
            let launch = Launch { grid: (wide as u32, high as u32), block: THREADS, shared, cluster: 1 };
            // SAFETY: the structure has the kernel's layout, and pointers and stream are valid as this function
            // requires.
            unsafe { kernel.launch(stream, launch, &parameters) }?;
        }
        Ok(())
    }

    /// The largest tile of which there are two for each SM; for few tokens that of few.
    fn tile(&self, rows: usize, tokens: usize) -> &(Tile, Kernel) {
        let [few, some, many] = &self.tiles;
        let (wide, high) = many.0.grid(rows, tokens);
        if tokens <= 2 * few.0.tokens as usize {
            few
        } else if wide.saturating_mul(high) < 2 * self.sms as usize {
            some
        } else {
            many
        }
    }
}
