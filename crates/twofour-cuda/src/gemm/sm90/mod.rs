//! Products on sm_90a: tiles, and how a launch is made from a problem.

mod source;

use serde::{Deserialize, Serialize};

use crate::{
    Architecture, DataType as Element, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    gemm::{Epilogue, Operands, Order, Problem, RawOutput, XOrder, panels::Panels, tile_k},
    tensor_map::{Swizzle, TensorMap},
};

/// What a block computes at a time, and with what.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Tile {
    /// Rows of W: 128 or 256.
    pub features: u32,
    /// Rows of X: a multiple of 8, of 16 for i8, at most 256.
    pub tokens: u32,
    /// Buffers between the copy engine and the tensor cores.
    pub stages: u32,
    /// Blocks that share rows of X: 1 or 2.
    pub cluster: u32,
}

/// Tokens of a piece of X where it is [reduction, tokens], and of results where they are [features, tokens].
const PIECE_TOKENS: u32 = 64;

const fn tile(features: u32, tokens: u32, stages: u32, cluster: u32) -> Tile {
    Tile { features, tokens, stages, cluster }
}

/// For 16-bit elements and 8-bit floats.
const FLOAT_TILES: [Tile; 5] =
    [tile(256, 200, 4, 2), tile(256, 192, 4, 2), tile(128, 256, 5, 2), tile(128, 256, 5, 1), tile(128, 200, 5, 2)];

/// For i8, whose products take multiples of 16 tokens.
const I8_TILES: [Tile; 4] = [tile(256, 192, 4, 2), tile(128, 256, 5, 2), tile(128, 256, 5, 1), tile(128, 208, 5, 2)];

/// Shared memory that a block of sm_90 can have.
pub(super) const SHARED_BYTES: u32 = Architecture::SM_90.shared_bytes();

/// Shared memory that each of so many blocks of a multiprocessor can have: it keeps 1024 bytes for each, which are what one block lacks of all there is.
pub(super) const fn shared_bytes_of_each(blocks: u32) -> u32 {
    (SHARED_BYTES + 1024) / blocks - 1024
}

/// Warpgroups that multiply.
const WARPGROUPS: u32 = 2;

/// Threads of a block.
const THREADS: u32 = (WARPGROUPS + 1) * 128;

impl Tile {
    /// Those that are compiled for an element type.
    pub fn all(element: Element) -> &'static [Tile] {
        if element == Element::I8 { &I8_TILES } else { &FLOAT_TILES }
    }

    /// Those that a problem can be computed with.
    pub fn fitting(problem: Problem) -> Vec<Tile> {
        let store = Store::of(problem);
        let fits = |tile: &Tile| {
            (problem.x == XOrder::TokensFirst && store != Store::Across) || tile.tokens.is_multiple_of(PIECE_TOKENS)
        };
        let mut tiles: Vec<Tile> = Tile::all(problem.element).iter().copied().filter(fits).collect();
        // Results one by one are slow in any case: one tile will do.
        if store == Store::OneByOne {
            tiles.truncate(1);
        }
        tiles
    }

    /// The one that takes the least time by a model: as many rounds as the device needs, each as long as its products and its stores take.
    pub fn best(problem: Problem, multiprocessors: u32) -> Tile {
        let time = |tile: &Tile| tile.model_time(problem, multiprocessors);
        Tile::fitting(problem).into_iter().min_by(|a, b| time(a).total_cmp(&time(b))).expect("there are tiles")
    }

    /// Cycles, about.
    fn model_time(self, problem: Problem, multiprocessors: u32) -> f64 {
        let clusters = problem.features.div_ceil((self.features * self.cluster) as usize);
        let tiles = clusters * problem.tokens.div_ceil(self.tokens as usize);
        let rounds = tiles.div_ceil((multiprocessors / self.cluster).max(1) as usize) as f64;
        // Of the tensor cores' peak: reading W and X from shared memory, and from the second-level cache where no rows are shared.
        let efficiency = match (self.features, self.cluster) {
            (256, _) => 0.745,
            (_, 1) => 0.68,
            _ => 0.70,
        };
        let area = f64::from(self.features * self.tokens);
        let steps = problem.reduction as f64 * problem.element.bytes() as f64 / 128.0;
        // A step of a 64-row product takes as many cycles as it has tokens; stores took a fifth of the time of 16 steps.
        rounds * area / 64.0 * (steps / efficiency + 5.0)
    }

    fn name(self) -> String {
        format!("{}x{}x{}c{}", self.features, self.tokens, self.stages, self.cluster)
    }
}

/// A kernel: a tile for types, an order of the result, and sums as they are or not.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// What W and X are made of.
    pub element: Element,
    /// What the result is made of.
    pub output: Element,
    /// The tile.
    pub tile: Tile,
    /// Which of X's axes is contiguous.
    pub x: XOrder,
    /// How results are stored.
    pub store: Store,
    /// Whether sums are scaled, biased or activated.
    pub epilogue: bool,
}

/// How results are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Store {
    /// Through shared memory and the copy engine: 16-bit results, `[tokens, features]`.
    Tiles,
    /// The same for `[features, tokens]`, without an epilogue.
    Across,
    /// One by one, in any order.
    OneByOne,
}

impl Store {
    /// How a problem's results are stored: the copy engine wants rows that are multiples of 16 bytes.
    fn of(problem: Problem) -> Store {
        let Problem { output, order, tokens, epilogue, .. } = problem;
        match order {
            Order::TokensFirst if output.bytes() == 2 => Store::Tiles,
            Order::FeaturesFirst if output.bytes() == 2 && !epilogue && tokens.is_multiple_of(8) => Store::Across,
            _ => Store::OneByOne,
        }
    }
}

impl Variant {
    /// Every kernel that a problem may ask for.
    pub fn all() -> Vec<Variant> {
        let mut all = Vec::new();
        for &(element, outputs) in super::TYPES {
            for &output in outputs {
                for x in [XOrder::TokensFirst, XOrder::ReductionFirst] {
                    for (order, tokens) in
                        [(Order::TokensFirst, 8), (Order::FeaturesFirst, 8), (Order::FeaturesFirst, 1)]
                    {
                        for epilogue in [false, true] {
                            let (features, reduction) = (64, tile_k(element).columns());
                            let problem = Problem { element, output, features, tokens, reduction, x, order, epilogue };
                            if problem.expect_known().is_ok() {
                                all.extend(Tile::fitting(problem).into_iter().map(|tile| Variant::of(problem, tile)));
                            }
                        }
                    }
                }
            }
        }
        all.sort_by_key(Variant::name);
        all.dedup();
        all
    }

    /// The kernel for a problem by a tile.
    fn of(problem: Problem, tile: Tile) -> Variant {
        let Problem { element, output, x, epilogue, .. } = problem;
        Variant { element, output, tile, x, store: Store::of(problem), epilogue }
    }

    /// Its name.
    pub fn name(&self) -> String {
        let store = match self.store {
            Store::Tiles => "",
            Store::Across => "-across",
            Store::OneByOne => "-one-by-one",
        };
        let x = if self.x == XOrder::ReductionFirst { "-x-across" } else { "" };
        let epilogue = if self.epilogue { "-epilogue" } else { "" };
        format!("{}-{}-{}{x}{store}{epilogue}", self.element, self.output, self.tile.name())
    }

    /// Elements of the reduction in a step.
    fn k_step(&self) -> u32 {
        128 / self.element.bytes() as u32
    }

    /// Tokens that leave at a time: a divisor of the tile's, as many as there is shared memory for.
    fn chunk(&self) -> u32 {
        let chunks = (1..=8).rev().map(|eights| 8 * eights);
        // Rows of 16, 32 or 64 tokens are what the copy engine can permute.
        let known = |chunk: u32| self.store != Store::Across || matches!(chunk, 16 | 32 | 64);
        let fits = |chunk: &u32| {
            known(*chunk) && self.tile.tokens.is_multiple_of(*chunk) && self.shared_bytes(*chunk) <= SHARED_BYTES
        };
        chunks.into_iter().find(fits).unwrap_or(8)
    }

    fn shared_bytes(&self, chunk: u32) -> u32 {
        let Tile { features, tokens, stages, .. } = self.tile;
        let meta = features * self.k_step() / 8;
        let tiles = if self.store == Store::OneByOne { 0 } else { 3 * chunk * 128 };
        let sums = if self.epilogue || self.store == Store::OneByOne { chunk * 64 * 4 } else { 0 };
        1024 + stages * (features * 64 + tokens * 128 + meta + 16) + WARPGROUPS * (tiles + sums)
    }

    /// What the source is defined for.
    pub(crate) fn definitions(&self) -> String {
        let Tile { features, tokens, stages, cluster } = self.tile;
        let blocks = features / 64 / WARPGROUPS;
        // What feeding needs; the others get the rest. They need more where two blocks of sums fill nearly all.
        let (left, taken) = if blocks == 2 { (24, 240) } else { (40, 232) };
        let store = match self.store {
            Store::Tiles => 0,
            Store::OneByOne => 1,
            Store::Across => 2,
        };
        format!(
            "#define ELEMENT {}\n#define OUTPUT {}\n#define BLOCKS {blocks}\n#define TOKENS {tokens}\n#define STAGES {stages}\n\
             #define CLUSTER {cluster}\n#define CHUNK {}\n#define STORE_TILES 0\n#define STORE_ONE_BY_ONE 1\n\
             #define STORE_ACROSS 2\n#define STORE {store}\n#define X_ACROSS {}\n#define EPILOGUE {}\n\
             #define REGISTERS_LEFT {left}\n#define REGISTERS_TAKEN {taken}\n#define SHARED_BYTES_ASKED {}\n",
            self.element.definition(),
            self.output.definition(),
            self.chunk(),
            u32::from(self.x == XOrder::ReductionFirst),
            u32::from(self.epilogue),
            self.shared_bytes(self.chunk()),
        )
    }
}

/// A product with its kernel and its launch.
#[derive(Debug, Clone)]
pub(super) struct Plan {
    problem: Problem,
    variant: Variant,
    kernel: Kernel,
    launch: Launch,
    panels: Panels,
}

/// As the kernel has it.
#[repr(C)]
struct Parameters {
    weight: TensorMap,
    x: [TensorMap; 2],
    out: TensorMap,
    meta: DevicePtr,
    to: RawOutput,
    features: u32,
    tokens: u32,
    steps: u32,
    panels: Panels,
}

/// Features of the tiles that are taken side by side: their metadata and values, and X's rows of a round, stay in the second-level cache.
const PANEL_FEATURES: u32 = 4096;

impl Plan {
    pub(super) fn new(device: &Device, problem: Problem, tile: Tile) -> Result<Self> {
        let variant = Variant::of(problem, tile);
        let shared = variant.shared_bytes(variant.chunk());
        assert!(shared <= SHARED_BYTES, "{} needs {shared} bytes of shared memory", variant.name());
        let kernel = device.kernel(&variant.source(), "gemm")?;
        kernel.allow_shared(shared)?;
        // A cluster's tile.
        let panels = Panels::new(problem, (tile.features * tile.cluster, tile.tokens), PANEL_FEATURES);
        let clusters = (device.multiprocessors() / tile.cluster).min(panels.tiles());
        let launch = Launch { grid: (clusters * tile.cluster, 1), block: THREADS, shared, cluster: tile.cluster };
        Ok(Self { problem, variant, kernel, launch, panels })
    }

    pub(super) fn kernel(&self) -> String {
        self.variant.name()
    }

    /// # Safety
    /// That of [`super::Gemm::run`].
    pub(super) unsafe fn run(&self, stream: Stream, operands: Operands, epilogue: Epilogue) -> Result<()> {
        let Problem { element, output, features, tokens, reduction, .. } = self.problem;
        // Of the weight: more than of X where that has the reduction first.
        let depth = reduction.next_multiple_of(tile_k(element).columns());
        let Tile { features: tile_features, tokens: tile_tokens, cluster, .. } = self.variant.tile;
        let (bytes, step) = (element.bytes(), self.variant.k_step());
        // The rows of X that the first block of a cluster reads: as the kernel has it.
        let first_part = if cluster == 1 { tile_tokens } else { (tile_tokens / 2).next_multiple_of(8) };
        let x = |rows: u32| match self.problem.x {
            XOrder::TokensFirst => {
                TensorMap::new(operands.x, bytes, (tokens, reduction), (rows, step), Swizzle::Bytes128)
            }
            XOrder::ReductionFirst => {
                TensorMap::new(operands.x, bytes, (reduction, tokens), (step, PIECE_TOKENS), Swizzle::Bytes128)
            }
        };
        let x_first = x(first_part)?;
        let parameters = Parameters {
            weight: TensorMap::new(
                operands.weight.values,
                bytes,
                (features, depth / 2),
                (tile_features, step / 2),
                Swizzle::Bytes64,
            )?,
            x: [x_first, if cluster == 1 { x_first } else { x(tile_tokens - first_part)? }],
            out: match self.variant.store {
                Store::Tiles => {
                    let tile = (self.variant.chunk(), 64);
                    TensorMap::new(operands.out, output.bytes(), (tokens, features), tile, Swizzle::Bytes128)?
                }
                Store::Across => {
                    let chunk = self.variant.chunk();
                    let swizzle = match chunk {
                        16 => Swizzle::Bytes32,
                        32 => Swizzle::Bytes64,
                        _ => Swizzle::Bytes128,
                    };
                    TensorMap::new(operands.out, output.bytes(), (features, tokens), (64, chunk), swizzle)?
                }
                Store::OneByOne => TensorMap::NONE,
            },
            meta: operands.weight.meta,
            to: RawOutput::new((features, tokens), self.problem.order, operands.out, epilogue),
            features: features as u32,
            tokens: tokens as u32,
            steps: (depth / step as usize) as u32,
            panels: self.panels,
        };
        // SAFETY: the caller's; the structure is the kernel's.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }
}
