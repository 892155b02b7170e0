//! Compresses dense tensors on the device along one axis, by a rule for groups of four ([`twofour::estimate`]) or by a
//! mask. The bytes are those of the `twofour` crate, bit for bit.
//!
//! - W for `X Wᵀ`, by magnitude: along rows, by [`Estimator::Magnitude`].
//! - W for training with S-STE: along rows, by [`Estimator::SoftThreshold`] with
//!   [`twofour::estimate::soft_threshold_scale`] as scale.
//! - The output gradient of a layer, for the weight gradient: along tokens, which are columns of `[tokens, features]`,
//!   by [`Estimator::Mvue`].
//! - A tensor under an existing mask: along rows or along columns, by [`CompressRule::Given`] with the tiles of
//!   [`crate::raw::prune::Pruner::both_ways`].
//!
//! Calls only launch kernels: they neither allocate nor synchronize, and a CUDA graph can capture them.

use twofour::{Axis, estimate::Estimator};

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    raw::{
        DenseWeight, MetaOrder, Packed,
        grid::{BLOCK, MAX_GRID_ROWS, blocks, shape},
        headers,
        prune::{TYPES, expect_types, types},
        weight::RawMeta,
    },
    source::{File, Source},
};

/// Which elements of a group are kept, and their values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum CompressRule {
    /// The choice and the values of an estimator.
    Estimate(Estimator),
    /// The elements kept by a mask of 4x4 tiles, in the format of [`crate::raw::prune::BothWays::tiles`].
    Given(DevicePtr),
}

/// The kernels that compress tensors of one element type to values of another, on one device.
#[derive(Debug, Clone)]
pub struct Compressor {
    input: DataType,
    output: DataType,
    /// The kernels of each rule, along rows and along columns.
    kernels: [[Kernel; 2]; 5],
    advance: Kernel,
}

/// The kernels' parameters, in their memory layout.
#[repr(C)]
struct CompressParameters {
    dense: DevicePtr,
    values: DevicePtr,
    meta: RawMeta,
    tiles: DevicePtr,
    factor: DevicePtr,
    wrong: DevicePtr,
    seed: u64,
    seed_at: DevicePtr,
    rows: u32,
    cols: u32,
    groups: u32,
    lines: u32,
    aligned: u32,
}

/// The destination of a compressed tensor.
#[derive(Debug, Clone, Copy)]
pub struct CompressTarget {
    /// Values and metadata: of shape `[rows, cols]` along rows, `[cols, rows]` along columns; padded where
    /// [`CompressTarget::order`] is the GEMM's ([`MetaOrder`]).
    pub packed: Packed,
    /// The metadata's order.
    pub order: MetaOrder,
    /// An f32 scale that values are multiplied by before they are rounded.
    pub factor: Option<DevicePtr>,
    /// A u64 that the kernel adds to an estimator's seed when it runs. A graph that captures the call then draws other
    /// random numbers at each replay ([`Compressor::advance`]).
    pub seed: Option<DevicePtr>,
    /// A u64 that receives the index, `row * cols + col`, of the first number that the rule does not support, if it is
    /// less than the u64's value: NaN, or for rules other than [`Estimator::Magnitude`] infinity. It must be
    /// [`crate::raw::prune::NO_NAN`] before. [`CompressRule::Given`] does not check.
    pub wrong: DevicePtr,
}

fn source(input: DataType, output: DataType) -> Source {
    let (definitions, support) = types(input, output);
    let kernel = File::new("compress/kernel.cu", include_str!("kernel.cu"));
    let shared = [headers::COMMON, headers::CODES, headers::PAIRS, headers::META_BLOCK, headers::ESTIMATE];
    Source::new(format!("compress-{input}-{output}"), support).define(definitions).with(shared).with([kernel])
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    TYPES.into_iter().map(|(input, output)| source(input, output)).collect()
}

impl Compressor {
    /// Loads the kernels that compress tensors of `input` to values of `output`: f16 and bf16 to themselves, f32 to
    /// either, all three to 8-bit floats (from compute capability 8.9 on). Values are rounded to nearest, ties to even;
    /// 8-bit floats saturate.
    ///
    /// # Errors
    /// [`Error::Types`] for other types, [`Error::Unsupported`]; those of compiling and loading.
    pub fn new(device: &Device, input: DataType, output: DataType) -> Result<Self> {
        let source = source(input, output);
        expect_types(device, input, output, &source)?;
        let rule = |name: &str| -> Result<[Kernel; 2]> {
            Ok([device.kernel(&source, &format!("rows_{name}"))?, device.kernel(&source, &format!("columns_{name}"))?])
        };
        let kernels =
            [rule("magnitude")?, rule("soft_threshold")?, rule("mvue_approximate")?, rule("mvue")?, rule("given")?];
        Ok(Self { input, output, kernels, advance: device.kernel(&source, "advance_seed")? })
    }

    /// Compresses along an axis: [`Axis::Row`] produces the compressed tensor, [`Axis::Column`] its compressed
    /// transpose. Every shape is supported, and every address that is aligned to an element; a last, incomplete group
    /// is completed with zeros. In the GEMM's order the compressed tensor is padded ([`MetaOrder::Sm90`]), and the
    /// padding is written. Random numbers are those of [`twofour::estimate::estimate`] for the tensor whose groups lie
    /// along rows.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null, or values and metadata that are not aligned to 16 bytes (the
    /// tensor: to its elements; the index of an unsupported number: 8; scale: 4; tiles: 2), [`Error::TooLarge`],
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has passed this call, and nothing else
    /// writes there; the stream is of this device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        dense: DenseWeight,
        axis: Axis,
        rule: CompressRule,
        to: CompressTarget,
    ) -> Result<()> {
        let (rows, cols) = shape(dense)?;
        let (lines, length) = match axis {
            Axis::Row => (dense.rows, dense.cols),
            Axis::Column => (dense.cols, dense.rows),
        };
        let (padded_lines, padded_length) = to.order.padded(lines, length);
        let meta = RawMeta::new(to.packed.meta, to.order);
        let (which, seed, tiles) = match rule {
            CompressRule::Estimate(Estimator::Magnitude) => (0, 0, 0),
            CompressRule::Estimate(Estimator::SoftThreshold) => (1, 0, 0),
            CompressRule::Estimate(Estimator::MvueApproximate { seed }) => (2, seed, 0),
            CompressRule::Estimate(Estimator::Mvue { seed }) => (3, seed, 0),
            CompressRule::Given(tiles) => (4, 0, tiles),
        };
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        expect_pointers(&[
            ("tensor", dense.data, self.input.bytes() as u64),
            ("values", to.packed.values, 16),
            ("metadata", to.packed.meta, 16),
            ("place of what is wrong", to.wrong, 8),
        ])?;
        if let CompressRule::Given(tiles) = rule {
            expect_pointers(&[("mask of tiles", tiles, 2)])?;
        }
        if let Some(factor) = to.factor {
            expect_pointers(&[("factor", factor, 4)])?;
        }
        if let Some(seed) = to.seed {
            expect_pointers(&[("seed", seed, 8)])?;
        }
        let parameters = CompressParameters {
            dense: dense.data,
            values: to.packed.values,
            meta,
            tiles,
            factor: to.factor.unwrap_or(0),
            wrong: to.wrong,
            seed,
            seed_at: to.seed.unwrap_or(0),
            rows,
            cols,
            groups: padded_length.div_ceil(4) as u32,
            lines: padded_lines as u32,
            aligned: u32::from(dense.is_aligned(self.input, if axis == Axis::Row { 4 } else { 2 })),
        };
        let words = padded_length.div_ceil(32);
        let grid = match axis {
            Axis::Row => (blocks(padded_lines as u64 * words as u64, dense)?, 1),
            // A CTA writes four words of metadata of 64 columns.
            Axis::Column if words.div_ceil(4) <= MAX_GRID_ROWS => {
                (padded_lines.div_ceil(64) as u32, words.div_ceil(4) as u32)
            }
            Axis::Column => return Err(Error::TooLarge { rows: dense.rows, cols: dense.cols }),
        };
        let kernel = &self.kernels[which][usize::from(axis == Axis::Column)];
        // SAFETY: the structure has the kernel's layout, and pointers and stream are valid as this function requires.
        unsafe { kernel.launch(stream, Launch::simple(grid, BLOCK), &parameters) }
    }

    /// Adds one to a seed on the device, in stream order: the next call then draws other random numbers.
    ///
    /// # Errors
    /// [`Error::Pointer`] for a pointer that is null or not aligned to 8 bytes, [`Error::Driver`].
    ///
    /// # Safety
    /// The pointer is valid for a u64 until the stream has passed this call, and nothing else writes there; the stream
    /// is of this device.
    pub unsafe fn advance(&self, stream: Stream, seed: DevicePtr) -> Result<()> {
        expect_pointers(&[("seed", seed, 8)])?;
        // SAFETY: the kernel's parameter is the pointer, which is valid until the stream has passed this call, as this
        // function requires.
        unsafe { self.advance.launch(stream, Launch::simple((1, 1), 1), &seed) }
    }

    /// Returns the data type of the tensors.
    pub fn input(&self) -> DataType {
        self.input
    }

    /// Returns the data type of the compressed values.
    pub fn output(&self) -> DataType {
        self.output
    }
}
