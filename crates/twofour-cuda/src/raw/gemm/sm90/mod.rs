//! GEMM by `wgmma.sp` on sm_90a: tiles, kernels and launch parameters.

mod source;

use serde::{Deserialize, Serialize};

use crate::{
    Architecture, DataType as Element, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    problem::{GemmProblem, Order, XOrder},
    raw::gemm::{
        Epilogue, GemmOperands, RawOutput,
        panels::Panels,
        supported::{elements, elements_name},
        tensor_map::{Swizzle, TensorMap},
        tile_k,
    },
};

/// A tile of the result, and the CTAs that compute it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Sm90Tile {
    /// Rows of W: 128 or 256.
    pub features: u32,
    /// Rows of X: a multiple of 8, of 16 for i8, at most 256.
    pub tokens: u32,
    /// Pipeline stages between TMA and the tensor cores.
    pub stages: u32,
    /// Columns of X in a stage, in units of 128 bytes: 1 or 2.
    pub atoms: u32,
    /// CTAs of a cluster that share rows of X by multicast: 1 or 2.
    pub cluster: u32,
    /// CTAs of a cluster that divide the reduction (split-K); `None` for a kernel without split-K.
    pub split: Option<u32>,
}

/// Tokens of a TMA box where X is `[reduction, tokens]`, or where results are `[features, tokens]`.
const PIECE_TOKENS: u32 = 64;

const fn tile(features: u32, tokens: u32, stages: u32, cluster: u32) -> Sm90Tile {
    Sm90Tile { features, tokens, stages, atoms: 1, cluster, split: None }
}

/// Tiles for 16-bit elements and 8-bit floats: persistent kernels whose accumulators fill the registers.
const FLOAT_TILES: [Sm90Tile; 5] =
    [tile(256, 200, 4, 2), tile(256, 192, 4, 2), tile(128, 256, 5, 2), tile(128, 256, 5, 1), tile(128, 200, 5, 2)];

/// Tiles for i8, whose instructions take multiples of 16 tokens.
const I8_TILES: [Sm90Tile; 4] =
    [tile(256, 192, 4, 2), tile(128, 256, 5, 2), tile(128, 256, 5, 1), tile(128, 208, 5, 2)];

/// Rows of W and of X of the tiles with split-K, for every element type.
const SPLIT_TILES: [(u32, u32); 12] = [
    (256, 192),
    (256, 160),
    (256, 144),
    (256, 128),
    (256, 96),
    (256, 64),
    (128, 208),
    (128, 192),
    (128, 160),
    (128, 128),
    (128, 96),
    (128, 64),
];

/// Rows of W and of X, and whether the kernel has split-K, of the only tiles whose W and X have different 8-bit float types or whose results TMA
/// accumulates: one for many tokens and one for small batches.
const RARE_TILES: [(u32, u32, bool); 2] = [(256, 192, false), (128, 128, true)];

/// Most CTAs of a cluster.
const MOST_CTAS: u32 = 8;

/// Split-K factors.
const SPLITS: [u32; 6] = [1, 2, 3, 4, 6, 8];

/// Shared memory that a CTA can have on sm_90.
pub(super) const SHARED_BYTES: u32 = Architecture::SM_90.shared_bytes();

/// Returns the shared memory that each of `blocks` CTAs resident on an SM can have. The SM reserves 1024 bytes for each; with one CTA they are
/// already subtracted from [`SHARED_BYTES`].
pub(super) const fn shared_bytes_of_each(blocks: u32) -> u32 {
    (SHARED_BYTES + 1024) / blocks - 1024
}

/// Consumer warpgroups.
const WARPGROUPS: u32 = 2;

/// Bytes reserved to align the start of shared memory.
const ALIGNMENT: u32 = 1024;

/// Bytes of the barrier that counts the accumulators received from other CTAs.
const RECEIVED_BARRIER: u32 = 8;

/// Bytes of a stage: values of W, X, metadata and two barriers.
const fn stage_bytes(element: Element, features: u32, tokens: u32, atoms: u32) -> u32 {
    atoms * (features * 64 + tokens * 128 + features * (128 / element.bytes() as u32) / 8) + 16
}

/// Bytes of a warpgroup's staging buffers for results stored by TMA.
const fn staging_bytes(chunk: u32) -> u32 {
    3 * chunk * 128
}

/// Bytes of a warpgroup's accumulators that go through shared memory of their own, where TMA does not store results.
const fn accumulator_bytes(chunk: u32) -> u32 {
    chunk * 64 * 4
}

/// Threads of a CTA: the consumer warpgroups and the producer's.
const THREADS: u32 = (WARPGROUPS + 1) * 128;

impl Sm90Tile {
    /// Returns the tiles of the persistent kernels for an element type.
    fn persistent(element: Element) -> &'static [Sm90Tile] {
        if element == Element::I8 { &I8_TILES } else { &FLOAT_TILES }
    }

    /// Returns the tiles with split-K for an element type, with every cluster.
    fn split_all(element: Element) -> impl Iterator<Item = Sm90Tile> {
        let clusters = [1, 2].into_iter().flat_map(|cluster| SPLITS.map(|split| (cluster, split)));
        let clusters = clusters.filter(|(cluster, split)| cluster * split <= MOST_CTAS);
        SPLIT_TILES.into_iter().flat_map(move |(features, tokens)| {
            // Shared memory left for stages beside the smallest chunk of results.
            let room =
                SHARED_BYTES - ALIGNMENT - RECEIVED_BARRIER - WARPGROUPS * (staging_bytes(16) + accumulator_bytes(16));
            // Two atoms of columns to a stage where three such stages fit.
            let stages = |atoms| room / stage_bytes(element, features, tokens, atoms);
            let (atoms, stages) = if stages(2) >= 3 { (2, stages(2)) } else { (1, stages(1)) };
            let split =
                move |(cluster, split)| Sm90Tile { features, tokens, stages, atoms, cluster, split: Some(split) };
            clusters.clone().map(split)
        })
    }

    /// Returns the CTAs that divide the reduction.
    fn parts(self) -> u32 {
        self.split.unwrap_or(1)
    }

    /// Returns the tiles that can compute a problem.
    pub fn all(problem: GemmProblem) -> Vec<Sm90Tile> {
        let store = Sm90Store::of(problem);
        let atoms = Sm90Kernel::atoms(problem);
        let fits = |tile: &Sm90Tile| {
            (problem.x == XOrder::TokensFirst && store != Sm90Store::Across || tile.tokens.is_multiple_of(PIECE_TOKENS))
                && tile.parts() <= atoms.div_ceil(tile.atoms)
                && Sm90Kernel::of(problem, *tile).has_room_for(tile.parts())
        };
        if problem.is_mixed() || Sm90Kernel::adds_by_tma(problem) {
            let all = Sm90Tile::persistent(problem.element).iter().copied().chain(Sm90Tile::split_all(problem.element));
            return all.filter(|tile| RARE_TILES.contains(&tile.size())).filter(fits).collect();
        }
        let mut persistent: Vec<Sm90Tile> =
            Sm90Tile::persistent(problem.element).iter().copied().filter(fits).collect();
        // Storing elements one at a time is slow with any tile, so there are only one tile for many tokens and one for small batches.
        let split = Sm90Tile::split_all(problem.element).filter(fits);
        if store == Sm90Store::OneByOne {
            persistent.truncate(1);
            return persistent
                .into_iter()
                .chain(split.filter(|tile| (tile.features, tile.tokens) == (128, 128)))
                .collect();
        }
        persistent.into_iter().chain(split).collect()
    }

    /// Returns the rows of W and of X, and whether the kernel has split-K.
    fn size(self) -> (u32, u32, bool) {
        (self.features, self.tokens, self.split.is_some())
    }

    fn name(self) -> String {
        let Sm90Tile { features, tokens, stages, cluster, split, .. } = self;
        let split = split.map_or(String::new(), |split| format!("s{split}"));
        format!("{features}x{tokens}x{stages}c{cluster}{split}")
    }
}

/// A kernel: a tile for data types, an order of the result, and with or without an epilogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90Kernel {
    /// Data type of W.
    pub element: Element,
    /// Data type of X.
    pub x_element: Element,
    /// Data type of the result.
    pub output: Element,
    /// The tile. With split-K it is that of one CTA, and the kernel serves any cluster.
    pub tile: Sm90Tile,
    /// Which of X's axes is contiguous.
    pub x: XOrder,
    /// How results are stored.
    pub store: Sm90Store,
    /// Whether the kernel has an epilogue: scales, bias and activation.
    pub epilogue: bool,
    /// Whether TMA adds results to the output (`cp.reduce`). Kernels that store one element at a time read this from the launch's parameters instead.
    pub accumulate: bool,
}

/// How results are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sm90Store {
    /// Through shared memory and TMA: 16-bit results, `[tokens, features]`, with a multiple of eight features.
    Tiles,
    /// Through shared memory and TMA: 16-bit results, `[features, tokens]`, with a multiple of eight tokens and without an epilogue.
    Across,
    /// One element at a time, in any order.
    OneByOne,
}

impl Sm90Store {
    /// Returns how a problem's results are stored. TMA requires rows that are multiples of 16 bytes. It accumulates only results of 16-bit elements
    /// without an epilogue, because other cases are rare.
    fn of(problem: GemmProblem) -> Sm90Store {
        let GemmProblem { element, output, order, features, tokens, epilogue, accumulate, .. } = problem;
        if accumulate && (element.bytes() != 2 || epilogue) {
            return Sm90Store::OneByOne;
        }
        let across = output.bytes() == 2 && !epilogue && tokens.is_multiple_of(8) && !problem.is_mixed();
        match order {
            Order::TokensFirst if output.bytes() == 2 && features.is_multiple_of(8) => Sm90Store::Tiles,
            Order::FeaturesFirst if across => Sm90Store::Across,
            _ => Sm90Store::OneByOne,
        }
    }
}

impl Sm90Kernel {
    /// Returns every kernel that a problem can need.
    pub fn all() -> Vec<Sm90Kernel> {
        let mut all = Vec::new();
        for (element, x_element) in elements() {
            let outputs = super::TYPES.iter().filter(|(of, _)| *of == element).flat_map(|(_, outputs)| *outputs);
            for &output in outputs {
                for x in [XOrder::TokensFirst, XOrder::ReductionFirst] {
                    for (order, tokens) in
                        [(Order::TokensFirst, 8), (Order::FeaturesFirst, 8), (Order::FeaturesFirst, 1)]
                    {
                        for (epilogue, accumulate) in [(false, false), (true, false), (false, true)] {
                            let (features, reduction) = (64, tile_k(element).columns());
                            let plain = GemmProblem::plain(element, output, features, tokens, reduction);
                            let problem = GemmProblem { x_element, x, order, epilogue, accumulate, ..plain };
                            let is_computed = problem.computed(Architecture::SM_90) == problem;
                            if problem.expect_known().is_ok() && is_computed {
                                all.extend(
                                    Sm90Tile::all(problem).into_iter().map(|tile| Sm90Kernel::of(problem, tile)),
                                );
                            }
                        }
                    }
                }
            }
        }
        all.sort_by_key(Sm90Kernel::name);
        all.dedup();
        all
    }

    /// Returns the kernel of a tile for a problem.
    fn of(problem: GemmProblem, tile: Sm90Tile) -> Sm90Kernel {
        let GemmProblem { element, x_element, output, x, epilogue, .. } = problem;
        let tile = if tile.split.is_some() { Sm90Tile { cluster: 1, split: Some(1), ..tile } } else { tile };
        let (store, accumulate) = (Sm90Store::of(problem), Sm90Kernel::adds_by_tma(problem));
        Sm90Kernel { element, x_element, output, tile, x, store, epilogue, accumulate }
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> String {
        let store = match self.store {
            Sm90Store::Tiles => "",
            Sm90Store::Across => "-across",
            Sm90Store::OneByOne => "-one-by-one",
        };
        let x = if self.x == XOrder::ReductionFirst { "-x-across" } else { "" };
        let epilogue = if self.epilogue { "-epilogue" } else { "" };
        let elements = elements_name(self.element, self.x_element);
        let add = if self.accumulate { "-add" } else { "" };
        format!("{elements}-{}-{}{x}{store}{epilogue}{add}", self.output, self.tile.name())
    }

    /// Returns whether TMA adds a problem's results to the output.
    fn adds_by_tma(problem: GemmProblem) -> bool {
        problem.accumulate && Sm90Store::of(problem) != Sm90Store::OneByOne
    }

    /// Returns the `k` extent of an atom, in elements.
    fn k_atom(&self) -> u32 {
        128 / self.element.bytes() as u32
    }

    /// Returns the `k` extent of a step, in elements.
    fn k_step(&self) -> u32 {
        self.tile.atoms * self.k_atom()
    }

    /// Returns the atoms of a problem's reduction.
    fn atoms(problem: GemmProblem) -> u32 {
        let depth = problem.reduction.next_multiple_of(tile_k(problem.element).columns());
        (depth * problem.element.bytes() / 128) as u32
    }

    /// Returns whether the accumulators that a CTA receives fit where the stages are. With `split` CTAs each receives those of its share of the
    /// pieces of 64 features by a chunk of tokens.
    fn has_room_for(&self, split: u32) -> bool {
        let Sm90Tile { features, tokens, stages, atoms, .. } = self.tile;
        let (chunk, blocks) = (self.chunk(), features / 64 / WARPGROUPS);
        let pieces = blocks * tokens / chunk;
        let received = pieces.div_ceil(split) * (split - 1) * WARPGROUPS * chunk * 256;
        received <= stages * atoms * (features * 64 + tokens * 128)
    }

    /// Returns the tokens of a chunk, the unit in which results are stored: a divisor of the tile's tokens, as large as shared memory allows.
    fn chunk(&self) -> u32 {
        // With split-K each CTA stores a share of the chunks, so there should be many.
        let most = if self.tile.split.is_some() { 4 } else { 8 };
        let chunks = (1..=most).rev().map(|eights| 8 * eights);
        // TMA can swizzle rows of 16, 32 or 64 tokens.
        let known = |chunk: u32| self.store != Sm90Store::Across || matches!(chunk, 16 | 32 | 64);
        let fits = |chunk: &u32| {
            known(*chunk) && self.tile.tokens.is_multiple_of(*chunk) && self.shared_bytes(*chunk) <= SHARED_BYTES
        };
        chunks.into_iter().find(fits).unwrap_or(8)
    }

    /// Returns the rows of X that each tile of a problem loads. With split-K and without multicast these are only as many as the problem needs, in
    /// whole chunks where there are several tiles.
    fn x_rows(&self, problem: GemmProblem, tile: Sm90Tile) -> u32 {
        if tile.split.is_none() || tile.cluster != 1 || self.x == XOrder::ReductionFirst {
            return tile.tokens;
        }
        let tiles = problem.tokens.div_ceil(tile.tokens as usize);
        let whole = if tiles == 1 { 8 } else { self.chunk() as usize };
        problem.tokens.div_ceil(tiles).next_multiple_of(whole).min(tile.tokens as usize) as u32
    }

    fn shared_bytes(&self, chunk: u32) -> u32 {
        let Sm90Tile { features, tokens, stages, atoms, split, .. } = self.tile;
        let staging = if self.store == Sm90Store::OneByOne { 0 } else { staging_bytes(chunk) };
        let sums = if self.store == Sm90Store::OneByOne { accumulator_bytes(chunk) } else { 0 };
        let received = if split.is_some() { RECEIVED_BARRIER } else { 0 };
        ALIGNMENT
            + stages * stage_bytes(self.element, features, tokens, atoms)
            + received
            + WARPGROUPS * (staging + sums)
    }

    /// Returns the source's preprocessor definitions.
    pub(crate) fn definitions(&self) -> String {
        let Sm90Tile { features, tokens, stages, atoms, cluster, .. } = self.tile;
        let split_k = u32::from(self.tile.split.is_some());
        let blocks = features / 64 / WARPGROUPS;
        // Registers of the producer warpgroup, and of the consumers. The producer needs at least this many; consumers need more of them where a
        // warpgroup has two 64-row accumulators.
        let (left, taken) = if blocks == 2 { (24, 240) } else { (40, 232) };
        let store = match self.store {
            Sm90Store::Tiles => 0,
            Sm90Store::OneByOne => 1,
            Sm90Store::Across => 2,
        };
        format!(
            "#define ELEMENT {}\n#define OUTPUT {}\n#define BLOCKS {blocks}\n#define TOKENS {tokens}\n#define STAGES {stages}\n\
             #define ATOMS {atoms}\n#define SPLIT_K {split_k}\n#define CLUSTER {cluster}\n#define CHUNK {}\n#define STORE_TILES 0\n#define STORE_ONE_BY_ONE 1\n\
             #define STORE_ACROSS 2\n#define STORE {store}\n#define X_ACROSS {}\n#define EPILOGUE {}\n#define ACCUMULATE {}\n\
             #define REGISTERS_LEFT {left}\n#define REGISTERS_TAKEN {taken}\n#define SHARED_BYTES_ASKED {}\n",
            self.element.definition(),
            self.output.definition(),
            self.chunk(),
            u32::from(self.x == XOrder::ReductionFirst),
            u32::from(self.epilogue),
            u32::from(self.accumulate),
            self.shared_bytes(self.chunk()),
        )
    }
}

/// A planned GEMM: its kernel and its launch configuration.
#[derive(Debug, Clone)]
pub(super) struct Sm90Plan {
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
    panels: Panels,
    features: u32,
}

/// Features of a panel: W's values and metadata of the panel, and the rows of X that concurrent CTAs read, stay in L2.
const PANEL_FEATURES: u32 = 4096;

impl Sm90Plan {
    pub(super) fn new(device: &Device, problem: GemmProblem, tile: Sm90Tile) -> Result<Self> {
        let variant = Sm90Kernel::of(problem, tile);
        let shared = variant.shared_bytes(variant.chunk());
        assert!(shared <= SHARED_BYTES, "{} needs {shared} bytes of shared memory", variant.name());
        let kernel = device.kernel(&variant.source(), "gemm")?;
        kernel.allow_shared(shared)?;
        // A tile of a whole cluster.
        let x_rows = variant.x_rows(problem, tile);
        let panels = Panels::new(problem, (tile.features * tile.cluster, x_rows), PANEL_FEATURES);
        let ctas = tile.cluster * tile.parts();
        // A cluster with split-K computes one tile; any other computes several.
        let clusters =
            if tile.parts() > 1 { panels.tiles() } else { (device.multiprocessors() / ctas).min(panels.tiles()) };
        let launch = Launch { grid: (clusters * ctas, 1), block: THREADS, shared, cluster: ctas };
        Ok(Self { problem, tile, x_rows, variant, kernel, launch, panels })
    }

    /// Returns whether TMA stores results, which requires an output aligned to 16 bytes.
    pub(super) fn stores_by_tma(&self) -> bool {
        self.variant.store != Sm90Store::OneByOne
    }

    pub(super) fn kernel(&self) -> String {
        Sm90Kernel { tile: self.tile, ..self.variant }.name()
    }

    /// # Safety
    /// That of [`super::Gemm::run`].
    pub(super) unsafe fn run(&self, stream: Stream, operands: GemmOperands, epilogue: Epilogue) -> Result<()> {
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
            panels: self.panels,
            features: features as u32,
        };
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }
}
