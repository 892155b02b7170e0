//! Planned GEMMs: the kernel's parameters and its launch.

use super::{Sm90Kernel, Sm90Store, Sm90Tile, WARPGROUPS, tile::PIECE_TOKENS};
use crate::{
    Device, DevicePtr, Result, Stream, TileScheduler,
    device::{Kernel, Launch},
    problem::{GemmProblem, XOrder},
    raw::gemm::{
        Epilogue, GemmOperands, RawOutput,
        panels::Panels,
        tensor_map::{Swizzle, TensorMap},
    },
};

/// Threads of a CTA: the consumer warpgroups and the producer's.
const THREADS: u32 = (WARPGROUPS + 1) * 128;

/// A planned GEMM: its kernel and its launch configuration.
#[derive(Debug, Clone)]
pub(in crate::raw::gemm) struct Sm90Plan {
    problem: GemmProblem,
    tile: Sm90Tile,
    /// Rows of X that a tile loads.
    x_rows: u32,
    variant: Sm90Kernel,
    kernel: Kernel,
    launch: Launch,
    panels: Panels,
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
struct Sm90Parameters {
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
    panels: Panels,
    features: u32,
}

/// Features of a panel: W's values and metadata of the panel, and the rows of X that concurrent CTAs read, stay in L2.
const PANEL_FEATURES: u32 = 4096;

impl Sm90Tile {
    /// Returns the tiles of a problem. A tile is that of a whole cluster.
    fn panels(self, problem: GemmProblem) -> Panels {
        let x_rows = Sm90Kernel::of(problem, self).x_rows(problem, self);
        Panels::new(problem, (self.features * self.cluster, x_rows), PANEL_FEATURES)
    }

    /// Returns the launch configuration for a problem, with the grid of the scheduler that assigns more CTAs.
    pub(in crate::raw::gemm) fn launch_by_hardware(self, problem: GemmProblem) -> Launch {
        self.launch(problem, self.panels(problem).tiles())
    }

    /// Returns the launch configuration for a problem on a device with so many SMs. A cluster with split-K computes one
    /// tile; any other computes several.
    pub(in crate::raw::gemm) fn launch_of(self, problem: GemmProblem, multiprocessors: u32) -> Launch {
        let tiles = self.panels(problem).tiles();
        let resident = (multiprocessors / (self.cluster * self.parts())).max(1);
        self.launch(problem, if self.parts() > 1 { tiles } else { resident.min(tiles) })
    }

    fn launch(self, problem: GemmProblem, clusters: u32) -> Launch {
        let variant = Sm90Kernel::of(problem, self);
        let (shared, cluster) = (variant.shared_bytes(variant.chunk()), self.cluster * self.parts());
        Launch { grid: (clusters.saturating_mul(cluster), 1), block: THREADS, shared, cluster }
    }
}

impl Sm90Plan {
    pub(in crate::raw::gemm) fn new(
        device: &Device,
        problem: GemmProblem,
        tile: Sm90Tile,
        launch: Launch,
    ) -> Result<Self> {
        let variant = Sm90Kernel::of(problem, tile);
        let kernel = device.kernel(&variant.source(), "gemm")?;
        kernel.allow_shared()?;
        let (x_rows, panels) = (variant.x_rows(problem, tile), tile.panels(problem));
        Ok(Self { problem, tile, x_rows, variant, kernel, launch, panels })
    }

    /// Returns whether TMA stores results, which requires an output aligned to 16 bytes.
    pub(in crate::raw::gemm) fn stores_by_tma(&self) -> bool {
        self.variant.store != Sm90Store::OneByOne
    }

    /// Returns the last token at which a tile may start, so that the last of several tiles is full: one that is not slows the others down, too
    /// (docs/explanation/kernels/cuda-gemm-tiled.md). A tile whose results are added to the output has its own tokens alone, and boxes of X across start at multiples of
    /// their size.
    fn last_token(&self) -> u32 {
        let overlaps = !self.problem.accumulate && self.problem.x == XOrder::TokensFirst;
        if overlaps { (self.problem.tokens as u32).saturating_sub(self.x_rows) } else { u32::MAX }
    }

    pub(in crate::raw::gemm) fn kernel(&self) -> String {
        Sm90Kernel { tile: self.tile, ..self.variant }.name()
    }

    /// # Safety
    /// That of [`crate::raw::gemm::Gemm::run`].
    pub(in crate::raw::gemm) unsafe fn run(
        &self,
        stream: Stream,
        operands: GemmOperands,
        epilogue: Epilogue,
    ) -> Result<()> {
        let GemmProblem { element, output, features, tokens, reduction, .. } = self.problem;
        let (rows, depth) = self.problem.padded();
        let x_row = self.problem.x_row_by_tma();
        let Sm90Tile { features: tile_features, tokens: tile_tokens, cluster, .. } = self.tile;
        let (bytes, atom, step) = (element.bytes(), self.variant.k_atom(), self.variant.k_step());
        // The rows of X that the first CTA of a cluster loads: FIRST_PART in the kernel.
        let first_part = if cluster == 1 { self.x_rows } else { (tile_tokens / 2).next_multiple_of(8) };
        let x = |rows: u32| match self.problem.x {
            XOrder::TokensFirst => TensorMap::new(operands.x, bytes, (tokens, x_row), (rows, atom), Swizzle::Bytes128),
            XOrder::ReductionFirst => {
                TensorMap::new(operands.x, bytes, (reduction, x_row), (atom, PIECE_TOKENS), Swizzle::Bytes128)
            }
        };
        let x_first = x(first_part)?;
        let parameters = Sm90Parameters {
            weight: TensorMap::new(
                operands.weight.values,
                bytes,
                (rows, depth / 2),
                (tile_features, step / 2),
                if self.tile.atoms == 2 { Swizzle::Bytes128 } else { Swizzle::Bytes64 },
            )?,
            x: [x_first, if cluster == 1 { x_first } else { x(tile_tokens - first_part)? }],
            out: match self.variant.store {
                Sm90Store::Tiles => {
                    let tile = (self.variant.chunk(), 64);
                    TensorMap::of_results(operands.out, output, (tokens, features), tile, Swizzle::Bytes128)?
                }
                Sm90Store::Across => {
                    let chunk = self.variant.chunk();
                    let swizzle = match chunk {
                        16 => Swizzle::Bytes32,
                        32 => Swizzle::Bytes64,
                        _ => Swizzle::Bytes128,
                    };
                    TensorMap::of_results(operands.out, output, (features, tokens), (64, chunk), swizzle)?
                }
                Sm90Store::OneByOne => TensorMap::NONE,
            },
            meta: operands.weight.meta,
            to: RawOutput::of(self.problem, operands.out, epilogue),
            rows: rows as u32,
            tokens: tokens as u32,
            atoms: (depth / atom as usize) as u32,
            steps: depth.div_ceil(step as usize) as u32,
            sharing: cluster,
            parts: self.tile.parts(),
            x_rows: self.x_rows,
            last_token: self.last_token(),
            panels: self.panels,
            features: features as u32,
        };
        let launch = match self.kernel.device().tile_scheduler() {
            TileScheduler::Persistent => self.launch,
            TileScheduler::Hardware => self.tile.launch_by_hardware(self.problem),
        };
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.kernel.launch(stream, launch, &parameters) }
    }
}
