//! Many tokens: every weight meets many activations and arithmetic is what limits. f32 and f16, bf16 on AVX2, and the gradients of all of them; bf16 with
//! AVX512_BF16 has [a kernel of its own](super::bf16).
//!
//! The tokens are cut into panels, stored depth-major (`[depth, tokens of the panel]`), so that one weight multiplies
//! whole vectors of tokens. For a 2:4 weight the kernel walks the list of what is kept, broadcasts each value and
//! multiplies it with the panel's vectors at its column: half the multiplications of the dense product, no shuffles, and
//! what is pruned is never touched. The gradient with respect to the input is the same walk along columns instead of
//! rows. A dense weight is multiplied tile by tile in the manner of Goto and van de Geijn (2008).
//!
//! Blocks of outputs are split among threads. A block goes over the depth in steps, so that a panel's part stays in
//! the first cache while every output of the block meets it.

mod ahead;
mod avx2;
mod avx512;
mod kept_columns;
mod kept_rows;
mod panels;
mod tile;
mod transposed;
mod walk;

use std::{ops::Range, time::Duration};

use super::{
    dense_block::DenseBlock,
    element::KernelElement,
    engine::{Cpu, HasAvx2, HasAvx512},
    epilogue::Epilogue,
    scratch::Scratch,
    share::{share_expecting, threads},
    strips::{ROWS, Strip, StripsRef},
    transposed_product::StoreRow,
    vector::{Vector, avx2::Avx2, avx512::Avx512},
};
use kept_columns::{ColumnLists, KeptOfColumns, StripRows};
use kept_rows::KeptOfRows;
use panels::{Lines, Panels, column_blocks, unpack};
use tile::{Columns, Rows, Tiles};
use walk::Lists;

/// What the blocks of outputs start at multiples of.
const ALIGNMENT: usize = 32;

/// Tokens from which a product takes this way rather than that of few tokens, by where the two cross (on a Zen 3 and on an
/// Emerald Rapids alike).
#[derive(Debug, Clone, Copy)]
pub(super) struct Many(usize);

impl Many {
    /// `x · Wᵀ`, 2:4: listing what is kept must pay.
    pub(super) const SPARSE: Many = Many(96);
    /// `x · Wᵀ`, dense.
    pub(super) const DENSE: Many = Many(48);
    /// `dy · W`: few tokens have no kernel of their own.
    pub(super) const GRADIENT: Many = Many(2);
    /// `aᵀ · b`: no number of tokens has another kernel.
    pub(super) const TRANSPOSED: Many = Many(0);
}

/// Lines of a panel are completed with zeros to a multiple of a group, whose padding multiplies them.
const GROUP: usize = 4;

/// Tokens multiplied in one go: bounds the memory for panels and products.
const TOKENS: usize = 512;

/// Outputs of the largest block: its lists and products stay in the second cache.
const OUTS: usize = 256;

/// The kernels of this module for one CPU, with the proof that it has their instructions.
#[derive(Debug, Clone, Copy)]
pub(super) enum Prefill {
    Avx2(HasAvx2),
    Avx512(HasAvx512),
}

impl Prefill {
    /// The kernels to multiply so many tokens with, or `None` where they are too few.
    pub(super) fn choose(cpu: Cpu, tokens: usize, Many(many): Many) -> Option<Self> {
        match cpu {
            _ if tokens < many => None,
            Cpu::Scalar => None,
            Cpu::Avx2(has) => Some(Prefill::Avx2(has)),
            Cpu::Avx512(has) => Some(Prefill::Avx512(has)),
            Cpu::Amx(has) => Some(Prefill::Avx512(has.avx512())),
        }
    }

    /// `y = act(x · Wᵀ + bias)` for a 2:4 weight; lengths are checked.
    pub(super) fn sparse_linear<T: KernelElement>(
        self,
        w: StripsRef<'_, T>,
        x: &[T],
        epilogue: Epilogue<'_>,
        y: &mut [T],
    ) {
        self.product(KeptOfRows(w), x, epilogue, y);
    }

    /// `dx = dy · W` for a 2:4 weight; lengths are checked.
    pub(super) fn sparse_input_gradient<T: KernelElement>(self, w: StripsRef<'_, T>, dy: &[T], dx: &mut [T]) {
        self.product(KeptOfColumns(w), dy, Epilogue::default(), dx);
    }

    /// `y = act(x · Wᵀ + bias)` for a dense weight; lengths are checked.
    pub(super) fn dense_linear<T: KernelElement>(
        self,
        w: DenseBlock<'_, T>,
        x: &[T],
        epilogue: Epilogue<'_>,
        y: &mut [T],
    ) {
        self.product(Rows(w), x, epilogue, y);
    }

    /// `dx = dy · W` for a dense weight; lengths are checked.
    pub(super) fn dense_input_gradient<T: KernelElement>(self, w: DenseBlock<'_, T>, dy: &[T], dx: &mut [T]) {
        self.product(Columns(w), dy, Epilogue::default(), dx);
    }

    /// `aᵀ · b` for two dense matrices, `[depth, rows]` and `[depth, cols]`, stored by `store`; lengths are checked, `c` is not empty.
    pub(super) fn transposed_product<C: Send>(
        self,
        a: DenseBlock<'_, f32>,
        b: DenseBlock<'_, f32>,
        store: impl StoreRow<C>,
        c: &mut [C],
    ) {
        match self {
            Prefill::Avx2(has) => transposed::transposed_product::<Avx2, C>(has, (a, b), store, c),
            Prefill::Avx512(has) => transposed::transposed_product::<Avx512, C>(has, (a, b), store, c),
        }
    }

    fn product<T: KernelElement, F: Factor>(self, factor: F, x: &[T], epilogue: Epilogue<'_>, y: &mut [T]) {
        match self {
            Prefill::Avx2(has) => product::<Avx2, T, F>(has, factor, x, epilogue, y),
            Prefill::Avx512(has) => product::<Avx512, T, F>(has, factor, x, epilogue, y),
        }
    }
}

/// The kernels in one CPU's instructions.
///
/// # Safety
/// The methods may be called only on a CPU that has [`Vector`]'s instructions.
unsafe trait Kernels: Vector + Send + Sync {
    /// Proof that the CPU has [`Vector`]'s instructions.
    type Has: Copy + Send + Sync;

    /// Vectors of tokens in the widest panel that lists are multiplied with.
    const LIST_VECTORS: usize;
    /// Depth of a block of lists, a multiple of a group, and at most the groups whose positions fill a word.
    const LIST_DEPTH: usize;
    /// Outputs of a tile.
    const TILE_OUTS: usize;
    /// Vectors of tokens in the widest panel that tiles are multiplied with.
    const TILE_VECTORS: usize;
    /// Depth of a block of tiles.
    const TILE_DEPTH: usize;

    /// See [`kept_rows::list_strip`].
    unsafe fn list_strip<T: KernelElement>(
        strip: Strip<'_, T>,
        groups: Range<usize>,
        values: &mut [f32],
        positions: &mut [u64; ROWS],
    );

    /// Adds what some rows of a strip keep of some groups to lists of columns, whose first is that of the first group, in order of row.
    unsafe fn list_columns<T: KernelElement>(
        strip: Strip<'_, T>,
        groups: Range<usize>,
        rows: StripRows,
        lists: &mut ColumnLists,
    );

    /// See [`walk::multiply`].
    unsafe fn multiply_lists<L: Lists>(lists: &L, panel: Lines<'_>, vectors: usize, out: &mut [f32]);

    /// See [`tile::multiply`].
    unsafe fn multiply_tiles(tiles: &Tiles, panel: Lines<'_>, vectors: usize, out: &mut [f32]);
}

/// A weight or its transpose, `[outs, depth]`, from which kernels take blocks.
trait Factor: Copy + Send + Sync {
    /// A block in the order in which the kernel reads it.
    type Block: Default + Send;

    /// Vectors of tokens in the widest panel, and depth of a block.
    fn shape<V: Kernels>() -> (usize, usize);

    fn outs(&self) -> usize;
    fn depth(&self) -> usize;

    /// Fills `block` with a part, for panels whose lines are `stride` tokens apart. The outputs start at a
    /// multiple of [`ALIGNMENT`], the depth at one of the block's.
    fn prepare<V: Kernels>(
        &self,
        has: V::Has,
        outs: Range<usize>,
        depth: Range<usize>,
        stride: usize,
        block: &mut Self::Block,
    );

    /// Asks for the memory that [`Factor::prepare`] will read: part `part` of so many, so that it comes while others are multiplied.
    fn fetch(&self, outs: Range<usize>, depth: Range<usize>, part: usize, parts: usize);

    /// Adds the product of `block` and `panel` to `out`: `[outs, vectors * lanes]`, one line per output.
    ///
    /// # Safety
    /// The CPU has `V`'s instructions; `block` was prepared for the panel's depth and stride.
    unsafe fn multiply<V: Kernels>(block: &Self::Block, panel: Lines<'_>, vectors: usize, out: &mut [f32]);
}

/// `y = act(x · factorᵀ + bias)`: `x` is `[tokens, depth]`, `y` is `[tokens, outs]`.
fn product<V: Kernels, T: KernelElement, F: Factor>(
    has: V::Has,
    factor: F,
    x: &[T],
    epilogue: Epilogue<'_>,
    y: &mut [T],
) {
    let (outs, depth) = (factor.outs(), factor.depth());
    if outs == 0 {
        return;
    }
    let (vectors, _) = F::shape::<V>();
    // A few blocks per thread even out what else the machine is doing.
    let block = outs.div_ceil(4 * threads()).next_multiple_of(ALIGNMENT).min(OUTS);
    for (i, y) in y.chunks_mut(TOKENS * outs).enumerate() {
        let tokens = y.len() / outs;
        let x = &x[i * TOKENS * depth..][..tokens * depth];
        let panels = Panels::pack(x, tokens, depth, V::LANES, vectors);
        share_expecting(
            expected(outs, depth, tokens),
            column_blocks(y, outs, block).into_iter(),
            || (F::Block::default(), Scratch::take(block * panels.padded_tokens())),
            |(prepared, products), mut y| {
                let products = &mut products[..y.cols().len() * panels.padded_tokens()];
                multiply_block::<V, F>(has, factor, y.cols(), &panels, prepared, products);
                unpack(products, &panels, epilogue, &mut y);
            },
        );
    }
}

/// How long one thread takes for a product, rather too short: a vector's products each nanosecond or so, and reading the weight.
fn expected(outs: usize, depth: usize, tokens: usize) -> Duration {
    /// What reading an element costs, in products.
    const READ: usize = 8;
    /// Products of a thread in a nanosecond.
    const PRODUCTS: usize = 64;
    Duration::from_nanos((outs.saturating_mul(depth).saturating_mul(tokens + READ) / PRODUCTS) as u64)
}

/// Multiplies some outputs with all panels: `[panel][outs, tokens of the panel]`.
fn multiply_block<V: Kernels, F: Factor>(
    has: V::Has,
    factor: F,
    outs: Range<usize>,
    panels: &Panels,
    prepared: &mut F::Block,
    products: &mut [f32],
) {
    let (_, step) = F::shape::<V>();
    let end = factor.depth();
    products.fill(0.0);
    for start in (0..end).step_by(step) {
        let depth = start..(start + step).min(end);
        factor.prepare::<V>(has, outs.clone(), depth.clone(), panels.stride(), prepared);
        let next = depth.end..(depth.end + step).min(end);
        for (i, panel) in panels.iter().enumerate() {
            factor.fetch(outs.clone(), next.clone(), i, panels.count());
            let out = &mut products[outs.len() * panel.first..][..outs.len() * panel.width];
            let lines = Lines {
                data: panels.lines(i, &depth),
                stride: panels.stride(),
                next: if i + 1 < panels.count() { panels.lines(i + 1, &depth) } else { panels.lines(0, &next) },
            };
            // SAFETY: `has` is proof of the instructions; the block was prepared for these lines.
            unsafe { F::multiply::<V>(prepared, lines, panel.width / V::LANES, out) };
        }
    }
}
