//! TMA descriptors of an int4 weight and X.

use super::{Int4Problem, Int4Weight, UNIT};
use crate::{
    DevicePtr, Result,
    raw::gemm::tensor_map::{Swizzle, TensorMap},
};
use twofour::int4::Granularity;

/// The descriptors, in the kernels' memory layout.
#[repr(C)]
pub(super) struct Maps {
    values: TensorMap,
    meta: TensorMap,
    scales: TensorMap,
    x: TensorMap,
}

impl Maps {
    /// Returns the descriptors for tiles of `units` units of rows, and `tokens` rows of X.
    pub(super) fn new(
        problem: Int4Problem,
        weight: Int4Weight,
        x: DevicePtr,
        height: u32,
        tokens: u32,
    ) -> Result<Self> {
        // Elements of eight bytes: rows of units, and the elements of each unit.
        let units = |data, words: u32| {
            let matrix = (problem.features / UNIT.0, problem.steps() * words as usize);
            TensorMap::new(data, 8, matrix, (height, words), Swizzle::None)
        };
        let half = UNIT.1 as u32 / 2;
        Ok(Self {
            values: units(weight.values, 64)?,
            meta: units(weight.meta, 32)?,
            scales: match problem.granularity {
                Granularity::Group => units(weight.scales, 4)?,
                // Groups of 64 columns have no packed form: see `Int4Kernel::name`.
                Granularity::Row | Granularity::Group64 => TensorMap::NONE,
            },
            x: TensorMap::new(x, 2, (problem.tokens, problem.reduction), (tokens, half), Swizzle::Bytes128)?,
        })
    }
}
