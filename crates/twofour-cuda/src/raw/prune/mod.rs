//! Prunes dense weights on the device: masks and compressed weights that are those of the `twofour` crate, bit for bit.
//!
//! | result | call |
//! |---|---|
//! | 2:4 along rows or along columns, by magnitude or by an estimator | [`crate::raw::compress`] |
//! | a transposable or a row mask, with compressed `W` and `Wᵀ`, from one read of `W` | [`Pruner::both_ways`] |
//! | compressed `W` and `Wᵀ` under an existing mask | [`Pruner::both_ways`] with [`MaskChoice::Given`] |
//! | a dense tensor with zeros where a mask prunes | [`Pruner::apply_mask`] |
//!
//! Calls only launch kernels: they neither allocate nor synchronize, and a CUDA graph can capture them. A NaN is
//! therefore not an error of the call: its index is written to device memory ([`Watch::nan`]), and [`first_nan`] makes
//! an error of it.

mod types;
mod watch;

use std::{sync::Arc, thread};

use twofour::select::Transposable;

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    once_map::OnceMap,
    raw::{
        DenseWeight, MetaOrder, Packed,
        grid::{BLOCK, MAX_GRID_ROWS, SIDE, blocks, shape},
        headers,
        weight::RawMeta,
    },
    source::{File, Source},
};

pub(crate) use types::{TYPES, expect_types, types};
pub use watch::{NO_NAN, Watch, first_nan};

/// Where the mask comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum MaskChoice {
    /// A rule for transposable masks.
    Rule(Transposable),
    /// [`BothWays::tiles`] is read. It must be 2:4 along rows, and along columns, too, where the transpose is
    /// compressed: surplus elements are lost.
    Given,
    /// The two largest magnitudes of each group of four along a row, ties to the lower index:
    /// [`twofour::select::magnitude`] along rows. Such a mask has no compressed transpose, so [`BothWays::transposed`]
    /// must be `None`.
    Rows,
}

/// The destinations of [`Pruner::both_ways`]; those that are `None` are not computed.
#[derive(Debug, Clone, Copy, Default)]
pub struct BothWays {
    /// `W`, compressed.
    pub packed: Option<Packed>,
    /// `Wᵀ`, compressed: of shape `[cols, rows]`.
    pub transposed: Option<Packed>,
    /// The mask: a u16 for each 4x4 tile, `[ceil(rows / 4), ceil(cols / 4)]`, with bit `4 * row + col` set where the
    /// tile keeps the element. In a tile at the weight's edge the bits of elements outside the weight are 0. It is
    /// written, but [`MaskChoice::Given`] reads it.
    pub tiles: Option<DevicePtr>,
    /// An f32 scale that values are multiplied by before they are rounded to 8-bit floats, such as the largest finite
    /// 8-bit float divided by the weight's largest magnitude. The mask does not depend on it; 16-bit values have none.
    pub factor: Option<DevicePtr>,
    /// A u32: where it is not 0 when the kernel runs, nothing is written. For steps whose gradients are not finite,
    /// which select no mask.
    pub skip: Option<DevicePtr>,
}

/// Kernels that are compiled together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum Part {
    /// Kernels of one rule, for aligned whole tiles. That for one weight takes its parameters from the launch; that for
    /// several loads them, which costs each CTA time.
    Rule(u32),
    /// That of every rule, shape and address.
    Any,
    /// Those that apply a mask: for rows of whole tiles, and for every shape.
    Masks,
}

/// The names of rules in sources, and in the kernels' code.
const RULES: [(&str, &str); 6] = [
    ("greedy", "GREEDY_ABS"),
    ("greedy-signed", "GREEDY_SIGNED"),
    ("causal1122", "CAUSAL_1122"),
    ("optimal", "OPTIMAL"),
    ("given", "GIVEN"),
    ("rows", "ROWS"),
];

impl Part {
    fn all() -> impl Iterator<Item = Self> {
        (0..RULES.len() as u32).map(Self::Rule).chain([Self::Any, Self::Masks])
    }

    /// The name in a source's name, and what the source defines.
    fn definition(self) -> (&'static str, String) {
        match self {
            Self::Rule(rule) => {
                let (name, constant) = RULES[rule as usize];
                (name, format!("#define PART_OF_A_RULE {constant}\n"))
            }
            Self::Any => ("any", "#define PART_OF_EVERY_SHAPE\n".into()),
            Self::Masks => ("masks", "#define PART_OF_MASKS\n".into()),
        }
    }

    /// The names of its kernels.
    fn kernels(self) -> [&'static str; 2] {
        match self {
            Self::Rule(_) => ["both_ways_together", "both_ways_alone"],
            Self::Any => ["both_ways_any"; 2],
            Self::Masks => ["apply_mask_of_tiles", "apply_mask_of_tiles_any"],
        }
    }
}

fn source(input: DataType, output: DataType, part: Part) -> Source {
    let name = if input == output { format!("prune-{input}") } else { format!("prune-{input}-{output}") };
    let (definitions, support) = types(input, output);
    let (part, definition) = part.definition();
    let rules = File::new("prune/rules.cuh", include_str!("rules.cuh"));
    let kernel = File::new("prune/kernel.cu", include_str!("kernel.cu"));
    Source::new(format!("{name}-{part}"), support).define(definitions + &definition).with([
        headers::COMMON,
        headers::CODES,
        headers::PAIRS,
        rules,
        kernel,
    ])
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    TYPES.into_iter().flat_map(|(input, output)| Part::all().map(move |part| source(input, output, part))).collect()
}

/// The kernels that prune and compress weights of one data type to values of another, on one device. Those of a rule
/// are compiled and loaded by the first call that needs them.
#[derive(Debug, Clone)]
pub struct Pruner {
    device: Device,
    input: DataType,
    output: DataType,
    parts: Arc<OnceMap<Part, [Kernel; 2]>>,
}

/// Weights of a launch.
const WEIGHTS: usize = 24;

/// What the kernels read of one weight, in their memory layout.
#[derive(Clone, Copy)]
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
    along: RawPadded,
    across: RawPadded,
    rule: u32,
    skip: DevicePtr,
}

/// The kernels' parameters, in their memory layout.
#[repr(C)]
struct RawWeights {
    of: [RawBothWays; WEIGHTS],
}

// What a kernel may have as parameters.
const _: () = assert!(size_of::<RawWeights>() <= 4096);

/// Lines and groups of a compressed form, padding included, and the number of groups with metadata.
#[derive(Clone, Copy)]
#[repr(C)]
struct RawPadded {
    lines: u32,
    groups: u32,
    coded: u32,
}

impl RawPadded {
    fn new(order: MetaOrder, rows: usize, cols: usize) -> Self {
        let (lines, length) = order.padded(rows, cols);
        let groups = length.div_ceil(4) as u32;
        Self { lines: lines as u32, groups, coded: groups }
    }
}

#[repr(C)]
struct RawMasked {
    dense: DevicePtr,
    out: DevicePtr,
    tiles: DevicePtr,
    rows: u32,
    cols: u32,
}

impl Pruner {
    /// Returns the kernels that prune weights of `input` to values of `output`: f16 or bf16 to themselves, f32 to one
    /// of them, all three to 8-bit floats (from compute capability 8.9 on). Values are rounded to nearest, ties to
    /// even, after the mask is selected; 8-bit floats saturate.
    ///
    /// # Errors
    /// [`Error::Types`] for other types, [`Error::Unsupported`].
    pub fn new(device: &Device, input: DataType, output: DataType) -> Result<Self> {
        expect_types(device, input, output, &source(input, output, Part::Any))?;
        Ok(Self { device: device.clone(), input, output, parts: Arc::default() })
    }

    /// Loads the kernels that weights of a shape need for mask choices, at the same time: what the first calls would do
    /// otherwise, but not while a stream is captured.
    ///
    /// # Errors
    /// Those of compiling and loading.
    pub fn load(&self, choices: &[MaskChoice], (rows, cols): (usize, usize), order: MetaOrder) -> Result<()> {
        let parts = match is_whole(order, rows, cols) && cols.is_multiple_of(4) && is_whole(order, cols, rows) {
            true => choices.iter().map(|choice| Part::Rule(rule_of(*choice))).collect(),
            false => vec![Part::Any],
        };
        thread::scope(|scope| {
            let load = |part| scope.spawn(move || self.kernels(part, None));
            let loading: Vec<_> = parts.into_iter().map(load).collect();
            let loaded = |thread: thread::ScopedJoinHandle<'_, Result<[Kernel; 2]>>| {
                thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)).map(|_| ())
            };
            loading.into_iter().try_for_each(loaded)
        })
    }

    /// Loads the kernels of [`Pruner::apply_mask`], as [`Pruner::load`] does those of mask choices.
    ///
    /// # Errors
    /// Those of compiling and loading.
    pub fn load_masks(&self) -> Result<()> {
        self.kernels(Part::Masks, None).map(|_| ())
    }

    /// Returns the kernels of a part, which may not be loaded while the stream, where one is given, is captured.
    fn kernels(&self, part: Part, stream: Option<Stream>) -> Result<[Kernel; 2]> {
        self.parts.get_or_try_insert(part, || {
            if let Some(stream) = stream {
                self.device.expect_not_capturing(stream, "loading kernels")?;
            }
            let source = source(self.input, self.output, part);
            let [first, second] = part.kernels();
            Ok([self.device.kernel(&source, first)?, self.device.kernel(&source, second)?])
        })
    }

    /// Selects a transposable mask ([`twofour::select::transposable`]) or one along rows, or reads a given one, and
    /// compresses `W` and `Wᵀ` from one read of `W`. Every shape is supported, and every address that is aligned to an
    /// element. In the GEMM's order both compressed forms are padded ([`MetaOrder::Sm90`]), and the padding is written.
    /// Shapes that are not multiples of 4, forms with padding, and weights that are not aligned to four elements run on
    /// kernels that load element by element.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null, or values and metadata that are not aligned to 16 bytes (the
    /// weight: to its elements; `nan`: 8; scale and flag: 4; tiles: 2), [`Error::Factor`] for a scale of 16-bit values,
    /// [`Error::NoTranspose`] for [`MaskChoice::Rows`] with a transpose, [`Error::TooLarge`], [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has passed this call, and nothing else
    /// writes there; the stream is of this device.
    pub unsafe fn both_ways(
        &self,
        stream: Stream,
        weight: DenseWeight,
        choice: MaskChoice,
        to: BothWays,
        order: MetaOrder,
        watch: Watch,
    ) -> Result<()> {
        // SAFETY: this function requires the same.
        unsafe { self.both_ways_together(stream, &[(weight, to, watch)], choice, order) }
    }

    /// As [`Pruner::both_ways`], for several weights at once: where each alone would leave the device idle at its end.
    ///
    /// # Errors
    /// Those of [`Pruner::both_ways`].
    ///
    /// # Safety
    /// That of [`Pruner::both_ways`], for each weight.
    pub unsafe fn both_ways_together(
        &self,
        stream: Stream,
        weights: &[(DenseWeight, BothWays, Watch)],
        choice: MaskChoice,
        order: MetaOrder,
    ) -> Result<()> {
        let rule = rule_of(choice);
        let (mut whole, mut others) = (vec![], vec![]);
        for (weight, to, watch) in weights {
            let raw = self.raw(*weight, choice, *to, order, *watch)?;
            if weight.rows == 0 || weight.cols == 0 {
                continue;
            }
            let is_whole = weight.is_aligned(self.input, 4)
                && weight.rows.is_multiple_of(4)
                && (to.packed.is_none() || is_whole(order, weight.rows, weight.cols))
                && (to.transposed.is_none() || is_whole(order, weight.cols, weight.rows));
            if is_whole { whole.push(raw) } else { others.push(raw) }
        }
        if let ([raw], true) = (whole.as_slice(), others.is_empty()) {
            let (rows, cols) = (raw.rows.div_ceil(SIDE as u32), raw.cols.div_ceil(SIDE as u32));
            if rows as usize <= MAX_GRID_ROWS {
                let launch = Launch::simple((cols, rows), BLOCK);
                // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed
                // this call, and the stream is of the device, as this function requires.
                return unsafe { self.kernels(Part::Rule(rule), Some(stream))?[1].launch(stream, launch, raw) };
            }
        }
        for (part, all) in [(Part::Rule(rule), whole), (Part::Any, others)] {
            if all.is_empty() {
                continue;
            }
            let [kernel, _] = self.kernels(part, Some(stream))?;
            for some in all.chunks(WEIGHTS) {
                let squares = |raw: &RawBothWays| raw.rows.div_ceil(SIDE as u32) * raw.cols.div_ceil(SIDE as u32);
                let most = some.iter().map(squares).max().unwrap_or(0);
                let mut weights = RawWeights { of: [some[0]; WEIGHTS] };
                weights.of[..some.len()].copy_from_slice(some);
                let launch = Launch::simple((most, some.len() as u32), BLOCK);
                // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed
                // this call, and the stream is of the device, as this function requires.
                unsafe { kernel.launch(stream, launch, &weights) }?;
            }
        }
        Ok(())
    }

    /// Checks a weight and its destinations, and returns what the kernels read.
    fn raw(
        &self,
        weight: DenseWeight,
        choice: MaskChoice,
        to: BothWays,
        order: MetaOrder,
        watch: Watch,
    ) -> Result<RawBothWays> {
        let (rows, cols) = shape(weight)?;
        if choice == MaskChoice::Rows && to.transposed.is_some() {
            return Err(Error::NoTranspose);
        }
        if to.factor.is_some() && self.output.bytes() > 1 {
            return Err(Error::Factor { output: self.output });
        }
        if rows > 0 && cols > 0 {
            expect_pointers(&[("weight", weight.data, self.input.bytes() as u64), ("NaN's place", watch.nan, 8)])?;
            if let Some(factor) = to.factor {
                expect_pointers(&[("factor", factor, 4)])?;
            }
            if let Some(skip) = to.skip {
                expect_pointers(&[("flag of skipped steps", skip, 4)])?;
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
        }
        let raw = |packed: Option<Packed>| match packed {
            Some(packed) => (packed.values, RawMeta::new(packed.meta, order)),
            None => (0, RawMeta::NONE),
        };
        let ((values, meta), (values_transposed, meta_transposed)) = (raw(to.packed), raw(to.transposed));
        let (tiles_before, flips) = watch.flips.unwrap_or((0, 0));
        let squares = weight.rows.div_ceil(SIDE).saturating_mul(weight.cols.div_ceil(SIDE));
        if squares > i32::MAX as usize {
            return Err(Error::TooLarge { rows: weight.rows, cols: weight.cols });
        }
        Ok(RawBothWays {
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
            along: RawPadded::new(order, weight.rows, weight.cols),
            across: RawPadded::new(order, weight.cols, weight.rows),
            rule: rule_of(choice),
            skip: to.skip.unwrap_or(0),
        })
    }

    /// Copies a dense tensor, of the weight's shape and of this pruner's input type, with zeros where the mask prunes;
    /// `out` may be the tensor itself. Every shape is supported, and every address that is aligned to an element.
    ///
    /// # Errors
    /// Those of [`Pruner::both_ways`].
    ///
    /// # Safety
    /// That of [`Pruner::both_ways`].
    pub unsafe fn apply_mask(
        &self,
        stream: Stream,
        dense: DenseWeight,
        tiles: DevicePtr,
        out: DevicePtr,
    ) -> Result<()> {
        let (rows, cols) = shape(dense)?;
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let width = self.input.bytes() as u64;
        expect_pointers(&[("tensor", dense.data, width), ("mask of tiles", tiles, 2), ("masked tensor", out, width)])?;
        let parameter = RawMasked { dense: dense.data, out, tiles, rows, cols };
        let whole = dense.is_aligned(self.input, 4) && out.is_multiple_of(4 * width);
        let threads = dense.rows as u64 * dense.cols.div_ceil(4) as u64;
        let kernel = &self.kernels(Part::Masks, Some(stream))?[usize::from(!whole)];
        // SAFETY: the structure has the kernel's layout, and pointers and stream are valid as this function requires.
        unsafe { kernel.launch(stream, Launch::simple((blocks(threads, dense)?, 1), BLOCK), &parameter) }
    }

    /// Returns the data type of the weights.
    pub fn input(&self) -> DataType {
        self.input
    }

    /// Returns the data type of the compressed values.
    pub fn output(&self) -> DataType {
        self.output
    }
}

/// Whether a compressed form has no padding.
fn is_whole(order: MetaOrder, rows: usize, cols: usize) -> bool {
    order.padded(rows, cols) == (rows, cols)
}

/// The number of a choice, as the kernels have it.
fn rule_of(choice: MaskChoice) -> u32 {
    match choice {
        MaskChoice::Rule(Transposable::GreedyAbs) => 0,
        MaskChoice::Rule(Transposable::GreedySigned) => 1,
        MaskChoice::Rule(Transposable::Causal1122) => 2,
        MaskChoice::Rule(Transposable::Optimal) => 3,
        MaskChoice::Given => 4,
        MaskChoice::Rows => 5,
    }
}
