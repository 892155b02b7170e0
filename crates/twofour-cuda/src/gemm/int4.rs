//! Products of few tokens with a four-bit 2:4 weight ([`twofour::int4`]), on every architecture from sm_80 on.
//!
//! W is in the order of [`twofour::layout::lanes`]; X has 16 bits, and so have the multiplications, after integers have become elements exactly. Sums are
//! in f32, and scales multiply sums, not weights.

use twofour::int4::Granularity;

use super::{Epilogue, MOST, Order, RawOutput, expect_dimension, expect_epilogue};
use crate::{
    Device, DevicePtr, Element, Error, Result, Stream,
    device::{Kernel, Launch},
    prune::{expect_multiple, expect_pointers},
    source::Source,
};

/// Most tokens of a product.
pub const MOST_TOKENS: usize = 64;

/// Tokens that there are kernels for.
const TOKENS: [u32; 4] = [8, 16, 32, 64];

/// Warps of a block.
const WARPS: u32 = 8;

/// Most units that a warp holds and has asked for.
const MOST_STAGES: u32 = 8;

/// Bytes of a unit of four-bit weights with a scale for every lane, and of where a block's warps exchange sums.
const UNIT_BYTES: u32 = 32 * (16 + 8 + 4);
const EXCHANGE_BYTES: u32 = WARPS * 32 * 16;

/// Rows and columns that a warp takes at a time.
const UNIT: (usize, usize) = (16, 128);

/// Shared memory that a block may have on all architectures: 99 KiB, as sm_86 and sm_89 give it.
const SHARED_BYTES: u32 = 99 * 1024;

/// What is to be multiplied.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Problem {
    /// What X is made of: f16 or bf16.
    pub element: Element,
    /// What the result and the bias are made of: X's type or f32.
    pub output: Element,
    /// What shares a scale of W.
    pub granularity: Granularity,
    /// Rows of W, a multiple of 16.
    pub features: usize,
    /// Rows of X, 1 to [`MOST_TOKENS`].
    pub tokens: usize,
    /// Columns of both, a multiple of 128.
    pub reduction: usize,
    /// Which of the result's axes is contiguous.
    pub order: Order,
}

impl Problem {
    fn expect_known(self) -> Result<()> {
        let Problem { element, output, features, tokens, reduction, .. } = self;
        if !matches!(element, Element::F16 | Element::BF16) || !matches!(output, o if o == element || o == Element::F32)
        {
            return Err(Error::Product { element, output, epilogue: true });
        }
        for (what, size, most) in
            [("features", features, MOST), ("tokens", tokens, MOST_TOKENS), ("reduction", reduction, MOST)]
        {
            expect_dimension(what, size, most)?;
        }
        expect_multiple("features of the product", features, UNIT.0)?;
        expect_multiple("reduction of the product", reduction, UNIT.1)
    }
}

/// How the warps of a block share the work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Shape {
    /// Rows of X that there is room for.
    pub tokens: u32,
    /// Warps that share the same rows of W: 1, 2, 4 or 8 of the block's eight, and no fewer than the units.
    pub k_warps: u32,
    /// Units of 16 rows that a warp takes at a time: 1 or, up to 16 tokens, 2.
    pub height: u32,
}

impl Shape {
    /// Those for so many tokens: none where there are too many.
    pub fn all(tokens: usize) -> Vec<Shape> {
        let Some(tokens) = TOKENS.into_iter().find(|most| tokens <= *most as usize) else { return Vec::new() };
        let heights: &[u32] = if tokens <= 16 { &[2, 1] } else { &[1] };
        let of = |height: &u32| [1, 2, 4, 8].map(|k_warps| Shape { tokens, k_warps, height: *height });
        let is = |shape: &Shape| shape.k_warps >= shape.height && shape.stages() >= 2;
        heights.iter().flat_map(of).filter(is).collect()
    }

    /// The one that spreads the work best, as measured on an H200: the most rows to a block, and so the least of X to be read, that leave blocks for
    /// seven of ten multiprocessors.
    pub fn best(problem: Problem, multiprocessors: u32) -> Option<Shape> {
        let all = Shape::all(problem.tokens);
        let enough = |shape: &&Shape| shape.blocks(problem.features) * 10 >= 7 * multiprocessors;
        all.iter().find(enough).or(all.last()).copied()
    }

    /// Groups of rows, each of which a block takes at a time.
    fn blocks(self, features: usize) -> u32 {
        (features / UNIT.0).div_ceil((WARPS / self.k_warps * self.height) as usize) as u32
    }

    /// Bytes of all warps' units of a stage.
    fn stage_bytes(self) -> u32 {
        WARPS * self.height * UNIT_BYTES
    }

    /// Bytes of a chunk of X with so many tokens.
    fn chunk_bytes(self, tokens: u32) -> u32 {
        tokens * (self.k_warps * UNIT.1 as u32 * 2 + 16)
    }

    /// Stages that there is room for where X passes through.
    fn stages(self) -> u32 {
        let stage = self.chunk_bytes(self.tokens) + self.stage_bytes();
        ((SHARED_BYTES - EXCHANGE_BYTES) / stage).min(MOST_STAGES)
    }

    /// Whether all of X stays in shared memory, and how much of it that takes.
    fn shared(self, problem: Problem) -> (bool, u32) {
        let chunk = u64::from(self.chunk_bytes(problem.tokens as u32));
        let chunks = problem.reduction.div_ceil(self.k_warps as usize * UNIT.1) as u64;
        let stages = u64::from(self.stages());
        let other = u64::from(EXCHANGE_BYTES) + stages * u64::from(self.stage_bytes());
        let resident = other + chunks * chunk <= u64::from(SHARED_BYTES);
        (resident, (other + if resident { chunks } else { stages } * chunk) as u32)
    }
}

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// What X is made of.
    pub element: Element,
    /// What shares a scale.
    pub granularity: Granularity,
    /// How the work is shared.
    pub shape: Shape,
}

impl Variant {
    /// Every kernel that a problem may ask for.
    pub fn all() -> Vec<Variant> {
        let shapes: Vec<Shape> = TOKENS.iter().flat_map(|tokens| Shape::all(*tokens as usize)).collect();
        let of = |element, granularity| shapes.iter().map(move |shape| Variant { element, granularity, shape: *shape });
        [Element::F16, Element::BF16]
            .into_iter()
            .flat_map(|element| [Granularity::Row, Granularity::Group].map(|granularity| (element, granularity)))
            .flat_map(|(element, granularity)| of(element, granularity))
            .collect()
    }

    /// Its name.
    pub fn name(&self) -> String {
        let scales = match self.granularity {
            Granularity::Row => "row",
            Granularity::Group => "g128",
        };
        let Shape { tokens, k_warps, height } = self.shape;
        format!("{}-{scales}-{tokens}k{k_warps}h{height}", self.element)
    }

    /// What the source is defined for.
    pub(crate) fn definitions(&self) -> String {
        format!(
            "#define ELEMENT {}\n#define TOKENS {}\n#define K_WARPS {}\n#define HEIGHT {}\n#define STAGES {}\n#define BY_ROW {}\n",
            self.element.definition(),
            self.shape.tokens,
            self.shape.k_warps,
            self.shape.height,
            self.shape.stages(),
            self.granularity == Granularity::Row,
        )
    }
}

/// Where a weight is, in the order of [`twofour::layout::lanes`].
#[derive(Debug, Clone, Copy)]
pub struct Weight {
    /// The values.
    pub values: DevicePtr,
    /// The metadata.
    pub meta: DevicePtr,
    /// The scales.
    pub scales: DevicePtr,
}

/// A product that has been planned: its kernel is loaded and its launch is settled.
#[derive(Debug, Clone)]
pub struct Decode {
    problem: Problem,
    variant: Variant,
    kernel: Kernel,
    launch: Launch,
    resident: bool,
}

/// As the kernel has it.
#[repr(C)]
struct Parameters {
    values: DevicePtr,
    meta: DevicePtr,
    scales: DevicePtr,
    x: DevicePtr,
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    reduction: u32,
    resident: u32,
}

impl Decode {
    /// Plans with the shape that spreads the work best.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for the device, [`Error::Product`] for a combination of types that no kernel has, [`Error::Multiple`] and
    /// [`Error::Dimension`] for a shape; those of compiling and loading.
    pub fn new(device: &Device, problem: Problem) -> Result<Self> {
        problem.expect_known()?;
        let shape = Shape::best(problem, device.multiprocessors()).ok_or(Error::Dimension {
            what: "tokens",
            size: problem.tokens,
            most: MOST_TOKENS,
        })?;
        Self::with(device, problem, shape)
    }

    /// Plans with a shape of the caller's choice, one of [`Shape::all`].
    ///
    /// # Errors
    /// Those of [`Decode::new`]; [`Error::Int4Shape`] for another shape.
    pub fn with(device: &Device, problem: Problem, shape: Shape) -> Result<Self> {
        let (major, minor) = device.architecture().capability();
        if major < 8 {
            return Err(Error::Unsupported {
                operation: "a product by mma.sp",
                major,
                minor,
                needs: "8.0 (Ampere) or later",
            });
        }
        problem.expect_known()?;
        if !Shape::all(problem.tokens).contains(&shape) {
            return Err(Error::Int4Shape { shape, tokens: problem.tokens });
        }
        let variant = Variant { element: problem.element, granularity: problem.granularity, shape };
        let kernel = device.kernel(Source::Int4(variant), "decode")?;
        let (resident, shared) = shape.shared(problem);
        kernel.allow_shared(shared)?;
        let at_once = kernel.blocks_per_multiprocessor(WARPS * 32, shared)? * device.multiprocessors();
        let grid = (shape.blocks(problem.features).min(at_once), 1);
        let launch = Launch { grid, block: WARPS * 32, shared, cluster: 1 };
        Ok(Self { problem, variant, kernel, launch, resident })
    }

    /// Multiplies.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to 16 bytes (scales of features and tokens and bias: to their elements),
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what the problem reads and writes until the stream has come past this call, and nothing else writes there; the
    /// metadata's codes are six of the sixteen, as [`twofour::layout::lanes::encode`] makes them; the stream is of the plan's device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        weight: Weight,
        x: DevicePtr,
        out: DevicePtr,
        epilogue: Epilogue,
    ) -> Result<()> {
        expect_pointers(&[
            ("values", weight.values, 16),
            ("metadata", weight.meta, 16),
            ("scales", weight.scales, 16),
            ("X", x, 16),
            ("result", out, 16),
        ])?;
        let Problem { output, features, tokens, reduction, order, .. } = self.problem;
        expect_epilogue(epilogue, output)?;
        let parameters = Parameters {
            values: weight.values,
            meta: weight.meta,
            scales: weight.scales,
            x,
            to: RawOutput::new((features, tokens), order, out, epilogue),
            output: output as u32,
            features: features as u32,
            tokens: tokens as u32,
            reduction: reduction as u32,
            resident: u32::from(self.resident),
        };
        // SAFETY: the caller's; the structure is the kernel's.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }

    /// The kernel's name, which tells its shape.
    pub fn kernel(&self) -> String {
        self.variant.name()
    }
}
