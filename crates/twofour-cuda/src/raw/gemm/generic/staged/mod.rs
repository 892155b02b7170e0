//! GEMM with an int4 weight through `cp.async` pipelines in shared memory, on all architectures: for up to 64 tokens,
//! and for fewer where [`super::direct`] has no room for X.

use serde::{Deserialize, Serialize};

use crate::{
    Architecture, Result,
    device::Launch,
    problem::Int4Problem,
    raw::gemm::{
        Epilogue,
        family::KernelFamily,
        int4::{Int4Operands, Int4Parameters, Int4Types, UNIT},
    },
    source::{File, Source, Support},
};

/// Most tokens of each kernel.
const TOKENS: [u32; 4] = [8, 16, 32, 64];

/// Warps of a CTA.
const WARPS: u32 = 8;

/// Most pipeline stages.
const MAX_STAGES: u32 = 8;

/// Bytes of a unit of int4 weights with a scale for every lane, and of the exchange of partial sums in a CTA.
const UNIT_BYTES: u32 = 32 * (16 + 8 + 4);
const EXCHANGE_BYTES: u32 = WARPS * 32 * 16;

/// Shared memory that a CTA may have on all architectures: that of sm_86 and sm_89.
const SHARED_BYTES: u32 = Architecture::SM_86.features().shared_bytes;

/// The division of the work among a CTA's warps.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StagedShape {
    /// Most rows of X.
    pub tokens: u32,
    /// Warps that share the same rows of W: 1, 2, 4 or 8 of the CTA's eight, and at least `height`.
    pub k_warps: u32,
    /// Vertically adjacent units of 16 rows that a warp computes at a time: 1 or, up to 16 tokens, 2.
    pub height: u32,
}

impl StagedShape {
    /// Returns the shapes for a number of tokens. The list is empty for too many.
    pub fn all(tokens: usize) -> Vec<StagedShape> {
        let Some(tokens) = TOKENS.into_iter().find(|most| tokens <= *most as usize) else { return Vec::new() };
        let heights: &[u32] = if tokens <= 16 { &[2, 1] } else { &[1] };
        let of = |height: &u32| [1, 2, 4, 8].map(|k_warps| StagedShape { tokens, k_warps, height: *height });
        let is = |shape: &StagedShape| shape.k_warps >= shape.height && shape.stages() >= 2;
        heights.iter().flat_map(of).filter(is).collect()
    }

    /// Returns the groups of rows. A CTA computes one group at a time.
    fn blocks(self, features: usize) -> u32 {
        (features / UNIT.0).div_ceil((WARPS / self.k_warps * self.height) as usize) as u32
    }

    /// Returns the bytes of all warps' units of a stage.
    fn stage_bytes(self) -> u32 {
        WARPS * self.height * UNIT_BYTES
    }

    /// Returns the bytes of a chunk of X with `tokens` tokens.
    fn chunk_bytes(self, tokens: u32) -> u32 {
        tokens * (self.k_warps * UNIT.1 as u32 * 2 + 16)
    }

    /// Returns the stages that fit where X is streamed.
    fn stages(self) -> u32 {
        let stage = self.chunk_bytes(self.tokens) + self.stage_bytes();
        ((SHARED_BYTES - EXCHANGE_BYTES) / stage).min(MAX_STAGES)
    }

    /// Returns whether all of X stays in shared memory, and the bytes of shared memory.
    fn shared(self, problem: Int4Problem) -> (bool, u32) {
        let chunk = u64::from(self.chunk_bytes(problem.tokens as u32));
        let chunks = problem.reduction.div_ceil(self.k_warps as usize * UNIT.1) as u64;
        let stages = u64::from(self.stages());
        let other = u64::from(EXCHANGE_BYTES) + stages * u64::from(self.stage_bytes());
        let resident = other + chunks * chunk <= u64::from(SHARED_BYTES);
        (resident, (other + if resident { chunks } else { stages } * chunk) as u32)
    }

    /// Returns the shape's name.
    fn name(self) -> String {
        let StagedShape { tokens, k_warps, height } = self;
        format!("{tokens}k{k_warps}h{height}")
    }

    /// Returns the source's preprocessor definitions.
    fn definitions(self) -> String {
        let StagedShape { tokens, k_warps, height } = self;
        let stages = self.stages();
        format!(
            "#define TOKENS {tokens}\n#define K_WARPS {k_warps}\n#define HEIGHT {height}\n#define STAGES {stages}\n"
        )
    }

    fn int4_source(self, types: Int4Types) -> Source {
        let kernel = File::new("gemm/generic/staged/kernel.cu", include_str!("kernel.cu"));
        types.source_by_mma(&self.name(), Support::ALL, &self.definitions()).with([kernel])
    }
}

impl KernelFamily<Int4Problem> for StagedShape {
    const ENTRY: &'static str = "decode";
    type Parameters = Int4Parameters;

    fn sources() -> Vec<Source> {
        let shapes = || TOKENS.iter().flat_map(|tokens| StagedShape::all(*tokens as usize));
        Int4Types::all().flat_map(|types| shapes().map(move |shape| shape.int4_source(types))).collect()
    }

    fn methods(problem: Int4Problem, _architecture: Architecture) -> Vec<StagedShape> {
        StagedShape::all(problem.tokens)
    }

    /// The most rows to a CTA, and so the fewest reads of X, that leave CTAs for 70 % of the SMs, as measured on an
    /// H200.
    fn preferred(problem: Int4Problem, _architecture: Architecture, sms: u32) -> Option<StagedShape> {
        let all = StagedShape::all(problem.tokens);
        let enough = |shape: &&StagedShape| shape.blocks(problem.features) * 10 >= 7 * sms;
        all.iter().find(enough).or(all.last()).copied()
    }

    /// A CTA for each group of rows.
    fn launch(self, problem: Int4Problem, _sms: u32) -> Launch {
        let (grid, shared) = ((self.blocks(problem.features), 1), self.shared(problem).1);
        Launch { grid, block: WARPS * 32, shared, cluster: 1 }
    }

    /// As many CTAs as run at once, each of which computes several groups of rows.
    fn resident(self, launch: Launch, at_once: impl FnOnce() -> Result<u32>) -> Result<Launch> {
        Ok(Launch { grid: (launch.grid.0.min(at_once()?), 1), ..launch })
    }

    fn source(self, problem: Int4Problem) -> Source {
        self.int4_source(Int4Types::of(problem))
    }

    fn kernel(self, problem: Int4Problem) -> String {
        Int4Types::of(problem).kernel(&self.name())
    }

    fn parameters(self, problem: Int4Problem, operands: Int4Operands, epilogue: Epilogue) -> Result<Int4Parameters> {
        Ok(Int4Parameters::new(problem, operands, epilogue, self.shared(problem).0))
    }
}
