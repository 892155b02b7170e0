//! The kernel families, and the choice among them.

use serde::{Deserialize, Serialize};

use super::{Int4Problem, UNIT, rings, staged, stream};
use crate::{
    Architecture,
    device::Launch,
    raw::gemm::{direct, rings::RingsShape, stream::StreamShape, supported::is_hopper},
};

/// The kernel family that computes a GEMM, with its shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Int4Method {
    /// W goes from memory straight into registers; for at most eight tokens.
    Direct(direct::DirectShape),
    /// A circular buffer of stages for each warp, filled by TMA; on Hopper.
    Rings(RingsShape),
    /// Clusters with split-K; on Hopper, for more than eight tokens.
    Streamed(StreamShape),
    /// `cp.async` pipelines through shared memory, on all architectures.
    Staged(staged::StagedShape),
}

/// Shapes of the direct kernels, named by the problems for which they were the fastest on an H200.
const MANY_ROWS: direct::DirectShape = direct::DirectShape { height: 1, warps: 8, depth: 2, blocks: 5 };
const MANY_ROWS_MORE_TOKENS: direct::DirectShape = direct::DirectShape { height: 2, warps: 8, depth: 1, blocks: 4 };
const FEW_ROWS: direct::DirectShape = direct::DirectShape { height: 1, warps: 16, depth: 1, blocks: 3 };
const FEW_LONG_ROWS: direct::DirectShape = direct::DirectShape { height: 1, warps: 16, depth: 2, blocks: 2 };
pub(super) const DIRECT: [direct::DirectShape; 4] = [MANY_ROWS, MANY_ROWS_MORE_TOKENS, FEW_ROWS, FEW_LONG_ROWS];

impl Int4Method {
    /// Returns the launch configuration for a problem: for [`Int4Method::Staged`], with a CTA for each group of rows.
    pub(in crate::raw::gemm) fn launch(self, problem: Int4Problem) -> Launch {
        let Int4Problem { features, tokens, granularity, .. } = problem;
        match self {
            Int4Method::Direct(shape) => shape.launch(features, problem.shared_bytes(shape) as u32),
            Int4Method::Rings(shape) => shape.launch(features, rings::step_bytes(shape, granularity)),
            Int4Method::Streamed(shape) => shape.launch((features, tokens), stream::step(shape.tile, granularity)),
            Int4Method::Staged(shape) => Launch {
                grid: (shape.blocks(features), 1),
                block: staged::WARPS * 32,
                shared: shape.shared(problem).1,
                cluster: 1,
            },
        }
    }

    /// Returns the methods that compute a problem. The list is empty for too many tokens.
    pub fn all(problem: Int4Problem, architecture: Architecture) -> Vec<Int4Method> {
        let fits = |shape: &direct::DirectShape| {
            problem.tokens <= direct::TOKENS && problem.shared_bytes(*shape) <= architecture.shared_bytes() as usize
        };
        let direct = DIRECT.into_iter().filter(fits).map(Int4Method::Direct);
        direct
            .chain(rings_for(problem, architecture).into_iter().map(Int4Method::Rings))
            .chain(streams_for(problem, architecture).into_iter().map(Int4Method::Streamed))
            .chain(staged::StagedShape::all(problem.tokens).into_iter().map(Int4Method::Staged))
            .collect()
    }

    /// Returns the method that best balances the work over the SMs, as measured on an H200.
    pub fn best(problem: Int4Problem, architecture: Architecture, multiprocessors: u32) -> Option<Int4Method> {
        let few_rows = problem.features <= (3 * UNIT.0) * multiprocessors as usize;
        let best = match few_rows {
            true if problem.steps() > 64 => FEW_LONG_ROWS,
            true => FEW_ROWS,
            false if problem.tokens > 4 => MANY_ROWS_MORE_TOKENS,
            false => MANY_ROWS,
        };
        let best = Int4Method::Direct(best);
        let rings = rings_for(problem, architecture);
        if Int4Method::all(problem, architecture).contains(&best) && (problem.tokens <= 4 || rings.is_empty()) {
            return Some(best);
        }
        // The more tokens there are, the more it matters that few CTAs read X.
        if !few_rows && problem.tokens > 16 || problem.tokens > 32 {
            let streams = streams_for(problem, architecture);
            if let Some(shape) = StreamShape::best(&streams, problem.features, multiprocessors) {
                return Some(Int4Method::Streamed(shape));
            }
        }
        let rings = RingsShape::best(&rings, problem.features, multiprocessors).or(rings.last().copied());
        if let Some(rings) = rings {
            return Some(Int4Method::Rings(rings));
        }
        staged::StagedShape::best(problem, multiprocessors).map(Int4Method::Staged)
    }
}

/// Returns the [`Int4Method::Rings`] shapes for a problem's tokens, where the architecture supports them.
fn rings_for(problem: Int4Problem, architecture: Architecture) -> Vec<RingsShape> {
    let shapes: &[_] = if is_hopper(architecture) { &rings::SHAPES } else { &[] };
    RingsShape::with_room(shapes, problem.tokens)
}

/// Returns the [`Int4Method::Streamed`] shapes for a problem, where the architecture supports them.
fn streams_for(problem: Int4Problem, architecture: Architecture) -> Vec<StreamShape> {
    if is_hopper(architecture) { stream::shapes(problem) } else { Vec::new() }
}
