//! TMA descriptors of an int4 weight and X.

use super::{Int4Operands, Int4Problem, UNIT};
use crate::{
    Result,
    raw::gemm::tensor_map::{Swizzle, TensorMap},
    source::File,
};
use twofour::int4::Granularity;

/// The descriptors, in the kernels' memory layout.
#[repr(C)]
pub(in crate::raw::gemm) struct Maps {
    values: TensorMap,
    meta: TensorMap,
    scales: TensorMap,
    x: TensorMap,
}

impl Maps {
    /// The kernels' side.
    pub(in crate::raw::gemm) const SOURCE: File = File::new("gemm/int4/maps.cuh", include_str!("maps.cuh"));

    /// Returns the descriptors for tiles of `height` units of rows, and `tokens` rows of X.
    pub(in crate::raw::gemm) fn new(
        problem: Int4Problem,
        operands: Int4Operands,
        height: u32,
        tokens: u32,
    ) -> Result<Self> {
        let Int4Operands { weight, x, .. } = operands;
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
                // Groups of 64 columns have no packed form: see `Int4Types::kernel`.
                Granularity::Row | Granularity::Group64 => TensorMap::NONE,
            },
            x: TensorMap::new(x, 2, (problem.tokens, problem.reduction), (tokens, half), Swizzle::Bytes128)?,
        })
    }
}
