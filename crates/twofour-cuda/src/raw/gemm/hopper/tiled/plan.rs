//! The kernels' parameters and launches.

use super::{HopperKernel, HopperStore, HopperTile, WARPGROUPS, tile::PIECE_TOKENS};
use crate::{
    Architecture, DevicePtr, Result,
    device::Launch,
    problem::{GemmProblem, XOrder},
    raw::gemm::{
        Epilogue, GemmOperands, RawOutput,
        cost::{self, FamilyTimes},
        family::KernelFamily,
        rasterization::Rasterization,
        tensor_map::{Swizzle, TensorMap},
    },
    source::{Source, Support},
};

/// Threads of a CTA: the consumer warpgroups and the producer's.
const THREADS: u32 = (WARPGROUPS + 1) * 128;

/// The kernel's parameters, in their memory layout.
#[repr(C)]
pub(in crate::raw::gemm) struct HopperParameters {
    weight: TensorMap,
    x: [TensorMap; 2],
    out: TensorMap,
    meta: DevicePtr,
    to: RawOutput,
    rows: u32,
    tokens: u32,
    atoms: u32,
    steps: u32,
    sharing: u32,
    parts: u32,
    x_rows: u32,
    last_token: u32,
    rasterization: Rasterization,
    features: u32,
}

/// Features of a panel: W's values and metadata of the panel, and the rows of X that concurrent CTAs read, stay in L2.
const PANEL_FEATURES: u32 = 4096;

impl HopperTile {
    /// Returns the tiles of a problem. A tile is that of a whole cluster.
    fn rasterization(self, problem: GemmProblem) -> Rasterization {
        let x_rows = HopperKernel::of(problem, self).x_rows(problem, self);
        Rasterization::new(problem, (self.features * self.cluster, x_rows), PANEL_FEATURES)
    }

    fn launch_of(self, problem: GemmProblem, clusters: u32) -> Launch {
        let variant = HopperKernel::of(problem, self);
        let (shared, cluster) = (variant.shared_bytes(variant.chunk()), self.cluster * self.parts());
        Launch { grid: (clusters.saturating_mul(cluster), 1), block: THREADS, shared, cluster }
    }
}

impl KernelFamily<GemmProblem> for HopperTile {
    const ENTRY: &'static str = "gemm";
    const SUPPORT: Support = Support::WGMMA;
    const READS_BY_TMA: bool = true;
    const TIMES: &'static [&'static FamilyTimes] = &super::cost::TIMES;
    type Parameters = HopperParameters;

    fn sources() -> Vec<Source> {
        HopperKernel::all().iter().map(HopperKernel::source).collect()
    }

    fn methods(problem: GemmProblem, architecture: Architecture) -> Vec<HopperTile> {
        if architecture.features().wgmma { HopperTile::all(problem) } else { Vec::new() }
    }

    fn cost(self, problem: GemmProblem, architecture: Architecture) -> Option<f64> {
        cost::microseconds(&self.work(problem), problem, architecture)
    }

    /// A cluster with split-K computes one tile; any other computes several.
    fn launch(self, problem: GemmProblem, sms: u32) -> Launch {
        let tiles = self.rasterization(problem).tiles();
        let resident = (sms / (self.cluster * self.parts())).max(1);
        self.launch_of(problem, if self.parts() > 1 { tiles } else { resident.min(tiles) })
    }

    /// The hardware assigns a tile to each cluster.
    fn launch_by_hardware(self, problem: GemmProblem) -> Option<Launch> {
        Some(self.launch_of(problem, self.rasterization(problem).tiles()))
    }

    fn stores_by_tma(self, problem: GemmProblem) -> bool {
        HopperStore::of(problem) != HopperStore::OneByOne
    }

    fn source(self, problem: GemmProblem) -> Source {
        HopperKernel::of(problem, self).source()
    }

    fn kernel(self, problem: GemmProblem) -> String {
        HopperKernel { tile: self, ..HopperKernel::of(problem, self) }.name()
    }

    fn parameters(self, problem: GemmProblem, operands: GemmOperands, epilogue: Epilogue) -> Result<HopperParameters> {
        let GemmProblem { element, output, features, tokens, reduction, .. } = problem;
        let variant = HopperKernel::of(problem, self);
        let (rows, depth) = problem.padded();
        let (x_row, x_rows) = (problem.x_row_by_tma(), variant.x_rows(problem, self));
        let HopperTile { features: tile_features, tokens: tile_tokens, cluster, .. } = self;
        let (bytes, atom, step) = (element.bytes(), variant.k_atom(), variant.k_step());
        // The rows of X that the first CTA of a cluster loads: FIRST_PART in the kernel.
        let first_part = if cluster == 1 { x_rows } else { (tile_tokens / 2).next_multiple_of(8) };
        let x = |rows: u32| match problem.x {
            XOrder::TokensFirst => TensorMap::new(operands.x, bytes, (tokens, x_row), (rows, atom), Swizzle::Bytes128),
            XOrder::ReductionFirst => {
                TensorMap::new(operands.x, bytes, (reduction, x_row), (atom, PIECE_TOKENS), Swizzle::Bytes128)
            }
        };
        let x_first = x(first_part)?;
        let chunk = variant.chunk();
        Ok(HopperParameters {
            weight: TensorMap::new(
                operands.weight.values,
                bytes,
                (rows, depth / 2),
                (tile_features, step / 2),
                if self.atoms == 2 { Swizzle::Bytes128 } else { Swizzle::Bytes64 },
            )?,
            x: [x_first, if cluster == 1 { x_first } else { x(tile_tokens - first_part)? }],
            out: match variant.store {
                HopperStore::Tiles => {
                    let tile = (chunk, 64);
                    TensorMap::of_results(operands.out, output, (tokens, features), tile, Swizzle::Bytes128)?
                }
                HopperStore::MnMajor => {
                    let swizzle = match chunk {
                        16 => Swizzle::Bytes32,
                        32 => Swizzle::Bytes64,
                        _ => Swizzle::Bytes128,
                    };
                    TensorMap::of_results(operands.out, output, (features, tokens), (64, chunk), swizzle)?
                }
                HopperStore::OneByOne => TensorMap::NONE,
            },
            meta: operands.weight.meta,
            to: RawOutput::of(problem, operands.out, epilogue),
            rows: rows as u32,
            tokens: tokens as u32,
            atoms: (depth / atom as usize) as u32,
            steps: depth.div_ceil(step as usize) as u32,
            sharing: cluster,
            parts: self.parts(),
            x_rows,
            last_token: last_token(problem, x_rows),
            rasterization: self.rasterization(problem),
            features: features as u32,
        })
    }
}

/// Returns the last token at which a tile may start, so that the last of several tiles is full: one that is not slows
/// the others down, too (docs/explanation/kernels/cuda-gemm-tiled.md). A tile whose results are added to the output has
/// its own tokens alone, and boxes of an MN-major X start at multiples of their size.
fn last_token(problem: GemmProblem, x_rows: u32) -> u32 {
    let overlaps = !problem.accumulate && problem.x == XOrder::TokensFirst;
    if overlaps { (problem.tokens as u32).saturating_sub(x_rows) } else { u32::MAX }
}
