//! GEMM of small batches with an int4 weight on sm_90a, by clusters with split-K: see [`crate::raw::gemm::stream`].

use super::{Int4Problem, Int4Weight, UNIT, maps::Maps};
use crate::{
    DevicePtr, Result,
    raw::gemm::{
        RawOutput,
        stream::{RawProblem, Step, StreamShape, StreamTile},
    },
};
use twofour::int4::Granularity;

/// Rows of W of the kernels.
const FEATURES: [u32; 4] = [64, 96, 128, 256];

/// Most tokens of each kernel.
const TOKENS: [u32; 3] = [16, 32, 64];

/// Returns the shapes that compute a problem.
pub(super) fn shapes(problem: Int4Problem) -> Vec<StreamShape> {
    let of = (problem.features, problem.tokens);
    let all = StreamShape::of(|_| &FEATURES, of, problem.steps() as u32, |tile| step(tile, problem.granularity));
    all.into_iter().filter(|shape| TOKENS.contains(&shape.tile.tokens)).collect()
}

/// Returns the shapes that need different kernels.
pub(super) fn kernels() -> Vec<StreamShape> {
    let of = |tokens| FEATURES.map(|features| StreamShape { tile: StreamTile { features, tokens }, split: 1 });
    TOKENS.into_iter().flat_map(of).collect()
}

/// Returns the stage of a tile: two tiles of X, and a unit of W for each 16 rows.
pub(super) fn step(tile: StreamTile, granularity: Granularity) -> Step {
    let units = tile.features / UNIT.0 as u32;
    let scales = if granularity == Granularity::Group { (units * 32).next_multiple_of(128) } else { 0 };
    let height = if tile.features > 64 { 2 } else { 1 };
    Step { bytes: 2 * tile.tokens * 128 + units * (512 + 256) + scales, most_ahead: 16, height }
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
pub(super) struct Int4StreamParameters {
    maps: Maps,
    row_scales: DevicePtr,
    problem: RawProblem,
}

impl Int4StreamParameters {
    /// Returns the parameters of a validated problem.
    pub(super) fn new(
        problem: Int4Problem,
        shape: StreamShape,
        weight: Int4Weight,
        x: DevicePtr,
        to: RawOutput,
    ) -> Result<Self> {
        let Int4Problem { output, features, tokens, .. } = problem;
        let StreamTile { features: rows, tokens: room } = shape.tile;
        Ok(Self {
            maps: Maps::new(problem, weight, x, rows / UNIT.0 as u32, room)?,
            row_scales: weight.scales,
            problem: RawProblem::new(to, output, (features, tokens), problem.steps(), shape),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{DataType, problem::Order};

    #[test]
    fn clusters_have_room_for_sums_where_layers_want_them() {
        for granularity in [Granularity::Group, Granularity::Row] {
            for tokens in TOKENS {
                let problem = Int4Problem {
                    element: DataType::BF16,
                    output: DataType::BF16,
                    granularity,
                    features: 4096,
                    tokens: tokens as usize,
                    reduction: 14_336,
                    order: Order::TokensFirst,
                    epilogue: None,
                };
                let shapes = shapes(problem);
                for (features, split) in [(64, 1), (64, 2), (128, 7)] {
                    let wanted = StreamShape { tile: StreamTile { features, tokens }, split };
                    assert!(shapes.contains(&wanted), "{granularity:?} {wanted:?}");
                }
                for shape in shapes {
                    let launch = shape.launch((problem.features, problem.tokens), step(shape.tile, granularity));
                    assert_eq!(launch.grid.0 * launch.grid.1, shape.blocks(problem.features));
                }
            }
        }
    }
}
