//! Products of few tokens with a four-bit weight on sm_90a, through rings of buffers: see [`crate::gemm::rings`].

use super::{Problem, Weight, maps::Maps};
use crate::{
    DevicePtr, Result,
    gemm::{
        RawOutput,
        rings::{Shape, shape},
    },
};
use twofour::int4::Granularity;

/// Shapes that there are kernels for.
pub(super) const SHAPES: [Shape; 13] = [
    shape(2, 8, 1, 8),
    shape(3, 8, 1, 8),
    shape(2, 4, 2, 8),
    shape(4, 4, 2, 8),
    shape(2, 8, 1, 16),
    shape(3, 8, 1, 16),
    shape(2, 4, 2, 16),
    shape(4, 4, 2, 16),
    shape(2, 8, 1, 32),
    shape(3, 4, 1, 32),
    shape(2, 4, 2, 32),
    shape(4, 4, 1, 32),
    shape(2, 4, 1, 64),
];

/// Bytes of two tiles of X, of so many tokens, and of a unit of W for each sixteen rows.
pub(super) fn step_bytes(shape: Shape, granularity: Granularity) -> u32 {
    let scales = if granularity == Granularity::Group { 32 } else { 0 };
    2 * shape.tokens * 128 + shape.height * (512 + 256 + scales)
}

/// As the kernel has it.
#[repr(C)]
pub(super) struct Parameters {
    maps: Maps,
    row_scales: DevicePtr,
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    steps: u32,
}

impl Parameters {
    /// Of a problem that is known to kernels.
    pub(super) fn new(problem: Problem, shape: Shape, weight: Weight, x: DevicePtr, to: RawOutput) -> Result<Self> {
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
