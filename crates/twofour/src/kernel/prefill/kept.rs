//! What a 2:4 weight keeps, listed per output, and the kernel that walks the lists.

use std::ops::Range;

use super::{
    super::{
        KernelElement,
        decode::{
            SparseBlock,
            vector::{Vector, WORD_COLUMNS, WORD_VALUES},
        },
    },
    Factor, Kernels,
};
use crate::compressed::code;

/// A kept weight.
#[derive(Debug, Clone, Copy, Default)]
struct Kept {
    value: f32,
    /// Where its activations start, counted in elements of the panel.
    offset: u32,
}

/// For each output, in order of depth, what it multiplies with.
#[derive(Debug, Default)]
pub(super) struct Lists {
    kept: Vec<Kept>,
    lengths: Vec<u32>,
    /// Places for each list.
    capacity: usize,
    /// Elements of the panels that the offsets point into.
    panel_len: usize,
}

impl Lists {
    fn clear(&mut self, outs: usize, capacity: usize, panel_len: usize) {
        self.lengths.clear();
        self.lengths.resize(outs, 0);
        self.capacity = capacity;
        self.panel_len = panel_len;
        if self.kept.len() < outs * capacity {
            self.kept.resize(outs * capacity, Kept::default());
        }
    }
}

/// The weight itself: outputs are rows.
#[derive(Debug)]
pub(super) struct KeptOfRows<'a, T> {
    pub w: SparseBlock<'a, T>,
    pub cols: usize,
}

/// Its transpose: outputs are columns.
#[derive(Debug)]
pub(super) struct KeptOfColumns<'a, T> {
    pub w: SparseBlock<'a, T>,
    pub cols: usize,
}

impl<T> Clone for KeptOfRows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for KeptOfRows<'_, T> {}
impl<T> Clone for KeptOfColumns<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for KeptOfColumns<'_, T> {}

/// Calls `f(column, value)` for what a row keeps in `cols`, whose start is a multiple of 32, in order of column.
#[inline(always)]
fn for_each_kept<T: KernelElement>(
    w: &SparseBlock<'_, T>,
    row: usize,
    cols: &Range<usize>,
    mut f: impl FnMut(usize, f32),
) {
    let values = &w.values[row * w.row_values..][..w.row_values];
    let meta = &w.meta[row * w.row_words..][..w.row_words];
    let words = cols.start / WORD_COLUMNS..cols.end.div_ceil(WORD_COLUMNS);
    for ((word, meta), values) in
        words.clone().zip(&meta[words.clone()]).zip(values[words.start * WORD_VALUES..].chunks(WORD_VALUES))
    {
        for (group, pair) in values.as_chunks::<2>().0.iter().enumerate() {
            let (first, second) = code::positions((meta >> (4 * group) & 15) as u8);
            for (position, value) in [first, second].into_iter().zip(pair) {
                let col = word * WORD_COLUMNS + group * 4 + position;
                // Padding past the last column multiplies nothing.
                if col < cols.end {
                    f(col, value.to_f32());
                }
            }
        }
    }
}

impl<T: KernelElement> Factor for KeptOfRows<'_, T> {
    type Block = Lists;

    fn shape<V: Kernels>() -> (usize, usize) {
        (V::LIST_VECTORS, V::LIST_DEPTH)
    }

    fn outs(&self) -> usize {
        self.w.rows
    }

    fn depth(&self) -> usize {
        self.cols
    }

    fn prepare<V: Kernels>(&self, outs: Range<usize>, depth: Range<usize>, stride: usize, lists: &mut Lists) {
        let capacity = depth.len().div_ceil(4) * 2;
        lists.clear(outs.len(), capacity, depth.len() * stride);
        for ((row, list), length) in outs.zip(lists.kept.chunks_exact_mut(capacity)).zip(&mut lists.lengths) {
            let mut n = 0;
            for_each_kept(&self.w, row, &depth, |col, value| {
                list[n] = Kept { value, offset: ((col - depth.start) * stride) as u32 };
                n += 1;
            });
            *length = n as u32;
        }
    }

    unsafe fn multiply<V: Kernels>(lists: &Lists, panel: &[f32], _: usize, vectors: usize, out: &mut [f32]) {
        // SAFETY: the caller's.
        unsafe { V::multiply_lists(lists, panel, vectors, out) }
    }
}

impl<T: KernelElement> Factor for KeptOfColumns<'_, T> {
    type Block = Lists;

    fn shape<V: Kernels>() -> (usize, usize) {
        (V::LIST_VECTORS, V::LIST_DEPTH)
    }

    fn outs(&self) -> usize {
        self.cols
    }

    fn depth(&self) -> usize {
        self.w.rows
    }

    fn prepare<V: Kernels>(&self, outs: Range<usize>, depth: Range<usize>, stride: usize, lists: &mut Lists) {
        // A column may be kept in every row.
        let capacity = depth.len();
        lists.clear(outs.len(), capacity, depth.len() * stride);
        for row in depth.clone() {
            let offset = ((row - depth.start) * stride) as u32;
            for_each_kept(&self.w, row, &outs, |col, value| {
                let out = col - outs.start;
                let length = &mut lists.lengths[out];
                lists.kept[out * capacity + *length as usize] = Kept { value, offset };
                *length += 1;
            });
        }
    }

    unsafe fn multiply<V: Kernels>(lists: &Lists, panel: &[f32], _: usize, vectors: usize, out: &mut [f32]) {
        // SAFETY: the caller's.
        unsafe { V::multiply_lists(lists, panel, vectors, out) }
    }
}

/// Adds to each line of `out`, of `vectors` vectors, the products of an output's list with the panel.
///
/// # Safety
/// The CPU has `V`'s instructions; lines of the panel are at least `vectors` vectors long, as in the panel that the lists
/// were made for.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector>(lists: &Lists, panel: &[f32], vectors: usize, out: &mut [f32]) {
    assert!(lists.panel_len <= panel.len() && out.len() == lists.lengths.len() * vectors * V::LANES);
    // SAFETY: offsets are starts of lines of the panel; `out` has a line for each list.
    unsafe {
        match vectors {
            1 => walk::<V, 1, 4>(lists, panel, out),
            2 => walk::<V, 2, 4>(lists, panel, out),
            3 => walk::<V, 3, 3>(lists, panel, out),
            4 => walk::<V, 4, 2>(lists, panel, out),
            5 => walk::<V, 5, 2>(lists, panel, out),
            6 => walk::<V, 6, 2>(lists, panel, out),
            7 => walk::<V, 7, 1>(lists, panel, out),
            8 => walk::<V, 8, 1>(lists, panel, out),
            9 => walk::<V, 9, 1>(lists, panel, out),
            10 => walk::<V, 10, 1>(lists, panel, out),
            11 => walk::<V, 11, 1>(lists, panel, out),
            12 => walk::<V, 12, 1>(lists, panel, out),
            _ => unreachable!("panels are at most LIST_VECTORS wide"),
        }
    }
}

/// One list after the other. Narrow panels take `S` of its elements at once into sums of their own, so that additions
/// need not wait for each other.
///
/// # Safety
/// As [`multiply`]; `out` has `N` vectors for each list.
#[inline(always)]
unsafe fn walk<V: Vector, const N: usize, const S: usize>(lists: &Lists, panel: &[f32], out: &mut [f32]) {
    // SAFETY: the caller's; a list's length is at most its capacity.
    unsafe {
        let panel = panel.as_ptr();
        for (out_index, length) in lists.lengths.iter().enumerate() {
            let list = lists.kept.get_unchecked(out_index * lists.capacity..).get_unchecked(..*length as usize);
            let line = out.as_mut_ptr().add(out_index * N * V::LANES);
            let mut sums = [[V::zero(); N]; S];
            for (n, sum) in sums[0].iter_mut().enumerate() {
                *sum = V::load(line.add(n * V::LANES));
            }
            let (runs, rest) = list.as_chunks::<S>();
            for run in runs {
                for (kept, sums) in run.iter().zip(&mut sums) {
                    add_product(*kept, panel, sums);
                }
            }
            for kept in rest {
                add_product(*kept, panel, &mut sums[0]);
            }
            let one = V::splat(1.0);
            let (first, others) = sums.split_at_mut(1);
            for (n, sum) in first[0].iter_mut().enumerate() {
                for other in others.iter() {
                    *sum = one.multiply_add(other[n], *sum);
                }
                sum.store(line.add(n * V::LANES));
            }
        }
    }
}

/// Adds the products of one kept weight with `N` vectors of tokens.
///
/// # Safety
/// The CPU has `V`'s instructions; the weight's activations are `N` vectors within the panel.
#[inline(always)]
unsafe fn add_product<V: Vector, const N: usize>(kept: Kept, panel: *const f32, sums: &mut [V; N]) {
    // SAFETY: the caller's.
    unsafe {
        let w = V::splat(kept.value);
        let x = panel.add(kept.offset as usize);
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = w.multiply_add(V::load(x.add(n * V::LANES)), *sum);
        }
    }
}
