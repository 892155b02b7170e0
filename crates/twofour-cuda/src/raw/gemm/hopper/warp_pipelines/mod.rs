//! GEMM of small batches by `mma.sp` on Hopper, without clusters. Every warp has its own circular buffer of stages,
//! which TMA fills, and CTAs do not synchronize. Kernels keep the name `rings`, by which bench/results
//! has them.

mod int4;

use serde::{Deserialize, Serialize};

use super::shared::shared_bytes_of_each;
use crate::{
    Architecture, DataType, Result,
    device::Launch,
    problem::{GemmProblem, XOrder},
    raw::{
        gemm::{
            Epilogue, GemmOperands, RawOutput,
            cost::{self, CtaWork, FamilyTimes, kernel},
            epilogue,
            family::KernelFamily,
            mma, supported,
            tensor_map::{Swizzle, TensorMap},
            tile_k,
        },
        headers,
    },
    source::{File, Source, Support},
};

/// What the kernels require of an architecture.
const SUPPORT: Support = supported::WARP_PIPELINES;

/// The parts that the kernels of both formats of weights share.
const PIPELINES: File = File::new("gemm/hopper/warp_pipelines/warp_pipelines.cuh", include_str!("warp_pipelines.cuh"));

/// The rows, warps and tokens of a CTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct WarpPipelinesShape {
    /// Rows of W, in units of 16.
    pub height: u32,
    /// Warps, each of which accumulates a part of the columns.
    pub warps: u32,
    /// CTAs resident on an SM.
    pub blocks: u32,
    /// Most rows of X: 8, 16 or 32, and 64 with int4 weights.
    pub tokens: u32,
}

const fn shape(height: u32, warps: u32, blocks: u32, tokens: u32) -> WarpPipelinesShape {
    WarpPipelinesShape { height, warps, blocks, tokens }
}

/// The shapes of all kernels. One CTA to an SM is for weights that the device computes in one wave, with 32 or 48 rows
/// to a CTA; two are for larger weights.
const SHAPES: [WarpPipelinesShape; 6] = [
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
const MAX_BUFFERS: u32 = 24;

impl WarpPipelinesShape {
    /// Returns those shapes of a list whose rows of X are the fewest that hold `tokens`.
    fn with_room(shapes: &[WarpPipelinesShape], tokens: usize) -> Vec<WarpPipelinesShape> {
        let room = shapes.iter().map(|shape| shape.tokens).find(|most| tokens <= *most as usize);
        shapes.iter().filter(|shape| Some(shape.tokens) == room).copied().collect()
    }

    /// Returns the shape that best balances `features` rows over the SMs, or `None` if there is none that does.
    fn best(all: &[WarpPipelinesShape], features: usize, sms: u32) -> Option<WarpPipelinesShape> {
        let rows = |shape: &WarpPipelinesShape| (16 * shape.height * sms) as usize;
        // The fewest rows to a CTA that make one wave, or else the most that leave more CTAs than SMs.
        let at_once = all.iter().filter(|shape| shape.blocks == 1 && features <= rows(shape));
        let in_rounds = all.iter().rfind(|shape| shape.blocks > 1 && features > rows(shape));
        at_once.min_by_key(|shape| shape.height).or(in_rounds).copied()
    }

    /// Returns the shape's name.
    fn name(self) -> String {
        let WarpPipelinesShape { height, warps, blocks, tokens } = self;
        format!("{}x{tokens}w{warps}b{blocks}", 16 * height)
    }

    /// Returns the stages of a warp, for a step of `step_bytes` bytes: as many as fit beside the SM's other CTA, if
    /// there is one.
    fn stages(self, step_bytes: u32) -> u32 {
        let WarpPipelinesShape { warps, blocks, .. } = self;
        ((shared_bytes_of_each(blocks) - 1024) / (warps * (stage_bytes(step_bytes) + 8))).min(MAX_BUFFERS / warps)
    }

    /// Returns the bytes of shared memory, with 1024 to align the start.
    fn shared_bytes(self, step_bytes: u32) -> u32 {
        1024 + self.warps * self.stages(step_bytes) * (stage_bytes(step_bytes) + 8)
    }

    /// Returns the sources' preprocessor definitions, for a step of `step_bytes` bytes.
    fn definitions(self, step_bytes: u32) -> String {
        let WarpPipelinesShape { height, warps, blocks, tokens } = self;
        let (stages, shared) = (self.stages(step_bytes), self.shared_bytes(step_bytes));
        format!(
            "#define HEIGHT {height}\n#define WARPS {warps}\n#define BLOCKS {blocks}\n#define TOKENS {tokens}\n\
             #define STAGES {stages}\n#define SHARED_BYTES_ASKED {shared}\n"
        )
    }

    /// Returns the launch configuration.
    fn launch_of(self, features: usize, step_bytes: u32) -> Launch {
        let blocks = features.div_ceil((16 * self.height) as usize) as u32;
        Launch { grid: (blocks, 1), block: self.warps * 32, shared: self.shared_bytes(step_bytes), cluster: 1 }
    }
}

/// Returns the bytes of a stage.
fn stage_bytes(step_bytes: u32) -> u32 {
    step_bytes.next_multiple_of(1024)
}

/// Returns the `k` extent of a step, in elements.
fn k_step(element: DataType) -> u32 {
    2 * ROW / element.bytes() as u32
}

/// Returns the bytes of metadata of 16 rows in half a step.
fn fragment_meta_bytes(element: DataType) -> u32 {
    16 * (k_step(element) / 2) / 8
}

impl WarpPipelinesShape {
    /// Returns the bytes of a step of W and X of a data type.
    fn step_bytes(self, element: DataType) -> u32 {
        let WarpPipelinesShape { height, tokens, .. } = self;
        16 * height * ROW + 2 * tokens * ROW + 2 * height * fragment_meta_bytes(element)
    }

    /// Returns the source of the kernel for W and X of a data type.
    fn source_for(self, element: DataType) -> Source {
        let kernel = File::new("gemm/hopper/warp_pipelines/kernel.cu", include_str!("kernel.cu"));
        let definitions = mma::instruction(element, element) + &self.definitions(self.step_bytes(element));
        let files = [headers::COMMON, mma::SOURCE, epilogue::SOURCE, headers::HOPPER, PIPELINES, kernel];
        Source::new(format!("rings-sm90-{element}-{}", self.name()), SUPPORT).define(definitions).with(files)
    }
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
pub(in crate::raw::gemm) struct WarpPipelinesParameters {
    weight: TensorMap,
    x: TensorMap,
    meta: TensorMap,
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    steps: u32,
}

/// Keys: rows, tokens, warps and CTAs of an SM.
const TIMES: FamilyTimes = FamilyTimes {
    launch: 4.354,
    l2: 1.798e+07,
    hbm: 3.957e+06,
    kernels: &[
        kernel([32, 8, 4, 2], 1.133, 0.06118),
        kernel([32, 8, 8, 1], 1.157, 0.05636),
        kernel([32, 32, 4, 2], 1.308, 0.06385),
        kernel([32, 16, 8, 1], 1.325, 0.05874),
        kernel([48, 8, 8, 1], 1.259, 0.06246),
        kernel([48, 32, 4, 1], 1.519, 0.06892),
    ],
    ..FamilyTimes::NO_CLUSTERS
};

impl KernelFamily<GemmProblem> for WarpPipelinesShape {
    const ENTRY: &'static str = "rings";
    const SUPPORT: Support = SUPPORT;
    const READS_BY_TMA: bool = true;
    const TIMES: &'static [&'static FamilyTimes] = &[&TIMES];
    type Parameters = WarpPipelinesParameters;

    fn sources() -> Vec<Source> {
        ELEMENTS.into_iter().flat_map(|element| SHAPES.map(|shape| shape.source_for(element))).collect()
    }

    /// None for too many tokens, and for 8-bit floats, because Hopper emulates their `mma.sp` by other instructions.
    fn methods(problem: GemmProblem, architecture: Architecture) -> Vec<WarpPipelinesShape> {
        let known = problem.x == XOrder::TokensFirst && ELEMENTS.contains(&problem.element);
        let shapes: &[_] = if known && SUPPORT.includes(architecture) { &SHAPES } else { &[] };
        WarpPipelinesShape::with_room(shapes, problem.tokens)
    }

    fn cost(self, problem: GemmProblem, architecture: Architecture) -> Option<f64> {
        let WarpPipelinesShape { height, warps, blocks, tokens } = self;
        let (features, resident) = (16 * height, blocks);
        let work = CtaWork::new(&TIMES, [features, tokens, warps, blocks], (features, tokens), problem);
        cost::microseconds(&CtaWork { warps, resident, ..work }, problem, architecture)
    }

    fn launch(self, problem: GemmProblem, _sms: u32) -> Launch {
        self.launch_of(problem.features, self.step_bytes(problem.element))
    }

    fn source(self, problem: GemmProblem) -> Source {
        self.source_for(problem.element)
    }

    fn kernel(self, problem: GemmProblem) -> String {
        format!("rings-{}-{}", problem.element, self.name())
    }

    fn parameters(
        self,
        problem: GemmProblem,
        operands: GemmOperands,
        epilogue: Epilogue,
    ) -> Result<WarpPipelinesParameters> {
        let GemmProblem { element, output, features, tokens, .. } = problem;
        let (rows, columns) = problem.padded();
        let (bytes, half) = (element.bytes(), k_step(element) / 2);
        let WarpPipelinesShape { height, tokens: room, .. } = self;
        // Metadata is in half steps, each for all features. Its units are eight bytes, because a TMA box is 256 units
        // wide at most.
        let units = fragment_meta_bytes(element) / 8;
        let meta = (columns / tile_k(element).columns(), rows / 16 * units as usize);
        let wide = Swizzle::Bytes128;
        Ok(WarpPipelinesParameters {
            weight: TensorMap::new(operands.weight.values, bytes, (rows, columns / 2), (16 * height, half), wide)?,
            x: TensorMap::new(operands.x, bytes, (tokens, problem.x_row_by_tma()), (room, half), wide)?,
            meta: TensorMap::new(operands.weight.meta, 8, meta, (2, height * units), Swizzle::None)?,
            to: RawOutput::of(problem, operands.out, epilogue),
            output: output as u32,
            features: features as u32,
            tokens: tokens as u32,
            steps: columns.div_ceil(2 * half as usize) as u32,
        })
    }
}
