//! GEMM of small batches with an int4 weight on sm_90a, through circular buffers of stages: see [`crate::raw::gemm::rings`].

use super::{Int4Problem, Int4Weight, maps::Maps};
use crate::{
    DevicePtr, Result,
    raw::gemm::{
        RawOutput,
        rings::{RingsShape, shape},
    },
};
use twofour::int4::Granularity;

/// The shapes of all kernels. 112 rows are for weights that give every SM several CTAs: 28672 rows are two for each of 128 SMs.
pub(super) const SHAPES: [RingsShape; 15] = [
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
pub(super) fn step_bytes(shape: RingsShape, granularity: Granularity) -> u32 {
    let scales = if granularity == Granularity::Group { 32 } else { 0 };
    2 * shape.tokens * 128 + shape.height * (512 + 256 + scales)
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
pub(super) struct Int4RingsParameters {
    maps: Maps,
    row_scales: DevicePtr,
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    steps: u32,
}

impl Int4RingsParameters {
    /// Returns the parameters of a validated problem.
    pub(super) fn new(
        problem: Int4Problem,
        shape: RingsShape,
        weight: Int4Weight,
        x: DevicePtr,
        to: RawOutput,
    ) -> Result<Self> {
        Ok(Self {
            maps: Maps::new(problem, weight, x, shape.height, shape.tokens)?,
            row_scales: weight.scales,
            to,
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
            let shapes = RingsShape::with_room(&SHAPES, tokens);
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
                let best = RingsShape::best(&shapes, features, 132).unwrap();
                assert_eq!(16 * best.height, rows, "{features} rows, {tokens} tokens");
            }
        }
    }
}
