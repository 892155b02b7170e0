//! Int4 weights.

use super::{DIRECT, DirectShape, TOKENS};
use crate::{
    Architecture, Result,
    device::Launch,
    problem::Int4Problem,
    raw::gemm::{
        Epilogue,
        family::KernelFamily,
        int4::{Int4Operands, Int4Parameters, Int4Types, UNIT},
        supported,
    },
    source::{File, Source, Support},
};

/// The shapes of the kernels, named by the problems for which they were the fastest on an H200.
const MANY_ROWS: DirectShape = DirectShape { height: 1, warps: 8, depth: 2, blocks: 5 };
const MANY_ROWS_MORE_TOKENS: DirectShape = DirectShape { height: 2, warps: 8, depth: 1, blocks: 4 };
const FEW_ROWS: DirectShape = DirectShape { height: 1, warps: 16, depth: 1, blocks: 3 };
const FEW_LONG_ROWS: DirectShape = DirectShape { height: 1, warps: 16, depth: 2, blocks: 2 };
const SHAPES: [DirectShape; 4] = [MANY_ROWS, MANY_ROWS_MORE_TOKENS, FEW_ROWS, FEW_LONG_ROWS];

/// Steps of a long row.
const LONG: usize = 64;

impl DirectShape {
    fn shared_bytes_of_int4(self, problem: Int4Problem) -> usize {
        self.shared_bytes(problem.tokens, problem.steps(), UNIT.1 * 2)
    }

    fn int4_name(self) -> String {
        format!("direct-{}", self.name())
    }

    fn int4_source(self, types: Int4Types) -> Source {
        let kernel = File::new("gemm/generic/direct/int4.cu", include_str!("int4.cu"));
        types.source_by_mma(&self.int4_name(), Support::ALL, &self.definitions()).with([DIRECT, kernel])
    }
}

impl KernelFamily<Int4Problem> for DirectShape {
    const ENTRY: &'static str = "decode";
    type Parameters = Int4Parameters;

    fn sources() -> Vec<Source> {
        Int4Types::all().flat_map(|types| SHAPES.map(|shape| shape.int4_source(types))).collect()
    }

    fn methods(problem: Int4Problem, architecture: Architecture) -> Vec<DirectShape> {
        let most = architecture.features().shared_bytes as usize;
        let fits = |shape: &DirectShape| problem.tokens <= TOKENS && shape.shared_bytes_of_int4(problem) <= most;
        SHAPES.into_iter().filter(fits).collect()
    }

    /// The shape that was the fastest on an H200; beyond four tokens, warp pipelines are faster where they are.
    fn preferred(problem: Int4Problem, architecture: Architecture, sms: u32) -> Option<DirectShape> {
        let few_rows = problem.has_few_rows(sms);
        let best = match few_rows {
            true if problem.steps() > LONG => FEW_LONG_ROWS,
            true => FEW_ROWS,
            false if problem.tokens > 4 => MANY_ROWS_MORE_TOKENS,
            false => MANY_ROWS,
        };
        let is_fastest = problem.tokens <= 4 || !supported::WARP_PIPELINES.includes(architecture);
        (is_fastest && Self::methods(problem, architecture).contains(&best)).then_some(best)
    }

    fn launch(self, problem: Int4Problem, _sms: u32) -> Launch {
        self.launch_of(problem.features, self.shared_bytes_of_int4(problem) as u32)
    }

    fn source(self, problem: Int4Problem) -> Source {
        self.int4_source(Int4Types::of(problem))
    }

    fn kernel(self, problem: Int4Problem) -> String {
        Int4Types::of(problem).kernel(&self.int4_name())
    }

    fn parameters(self, problem: Int4Problem, operands: Int4Operands, epilogue: Epilogue) -> Result<Int4Parameters> {
        Ok(Int4Parameters::new(problem, operands, epilogue, true))
    }
}
