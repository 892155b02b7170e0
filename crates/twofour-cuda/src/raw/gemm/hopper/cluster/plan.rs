//! Weights of one element type: the kernels' parameters, the choice of a shape and its cost.

use super::{
    ClusterKernel, ClusterShape, ClusterTile,
    kernel::{atom_bytes, features as rows_of_w, k_step, step},
};
use crate::{
    Architecture, DataType as Element, Result,
    device::Launch,
    problem::{GemmProblem, XOrder},
    raw::gemm::{
        Epilogue, GemmOperands, RawOutput,
        cost::{self, CtaWork, EpilogueTimes, FamilyTimes, kernel, time},
        family::KernelFamily,
        tensor_map::{Swizzle, TensorMap},
    },
    source::{Source, Support},
};

/// The problem, in the kernels' memory layout.
#[repr(C)]
pub(super) struct RawProblem {
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    clusters: u32,
    x_rows: u32,
    split: u32,
    steps_each: Share,
    fragments_each: Share,
}

/// An even division among the CTAs of a cluster: `each` for every one, and one more for the first `more`.
#[repr(C)]
struct Share {
    each: u32,
    more: u32,
}

impl Share {
    fn of(all: u32, blocks: u32) -> Self {
        Self { each: all / blocks, more: all % blocks }
    }
}

impl RawProblem {
    /// Returns the parameters of a problem.
    pub(super) fn new(
        to: RawOutput,
        output: Element,
        (features, tokens): (usize, usize),
        steps: usize,
        shape: ClusterShape,
    ) -> Self {
        let (output, split) = (output as u32, shape.split);
        Self {
            to,
            output,
            features: features as u32,
            tokens: tokens as u32,
            clusters: shape.tile.clusters(features),
            x_rows: shape.tile.x_rows(tokens),
            split,
            steps_each: Share::of(steps as u32, split),
            fragments_each: Share::of(shape.tile.features / 16, split),
        }
    }
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
pub(in crate::raw::gemm) struct ClusterParameters {
    weight: TensorMap,
    x: TensorMap,
    meta: TensorMap,
    problem: RawProblem,
}

/// Keys: rows and tokens.
const TIMES: FamilyTimes = FamilyTimes {
    launch: 4.066,
    l2: 1.521e+07,
    hbm: 3.847e+06,
    split: 0.2966,
    exchange: 0.1117,
    sharing: 1.0,
    cluster: 5.532e-09,
    epilogues: EpilogueTimes { bias: time(0.32, 0.002), activation: time(0.67, 0.057), scales: time(0.76, 0.036) },
    kernels: &[
        kernel([64, 8, 0, 0], 1.458, 0.05263),
        kernel([64, 16, 0, 0], 1.487, 0.05516),
        kernel([64, 64, 0, 0], 1.636, 0.07106),
        kernel([64, 96, 0, 0], 1.671, 0.08882),
        kernel([64, 128, 0, 0], 1.578, 0.1127),
        kernel([96, 128, 0, 0], 2.292, 0.1887),
        kernel([128, 8, 0, 0], 1.447, 0.09483),
        kernel([128, 16, 0, 0], 1.503, 0.1022),
        kernel([128, 64, 0, 0], 1.99, 0.1266),
        kernel([128, 96, 0, 0], 2.684, 0.1493),
        kernel([128, 128, 0, 0], 2.799, 0.1879),
        kernel([224, 16, 0, 0], 1.92, 0.1301),
        kernel([224, 64, 0, 0], 2.501, 0.2537),
        kernel([224, 128, 0, 0], 3.068, 0.4298),
        kernel([256, 96, 0, 0], 3.047, 0.3475),
    ],
};

impl KernelFamily<GemmProblem> for ClusterShape {
    const ENTRY: &'static str = "stream";
    const SUPPORT: Support = Support::WGMMA;
    const READS_BY_TMA: bool = true;
    const TIMES: &'static [&'static FamilyTimes] = &[&TIMES];
    type Parameters = ClusterParameters;

    fn sources() -> Vec<Source> {
        ClusterKernel::all().iter().map(ClusterKernel::source).collect()
    }

    fn methods(problem: GemmProblem, architecture: Architecture) -> Vec<ClusterShape> {
        let GemmProblem { element, features, tokens, reduction, .. } = problem;
        if !architecture.features().wgmma || problem.x == XOrder::ReductionFirst || problem.is_mixed() {
            return Vec::new();
        }
        let steps = reduction.div_ceil(k_step(element) as usize) as u32;
        ClusterShape::of(|tokens| rows_of_w(element, tokens), (features, tokens), steps, |tile| step(element, tile))
    }

    fn cost(self, problem: GemmProblem, architecture: Architecture) -> Option<f64> {
        let ClusterShape { tile: ClusterTile { features, tokens }, split } = self;
        let work = CtaWork::new(&TIMES, [features, tokens, 0, 0], (features, tokens), problem);
        let resident = self.tile.blocks();
        cost::microseconds(&CtaWork { split, together: 2, resident, ..work }, problem, architecture)
    }

    fn launch(self, problem: GemmProblem, _sms: u32) -> Launch {
        self.launch_of((problem.features, problem.tokens), step(problem.element, self.tile))
    }

    fn source(self, problem: GemmProblem) -> Source {
        ClusterKernel::of(problem, self.tile).source()
    }

    fn kernel(self, problem: GemmProblem) -> String {
        ClusterKernel::of(problem, self.tile).name_of(self.name())
    }

    fn parameters(self, problem: GemmProblem, operands: GemmOperands, epilogue: Epilogue) -> Result<ClusterParameters> {
        let GemmProblem { element, output, features, tokens, .. } = problem;
        let (rows, columns) = problem.padded();
        let (tile_features, x_rows) = (self.tile.features, self.tile.x_rows(tokens));
        let (bytes, step, atom) = (element.bytes(), k_step(element), atom_bytes(element));
        // Metadata is in half steps, each for all features. Its units are eight bytes, because a TMA box is 256 units
        // wide at most.
        let meta_rows = columns.div_ceil(step as usize / 2);
        let meta_cols = rows / 64 * atom as usize / 8;
        Ok(ClusterParameters {
            weight: TensorMap::new(
                operands.weight.values,
                bytes,
                (rows, columns / 2),
                (tile_features, step / 2),
                Swizzle::Bytes128,
            )?,
            x: TensorMap::new(
                operands.x,
                bytes,
                (tokens, problem.x_row_by_tma()),
                (x_rows, step / 2),
                Swizzle::Bytes128,
            )?,
            meta: TensorMap::new(
                operands.weight.meta,
                8,
                (meta_rows, meta_cols),
                (2, tile_features / 16 * (atom / 32)),
                Swizzle::None,
            )?,
            problem: RawProblem::new(
                RawOutput::of(problem, operands.out, epilogue),
                output,
                (features, tokens),
                columns.div_ceil(step as usize),
                self,
            ),
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::raw::gemm::hopper::cluster::tile::MAX_BLOCKS;

    #[test]
    fn shares_of_a_cluster_are_even_and_leave_nothing_out() {
        for all in [1, 4, 6, 7, 16, 57] {
            for blocks in 1..=MAX_BLOCKS {
                let Share { each, more } = Share::of(all, blocks);
                assert!(each * blocks + more == all && more < blocks, "{all} {blocks}");
                // The CTA with the most rows has room for the accumulators that all others send.
                let most = each + u32::from(more > 0);
                let room = ClusterTile { features: all * 16, tokens: 8 }.sums_bytes(blocks);
                assert_eq!(room, most * (blocks - 1) * 16 * 8 * 4, "{all} {blocks}");
            }
        }
    }
}
