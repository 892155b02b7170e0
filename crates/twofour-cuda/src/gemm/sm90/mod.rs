//! Products on sm_90a: tiles, and how a launch is made from a problem.

mod source;

use serde::{Deserialize, Serialize};

use crate::{
    Architecture, DataType as Element, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    gemm::{
        Epilogue, GemmOperands, GemmProblem, Order, RawOutput, XOrder,
        panels::Panels,
        problem::{elements, elements_name},
        tile_k,
    },
    tensor_map::{Swizzle, TensorMap},
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
    /// Times 128 bytes of X's rows to a stage: 1 or 2.
    pub atoms: u32,
    /// CTAs of a cluster that share rows of X by multicast: 1 or 2.
    pub cluster: u32,
    /// CTAs of a cluster that divide the reduction; `None` for a kernel without split-K.
    pub split: Option<u32>,
}

/// Tokens of a piece of X where it is [reduction, tokens], and of results where they are [features, tokens].
const PIECE_TOKENS: u32 = 64;

const fn tile(features: u32, tokens: u32, stages: u32, cluster: u32) -> Sm90Tile {
    Sm90Tile { features, tokens, stages, atoms: 1, cluster, split: None }
}

/// For 16-bit elements and 8-bit floats: persistent kernels whose accumulators fill the registers.
const FLOAT_TILES: [Sm90Tile; 5] =
    [tile(256, 200, 4, 2), tile(256, 192, 4, 2), tile(128, 256, 5, 2), tile(128, 256, 5, 1), tile(128, 200, 5, 2)];

/// For i8, whose instructions take multiples of 16 tokens.
const I8_TILES: [Sm90Tile; 4] =
    [tile(256, 192, 4, 2), tile(128, 256, 5, 2), tile(128, 256, 5, 1), tile(128, 208, 5, 2)];

/// Rows of W and rows of X of the kernels with split-K, for every element type.
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

/// Rows of W and of X, and whether it is with split-K, of the only kernels whose W and X are of different 8-bit floats or that add results by TMA: one for many tokens and one for few.
const RARE_TILES: [(u32, u32, bool); 2] = [(256, 192, false), (128, 128, true)];

/// CTAs of a cluster at most.
const MOST_CTAS: u32 = 8;

/// Into how many parts a reduction is divided.
const SPLITS: [u32; 6] = [1, 2, 3, 4, 6, 8];

/// Shared memory that a block of sm_90 can have.
pub(super) const SHARED_BYTES: u32 = Architecture::SM_90.shared_bytes();

/// Shared memory that each of so many blocks of a multiprocessor can have: it keeps 1024 bytes for each, which are what one block lacks of all there is.
pub(super) const fn shared_bytes_of_each(blocks: u32) -> u32 {
    (SHARED_BYTES + 1024) / blocks - 1024
}

/// Warpgroups that multiply.
const WARPGROUPS: u32 = 2;

/// Bytes to round up the start of shared memory.
const ALIGNMENT: u32 = 1024;

/// Bytes of the barrier that counts what the other parts send.
const RECEIVED_BARRIER: u32 = 8;

/// Bytes of a stage: values of W, X, metadata, two barriers.
const fn stage_bytes(element: Element, features: u32, tokens: u32, atoms: u32) -> u32 {
    atoms * (features * 64 + tokens * 128 + features * (128 / element.bytes() as u32) / 8) + 16
}

/// Bytes of a warpgroup's buffers for results on their way out.
const fn staging_bytes(chunk: u32) -> u32 {
    3 * chunk * 128
}

/// Bytes of a warpgroup's accumulators on their way through an epilogue.
const fn accumulator_bytes(chunk: u32) -> u32 {
    chunk * 64 * 4
}

/// Threads of a block.
const THREADS: u32 = (WARPGROUPS + 1) * 128;

impl Sm90Tile {
    /// Those of the persistent kernels for an element type.
    fn persistent(element: Element) -> &'static [Sm90Tile] {
        if element == Element::I8 { &I8_TILES } else { &FLOAT_TILES }
    }

    /// Those with split-K for an element type, with every cluster.
    fn split_all(element: Element) -> impl Iterator<Item = Sm90Tile> {
        let clusters = [1, 2].into_iter().flat_map(|cluster| SPLITS.map(|split| (cluster, split)));
        let clusters = clusters.filter(|(cluster, split)| cluster * split <= MOST_CTAS);
        SPLIT_TILES.into_iter().flat_map(move |(features, tokens)| {
            // What the least chunk of results leaves for stages.
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

    /// CTAs that divide the reduction.
    fn parts(self) -> u32 {
        self.split.unwrap_or(1)
    }

    /// Those that a problem can be computed with.
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
        // Elements stored one at a time are slow in any case: one tile for many tokens and one for few.
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

    /// Rows of W and of X, and whether it is of a kernel with split-K.
    fn size(self) -> (u32, u32, bool) {
        (self.features, self.tokens, self.split.is_some())
    }

    fn name(self) -> String {
        let Sm90Tile { features, tokens, stages, cluster, split, .. } = self;
        let split = split.map_or(String::new(), |split| format!("s{split}"));
        format!("{features}x{tokens}x{stages}c{cluster}{split}")
    }
}

/// A kernel: a tile for types, an order of the result, and sums as they are or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sm90Kernel {
    /// What W is made of.
    pub element: Element,
    /// What X is made of.
    pub x_element: Element,
    /// What the result is made of.
    pub output: Element,
    /// The tile; with split-K that of one CTA, for any cluster.
    pub tile: Sm90Tile,
    /// Which of X's axes is contiguous.
    pub x: XOrder,
    /// How results are stored.
    pub store: Sm90Store,
    /// Whether sums are scaled, biased or activated.
    pub epilogue: bool,
    /// Whether TMA adds results to what is there. Kernels that store one by one find out with each call.
    pub accumulate: bool,
}

/// How results are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Sm90Store {
    /// Through shared memory and the copy engine: 16-bit results, `[tokens, features]`, of a multiple of eight features.
    Tiles,
    /// The same for `[features, tokens]`, of a multiple of eight tokens, without an epilogue.
    Across,
    /// One by one, in any order.
    OneByOne,
}

impl Sm90Store {
    /// How a problem's results are stored: the copy engine requires rows that are multiples of 16 bytes. It adds only results of 16-bit elements without an epilogue: others are rare.
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
    /// Every kernel that a problem may ask for.
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

    /// The kernel for a problem by a tile.
    fn of(problem: GemmProblem, tile: Sm90Tile) -> Sm90Kernel {
        let GemmProblem { element, x_element, output, x, epilogue, .. } = problem;
        let tile = if tile.split.is_some() { Sm90Tile { cluster: 1, split: Some(1), ..tile } } else { tile };
        let (store, accumulate) = (Sm90Store::of(problem), Sm90Kernel::adds_by_tma(problem));
        Sm90Kernel { element, x_element, output, tile, x, store, epilogue, accumulate }
    }

    /// Its name.
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

    /// Whether TMA adds a problem's results to what is there.
    fn adds_by_tma(problem: GemmProblem) -> bool {
        problem.accumulate && Sm90Store::of(problem) != Sm90Store::OneByOne
    }

    /// Elements of the reduction in an atom.
    fn k_atom(&self) -> u32 {
        128 / self.element.bytes() as u32
    }

    /// Elements of the reduction in a step.
    fn k_step(&self) -> u32 {
        self.tile.atoms * self.k_atom()
    }

    /// Atoms of a problem's reduction.
    fn atoms(problem: GemmProblem) -> u32 {
        let depth = problem.reduction.next_multiple_of(tile_k(problem.element).columns());
        (depth * problem.element.bytes() / 128) as u32
    }

    /// Whether accumulators of so many parts fit where the stages are: what each CTA of a cluster receives, of its share of 64 features by a chunk of tokens.
    fn has_room_for(&self, split: u32) -> bool {
        let Sm90Tile { features, tokens, stages, atoms, .. } = self.tile;
        let (chunk, blocks) = (self.chunk(), features / 64 / WARPGROUPS);
        let pieces = blocks * tokens / chunk;
        let received = pieces.div_ceil(split) * (split - 1) * WARPGROUPS * chunk * 256;
        received <= stages * atoms * (features * 64 + tokens * 128)
    }

    /// Tokens that leave at a time: a divisor of the tile's, as many as there is shared memory for.
    fn chunk(&self) -> u32 {
        // With split-K a CTA stores a share of the chunks: there should be many.
        let most = if self.tile.split.is_some() { 4 } else { 8 };
        let chunks = (1..=most).rev().map(|eights| 8 * eights);
        // Rows of 16, 32 or 64 tokens are what the copy engine can permute.
        let known = |chunk: u32| self.store != Sm90Store::Across || matches!(chunk, 16 | 32 | 64);
        let fits = |chunk: &u32| {
            known(*chunk) && self.tile.tokens.is_multiple_of(*chunk) && self.shared_bytes(*chunk) <= SHARED_BYTES
        };
        chunks.into_iter().find(fits).unwrap_or(8)
    }

    /// Rows of X that each tile of a problem takes: with split-K and for one CTA only as many as it has to, in whole chunks where there are several tiles.
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
        let sums = if self.epilogue || self.store == Sm90Store::OneByOne { accumulator_bytes(chunk) } else { 0 };
        let received = if split.is_some() { RECEIVED_BARRIER } else { 0 };
        ALIGNMENT
            + stages * stage_bytes(self.element, features, tokens, atoms)
            + received
            + WARPGROUPS * (staging + sums)
    }

    /// What the source is defined for.
    pub(crate) fn definitions(&self) -> String {
        let Sm90Tile { features, tokens, stages, atoms, cluster, .. } = self.tile;
        let split_k = u32::from(self.tile.split.is_some());
        let blocks = features / 64 / WARPGROUPS;
        // What feeding needs; the others get the rest. They need more where two blocks of sums fill nearly all.
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

/// A product with its kernel and its launch.
#[derive(Debug, Clone)]
pub(super) struct Sm90Plan {
    problem: GemmProblem,
    tile: Sm90Tile,
    /// Rows of X that a tile takes.
    x_rows: u32,
    variant: Sm90Kernel,
    kernel: Kernel,
    launch: Launch,
    panels: Panels,
}

/// As the kernel has it.
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

/// Features of the tiles that are taken side by side: their metadata and values, and X's rows of a round, stay in the second-level cache.
const PANEL_FEATURES: u32 = 4096;

impl Sm90Plan {
    pub(super) fn new(device: &Device, problem: GemmProblem, tile: Sm90Tile) -> Result<Self> {
        let variant = Sm90Kernel::of(problem, tile);
        let shared = variant.shared_bytes(variant.chunk());
        assert!(shared <= SHARED_BYTES, "{} needs {shared} bytes of shared memory", variant.name());
        let kernel = device.kernel(&variant.source(), "gemm")?;
        kernel.allow_shared(shared)?;
        // A cluster's tile.
        let x_rows = variant.x_rows(problem, tile);
        let panels = Panels::new(problem, (tile.features * tile.cluster, x_rows), PANEL_FEATURES);
        let ctas = tile.cluster * tile.parts();
        // A cluster with split-K computes one tile, any other as many as it takes.
        let clusters =
            if tile.parts() > 1 { panels.tiles() } else { (device.multiprocessors() / ctas).min(panels.tiles()) };
        let launch = Launch { grid: (clusters * ctas, 1), block: THREADS, shared, cluster: ctas };
        Ok(Self { problem, tile, x_rows, variant, kernel, launch, panels })
    }

    /// Whether results are stored by TMA, to addresses that are multiples of 16 bytes.
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
        // The rows of X that the first block of a cluster reads: as the kernel has it.
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
        // SAFETY: the caller's; the structure is the kernel's.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }
}
