//! The kernels: their names, their shared memory and their preprocessor definitions.

use super::{HopperTile, WARPGROUPS, shared};
use crate::{
    Architecture, DataType as Element,
    problem::{EpilogueKind, GemmProblem, Order, XOrder},
    raw::gemm::{
        epilogue::KernelEpilogue,
        hopper::shared::SHARED_BYTES,
        supported::{TYPES, elements, elements_name},
        tile_k,
    },
};

/// A kernel: a tile for data types, an order of the result, and with or without an epilogue.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct HopperKernel {
    /// Data type of W.
    pub element: Element,
    /// Data type of X.
    pub x_element: Element,
    /// Data type of the result.
    pub output: Element,
    /// The tile. With split-K it is that of one CTA, and the kernel serves any cluster.
    pub tile: HopperTile,
    /// Which of X's axes is contiguous.
    pub x: XOrder,
    /// How results are stored.
    pub store: HopperStore,
    /// The epilogues that the kernel is for.
    pub epilogue: KernelEpilogue,
    /// Whether TMA adds results to the output (`cp.reduce`). Kernels that store one element at a time read this from
    /// the launch's parameters instead.
    pub accumulate: bool,
}

/// How results are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum HopperStore {
    /// Through shared memory and TMA: 16-bit results, `[tokens, features]`, with a multiple of eight features.
    Tiles,
    /// Through shared memory and TMA: 16-bit results, `[features, tokens]`, with a multiple of eight tokens and without
    /// an epilogue.
    MnMajor,
    /// One element at a time, in any order.
    OneByOne,
}

impl HopperStore {
    /// Returns how a problem's results are stored. TMA requires rows that are multiples of 16 bytes. It accumulates
    /// only results of 16-bit elements without an epilogue, because other cases are rare.
    pub(super) fn of(problem: GemmProblem) -> HopperStore {
        let GemmProblem { element, output, order, features, tokens, epilogue, accumulate, .. } = problem;
        if accumulate && (element.bytes() != 2 || epilogue.is_some()) {
            return HopperStore::OneByOne;
        }
        let mn_major = output.bytes() == 2 && epilogue.is_none() && tokens.is_multiple_of(8) && !problem.is_mixed();
        match order {
            Order::TokensFirst if output.bytes() == 2 && features.is_multiple_of(8) => HopperStore::Tiles,
            Order::FeaturesFirst if mn_major => HopperStore::MnMajor,
            _ => HopperStore::OneByOne,
        }
    }
}

impl HopperKernel {
    /// Returns every kernel that a problem can need.
    pub fn all() -> Vec<HopperKernel> {
        let mut all = Vec::new();
        for (element, x_element) in elements() {
            let outputs = TYPES.iter().filter(|(of, _)| *of == element).flat_map(|(_, outputs)| *outputs);
            for &output in outputs {
                for x in [XOrder::TokensFirst, XOrder::ReductionFirst] {
                    for (order, tokens) in
                        [(Order::TokensFirst, 8), (Order::FeaturesFirst, 8), (Order::FeaturesFirst, 1)]
                    {
                        for (epilogue, accumulate) in [
                            (None, false),
                            (Some(EpilogueKind::Bias), false),
                            (Some(EpilogueKind::Activation), false),
                            (None, true),
                        ] {
                            let (features, reduction) = (64, tile_k(element).columns());
                            let plain = GemmProblem::plain(element, output, features, tokens, reduction);
                            let problem = GemmProblem { x_element, x, order, epilogue, accumulate, ..plain };
                            let is_computed = problem.computed(Architecture::SM_90) == problem;
                            if problem.expect_known().is_ok() && is_computed {
                                all.extend(
                                    HopperTile::all(problem).into_iter().map(|tile| HopperKernel::of(problem, tile)),
                                );
                            }
                        }
                    }
                }
            }
        }
        all.sort_by_key(HopperKernel::name);
        all.dedup();
        all
    }

    /// Returns the kernel of a tile for a problem.
    pub(super) fn of(problem: GemmProblem, tile: HopperTile) -> HopperKernel {
        let GemmProblem { element, x_element, output, x, .. } = problem;
        let tile = if tile.split.is_some() { HopperTile { cluster: 1, split: Some(1), ..tile } } else { tile };
        let (store, accumulate) = (HopperStore::of(problem), HopperKernel::adds_by_tma(problem));
        // Only kernels without split-K have code for an activation in registers.
        let distinguishes = store == HopperStore::Tiles && tile.split.is_none();
        let epilogue = KernelEpilogue::of(problem.epilogue);
        let epilogue = if distinguishes { epilogue } else { epilogue.merged() };
        HopperKernel { element, x_element, output, tile, x, store, epilogue, accumulate }
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> String {
        let store = match self.store {
            HopperStore::Tiles => "",
            HopperStore::MnMajor => "-across",
            HopperStore::OneByOne => "-one-by-one",
        };
        let x = if self.x == XOrder::ReductionFirst { "-x-across" } else { "" };
        let epilogue = self.epilogue.suffix();
        let elements = elements_name(self.element, self.x_element);
        let add = if self.accumulate { "-add" } else { "" };
        format!("{elements}-{}-{}{x}{store}{epilogue}{add}", self.output, self.tile.name())
    }

    /// Returns whether TMA adds a problem's results to the output.
    pub(super) fn adds_by_tma(problem: GemmProblem) -> bool {
        problem.accumulate && HopperStore::of(problem) != HopperStore::OneByOne
    }

    /// Returns the `k` extent of an atom, in elements.
    pub(super) fn k_atom(&self) -> u32 {
        128 / self.element.bytes() as u32
    }

    /// Returns the `k` extent of a step, in elements.
    pub(super) fn k_step(&self) -> u32 {
        self.tile.atoms * self.k_atom()
    }

    /// Returns the atoms of a problem's reduction.
    pub(super) fn atoms(problem: GemmProblem) -> u32 {
        let depth = problem.reduction.next_multiple_of(tile_k(problem.element).columns());
        (depth * problem.element.bytes() / 128) as u32
    }

    /// Returns whether the accumulators that a CTA receives fit where the stages are. With `split` CTAs each receives
    /// those of its share of the pieces of 64 features by a chunk of tokens.
    pub(super) fn has_room_for(&self, split: u32) -> bool {
        let HopperTile { features, tokens, stages, atoms, .. } = self.tile;
        let (chunk, blocks) = (self.chunk(), features / 64 / WARPGROUPS);
        let pieces = blocks * tokens / chunk;
        let received = pieces.div_ceil(split) * (split - 1) * WARPGROUPS * chunk * 256;
        received <= stages * atoms * (features * 64 + tokens * 128)
    }

    /// Returns the tokens of a chunk, the unit in which results are stored: a divisor of the tile's tokens, as large as
    /// shared memory allows.
    pub(super) fn chunk(&self) -> u32 {
        // With split-K each CTA stores a share of the chunks, so there should be many.
        let most = if self.tile.split.is_some() { 4 } else { 8 };
        let chunks = (1..=most).rev().map(|vectors| 8 * vectors);
        // TMA can swizzle rows of 16, 32 or 64 tokens.
        let known = |chunk: u32| self.store != HopperStore::MnMajor || matches!(chunk, 16 | 32 | 64);
        let fits = |chunk: &u32| {
            known(*chunk) && self.tile.tokens.is_multiple_of(*chunk) && self.shared_bytes(*chunk) <= SHARED_BYTES
        };
        chunks.into_iter().find(fits).unwrap_or(8)
    }

    /// Returns the rows of X that each tile of a problem loads. With split-K and without multicast these are only as
    /// many as the problem needs, in whole chunks where there are several tiles.
    pub(super) fn x_rows(&self, problem: GemmProblem, tile: HopperTile) -> u32 {
        if tile.split.is_none() || tile.cluster != 1 || self.x == XOrder::ReductionFirst {
            return tile.tokens;
        }
        let tiles = problem.tokens.div_ceil(tile.tokens as usize);
        let whole = if tiles == 1 { 8 } else { self.chunk() as usize };
        problem.tokens.div_ceil(tiles).next_multiple_of(whole).min(tile.tokens as usize) as u32
    }

    pub(super) fn shared_bytes(&self, chunk: u32) -> u32 {
        let HopperTile { features, tokens, stages, atoms, split, .. } = self.tile;
        let staging = if self.store == HopperStore::OneByOne { 0 } else { shared::staging_bytes(chunk) };
        let sums = if self.store == HopperStore::OneByOne { shared::accumulator_bytes(chunk) } else { 0 };
        let received = if split.is_some() { shared::RECEIVED_BARRIER } else { 0 };
        shared::ALIGNMENT
            + stages * shared::stage_bytes(self.element, features, tokens, atoms)
            + received
            + WARPGROUPS * (staging + sums)
    }
}
