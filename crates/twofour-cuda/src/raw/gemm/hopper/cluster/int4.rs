//! Int4 weights.

use super::{CLUSTER, ClusterShape, ClusterTile, RawProblem, Step};
use crate::{
    Architecture, DevicePtr, Result,
    device::Launch,
    problem::{Int4Problem, XOrder},
    raw::{
        gemm::{
            Epilogue, RawOutput,
            epilogue::{self, KernelEpilogue},
            family::KernelFamily,
            int4::{self, Int4Operands, Int4Types, Maps, UNIT},
            wgmma::{self, Weights},
        },
        headers,
    },
    source::{File, Source, Support},
};
use twofour::int4::Granularity;

/// Rows of W of the kernels.
const FEATURES: [u32; 4] = [64, 96, 128, 256];

/// Most tokens of each kernel.
const TOKENS: [u32; 3] = [16, 32, 64];

/// Returns the shapes that compute a problem.
fn shapes(problem: Int4Problem) -> Vec<ClusterShape> {
    let of = (problem.features, problem.tokens);
    let all = ClusterShape::of(|_| &FEATURES, of, problem.steps() as u32, |tile| step(tile, problem.granularity));
    all.into_iter().filter(|shape| TOKENS.contains(&shape.tile.tokens)).collect()
}

/// Returns the stage of a tile: two tiles of X, and a unit of W for each 16 rows.
fn step(tile: ClusterTile, granularity: Granularity) -> Step {
    let units = tile.features / UNIT.0 as u32;
    let scales = if granularity == Granularity::Group { (units * 32).next_multiple_of(128) } else { 0 };
    let height = if tile.features > 64 { 2 } else { 1 };
    Step { bytes: 2 * tile.tokens * 128 + units * (512 + 256) + scales, most_ahead: 16, height }
}

/// A kernel. The launch, not the kernel, sets the CTAs of a cluster. Kernels are compiled for an epilogue, because
/// their code would otherwise be more than 64 KiB.
#[derive(Clone, Copy)]
struct Int4ClusterKernel {
    types: Int4Types,
    tile: ClusterTile,
    epilogue: KernelEpilogue,
}

impl Int4ClusterKernel {
    fn of(problem: Int4Problem, tile: ClusterTile) -> Self {
        Self { types: Int4Types::of(problem), tile, epilogue: KernelEpilogue::of(problem.epilogue) }
    }

    /// Returns the name of the kernel's launch by a shape.
    fn name(self, shape: ClusterShape) -> String {
        format!("stream-{}{}", shape.name(), self.epilogue.suffix())
    }

    fn source(self) -> Source {
        let Self { types, tile, epilogue } = self;
        let (element, tokens) = (types.element, tile.tokens);
        let products = wgmma::products((element, element), tokens, XOrder::TokensFirst, Weights::Registers);
        let kernel = File::new("gemm/hopper/cluster/int4.cu", include_str!("int4.cu"));
        let definitions = format!(
            "#define BY_ROW {}\n#define ELEMENT {}\n#define OUTPUT ANY_OUTPUT\n#define KERNEL_EPILOGUE {}\n{}",
            types.is_by_row(),
            element.definition(),
            epilogue.definition(),
            tile.definitions(step(tile, types.granularity))
        );
        let name = types.kernel(&self.name(ClusterShape { tile, split: 1 }));
        let files = [headers::COMMON, headers::HOPPER, products, epilogue::SOURCE, int4::SOURCE];
        let source = Source::new(format!("int4-{name}"), Support::WGMMA).define(definitions).with(files);
        source.with([CLUSTER, Maps::SOURCE, kernel])
    }
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
pub(in crate::raw::gemm) struct Int4ClusterParameters {
    maps: Maps,
    row_scales: DevicePtr,
    problem: RawProblem,
}

impl KernelFamily<Int4Problem> for ClusterShape {
    const ENTRY: &'static str = "decode";
    const SUPPORT: Support = Support::WGMMA;
    type Parameters = Int4ClusterParameters;

    fn sources() -> Vec<Source> {
        let tiles = || TOKENS.into_iter().flat_map(|tokens| FEATURES.map(|features| ClusterTile { features, tokens }));
        let epilogues = [KernelEpilogue::None, KernelEpilogue::Linear, KernelEpilogue::Activated];
        let of =
            |types| tiles().flat_map(move |tile| epilogues.map(|epilogue| Int4ClusterKernel { types, tile, epilogue }));
        Int4Types::all().flat_map(of).map(Int4ClusterKernel::source).collect()
    }

    fn methods(problem: Int4Problem, architecture: Architecture) -> Vec<ClusterShape> {
        if architecture.features().wgmma { shapes(problem) } else { Vec::new() }
    }

    /// None for few tokens: the more there are, the more it matters that few CTAs read X.
    fn preferred(problem: Int4Problem, architecture: Architecture, sms: u32) -> Option<ClusterShape> {
        let many = if problem.has_few_rows(sms) { 32 } else { 16 };
        let all = Self::methods(problem, architecture);
        ClusterShape::best(&all, problem.features, sms).filter(|_| problem.tokens > many)
    }

    fn launch(self, problem: Int4Problem, _sms: u32) -> Launch {
        self.launch_of((problem.features, problem.tokens), step(self.tile, problem.granularity))
    }

    fn source(self, problem: Int4Problem) -> Source {
        Int4ClusterKernel::of(problem, self.tile).source()
    }

    fn kernel(self, problem: Int4Problem) -> String {
        let kernel = Int4ClusterKernel::of(problem, self.tile);
        kernel.types.kernel(&kernel.name(self))
    }

    fn parameters(
        self,
        problem: Int4Problem,
        operands: Int4Operands,
        epilogue: Epilogue,
    ) -> Result<Int4ClusterParameters> {
        let Int4Problem { output, features, tokens, .. } = problem;
        let (ClusterTile { features: rows, tokens: room }, to) =
            (self.tile, RawOutput::of_int4(problem, operands.out, epilogue));
        Ok(Int4ClusterParameters {
            maps: Maps::new(problem, operands, rows / UNIT.0 as u32, room)?,
            row_scales: operands.weight.scales,
            problem: RawProblem::new(to, output, (features, tokens), problem.steps(), self),
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
                    let wanted = ClusterShape { tile: ClusterTile { features, tokens }, split };
                    assert!(shapes.contains(&wanted), "{granularity:?} {wanted:?}");
                }
                for shape in shapes {
                    let launch = shape.launch_of((problem.features, problem.tokens), step(shape.tile, granularity));
                    assert_eq!(launch.grid.0 * launch.grid.1, shape.blocks(problem.features));
                }
            }
        }
    }
}
