//! From dense weights on the device to masks and compressed weights: the masks and bytes of the `twofour` crate, bit for bit.
//!
//! | wanted | call |
//! |---|---|
//! | 2:4 along rows or columns alone, by magnitude or by an estimator | [`crate::compress`] |
//! | a transposable mask, and `W` and `Wᵀ` compressed, from one read of `W` | [`Pruner::both_ways`] |
//! | the same with a mask that is there already | [`Pruner::both_ways`] with [`MaskChoice::Given`] |
//! | zeros where a mask says so | [`Pruner::apply_mask`] |
//!
//! Calls only launch: they neither allocate nor wait, and may be captured in a graph. So a NaN is not an error at once: its place is written to
//! memory of the caller's ([`Watch::nan`]), for [`first_nan`] to read.

use twofour::{layout::sm90::TileK, select::Transposable};

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::{expect_multiple, expect_pointers},
    device::{Kernel, Launch},
    headers,
    source::{File, Source, Support},
};

/// A dense weight on the device, `[rows, cols]` row-major.
#[derive(Debug, Clone, Copy)]
pub struct DenseWeight {
    /// Where it starts.
    pub data: DevicePtr,
    /// Rows: output features.
    pub rows: usize,
    /// Columns: input features.
    pub cols: usize,
}

/// In which order metadata is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MetaOrder {
    /// As on disk: `[rows, ceil(cols / 32)]` u32s.
    Canonical,
    /// For products ([`crate::gemm`]), as [`twofour::layout::sm90::encode_16`] and `encode_8`: `rows * cols / 8` bytes.
    Sm90(TileK),
}

/// Where a compressed weight goes: `[rows, 2 * ceil(cols / 4)]` values and their metadata.
#[derive(Debug, Clone, Copy)]
pub struct Packed {
    /// The values.
    pub values: DevicePtr,
    /// The metadata.
    pub meta: DevicePtr,
}

/// How the mask of tiles comes about.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MaskChoice {
    /// It is chosen by a rule.
    Rule(Transposable),
    /// It is read from [`BothWays::tiles`]. It must be 2:4 along rows and along columns: what it keeps too much of is lost.
    Given,
}

/// Where the results of a pass in both directions go; what is `None` is not made.
#[derive(Debug, Clone, Copy, Default)]
pub struct BothWays {
    /// `W`, compressed.
    pub packed: Option<Packed>,
    /// `Wᵀ`, compressed: of shape `[cols, rows]`.
    pub transposed: Option<Packed>,
    /// The mask: a u16 for each 4x4 tile, `[rows / 4, cols / 4]`, bit `4 * row + col` set where the tile keeps the element. Written, but read by
    /// [`MaskChoice::Given`].
    pub tiles: Option<DevicePtr>,
    /// An f32 that values are multiplied by before they are rounded to 8-bit floats, such as their largest number over the weight's largest magnitude. The mask is chosen
    /// without it; 16-bit values have none.
    pub factor: Option<DevicePtr>,
}

/// What else a pass is to look at.
#[derive(Debug, Clone, Copy)]
pub struct Watch {
    /// A u64 that gets the index, `row * cols + col`, of the first NaN if that is smaller than what it holds; [`NO_NAN`] to begin with. A mask
    /// that is given needs no order, so [`MaskChoice::Given`] does not look for any.
    pub nan: DevicePtr,
    /// A mask of before, and a u64 to which the number of elements that differ is added.
    pub flips: Option<(DevicePtr, DevicePtr)>,
}

/// What [`Watch::nan`] holds where there was none.
pub const NO_NAN: u64 = u64::MAX;

/// The error for what a pass over a weight with so many columns has left in [`Watch::nan`].
///
/// # Errors
/// [`Error::NotANumber`].
///
/// ```
/// use twofour_cuda::prune::{NO_NAN, first_nan};
/// assert!(first_nan(NO_NAN, 64).is_ok());
/// assert!(first_nan(130, 64).unwrap_err().to_string().contains("row 2, column 2"));
/// ```
pub fn first_nan(found: u64, cols: usize) -> Result<()> {
    match found {
        NO_NAN => Ok(()),
        index => Err(Error::NotANumber { row: (index / cols as u64) as usize, col: (index % cols as u64) as usize }),
    }
}

/// Which tensors can become which values.
pub(crate) const TYPES: [(DataType, DataType); 10] = {
    use DataType::{BF16, E4M3, E5M2, F16, F32};
    [
        (F32, F16),
        (F32, BF16),
        (F16, F16),
        (BF16, BF16),
        (F32, E4M3),
        (F32, E5M2),
        (F16, E4M3),
        (F16, E5M2),
        (BF16, E4M3),
        (BF16, E5M2),
    ]
};

/// Definitions of the types, and what architectures have them.
pub(crate) fn types(input: DataType, output: DataType) -> (String, Support) {
    // Earlier architectures have no 8-bit floats.
    let support = if output.bytes() > 1 { Support::ALL } else { Support::From((8, 9)) };
    (format!("#define IN {}\n#define OUT {}\n", input.definition(), output.definition()), support)
}

fn source(input: DataType, output: DataType) -> Source {
    let name = if input == output { format!("prune-{input}") } else { format!("prune-{input}-{output}") };
    let (definitions, support) = types(input, output);
    let kernel = File::new("prune/kernel.cu", include_str!("kernel.cu"));
    Source::new(name, support).define(definitions).with([headers::COMMON, headers::CODES, headers::PAIRS, kernel])
}

/// Every source.
pub(crate) fn sources() -> Vec<Source> {
    TYPES.into_iter().map(|(input, output)| source(input, output)).collect()
}

/// Refuses types that nothing is compressed between, and such as the device does not know.
pub(crate) fn expect_types(device: &Device, input: DataType, output: DataType, source: &Source) -> Result<()> {
    if !TYPES.contains(&(input, output)) {
        return Err(Error::Types { input, output });
    }
    if !source.is_for(device.architecture()) {
        let (major, minor) = device.architecture().capability();
        let operation = "compressing to 8-bit floats";
        return Err(Error::Unsupported { operation, major, minor, needs: "8.9 (Ada) or later" });
    }
    Ok(())
}

/// The kernels that prune and compress weights of one element type to values of another, on one device.
#[derive(Debug, Clone)]
pub struct Pruner {
    input: DataType,
    output: DataType,
    rules: [Kernel; 5],
    apply_mask: Kernel,
}

/// As the kernels have it.
#[repr(C)]
pub(crate) struct RawMeta {
    words: DevicePtr,
    order: u32,
}

impl RawMeta {
    /// Of a compressed weight of that shape.
    pub(crate) fn new(words: DevicePtr, order: MetaOrder, rows: usize, cols: usize) -> Result<Self> {
        Ok(Self { words, order: raw_order(order, rows, cols)? })
    }

    const NONE: Self = Self { words: 0, order: 0 };
}

#[repr(C)]
struct RawBothWays {
    weight: DevicePtr,
    values: DevicePtr,
    meta: RawMeta,
    values_transposed: DevicePtr,
    meta_transposed: RawMeta,
    tiles: DevicePtr,
    tiles_before: DevicePtr,
    flips: DevicePtr,
    nan: DevicePtr,
    rows: u32,
    cols: u32,
    factor: DevicePtr,
}

#[repr(C)]
struct RawMasked {
    dense: DevicePtr,
    out: DevicePtr,
    tiles: DevicePtr,
    rows: u32,
    cols: u32,
}

/// Elements of a side of the square that a block takes.
const SIDE: usize = 128;

/// Blocks that a grid can have along its second axis.
pub(crate) const MOST_GRID_ROWS: usize = 65_535;

/// Threads of a block.
pub(crate) const BLOCK: u32 = 256;

impl Pruner {
    /// Weights of `input` to values of `output`: f16 or bf16 to themselves, f32 to one of them, all three to 8-bit floats (from compute capability 8.9 on). Values are rounded to
    /// nearest, ties to even, after the mask has been chosen; 8-bit floats saturate.
    ///
    /// # Errors
    /// [`Error::Types`] for other types, [`Error::Unsupported`]; those of compiling and loading.
    pub fn new(device: &Device, input: DataType, output: DataType) -> Result<Self> {
        let source = source(input, output);
        expect_types(device, input, output, &source)?;
        let rule = |rule| device.kernel(&source, rule);
        Ok(Self {
            input,
            output,
            rules: [
                rule("both_ways_greedy")?,
                rule("both_ways_greedy_signed")?,
                rule("both_ways_causal1122")?,
                rule("both_ways_optimal")?,
                rule("both_ways_given")?,
            ],
            apply_mask: device.kernel(&source, "apply_mask_of_tiles")?,
        })
    }

    /// Chooses a transposable mask ([`twofour::select::transposable`]) or takes one, and compresses `W` and `Wᵀ` from one read of `W`.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to 16 bytes (`nan`: 8; factor: 4; tiles: 2), [`Error::Multiple`] where rows or columns are no multiples of 4 or
    /// do not fit the order, [`Error::Factor`] for one with 16-bit values, [`Error::TooLarge`], [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has come past this call, and nothing else writes there; the stream is of this
    /// device.
    pub unsafe fn both_ways(
        &self,
        stream: Stream,
        weight: DenseWeight,
        choice: MaskChoice,
        to: BothWays,
        order: MetaOrder,
        watch: Watch,
    ) -> Result<()> {
        let (rows, cols) = shape(weight)?;
        expect_multiple("rows of the weight", weight.rows, 4)?;
        expect_multiple("columns of the weight", weight.cols, 4)?;
        if to.factor.is_some() && self.output.bytes() > 1 {
            return Err(Error::Factor { output: self.output });
        }
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        expect_pointers(&[("weight", weight.data, 16), ("NaN's place", watch.nan, 8)])?;
        if let Some(factor) = to.factor {
            expect_pointers(&[("factor", factor, 4)])?;
        }
        for packed in [to.packed, to.transposed].into_iter().flatten() {
            expect_pointers(&[("values", packed.values, 16), ("metadata", packed.meta, 16)])?;
        }
        if let (MaskChoice::Given, _) | (_, Some(_)) = (choice, to.tiles) {
            expect_pointers(&[("mask of tiles", to.tiles.unwrap_or(0), 2)])?;
        }
        if let Some((before, flips)) = watch.flips {
            expect_pointers(&[("mask before", before, 2), ("number of flips", flips, 8)])?;
        }
        let raw = |packed: Option<Packed>, rows, cols| -> Result<(DevicePtr, RawMeta)> {
            let Some(packed) = packed else { return Ok((0, RawMeta::NONE)) };
            Ok((packed.values, RawMeta::new(packed.meta, order, rows, cols)?))
        };
        let (values, meta) = raw(to.packed, weight.rows, weight.cols)?;
        let (values_transposed, meta_transposed) = raw(to.transposed, weight.cols, weight.rows)?;
        let (tiles_before, flips) = watch.flips.unwrap_or((0, 0));
        let parameter = RawBothWays {
            weight: weight.data,
            values,
            meta,
            values_transposed,
            meta_transposed,
            tiles: to.tiles.unwrap_or(0),
            tiles_before,
            flips,
            nan: watch.nan,
            rows,
            cols,
            factor: to.factor.unwrap_or(0),
        };
        let kernel = match choice {
            MaskChoice::Rule(Transposable::GreedyAbs) => &self.rules[0],
            MaskChoice::Rule(Transposable::GreedySigned) => &self.rules[1],
            MaskChoice::Rule(Transposable::Causal1122) => &self.rules[2],
            MaskChoice::Rule(Transposable::Optimal) => &self.rules[3],
            MaskChoice::Given => &self.rules[4],
        };
        let grid_rows = weight.rows.div_ceil(SIDE);
        if grid_rows > MOST_GRID_ROWS {
            return Err(Error::TooLarge { rows: weight.rows, cols: weight.cols });
        }
        let grid = (weight.cols.div_ceil(SIDE) as u32, grid_rows as u32);
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { kernel.launch(stream, Launch::simple(grid, BLOCK), &parameter) }
    }

    /// Copies a dense tensor, of the weight's shape and of this pruner's input type, and writes zeros where the mask of tiles drops; `out` may be the tensor
    /// itself.
    ///
    /// # Errors
    /// Those of [`Pruner::both_ways`].
    ///
    /// # Safety
    /// As for [`Pruner::both_ways`].
    pub unsafe fn apply_mask(
        &self,
        stream: Stream,
        dense: DenseWeight,
        tiles: DevicePtr,
        out: DevicePtr,
    ) -> Result<()> {
        let (rows, cols) = shape(dense)?;
        expect_multiple("rows of the tensor", dense.rows, 4)?;
        expect_multiple("columns of the tensor", dense.cols, 4)?;
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        expect_pointers(&[("tensor", dense.data, 16), ("mask of tiles", tiles, 2), ("masked tensor", out, 16)])?;
        let parameter = RawMasked { dense: dense.data, out, tiles, rows, cols };
        let threads = dense.rows as u64 * (dense.cols / 4) as u64;
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.apply_mask.launch(stream, Launch::simple((blocks(threads, dense)?, 1), BLOCK), &parameter) }
    }

    /// What weights are made of.
    pub fn input(&self) -> DataType {
        self.input
    }

    /// What compressed values are made of.
    pub fn output(&self) -> DataType {
        self.output
    }
}

fn raw_order(order: MetaOrder, rows: usize, cols: usize) -> Result<u32> {
    let MetaOrder::Sm90(tile) = order else { return Ok(0) };
    expect_multiple("rows of the compressed weight", rows, 64)?;
    expect_multiple("columns of the compressed weight", cols, tile.columns())?;
    Ok(tile.columns() as u32)
}

pub(crate) fn shape(weight: DenseWeight) -> Result<(u32, u32)> {
    let too_large = || Error::TooLarge { rows: weight.rows, cols: weight.cols };
    // Kernels round up to multiples of the square's side.
    let side = |n: usize| u32::try_from(n).ok().filter(|n| *n <= u32::MAX - SIDE as u32).ok_or_else(too_large);
    Ok((side(weight.rows)?, side(weight.cols)?))
}

pub(crate) fn blocks(threads: u64, weight: DenseWeight) -> Result<u32> {
    let blocks = threads.div_ceil(u64::from(BLOCK));
    let most = i32::MAX as u64;
    if blocks <= most { Ok(blocks as u32) } else { Err(Error::TooLarge { rows: weight.rows, cols: weight.cols }) }
}
