//! Products of few tokens with a four-bit weight on sm_90a, through rings of buffers: see [`crate::gemm::rings`].

use super::{Problem, UNIT, Weight};
use crate::{
    DevicePtr, Result,
    gemm::{
        Epilogue, RawOutput,
        rings::{Shape, shape},
    },
    tensor_map::{Swizzle, TensorMap},
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
    values: TensorMap,
    meta: TensorMap,
    scales: TensorMap,
    x: TensorMap,
    row_scales: DevicePtr,
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    steps: u32,
}

impl Parameters {
    /// Of a problem that is known to kernels.
    pub(super) fn new(
        problem: Problem,
        shape: Shape,
        weight: Weight,
        x: DevicePtr,
        out: DevicePtr,
        epilogue: Epilogue,
    ) -> Result<Self> {
        let Problem { output, granularity, features, tokens, reduction, order, .. } = problem;
        let steps = problem.steps();
        // Words of eight bytes: rows of units, and so many words of each unit.
        let units = |data, words: u32| {
            let matrix = (features / UNIT.0, steps * words as usize);
            TensorMap::new(data, 8, matrix, (shape.height, words), Swizzle::None)
        };
        Ok(Self {
            values: units(weight.values, 64)?,
            meta: units(weight.meta, 32)?,
            scales: match granularity {
                Granularity::Group => units(weight.scales, 4)?,
                Granularity::Row => TensorMap::NONE,
            },
            x: TensorMap::new(x, 2, (tokens, reduction), (shape.tokens, UNIT.1 as u32 / 2), Swizzle::Bytes128)?,
            row_scales: weight.scales,
            to: RawOutput::new((features, tokens), order, out, epilogue),
            output: output as u32,
            features: features as u32,
            tokens: tokens as u32,
            steps: steps as u32,
        })
    }
}
