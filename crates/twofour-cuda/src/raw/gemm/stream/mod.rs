//! GEMM of small batches by `wgmma.sp` on sm_90a, by clusters with split-K. It reads every byte of the weight once and is bound by HBM bandwidth.

use serde::{Deserialize, Serialize};

use crate::{
    DataType as Element, Device, Result, Stream,
    device::{Kernel, Launch},
    problem::{GemmProblem, XOrder},
    raw::{
        gemm::{
            Epilogue, GemmOperands, RawOutput,
            sm90::{SHARED_BYTES, shared_bytes_of_each},
            tensor_map::{Swizzle, TensorMap},
            wgmma::{self, Weights},
        },
        headers,
    },
    source::{File, Source, Support},
};

/// The tile of the result that a cluster computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StreamTile {
    /// Rows of W, a multiple of 16.
    pub features: u32,
    /// Most rows of X: 8, 16, 32, 64, 96 or 128.
    pub tokens: u32,
}

/// A cluster's tile, and its CTAs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct StreamShape {
    /// Rows of W and of X.
    pub tile: StreamTile,
    /// CTAs of the cluster: 1 to 8. They share the rows of W, and each accumulates a part of the columns.
    pub split: u32,
}

/// The shared memory and the rows of a CTA's step.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step {
    /// Bytes of a stage.
    pub(super) bytes: u32,
    /// The largest prefetch distance, in steps.
    pub(super) most_ahead: u32,
    /// Rows of W that a warpgroup computes, in units of 64: 1 or 2.
    pub(super) height: u32,
}

/// Returns the rows of W that kernels have. 224 rows of 8-bit elements are missing because their metadata is wider than a TMA box.
fn features(element: Element) -> &'static [u32] {
    if element.bytes() == 1 { &[64, 128] } else { &[64, 96, 128, 224, 256] }
}

/// The rows of X that kernels have.
const TOKENS: [u32; 6] = [8, 16, 32, 64, 96, 128];

/// The fewest tokens of a tile where there are several tiles.
const LEAST_OF_SEVERAL: u32 = 64;

/// Most tokens: beyond them the tiles of `sm90` are always as good.
const MOST_TOKENS: usize = 2048;

/// Most CTAs of a cluster.
const MOST_BLOCKS: u32 = 8;

/// Most clusters: the rows of a grid.
const MOST_CLUSTERS: u32 = 65_535;

/// The fewest stages of a tile of 128 rows that reserves room for the accumulators of a cluster of seven.
const ENOUGH_STAGES: u32 = 6;

/// Bytes of W's rows in a step.
const ROW: u32 = 128;

/// Returns the `k` extent of a step, in elements.
fn k_step(element: Element) -> u32 {
    2 * ROW / element.bytes() as u32
}

/// Bytes to align the start of shared memory, and of the barrier that counts received accumulators.
const OTHER_BYTES: u32 = 1024 + 8;

impl StreamTile {
    /// Returns the tile's name.
    pub(super) fn name(self) -> String {
        format!("{}x{}", self.features, self.tokens)
    }

    /// Returns the clusters for `features` rows of W.
    fn clusters(self, features: usize) -> u32 {
        features.div_ceil(self.features as usize) as u32
    }

    /// Returns the tiles for `tokens` tokens.
    fn tiles(self, tokens: usize) -> u32 {
        tokens.div_ceil(self.tokens as usize) as u32
    }

    /// Returns the rows of X of each tile.
    pub(super) fn x_rows(self, tokens: usize) -> u32 {
        tokens.div_ceil(self.tiles(tokens) as usize).next_multiple_of(8) as u32
    }

    /// Returns the consumer warpgroups.
    fn groups(self, step: Step) -> u32 {
        self.features.div_ceil(64 * step.height)
    }

    /// Returns whether producer warps release registers to consumers (`setmaxnreg`): where there are several consumer warpgroups with large accumulators.
    fn gives(self, step: Step) -> bool {
        step.height * self.tokens >= 128 && self.groups(step) > 1
    }

    /// Returns the registers of a consumer thread where producers release some: those that a launch allocates for all threads of the CTA, less 24 for
    /// each producer thread.
    fn taken(self, step: Step) -> u32 {
        let groups = self.groups(step);
        let launched = 65_536 / self.threads(step) / 8 * 8;
        ((launched * (groups + 1) - 24) / groups / 8 * 8).min(240)
    }

    /// Returns the threads of a CTA: the consumer warpgroups, and one more for the producer warps.
    fn threads(self, step: Step) -> u32 {
        (self.groups(step) + 1) * 128
    }

    /// Returns the bytes of the accumulators that one of `split` CTAs receives from the others.
    fn sums_bytes(self, split: u32) -> u32 {
        (self.features / 16).div_ceil(split) * (split - 1) * 16 * self.tokens * 4
    }

    /// Returns the CTAs resident on an SM: two where tiles are small in both directions.
    fn blocks(self) -> u32 {
        if self.features > 128 || self.tokens >= 64 { 1 } else { 2 }
    }

    /// Returns the bytes for stages and received accumulators.
    fn room(self) -> u32 {
        shared_bytes_of_each(self.blocks()) - OTHER_BYTES
    }

    /// Returns the pipeline stages: as many as fit beside the accumulators that a cluster receives. Tiles of 64 rows reserve room for clusters of
    /// two, and tiles of 128 rows for clusters of seven where enough stages are left; measurements of layers showed these clusters to be the fastest.
    fn stages(self, step: Step) -> u32 {
        let beside = |split| ((self.room() - self.sums_bytes(split)) / (step.bytes + 16)).min(step.most_ahead);
        match self.features {
            64 => beside(2),
            128 if beside(7) >= ENOUGH_STAGES => beside(7),
            _ => beside(1),
        }
    }

    /// Returns the bytes left for received accumulators beside the stages, at most as many as a cluster needs.
    fn room_for_sums(self, step: Step) -> u32 {
        let left = self.room() - self.stages(step) * (step.bytes + 16);
        (1..=MOST_BLOCKS).map(|split| self.sums_bytes(split)).filter(|bytes| *bytes <= left).max().unwrap_or(0)
    }

    fn shared_bytes(self, step: Step) -> u32 {
        OTHER_BYTES + self.stages(step) * (step.bytes + 16) + self.room_for_sums(step)
    }

    /// Returns the sources' preprocessor definitions.
    pub(super) fn definitions(self, step: Step) -> String {
        let StreamTile { features, tokens } = self;
        let (stages, shared, threads) = (self.stages(step), self.shared_bytes(step), self.threads(step));
        let (sums, gives, blocks) = (self.room_for_sums(step), u32::from(self.gives(step)), self.blocks());
        let taken = self.taken(step);
        format!(
            "#define FEATURES {features}\n#define TOKENS {tokens}\n#define HEIGHT {}\n#define THREADS {threads}\n\
             #define GIVES {gives}\n#define TAKEN {taken}\n#define BLOCKS {blocks}\n#define STAGES {stages}\n#define SUMS_BYTES {sums}\n#define SHARED_BYTES_ASKED {shared}\n",
            step.height
        )
    }
}

impl StreamShape {
    /// Returns the shapes of some tiles. Their rows of X are the fewest that hold all tokens; where that is 64 or more, or none holds them all, all
    /// such widths as several tiles. The list is empty where there are too many tokens. Every CTA has a step at least, and room for the accumulators
    /// that others send.
    pub(super) fn of(
        tiles: &[u32],
        (features, tokens): (usize, usize),
        steps: u32,
        step: impl Fn(StreamTile) -> Step,
    ) -> Vec<StreamShape> {
        if tokens > MOST_TOKENS {
            return Vec::new();
        }
        let least = TOKENS.into_iter().find(|most| tokens <= *most as usize);
        let widths = TOKENS.into_iter().filter(|width| {
            Some(*width) == least || *width >= LEAST_OF_SEVERAL && least.is_none_or(|least| *width <= least)
        });
        let tiles =
            widths.flat_map(|tokens| tiles.iter().map(move |features| StreamTile { features: *features, tokens }));
        let tiles = tiles.filter(|tile| tile.clusters(features) * tile.tiles(tokens) <= MOST_CLUSTERS);
        let all = tiles.flat_map(|tile| (1..=steps.min(MOST_BLOCKS)).map(move |split| StreamShape { tile, split }));
        all.filter(|shape| shape.tile.sums_bytes(shape.split) <= shape.tile.room_for_sums(step(shape.tile))).collect()
    }

    /// Returns the shapes that compute a problem.
    pub fn all(problem: GemmProblem) -> Vec<StreamShape> {
        let GemmProblem { element, reduction, .. } = problem;
        let steps = reduction.div_ceil(k_step(element) as usize) as u32;
        let of = (problem.features, problem.tokens);
        StreamShape::of(features(element), of, steps, |tile| StreamKernel { element, tile }.step())
    }

    /// Returns the shape that best balances `features` rows over the SMs, or `None` if all leave too many SMs idle.
    pub(super) fn best(all: &[StreamShape], features: usize, multiprocessors: u32) -> Option<StreamShape> {
        // The smallest clusters whose CTAs occupy most of the device, and the fewest CTAs that read X.
        let enough = all.iter().filter(|shape| shape.blocks(features) * 10 >= multiprocessors * 7);
        enough.min_by_key(|shape| (shape.split, std::cmp::Reverse(shape.tile.features))).copied()
    }

    /// Returns the CTAs of all clusters.
    pub(super) fn blocks(self, features: usize) -> u32 {
        self.tile.clusters(features) * self.split
    }

    /// Returns the shape's name.
    pub(super) fn name(self) -> String {
        format!("{}s{}", self.tile.name(), self.split)
    }

    /// Returns the launch configuration.
    pub(super) fn launch(self, (features, tokens): (usize, usize), step: Step) -> Launch {
        let StreamShape { tile, split } = self;
        let (block, shared) = (tile.threads(step), tile.shared_bytes(step));
        assert!(shared <= SHARED_BYTES, "{} needs {shared} bytes of shared memory", self.name());
        Launch { grid: (split, tile.clusters(features) * tile.tiles(tokens)), block, shared, cluster: split }
    }
}

/// A kernel: a data type, and rows of W and of X.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct StreamKernel {
    /// Data type of W and X.
    pub element: Element,
    /// Rows of W and of X.
    pub tile: StreamTile,
}

impl StreamKernel {
    /// Returns every kernel that a problem can need.
    pub fn all() -> Vec<StreamKernel> {
        let of =
            |element, features| TOKENS.map(|tokens| StreamKernel { element, tile: StreamTile { features, tokens } });
        let of = |element| features(element).iter().flat_map(move |features| of(element, *features));
        super::TYPES.iter().flat_map(|(element, _)| of(*element)).collect()
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> String {
        format!("{}-{}", self.element, self.tile.name())
    }

    /// Returns the bytes of an atom of metadata.
    fn atom_bytes(&self) -> u32 {
        64 * (k_step(self.element) / 2) / 8
    }

    fn step(&self) -> Step {
        let StreamTile { features, tokens } = self.tile;
        let meta = features / 16 * 2 * (self.atom_bytes() / 4);
        Step { bytes: features * ROW + 2 * tokens * ROW + meta, most_ahead: 8, height: 1 }
    }

    /// Returns the source's preprocessor definitions.
    pub(crate) fn definitions(&self) -> String {
        format!("#define ELEMENT {}\n{}", self.element.definition(), self.tile.definitions(self.step()))
    }

    pub(super) fn source(&self) -> Source {
        let elements = (self.element, self.element);
        let products = wgmma::products(elements, self.tile.tokens, XOrder::TokensFirst, Weights::Shared);
        let kernel = File::new("gemm/stream/kernel.cu", include_str!("kernel.cu"));
        Source::new(format!("stream-sm90-{}", self.name()), Support::Only((9, 0))).define(self.definitions()).with([
            headers::COMMON,
            headers::HOPPER,
            products,
            headers::EPILOGUE,
            headers::STREAM,
            kernel,
        ])
    }
}

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
    sixteens_each: Share,
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
        shape: StreamShape,
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
            sixteens_each: Share::of(shape.tile.features / 16, split),
        }
    }
}

/// A planned GEMM: its kernel and its launch configuration.
#[derive(Debug, Clone)]
pub(super) struct StreamPlan {
    problem: GemmProblem,
    variant: StreamKernel,
    shape: StreamShape,
    kernel: Kernel,
    launch: Launch,
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
struct StreamParameters {
    weight: TensorMap,
    x: TensorMap,
    meta: TensorMap,
    problem: RawProblem,
}

impl StreamPlan {
    /// Plans a validated problem with one of its shapes.
    pub(super) fn new(device: &Device, problem: GemmProblem, shape: StreamShape) -> Result<Self> {
        let variant = StreamKernel { element: problem.element, tile: shape.tile };
        let kernel = device.kernel(&variant.source(), "stream")?;
        let launch = shape.launch((problem.features, problem.tokens), variant.step());
        kernel.allow_shared(launch.shared)?;
        Ok(Self { problem, variant, shape, kernel, launch })
    }

    pub(super) fn kernel(&self) -> String {
        format!("{}-{}", self.variant.element, self.shape.name())
    }

    /// # Safety
    /// That of [`super::Gemm::run`].
    pub(super) unsafe fn run(&self, stream: Stream, operands: GemmOperands, epilogue: Epilogue) -> Result<()> {
        let GemmProblem { element, output, features, tokens, .. } = self.problem;
        let (rows, columns) = self.problem.padded();
        let StreamTile { features: tile_features, .. } = self.shape.tile;
        let x_rows = self.shape.tile.x_rows(tokens);
        let (bytes, step) = (element.bytes(), k_step(element));
        let atom = self.variant.atom_bytes();
        // Metadata is in half steps, each for all features. Its units are eight bytes, because a TMA box is 256 units wide at most.
        let meta_rows = columns.div_ceil(step as usize / 2);
        let meta_cols = rows / 64 * atom as usize / 8;
        let parameters = StreamParameters {
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
                (tokens, self.problem.x_row_by_tma()),
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
                RawOutput::of(self.problem, operands.out, epilogue),
                output,
                (features, tokens),
                columns.div_ceil(step as usize),
                self.shape,
            ),
        };
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_cluster_has_room_for_buffers_and_for_the_sums_that_others_send() {
        for tokens in TOKENS {
            for element in [Element::BF16, Element::E4M3, Element::I8] {
                let shapes = StreamShape::all(GemmProblem::plain(element, Element::F32, 4096, tokens as usize, 14_336));
                for StreamShape { tile, split } in &shapes {
                    let step = StreamKernel { element, tile: *tile }.step();
                    assert!(tile.stages(step) >= 3 && tile.shared_bytes(step) <= SHARED_BYTES, "{tile:?}");
                    assert!(tile.sums_bytes(*split) <= tile.room_for_sums(step), "{tile:?} {split}");
                    assert!(tile.blocks() == 1 || 2 * tile.shared_bytes(step) <= SHARED_BYTES, "{tile:?}");
                }
                // The fastest clusters of small layers, as measured.
                for split in [1, 2] {
                    assert!(
                        shapes.contains(&StreamShape { tile: StreamTile { features: 64, tokens }, split }),
                        "{tokens} {split}"
                    );
                }
            }
        }
    }

    #[test]
    fn shares_of_a_cluster_are_even_and_leave_nothing_out() {
        for all in [1, 4, 6, 7, 16, 57] {
            for blocks in 1..=MOST_BLOCKS {
                let Share { each, more } = Share::of(all, blocks);
                assert!(each * blocks + more == all && more < blocks, "{all} {blocks}");
                // The CTA with the most rows has room for the accumulators that all others send.
                let most = each + u32::from(more > 0);
                let room = StreamTile { features: all * 16, tokens: 8 }.sums_bytes(blocks);
                assert_eq!(room, most * (blocks - 1) * 16 * 8 * 4, "{all} {blocks}");
            }
        }
    }

    #[test]
    fn more_clusters_than_a_grid_has_rows_are_not_asked_for() {
        let shapes = |features| StreamShape::all(GemmProblem::plain(Element::BF16, Element::BF16, features, 8, 4096));
        assert!(shapes(1 << 22).iter().all(|shape| shape.tile.features > 64));
        assert!(shapes(65_535 * 64).iter().any(|shape| shape.tile.features == 64));
        assert!(shapes(1 << 28).is_empty());
    }
}
