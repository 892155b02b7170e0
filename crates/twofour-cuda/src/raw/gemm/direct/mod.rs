//! GEMM of at most eight tokens by `mma.sp`, on every architecture from sm_80 on. The weight goes from memory straight into registers, and CTAs do
//! not synchronize. This module has the shapes of such kernels and those of 16-bit weights; [`super::int4`] has those of int4 weights.

use serde::{Deserialize, Serialize};

use super::{Epilogue, GemmOperands, GemmProblem, RawOutput, XOrder, is_hopper, mma, tile_k};
use crate::{
    Architecture, DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::headers,
    source::{File, Source, Support},
};

/// Tokens of an instruction (`n`).
pub(super) const TOKENS: usize = 8;

/// Rows of W of an instruction (`m`).
const ROWS: u32 = 16;

/// The rows, warps and prefetch distance of a CTA.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DirectShape {
    /// Rows of W, in units of 16.
    pub height: u32,
    /// Warps, each of which accumulates a part of the columns.
    pub warps: u32,
    /// Prefetch distance, in steps.
    pub depth: u32,
    /// CTAs resident on an SM, as far as registers limit them.
    pub blocks: u32,
}

impl DirectShape {
    /// Returns the bytes of shared memory: the accumulators of all warps, and `tokens` rows of X, divided among the warps. A row has `steps` steps of
    /// `step_bytes` bytes of X.
    pub(super) fn shared_bytes(self, tokens: usize, steps: usize, step_bytes: usize) -> usize {
        let warps = self.warps as usize;
        warps * (self.height as usize * 32 * 16 + tokens * (steps.div_ceil(warps) * step_bytes + 16))
    }

    /// Returns the shape's name.
    pub(super) fn name(self) -> String {
        let DirectShape { height, warps, depth, .. } = self;
        format!("{}w{warps}d{depth}", height * ROWS)
    }

    /// Returns the sources' preprocessor definitions.
    pub(super) fn definitions(self) -> String {
        let DirectShape { height, warps, depth, blocks } = self;
        format!("#define HEIGHT {height}\n#define WARPS {warps}\n#define DEPTH {depth}\n#define BLOCKS {blocks}\n")
    }

    /// Returns the launch configuration.
    pub(super) fn launch(self, features: usize, shared: u32) -> Launch {
        let blocks = features.div_ceil((ROWS * self.height) as usize) as u32;
        Launch { grid: (blocks, 1), block: self.warps * 32, shared, cluster: 1 }
    }
}

/// Shapes of the kernels of 16-bit weights, named by the problems for which they were the fastest on an H200.
const MANY_ROWS: DirectShape = DirectShape { height: 1, warps: 8, depth: 4, blocks: 3 };
const FEW_ROWS: DirectShape = DirectShape { height: 1, warps: 16, depth: 2, blocks: 2 };
const SHAPES: [DirectShape; 2] = [MANY_ROWS, FEW_ROWS];

impl DirectShape {
    /// Returns the shapes that compute a problem. The list is empty for too many tokens, for elements that are not of 16 bits, and where X does not
    /// fit in shared memory. On Hopper, where other families do as well as the shape for many rows, it has the one for few rows, and is empty where X
    /// would have to be copied that other kernels read in place.
    pub fn all(problem: GemmProblem, architecture: Architecture) -> Vec<DirectShape> {
        let few = problem.tokens <= TOKENS && problem.x == XOrder::TokensFirst;
        let whole = problem.reduction.is_multiple_of(tile_k(problem.element).columns()) || !is_hopper(architecture);
        let known = problem.element.bytes() == 2 && few && whole;
        let fits = |shape: &DirectShape| shape.shared_bytes_of(problem) <= architecture.shared_bytes() as usize;
        let shapes: &[DirectShape] = if is_hopper(architecture) { &[FEW_ROWS] } else { &SHAPES };
        shapes.iter().copied().filter(|shape| known && fits(shape)).collect()
    }

    /// Returns the shape that best balances the work over the SMs.
    pub(super) fn best(problem: GemmProblem, architecture: Architecture, multiprocessors: u32) -> Option<DirectShape> {
        let all = DirectShape::all(problem, architecture);
        let few_rows = problem.features <= (2 * ROWS * multiprocessors) as usize;
        let best = if few_rows { FEW_ROWS } else { MANY_ROWS };
        all.contains(&best).then_some(best).or(all.first().copied())
    }

    /// Returns the launch configuration for a problem.
    pub(super) fn launch_of(self, problem: GemmProblem) -> Launch {
        self.launch(problem.features, self.shared_bytes_of(problem) as u32)
    }

    fn shared_bytes_of(self, problem: GemmProblem) -> usize {
        let columns = tile_k(problem.element).columns();
        self.shared_bytes(problem.tokens, problem.reduction.div_ceil(columns), columns * problem.element.bytes())
    }
}

/// A kernel of 16-bit weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DirectKernel {
    /// Data type of W and X.
    pub element: DataType,
    /// The shape of a CTA.
    pub shape: DirectShape,
}

impl DirectKernel {
    /// Returns every kernel that a problem can need.
    pub fn all() -> Vec<DirectKernel> {
        let of = |element| SHAPES.map(|shape| DirectKernel { element, shape });
        [DataType::F16, DataType::BF16].into_iter().flat_map(of).collect()
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> String {
        format!("{}-{}", self.element, self.shape.name())
    }

    /// Returns the source's preprocessor definitions.
    pub(crate) fn definitions(&self) -> String {
        mma::instruction(self.element, self.element) + &self.shape.definitions()
    }

    pub(super) fn source(&self) -> Source {
        let kernel = File::new("gemm/direct/kernel.cu", include_str!("kernel.cu"));
        Source::new(format!("direct-{}", self.name()), Support::ALL).define(self.definitions()).with([
            headers::COMMON,
            headers::EPILOGUE,
            headers::SPARSE_PRODUCT,
            headers::DIRECT,
            kernel,
        ])
    }
}

/// A planned GEMM: its kernel and its launch configuration.
#[derive(Debug, Clone)]
pub(super) struct DirectPlan {
    problem: GemmProblem,
    variant: DirectKernel,
    kernel: Kernel,
    launch: Launch,
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
struct DirectParameters {
    values: DevicePtr,
    meta: DevicePtr,
    x: DevicePtr,
    to: RawOutput,
    output: u32,
    rows: u32,
    tokens: u32,
    steps: u32,
    features: u32,
}

impl DirectPlan {
    /// Plans a validated problem with one of its shapes.
    pub(super) fn new(device: &Device, problem: GemmProblem, shape: DirectShape, launch: Launch) -> Result<Self> {
        let variant = DirectKernel { element: problem.element, shape };
        let kernel = device.kernel(&variant.source(), "direct")?;
        kernel.allow_shared()?;
        Ok(Self { problem, variant, kernel, launch })
    }

    pub(super) fn kernel(&self) -> String {
        format!("direct-{}", self.variant.name())
    }

    /// # Safety
    /// That of [`super::Gemm::run`].
    pub(super) unsafe fn run(&self, stream: Stream, operands: GemmOperands, epilogue: Epilogue) -> Result<()> {
        let GemmProblem { element, output, features, tokens, .. } = self.problem;
        let (rows, columns) = self.problem.padded();
        let parameters = DirectParameters {
            values: operands.weight.values,
            meta: operands.weight.meta,
            x: operands.x,
            to: RawOutput::of(self.problem, operands.out, epilogue),
            output: output as u32,
            rows: rows as u32,
            tokens: tokens as u32,
            steps: (columns / tile_k(element).columns()) as u32,
            features: features as u32,
        };
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }
}
