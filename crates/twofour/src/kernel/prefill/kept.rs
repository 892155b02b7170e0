//! What a 2:4 weight keeps, listed per output, and the kernel that walks the lists.

use std::ops::Range;

use super::{
    super::{
        KernelElement,
        decode::vector::Vector,
        strips::{ROWS, Strips},
    },
    Factor, Kernels,
};

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

    #[inline(always)]
    fn push(&mut self, out: usize, kept: Kept) {
        let length = &mut self.lengths[out];
        self.kept[out * self.capacity + *length as usize] = kept;
        *length += 1;
    }
}

/// The weight itself: outputs are rows.
#[derive(Debug)]
pub(super) struct KeptOfRows<'a, T>(pub &'a Strips<T>);

/// Its transpose: outputs are columns.
#[derive(Debug)]
pub(super) struct KeptOfColumns<'a, T>(pub &'a Strips<T>);

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

/// Calls `f(row, column, value)` for what `rows` keep in `cols`, in order of column for each row. The rows start at a
/// multiple of [`ROWS`], the columns at one of 4.
#[inline(always)]
fn for_each_kept<T: KernelElement>(
    weight: &Strips<T>,
    rows: Range<usize>,
    cols: Range<usize>,
    mut f: impl FnMut(usize, usize, f32),
) {
    for first in rows.clone().step_by(ROWS) {
        let strip = weight.strip(first / ROWS);
        for group in cols.start / 4..cols.end.div_ceil(4) {
            for row in 0..ROWS.min(rows.end - first) {
                for (position, value) in strip.kept(row, group) {
                    let col = group * 4 + position;
                    // Padding past the last column multiplies nothing.
                    if col < cols.end {
                        f(first + row, col, value.to_f32());
                    }
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
        self.0.rows()
    }

    fn depth(&self) -> usize {
        self.0.cols()
    }

    fn prepare<V: Kernels>(&self, outs: Range<usize>, depth: Range<usize>, stride: usize, lists: &mut Lists) {
        let capacity = depth.len().div_ceil(4) * 2;
        lists.clear(outs.len(), capacity, depth.len() * stride);
        let whole = depth.start / 4..depth.end / 4;
        for first in outs.clone().step_by(ROWS) {
            let strip = self.0.strip(first / ROWS);
            for row in 0..ROWS.min(outs.end - first) {
                let list = &mut lists.kept[(first + row - outs.start) * capacity..][..capacity];
                let values = strip.values.chunks_exact(Strips::<T>::LINE);
                let lines = values.zip(strip.codes.as_chunks::<2>().0).take(whole.end).skip(whole.start);
                let mut offset = 0;
                for (pair, (values, codes)) in list.as_chunks_mut::<2>().0.iter_mut().zip(lines) {
                    for (which, slot) in pair.iter_mut().enumerate() {
                        let position = codes[which] >> (2 * row) & 3;
                        let value = values[T::value(row, 0, which)].to_f32();
                        *slot = Kept { value, offset: offset + position * stride as u32 };
                    }
                    offset += 4 * stride as u32;
                }
            }
        }
        lists.lengths.fill(2 * whole.len() as u32);
        // A last group that is not whole.
        for_each_kept(self.0, outs.clone(), 4 * whole.end..depth.end, |row, col, value| {
            lists.push(row - outs.start, Kept { value, offset: ((col - depth.start) * stride) as u32 });
        });
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
        self.0.cols()
    }

    fn depth(&self) -> usize {
        self.0.rows()
    }

    fn prepare<V: Kernels>(&self, outs: Range<usize>, depth: Range<usize>, stride: usize, lists: &mut Lists) {
        // A column may be kept in every row.
        let capacity = depth.len();
        lists.clear(outs.len(), capacity, depth.len() * stride);
        for_each_kept(self.0, depth.clone(), outs.clone(), |row, col, value| {
            lists.push(col - outs.start, Kept { value, offset: ((row - depth.start) * stride) as u32 });
        });
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
