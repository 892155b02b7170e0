//! GEMM by `mma.sp`, on every architecture from sm_80 on (8-bit floats from sm_89 on): tiles, kernels and launch
//! parameters.
//!
//! The order of weights and metadata is that of Hopper's `wgmma.sp`, because a lane holds the same word of metadata for
//! both instructions.

use serde::{Deserialize, Serialize};

use crate::{
    Architecture, DataType, DevicePtr, Result,
    device::Launch,
    problem::{GemmProblem, XOrder},
    raw::{
        gemm::{
            Epilogue, GemmOperands, RawOutput, epilogue,
            family::{KernelFamily, not_computed},
            mma,
            rasterization::{self, Rasterization},
            supported::{elements, elements_name},
            tile_k,
        },
        headers,
    },
    source::{File, Source, Support},
};

/// The tile of the result that a CTA computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct MmaTile {
    /// Rows of W: a multiple of 64.
    pub features: u32,
    /// Rows of X: a multiple of 16.
    pub tokens: u32,
    /// Pipeline stages between memory and the tensor cores.
    pub stages: u32,
}

/// Threads of a CTA: four warps.
const THREADS: u32 = 128;

/// Bytes of a step of X's rows.
const STEP_BYTES: u32 = 128;

const TILES: [MmaTile; 4] = [
    MmaTile { features: 128, tokens: 128, stages: 3 },
    MmaTile { features: 128, tokens: 64, stages: 4 },
    MmaTile { features: 64, tokens: 32, stages: 6 },
    MmaTile { features: 64, tokens: 16, stages: 8 },
];

impl MmaTile {
    /// Returns the tiles that kernels have for an element type, whichever 8-bit float type X has.
    pub fn all(element: DataType, architecture: Architecture) -> Vec<MmaTile> {
        TILES.into_iter().filter(|tile| tile.support(element).includes(architecture)).collect()
    }

    /// Returns the tiles of a problem.
    fn rasterization(self, problem: GemmProblem) -> Rasterization {
        Rasterization::new(problem, (self.features, self.tokens), PANEL_FEATURES)
    }

    fn name(self) -> String {
        format!("{}x{}x{}", self.features, self.tokens, self.stages)
    }

    /// Returns the architectures that have the instruction. Some emulate it for 8-bit floats, which takes registers
    /// that only small tiles have left.
    fn support(self, element: DataType) -> Support {
        let needed = needed(element);
        if needed == Support::FLOAT8 && self.features > 64 { Support::NATIVE_FLOAT8 } else { needed }
    }

    /// Returns the source of the kernel for data types of W and X.
    fn source_for(self, (element, x_element): (DataType, DataType)) -> Source {
        let MmaTile { features, tokens, stages } = self;
        let kernel = File::new("gemm/generic/tiled/kernel.cu", include_str!("kernel.cu"));
        let instruction = mma::instruction(element, x_element);
        let tile = format!("#define FEATURES {features}\n#define TOKENS {tokens}\n#define STAGES {stages}\n");
        let name = format!("gemm-mma-{}-{}", elements_name(element, x_element), self.name());
        Source::new(name, self.support(element)).with([headers::COMMON]).define(instruction + &tile).with([
            mma::SOURCE,
            epilogue::SOURCE,
            rasterization::SOURCE,
            kernel,
        ])
    }

    /// Returns the bytes of the stages, or of the accumulators that use the same memory after the main loop.
    fn shared_bytes(self, element: DataType) -> u32 {
        let MmaTile { features, tokens, stages } = self;
        let meta = features * tile_k(element).columns() as u32 / 8;
        let stages = stages * (features * STEP_BYTES / 2 + tokens * STEP_BYTES + meta);
        let sums = ((features + 4) * tokens).max((tokens + 4) * features) * 4;
        stages.max(sums)
    }
}

/// Returns what the instruction for an element type requires.
fn needed(element: DataType) -> Support {
    if matches!(element, DataType::E4M3 | DataType::E5M2) { Support::FLOAT8 } else { Support::ALL }
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
pub(in crate::raw::gemm) struct MmaParameters {
    values: DevicePtr,
    meta: DevicePtr,
    x: DevicePtr,
    to: RawOutput,
    output: u32,
    rows: u32,
    tokens: u32,
    steps: u32,
    rasterization: Rasterization,
    features: u32,
}

/// Features of a panel: see [`super::super::hopper::tiled`].
const PANEL_FEATURES: u32 = 2048;

impl KernelFamily<GemmProblem> for MmaTile {
    const ENTRY: &'static str = "gemm";
    type Parameters = MmaParameters;

    fn sources() -> Vec<Source> {
        elements().into_iter().flat_map(|elements| TILES.map(|tile| tile.source_for(elements))).collect()
    }

    /// None where `wgmma` computes every problem faster.
    fn methods(problem: GemmProblem, architecture: Architecture) -> Vec<MmaTile> {
        if architecture.features().wgmma { Vec::new() } else { MmaTile::all(problem.element, architecture) }
    }

    /// The tile with the least time by a model of its own: the number of waves, each as long as the slower of its math
    /// and its reads.
    fn preferred(problem: GemmProblem, architecture: Architecture, sms: u32) -> Option<MmaTile> {
        let time = |tile: &MmaTile| {
            let tiles =
                problem.features.div_ceil(tile.features as usize) * problem.tokens.div_ceil(tile.tokens as usize);
            let rounds = tiles.div_ceil(sms.max(1) as usize) as f64;
            // Cycles of a step: an SM multiplies about 4096 pairs of bytes and reads about 64 bytes in a cycle.
            let products = f64::from(tile.features * tile.tokens * STEP_BYTES) / 4096.0;
            let reads = f64::from(tile.features * STEP_BYTES * 9 / 16 + tile.tokens * STEP_BYTES) / 64.0;
            rounds * products.max(reads)
        };
        MmaTile::all(problem.element, architecture).into_iter().min_by(|a, b| time(a).total_cmp(&time(b)))
    }

    fn expect(self, problem: GemmProblem, architecture: Architecture) -> Result<()> {
        needed(problem.element).expect("GEMM by mma.sp with these data types", architecture)?;
        let is_there = MmaTile::all(problem.element, architecture).contains(&self);
        if is_there && problem.x == XOrder::TokensFirst { Ok(()) } else { Err(not_computed(self, problem)) }
    }

    fn launch(self, problem: GemmProblem, _sms: u32) -> Launch {
        let (grid, shared) = ((self.rasterization(problem).tiles(), 1), self.shared_bytes(problem.element));
        Launch { grid, block: THREADS, shared, cluster: 1 }
    }

    fn source(self, problem: GemmProblem) -> Source {
        self.source_for((problem.element, problem.x_element))
    }

    fn kernel(self, problem: GemmProblem) -> String {
        format!("mma-{}-{}", elements_name(problem.element, problem.x_element), self.name())
    }

    fn parameters(self, problem: GemmProblem, operands: GemmOperands, epilogue: Epilogue) -> Result<MmaParameters> {
        let GemmProblem { element, output, features, tokens, .. } = problem;
        let (rows, columns) = problem.padded();
        Ok(MmaParameters {
            values: operands.weight.values,
            meta: operands.weight.meta,
            x: operands.x,
            to: RawOutput::of(problem, operands.out, epilogue),
            output: output as u32,
            rows: rows as u32,
            tokens: tokens as u32,
            steps: (columns / tile_k(element).columns()) as u32,
            rasterization: self.rasterization(problem),
            features: features as u32,
        })
    }
}
