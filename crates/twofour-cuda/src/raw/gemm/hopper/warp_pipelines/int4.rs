//! Int4 weights.

use super::{PIPELINES, SUPPORT, WarpPipelinesShape, shape};
use crate::{
    Architecture, DevicePtr, Result,
    device::Launch,
    problem::Int4Problem,
    raw::{
        gemm::{
            Epilogue, RawOutput,
            family::KernelFamily,
            int4::{Int4Operands, Int4Types, Maps},
        },
        headers,
    },
    source::{File, Source, Support},
};
use twofour::int4::Granularity;

/// The shapes of all kernels. 112 rows are for weights that give every SM several CTAs: 28672 rows are two for each of
/// 128 SMs.
const SHAPES: [WarpPipelinesShape; 15] = [
    shape(2, 8, 1, 8),
    shape(3, 8, 1, 8),
    shape(2, 4, 2, 8),
    shape(4, 4, 2, 8),
    shape(7, 4, 2, 8),
    shape(2, 8, 1, 16),
    shape(3, 8, 1, 16),
    shape(2, 4, 2, 16),
    shape(4, 4, 2, 16),
    shape(7, 4, 2, 16),
    shape(2, 8, 1, 32),
    shape(3, 4, 1, 32),
    shape(2, 4, 2, 32),
    shape(4, 4, 1, 32),
    shape(2, 4, 1, 64),
];

/// Returns the bytes of a step: two tiles of X of `tokens` rows, and a unit of W for each 16 rows.
fn step_bytes(shape: WarpPipelinesShape, granularity: Granularity) -> u32 {
    let scales = if granularity == Granularity::Group { 32 } else { 0 };
    2 * shape.tokens * 128 + shape.height * (512 + 256 + scales)
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
pub(in crate::raw::gemm) struct Int4WarpPipelinesParameters {
    maps: Maps,
    row_scales: DevicePtr,
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    steps: u32,
}

/// Returns the shapes for a problem's tokens.
fn shapes(problem: Int4Problem, architecture: Architecture) -> Vec<WarpPipelinesShape> {
    let shapes: &[_] = if SUPPORT.includes(architecture) { &SHAPES } else { &[] };
    WarpPipelinesShape::with_room(shapes, problem.tokens)
}

impl WarpPipelinesShape {
    fn int4_name(self) -> String {
        format!("rings-{}", self.name())
    }

    fn int4_source(self, types: Int4Types) -> Source {
        let kernel = File::new("gemm/hopper/warp_pipelines/int4.cu", include_str!("int4.cu"));
        let definitions = self.definitions(step_bytes(self, types.granularity));
        let files = [headers::HOPPER, PIPELINES, Maps::SOURCE, kernel];
        types.source_by_mma(&self.int4_name(), SUPPORT, &definitions).with(files)
    }
}

impl KernelFamily<Int4Problem> for WarpPipelinesShape {
    const ENTRY: &'static str = "decode";
    const SUPPORT: Support = SUPPORT;
    type Parameters = Int4WarpPipelinesParameters;

    fn sources() -> Vec<Source> {
        Int4Types::all().flat_map(|types| SHAPES.map(|shape| shape.int4_source(types))).collect()
    }

    fn methods(problem: Int4Problem, architecture: Architecture) -> Vec<WarpPipelinesShape> {
        shapes(problem, architecture)
    }

    fn preferred(problem: Int4Problem, architecture: Architecture, sms: u32) -> Option<WarpPipelinesShape> {
        let all = shapes(problem, architecture);
        WarpPipelinesShape::best(&all, problem.features, sms).or(all.last().copied())
    }

    fn launch(self, problem: Int4Problem, _sms: u32) -> Launch {
        self.launch_of(problem.features, step_bytes(self, problem.granularity))
    }

    fn source(self, problem: Int4Problem) -> Source {
        self.int4_source(Int4Types::of(problem))
    }

    fn kernel(self, problem: Int4Problem) -> String {
        Int4Types::of(problem).kernel(&self.int4_name())
    }

    fn parameters(
        self,
        problem: Int4Problem,
        operands: Int4Operands,
        epilogue: Epilogue,
    ) -> Result<Int4WarpPipelinesParameters> {
        Ok(Int4WarpPipelinesParameters {
            maps: Maps::new(problem, operands, self.height, self.tokens)?,
            row_scales: operands.weight.scales,
            to: RawOutput::of_int4(problem, operands.out, epilogue),
            output: problem.output as u32,
            features: problem.features as u32,
            tokens: problem.tokens as u32,
            steps: problem.steps() as u32,
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The rows of a CTA that were fastest on an H200: docs/explanation/kernels/cuda-int4.md.
    #[test]
    fn weights_get_blocks_of_the_rows_that_were_fastest() {
        for tokens in [8, 16] {
            let shapes = WarpPipelinesShape::with_room(&SHAPES, tokens);
            for (features, rows) in [
                (4096, 32),
                (6144, 48),
                (8192, 32),
                (11_008, 64),
                (14_336, 64),
                (20_480, 112),
                (28_672, 112),
                (57_344, 112),
            ] {
                let best = WarpPipelinesShape::best(&shapes, features, 132).unwrap();
                assert_eq!(16 * best.height, rows, "{features} rows, {tokens} tokens");
            }
        }
    }
}
