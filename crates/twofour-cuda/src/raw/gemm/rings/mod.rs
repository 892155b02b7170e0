//! GEMM of small batches by `mma.sp` on sm_90a, without clusters. Every warp has its own circular buffer of stages, which TMA fills, and CTAs do not synchronize.

use serde::{Deserialize, Serialize};

use super::{Epilogue, GemmOperands, GemmProblem, RawOutput, mma, sm90::shared_bytes_of_each, tile_k};
use crate::{
    DataType, Device, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        gemm::tensor_map::{Swizzle, TensorMap},
        headers,
    },
    source::{File, Source, Support},
};

/// The rows, warps and tokens of a CTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RingsShape {
    /// Rows of W, in units of 16.
    pub height: u32,
    /// Warps, each of which accumulates a part of the columns.
    pub warps: u32,
    /// CTAs resident on an SM.
    pub blocks: u32,
    /// Most rows of X: 8, 16 or 32, and 64 with int4 weights.
    pub tokens: u32,
}

pub(super) const fn shape(height: u32, warps: u32, blocks: u32, tokens: u32) -> RingsShape {
    RingsShape { height, warps, blocks, tokens }
}

/// The shapes of all kernels. One CTA to an SM is for weights that the device computes in one wave, with 32 or 48 rows to a CTA; two are for larger weights.
const SHAPES: [RingsShape; 6] = [
    shape(2, 8, 1, 8),
    shape(3, 8, 1, 8),
    shape(2, 4, 2, 8),
    shape(2, 8, 1, 16),
    shape(3, 4, 1, 32),
    shape(2, 4, 2, 32),
];

/// Data types that kernels support.
const ELEMENTS: [DataType; 3] = [DataType::F16, DataType::BF16, DataType::I8];

/// Bytes of W's rows in a step.
const ROW: u32 = 128;

/// Most stages of a CTA: more are no faster.
const MOST_BUFFERS: u32 = 24;

impl RingsShape {
    /// Returns the shapes for an element type and a number of tokens. The list is empty for too many tokens and for 8-bit floats, because Hopper
    /// emulates their `mma.sp` by other instructions.
    pub fn all(element: DataType, tokens: usize) -> Vec<RingsShape> {
        if ELEMENTS.contains(&element) { RingsShape::with_room(&SHAPES, tokens) } else { Vec::new() }
    }

    /// Returns those shapes of a list whose rows of X are the fewest that hold `tokens`.
    pub(super) fn with_room(shapes: &[RingsShape], tokens: usize) -> Vec<RingsShape> {
        let room = shapes.iter().map(|shape| shape.tokens).find(|most| tokens <= *most as usize);
        shapes.iter().filter(|shape| Some(shape.tokens) == room).copied().collect()
    }

    /// Returns the shape that best balances `features` rows over the SMs, or `None` if there is none that does.
    pub(super) fn best(all: &[RingsShape], features: usize, multiprocessors: u32) -> Option<RingsShape> {
        let rows = |shape: &RingsShape| (16 * shape.height * multiprocessors) as usize;
        // The fewest rows to a CTA that make one wave, or else the most that leave more CTAs than SMs.
        let at_once = all.iter().filter(|shape| shape.blocks == 1 && features <= rows(shape));
        let in_rounds = all.iter().rfind(|shape| shape.blocks > 1 && features > rows(shape));
        at_once.min_by_key(|shape| shape.height).or(in_rounds).copied()
    }

    /// Returns the shape's name.
    pub(super) fn name(self) -> String {
        let RingsShape { height, warps, blocks, tokens } = self;
        format!("{}x{tokens}w{warps}b{blocks}", 16 * height)
    }

    /// Returns the stages of a warp, for a step of `step_bytes` bytes: as many as fit beside the SM's other CTA, if there is one.
    fn stages(self, step_bytes: u32) -> u32 {
        let RingsShape { warps, blocks, .. } = self;
        ((shared_bytes_of_each(blocks) - 1024) / (warps * (stage_bytes(step_bytes) + 8))).min(MOST_BUFFERS / warps)
    }

    /// Returns the bytes of shared memory, with 1024 to align the start.
    fn shared_bytes(self, step_bytes: u32) -> u32 {
        1024 + self.warps * self.stages(step_bytes) * (stage_bytes(step_bytes) + 8)
    }

    /// Returns the sources' preprocessor definitions, for a step of `step_bytes` bytes.
    pub(super) fn definitions(self, step_bytes: u32) -> String {
        let RingsShape { height, warps, blocks, tokens } = self;
        let (stages, shared) = (self.stages(step_bytes), self.shared_bytes(step_bytes));
        format!(
            "#define HEIGHT {height}\n#define WARPS {warps}\n#define BLOCKS {blocks}\n#define TOKENS {tokens}\n\
             #define STAGES {stages}\n#define SHARED_BYTES_ASKED {shared}\n"
        )
    }

    /// Returns the launch configuration.
    pub(super) fn launch(self, features: usize, step_bytes: u32) -> Launch {
        let blocks = features.div_ceil((16 * self.height) as usize) as u32;
        Launch { grid: (blocks, 1), block: self.warps * 32, shared: self.shared_bytes(step_bytes), cluster: 1 }
    }
}

impl RingsShape {
    /// Returns the launch configuration for a problem.
    pub(super) fn launch_of(self, problem: GemmProblem) -> Launch {
        let variant = RingsKernel { element: problem.element, shape: self };
        self.launch(problem.features, variant.step_bytes())
    }
}

/// Returns the bytes of a stage.
fn stage_bytes(step_bytes: u32) -> u32 {
    step_bytes.next_multiple_of(1024)
}

/// A kernel: a data type and a shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct RingsKernel {
    /// Data type of W and X.
    pub element: DataType,
    /// The shape of a CTA.
    pub shape: RingsShape,
}

impl RingsKernel {
    /// Returns every kernel that a problem can need.
    pub fn all() -> Vec<RingsKernel> {
        let of = |element| SHAPES.map(|shape| RingsKernel { element, shape });
        ELEMENTS.into_iter().flat_map(of).collect()
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> String {
        format!("{}-{}", self.element, self.shape.name())
    }

    /// Returns the `k` extent of a step, in elements.
    fn k_step(&self) -> u32 {
        2 * ROW / self.element.bytes() as u32
    }

    /// Returns the bytes of metadata of 16 rows in half a step.
    fn sixteen_codes(&self) -> u32 {
        16 * (self.k_step() / 2) / 8
    }

    /// Returns the bytes of a step.
    fn step_bytes(&self) -> u32 {
        let RingsShape { height, tokens, .. } = self.shape;
        16 * height * ROW + 2 * tokens * ROW + 2 * height * self.sixteen_codes()
    }

    /// Returns the source's preprocessor definitions.
    pub(crate) fn definitions(&self) -> String {
        mma::instruction(self.element, self.element) + &self.shape.definitions(self.step_bytes())
    }

    pub(super) fn source(&self) -> Source {
        let kernel = File::new("gemm/rings/kernel.cu", include_str!("kernel.cu"));
        let shared =
            [headers::COMMON, headers::SPARSE_PRODUCT, headers::EPILOGUE, headers::HOPPER, headers::RINGS, kernel];
        Source::new(format!("rings-sm90-{}", self.name()), Support::Only((9, 0)))
            .define(self.definitions())
            .with(shared)
    }
}

/// A planned GEMM: its kernel and its launch configuration.
#[derive(Debug, Clone)]
pub(super) struct RingsPlan {
    problem: GemmProblem,
    variant: RingsKernel,
    kernel: Kernel,
    launch: Launch,
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
struct RingsParameters {
    weight: TensorMap,
    x: TensorMap,
    meta: TensorMap,
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    steps: u32,
}

impl RingsPlan {
    /// Plans a validated problem with one of its shapes.
    pub(super) fn new(device: &Device, problem: GemmProblem, shape: RingsShape, launch: Launch) -> Result<Self> {
        let variant = RingsKernel { element: problem.element, shape };
        let kernel = device.kernel(&variant.source(), "rings")?;
        kernel.allow_shared()?;
        Ok(Self { problem, variant, kernel, launch })
    }

    pub(super) fn kernel(&self) -> String {
        format!("rings-{}", self.variant.name())
    }

    /// # Safety
    /// That of [`super::Gemm::run`].
    pub(super) unsafe fn run(&self, stream: Stream, operands: GemmOperands, epilogue: Epilogue) -> Result<()> {
        let GemmProblem { element, output, features, tokens, .. } = self.problem;
        let (rows, columns) = self.problem.padded();
        let (bytes, half) = (element.bytes(), self.variant.k_step() / 2);
        let RingsShape { height, tokens: room, .. } = self.variant.shape;
        // Metadata is in half steps, each for all features. Its units are eight bytes, because a TMA box is 256 units wide at most.
        let units = self.variant.sixteen_codes() / 8;
        let meta = (columns / tile_k(element).columns(), rows / 16 * units as usize);
        let wide = Swizzle::Bytes128;
        let parameters = RingsParameters {
            weight: TensorMap::new(operands.weight.values, bytes, (rows, columns / 2), (16 * height, half), wide)?,
            x: TensorMap::new(operands.x, bytes, (tokens, self.problem.x_row_by_tma()), (room, half), wide)?,
            meta: TensorMap::new(operands.weight.meta, 8, meta, (2, height * units), Swizzle::None)?,
            to: RawOutput::of(self.problem, operands.out, epilogue),
            output: output as u32,
            features: features as u32,
            tokens: tokens as u32,
            steps: columns.div_ceil(2 * half as usize) as u32,
        };
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }
}
