//! GEMM of at most eight tokens by `mma.sp`, on every architecture from sm_80 on. The weight goes from memory straight
//! into registers, and CTAs do not synchronize. This module has the shapes of such kernels and those of 16-bit weights;
//! `int4` has those of int4 weights.

mod int4;

use serde::{Deserialize, Serialize};

use crate::{
    Architecture, DataType, DevicePtr, Result,
    device::Launch,
    problem::{GemmProblem, XOrder},
    raw::{
        gemm::{
            Epilogue, GemmOperands, RawOutput,
            cost::{self, CtaWork, FamilyTimes, kernel},
            epilogue,
            family::KernelFamily,
            mma, tile_k,
        },
        headers,
    },
    source::{File, Source, Support},
};

/// The parts that the kernels of both formats of weights share.
const DIRECT: File = File::new("gemm/generic/direct/direct.cuh", include_str!("direct.cuh"));

/// Tokens of an instruction (`n`).
const TOKENS: usize = 8;

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
    /// Returns the bytes of shared memory: the accumulators of all warps, and `tokens` rows of X, divided among the
    /// warps. A row has `steps` steps of
    /// `step_bytes` bytes of X.
    fn shared_bytes(self, tokens: usize, steps: usize, step_bytes: usize) -> usize {
        let warps = self.warps as usize;
        warps * (self.height as usize * 32 * 16 + tokens * (steps.div_ceil(warps) * step_bytes + 16))
    }

    /// Returns the shape's name.
    fn name(self) -> String {
        let DirectShape { height, warps, depth, .. } = self;
        format!("{}w{warps}d{depth}", height * ROWS)
    }

    /// Returns the sources' preprocessor definitions.
    fn definitions(self) -> String {
        let DirectShape { height, warps, depth, blocks } = self;
        format!("#define HEIGHT {height}\n#define WARPS {warps}\n#define DEPTH {depth}\n#define BLOCKS {blocks}\n")
    }

    /// Returns the launch configuration.
    fn launch_of(self, features: usize, shared: u32) -> Launch {
        let blocks = features.div_ceil((ROWS * self.height) as usize) as u32;
        Launch { grid: (blocks, 1), block: self.warps * 32, shared, cluster: 1 }
    }
}

/// Shapes of the kernels of 16-bit weights, named by the problems for which they were the fastest on an H200.
const MANY_ROWS: DirectShape = DirectShape { height: 1, warps: 8, depth: 4, blocks: 3 };
const FEW_ROWS: DirectShape = DirectShape { height: 1, warps: 16, depth: 2, blocks: 2 };
const SHAPES: [DirectShape; 2] = [MANY_ROWS, FEW_ROWS];

impl DirectShape {
    fn shared_bytes_of(self, problem: GemmProblem) -> usize {
        let columns = tile_k(problem.element).columns();
        self.shared_bytes(problem.tokens, problem.reduction.div_ceil(columns), columns * problem.element.bytes())
    }

    /// Returns the source of the kernel for W and X of a data type.
    fn source_for(self, element: DataType) -> Source {
        let kernel = File::new("gemm/generic/direct/kernel.cu", include_str!("kernel.cu"));
        let definitions = mma::instruction(element, element) + &self.definitions();
        let files = [headers::COMMON, epilogue::SOURCE, mma::SOURCE, DIRECT, kernel];
        Source::new(format!("direct-{element}-{}", self.name()), Support::ALL).define(definitions).with(files)
    }
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
pub(in crate::raw::gemm) struct DirectParameters {
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

/// Rows, warps and prefetch distance. Epilogues were not measured, and are taken for those of the warp pipelines.
const TIMES: FamilyTimes = FamilyTimes {
    launch: 4.427,
    l2: 1.373e+07,
    hbm: 3.918e+06,
    kernels: &[kernel([16, 16, 2, 0], 1.168, 0.0516)],
    ..FamilyTimes::NO_CLUSTERS
};

impl KernelFamily<GemmProblem> for DirectShape {
    const ENTRY: &'static str = "direct";
    const TIMES: &'static [&'static FamilyTimes] = &[&TIMES];
    type Parameters = DirectParameters;

    fn sources() -> Vec<Source> {
        let of = |element| SHAPES.map(|shape| shape.source_for(element));
        [DataType::F16, DataType::BF16].into_iter().flat_map(of).collect()
    }

    /// No method for more than 8 tokens, an MN-major X, elements other than 16-bit, or X larger than shared memory. On
    /// Hopper only the shape for few rows, and none if X must be copied.
    fn methods(problem: GemmProblem, architecture: Architecture) -> Vec<DirectShape> {
        let features = architecture.features();
        let few = problem.tokens <= TOKENS && problem.x == XOrder::TokensFirst;
        let whole = problem.reduction.is_multiple_of(tile_k(problem.element).columns()) || !features.wgmma;
        let known = problem.element.bytes() == 2 && few && whole;
        let fits = |shape: &DirectShape| shape.shared_bytes_of(problem) <= features.shared_bytes as usize;
        let shapes: &[DirectShape] = if features.wgmma { &[FEW_ROWS] } else { &SHAPES };
        shapes.iter().copied().filter(|shape| known && fits(shape)).collect()
    }

    fn preferred(problem: GemmProblem, architecture: Architecture, sms: u32) -> Option<DirectShape> {
        let all = Self::methods(problem, architecture);
        let few_rows = problem.features <= (2 * ROWS * sms) as usize;
        let best = if few_rows { FEW_ROWS } else { MANY_ROWS };
        all.contains(&best).then_some(best).or(all.first().copied())
    }

    fn cost(self, problem: GemmProblem, architecture: Architecture) -> Option<f64> {
        let DirectShape { height, warps, depth, .. } = self;
        let features = ROWS * height;
        let work = CtaWork {
            warps,
            resident: 2,
            ..CtaWork::new(&TIMES, [features, warps, depth, 0], (features, TOKENS as u32), problem)
        };
        cost::microseconds(&work, problem, architecture)
    }

    fn launch(self, problem: GemmProblem, _sms: u32) -> Launch {
        self.launch_of(problem.features, self.shared_bytes_of(problem) as u32)
    }

    fn source(self, problem: GemmProblem) -> Source {
        self.source_for(problem.element)
    }

    fn kernel(self, problem: GemmProblem) -> String {
        format!("direct-{}-{}", problem.element, self.name())
    }

    fn parameters(self, problem: GemmProblem, operands: GemmOperands, epilogue: Epilogue) -> Result<DirectParameters> {
        let GemmProblem { element, output, features, tokens, .. } = problem;
        let (rows, columns) = problem.padded();
        Ok(DirectParameters {
            values: operands.weight.values,
            meta: operands.weight.meta,
            x: operands.x,
            to: RawOutput::of(problem, operands.out, epilogue),
            output: output as u32,
            rows: rows as u32,
            tokens: tokens as u32,
            steps: (columns / tile_k(element).columns()) as u32,
            features: features as u32,
        })
    }
}
