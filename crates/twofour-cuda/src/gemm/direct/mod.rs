//! GEMM of at most eight tokens by `mma.sp`, on every architecture from sm_80 on: the weight goes from memory straight into registers, and no block
//! waits for another. Here: how such kernels share the work, and those of 16-bit weights; [`super::int4`] has those of four bits.

use serde::{Deserialize, Serialize};

use super::{Epilogue, GemmOperands, GemmProblem, RawOutput, XOrder, is_hopper, mma, tile_k};
use crate::{
    Architecture, DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    headers,
    source::{File, Source, Support},
};

/// Tokens of an instruction.
pub(super) const TOKENS: usize = 8;

/// Rows of W of an instruction.
const ROWS: u32 = 16;

/// What a block does.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct DirectShape {
    /// Rows of W, in units of 16.
    pub height: u32,
    /// Warps, each of which sums over a part of the columns.
    pub warps: u32,
    /// Steps that are read ahead.
    pub depth: u32,
    /// Blocks that a multiprocessor runs at once, if registers are all that counts.
    pub blocks: u32,
}

impl DirectShape {
    /// Bytes of shared memory: sums of all warps, and so many rows of X, parted among the warps. `steps` are those of a row, of so many bytes of X.
    pub(super) fn shared_bytes(self, tokens: usize, steps: usize, step_bytes: usize) -> usize {
        let warps = self.warps as usize;
        warps * (self.height as usize * 32 * 16 + tokens * (steps.div_ceil(warps) * step_bytes + 16))
    }

    /// Its name.
    pub(super) fn name(self) -> String {
        let DirectShape { height, warps, depth, .. } = self;
        format!("{}w{warps}d{depth}", height * ROWS)
    }

    /// What sources are defined for.
    pub(super) fn definitions(self) -> String {
        let DirectShape { height, warps, depth, blocks } = self;
        format!("#define HEIGHT {height}\n#define WARPS {warps}\n#define DEPTH {depth}\n#define BLOCKS {blocks}\n")
    }

    /// The launch for so many rows.
    pub(super) fn launch(self, features: usize, shared: u32) -> Launch {
        let blocks = features.div_ceil((ROWS * self.height) as usize) as u32;
        Launch { grid: (blocks, 1), block: self.warps * 32, shared, cluster: 1 }
    }
}

/// Shapes that there are kernels of 16-bit weights for, by what they were the fastest for on an H200.
const MANY_ROWS: DirectShape = DirectShape { height: 1, warps: 8, depth: 4, blocks: 3 };
const FEW_ROWS: DirectShape = DirectShape { height: 1, warps: 16, depth: 2, blocks: 2 };
const MORE_TOKENS: DirectShape = DirectShape { height: 2, warps: 8, depth: 2, blocks: 2 };
const SHAPES: [DirectShape; 3] = [MANY_ROWS, FEW_ROWS, MORE_TOKENS];

impl DirectShape {
    /// Those for a problem: none where there are too many tokens, elements are not of 16 bits, or X does not fit in shared memory; none on Hopper, either, where X would have to be copied
    /// that other kernels read as it is.
    pub fn all(problem: GemmProblem, architecture: Architecture) -> Vec<DirectShape> {
        let few = problem.tokens <= TOKENS && problem.x == XOrder::TokensFirst;
        let whole = problem.reduction.is_multiple_of(tile_k(problem.element).columns()) || !is_hopper(architecture);
        let known = problem.element.bytes() == 2 && few && whole;
        let fits = |shape: &DirectShape| shape.shared_bytes_of(problem) <= architecture.shared_bytes() as usize;
        SHAPES.into_iter().filter(|shape| known && fits(shape)).collect()
    }

    /// The one that spreads the work best over the device.
    pub(super) fn best(problem: GemmProblem, architecture: Architecture, multiprocessors: u32) -> Option<DirectShape> {
        let all = DirectShape::all(problem, architecture);
        let few_rows = problem.features <= (2 * ROWS * multiprocessors) as usize;
        let best = if few_rows { FEW_ROWS } else { MANY_ROWS };
        all.contains(&best).then_some(best).or(all.first().copied())
    }

    fn shared_bytes_of(self, problem: GemmProblem) -> usize {
        let columns = tile_k(problem.element).columns();
        self.shared_bytes(problem.tokens, problem.reduction.div_ceil(columns), columns * problem.element.bytes())
    }
}

/// A kernel of 16-bit weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DirectKernel {
    /// What W and X are made of.
    pub element: DataType,
    /// What a block does.
    pub shape: DirectShape,
}

impl DirectKernel {
    /// Every kernel that a problem may ask for.
    pub fn all() -> Vec<DirectKernel> {
        let of = |element| SHAPES.map(|shape| DirectKernel { element, shape });
        [DataType::F16, DataType::BF16].into_iter().flat_map(of).collect()
    }

    /// Its name.
    pub fn name(&self) -> String {
        format!("{}-{}", self.element, self.shape.name())
    }

    /// What the source is defined for.
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

/// A GEMM with its kernel and its launch.
#[derive(Debug, Clone)]
pub(super) struct DirectPlan {
    problem: GemmProblem,
    variant: DirectKernel,
    kernel: Kernel,
    launch: Launch,
}

/// As the kernel has it.
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
    /// Of a problem that is known to kernels, with one of its shapes.
    pub(super) fn new(device: &Device, problem: GemmProblem, shape: DirectShape) -> Result<Self> {
        let variant = DirectKernel { element: problem.element, shape };
        let kernel = device.kernel(&variant.source(), "direct")?;
        let shared = shape.shared_bytes_of(problem) as u32;
        kernel.allow_shared(shared)?;
        Ok(Self { problem, variant, kernel, launch: shape.launch(problem.features, shared) })
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
