//! Many tokens: every weight meets many activations and arithmetic is what limits. f32, f16 and bf16, where the CPU has
//! no instructions of its own for the latter, and the gradients of all of them.
//!
//! The tokens are cut into panels, stored depth-major (`[depth, tokens of the panel]`), so that one weight multiplies
//! whole vectors of tokens. For a 2:4 weight the kernel walks the list of what is kept, broadcasts each value and
//! multiplies it with the panel's vectors at its column: half the multiplications of the dense product, no shuffles,
//! and what is pruned is never touched. The gradient with respect to the input is the same walk along columns instead
//! of rows. A dense weight is multiplied tile by tile in the manner of Goto and van de Geijn (2008).
//!
//! Blocks of outputs are split among threads. A block goes over the depth in steps, so that a panel's part stays in
//! the first cache while every output of the block meets it.

mod ahead;
mod blocks;
pub(super) mod kept_columns;
mod kept_rows;
mod listed;
mod panels;
mod tile;
mod transposed;
mod walk;

use std::{ops::Range, time::Duration};

use super::{
    dense::Rows,
    engine::Cpu,
    epilogue::Epilogue,
    format::KernelElement,
    scratch::Scratch,
    share::{share_expecting, threads},
    strips::{ROWS, StripsRef},
    vector::{Has, Vector, Work},
};
pub(super) use blocks::BlockProduct;
use kept_columns::{ColumnEntries, ColumnLists, ListColumns};
use kept_rows::{ListRows, RowEntries, RowLists, WORD_GROUPS};
pub(crate) use listed::Listed;
pub(super) use panels::column_blocks;
use panels::{Lines, Panels, unpack};
use tile::Tiles;
pub(super) use transposed::TransposedProduct;

/// What the blocks of outputs start at multiples of.
const ALIGNMENT: usize = 32;

/// Lines of a panel are completed with zeros to a multiple of a group, whose padding multiplies them.
pub(super) const GROUP: usize = 4;

/// Tokens multiplied in one go: bounds the memory for panels and products.
const TOKENS: usize = 512;

/// Outputs of the largest block: its lists and products stay in the second cache.
const OUTS: usize = 256;

/// A weight or its transpose, `[outs, depth]`, of which parts are prepared for a loop.
#[derive(Debug, Clone, Copy)]
pub(super) enum Factor<'a, T: KernelElement> {
    /// A 2:4 weight: outputs are rows.
    KeptOfRows(StripsRef<'a, T>),
    /// Its transpose: outputs are columns.
    KeptOfColumns(StripsRef<'a, T>),
    /// A dense weight: outputs are rows.
    Rows(Rows<'a, T>),
    /// Its transpose: outputs are columns.
    Columns(Rows<'a, T>),
}

/// A part of a factor in the order in which its loop reads it; a factor uses one of these.
#[derive(Debug, Default)]
struct Block {
    rows: RowLists,
    columns: ColumnLists,
    tiles: Tiles,
}

impl<T: KernelElement> Factor<'_, T> {
    /// Outputs, and depth.
    fn shape(&self) -> (usize, usize) {
        match self {
            Factor::KeptOfRows(w) => (w.shape.rows, w.shape.cols),
            Factor::KeptOfColumns(w) => (w.shape.cols, w.shape.rows),
            Factor::Rows(w) => (w.rows, w.cols),
            Factor::Columns(w) => (w.cols, w.rows),
        }
    }

    /// Registers of tokens in the widest panel, and depth of a block.
    fn steps<V: Vector>(&self) -> (usize, usize) {
        const { assert!(V::LISTS[1] <= WORD_GROUPS * GROUP) };
        match self {
            Factor::KeptOfRows(_) => (V::LISTS[0], V::LISTS[1]),
            // Here rows are the depth, and strips are taken whole.
            Factor::KeptOfColumns(_) => (V::LISTS[0], V::LISTS[1].next_multiple_of(ROWS)),
            Factor::Rows(_) | Factor::Columns(_) => (V::TILES[0], V::TILES[1]),
        }
    }

    /// Fills `block` with a part, for panels whose lines are `stride` tokens apart. The outputs start at a
    /// multiple of [`ALIGNMENT`], the depth at one of the block's.
    fn prepare<V: Vector>(
        &self,
        has: Has<V>,
        outs: Range<usize>,
        depth: Range<usize>,
        stride: usize,
        block: &mut Block,
    ) {
        match *self {
            Factor::KeptOfRows(weight) => {
                let groups = depth.start / GROUP..depth.end.div_ceil(GROUP);
                has.run(ListRows { weight, rows: outs, groups, stride, lists: &mut block.rows });
            }
            Factor::KeptOfColumns(weight) => {
                has.run(ListColumns { weight, columns: outs, rows: depth, stride, lists: &mut block.columns });
            }
            Factor::Rows(weight) => block.tiles.fill_by_rows::<V, T>(weight, outs, depth),
            Factor::Columns(weight) => block.tiles.fill_by_columns::<V, T>(weight, outs, depth),
        }
    }

    /// Asks for part `part` of `parts` of what [`Factor::prepare`] reads next, so that it comes while others are
    /// multiplied.
    fn fetch<V: Vector>(&self, outs: Range<usize>, depth: Range<usize>, part: usize, parts: usize) {
        let Factor::KeptOfRows(weight) = self else { return };
        let (first, end) = (outs.start / ROWS, outs.end.div_ceil(ROWS));
        let strips = (end - first).div_ceil(parts);
        let groups = depth.start / GROUP..depth.end.div_ceil(GROUP);
        for strip in (first + part * strips).min(end)..(first + (part + 1) * strips).min(end) {
            ahead::fetch::<V, _>(weight.strip(strip).bytes_of(groups.clone()));
        }
    }

    /// Adds the product of `block`, which was prepared for these lines, and `panel` to `out`: `[outs, vectors *
    /// lanes]`, one line per output.
    fn multiply<V: Vector>(&self, has: Has<V>, block: &Block, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        match self {
            Factor::KeptOfRows(_) => {
                has.run(walk::Multiply::<RowEntries> { lists: &block.rows, panel, vectors, out });
            }
            Factor::KeptOfColumns(_) => {
                has.run(walk::Multiply::<ColumnEntries> { lists: &block.columns, panel, vectors, out });
            }
            Factor::Rows(_) | Factor::Columns(_) => {
                has.run(tile::Multiply { tiles: &block.tiles, panel, vectors, out });
            }
        }
    }
}

/// `y = act(x · factorᵀ + bias)`: `x` is `[tokens, depth]`, `y` is `[tokens, outs]`.
pub(super) fn product<T: KernelElement>(cpu: Cpu, factor: Factor<'_, T>, x: &[T], epilogue: Epilogue<'_>, y: &mut [T]) {
    cpu.run(Product { factor, x, epilogue, y });
}

struct Product<'a, T: KernelElement> {
    factor: Factor<'a, T>,
    x: &'a [T],
    epilogue: Epilogue<'a>,
    y: &'a mut [T],
}

impl<T: KernelElement> Work for Product<'_, T> {
    type Output = ();

    // Compiled with the instructions enabled, what transposes activations and products becomes gathers and scatters.
    #[inline(never)]
    fn run<V: Vector>(self, has: Has<V>) {
        let Self { factor, x, epilogue, y } = self;
        let (outs, depth) = factor.shape();
        if outs == 0 {
            return;
        }
        let (vectors, _) = factor.steps::<V>();
        // A few blocks per thread even out what else the machine is doing.
        let block = outs.div_ceil(4 * threads()).next_multiple_of(ALIGNMENT).min(OUTS);
        for (i, y) in y.chunks_mut(TOKENS * outs).enumerate() {
            let tokens = y.len() / outs;
            let x = &x[i * TOKENS * depth..][..tokens * depth];
            let panels = Panels::pack(x, tokens, depth, V::LANES, vectors);
            share_expecting(
                expected(outs, depth, tokens),
                column_blocks(y, outs, block).into_iter(),
                || (Block::default(), Scratch::take(block * panels.padded_tokens())),
                |(prepared, products), mut y| {
                    let products = &mut products[..y.cols().len() * panels.padded_tokens()];
                    multiply_block(has, factor, y.cols(), &panels, prepared, products);
                    unpack(products, &panels, epilogue, &mut y);
                },
            );
        }
    }
}

/// How long one thread takes for a product, rather too short: a vector's products each nanosecond or so, and reading
/// the weight.
fn expected(outs: usize, depth: usize, tokens: usize) -> Duration {
    /// What reading an element costs, in products.
    const READ: usize = 8;
    /// Products of a thread in a nanosecond.
    const PRODUCTS: usize = 64;
    Duration::from_nanos((outs.saturating_mul(depth).saturating_mul(tokens + READ) / PRODUCTS) as u64)
}

/// Multiplies some outputs with all panels: `[panel][outs, tokens of the panel]`.
fn multiply_block<V: Vector, T: KernelElement>(
    has: Has<V>,
    factor: Factor<'_, T>,
    outs: Range<usize>,
    panels: &Panels,
    prepared: &mut Block,
    products: &mut [f32],
) {
    let ((_, step), (_, end)) = (factor.steps::<V>(), factor.shape());
    products.fill(0.0);
    for start in (0..end).step_by(step) {
        let depth = start..(start + step).min(end);
        factor.prepare(has, outs.clone(), depth.clone(), panels.stride(), prepared);
        let next = depth.end..(depth.end + step).min(end);
        for (i, panel) in panels.iter().enumerate() {
            factor.fetch::<V>(outs.clone(), next.clone(), i, panels.count());
            let out = &mut products[outs.len() * panel.first..][..outs.len() * panel.width];
            let lines = Lines {
                data: panels.lines(i, &depth),
                stride: panels.stride(),
                next: if i + 1 < panels.count() { panels.lines(i + 1, &depth) } else { panels.lines(0, &next) },
            };
            factor.multiply(has, prepared, lines, panel.width / V::LANES, out);
        }
    }
}
