//! What a 2:4 weight keeps, listed per output, and the kernel that walks the lists.

use std::{
    arch::x86_64::{_MM_HINT_T1, _mm_prefetch},
    ops::Range,
};

use super::{
    super::{
        KernelElement,
        aligned::Aligned,
        decode::vector::Vector,
        strips::{ROWS, Strips},
    },
    Factor, Kernels,
};

/// For each output, in order of depth, the kept values and where their activations start, counted in elements of the panel.
///
/// The lists of `INTERLEAVED` outputs lie side by side, as strips have them.
#[derive(Debug)]
pub(super) struct Lists<const INTERLEAVED: usize> {
    values: Aligned<f32>,
    offsets: Aligned<u32>,
    lengths: Vec<u32>,
    /// Places for each list.
    capacity: usize,
    /// Elements of the panels that the offsets point into.
    panel_len: usize,
}

impl<const INTERLEAVED: usize> Default for Lists<INTERLEAVED> {
    fn default() -> Self {
        Self { values: Aligned::zeroed(0), offsets: Aligned::zeroed(0), lengths: Vec::new(), capacity: 0, panel_len: 0 }
    }
}

impl<const INTERLEAVED: usize> Lists<INTERLEAVED> {
    /// Makes room; the lists have so many entries each.
    fn reset(&mut self, outs: usize, length: usize, capacity: usize, panel_len: usize) {
        self.lengths.clear();
        self.lengths.resize(outs, length as u32);
        self.capacity = capacity;
        self.panel_len = panel_len;
        let places = outs.next_multiple_of(INTERLEAVED) * capacity;
        if self.values.len() < places {
            self.values = Aligned::zeroed(places);
            self.offsets = Aligned::zeroed(places);
        }
    }

    /// Where an output's list starts; its entries are `INTERLEAVED` apart.
    #[inline(always)]
    fn start(&self, out: usize) -> usize {
        out / INTERLEAVED * (INTERLEAVED * self.capacity) + out % INTERLEAVED
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
    type Block = Lists<ROWS>;

    fn shape<V: Kernels>() -> (usize, usize) {
        (V::LIST_VECTORS, V::LIST_DEPTH)
    }

    fn outs(&self) -> usize {
        self.0.rows()
    }

    fn depth(&self) -> usize {
        self.0.cols()
    }

    fn prepare<V: Kernels>(&self, outs: Range<usize>, depth: Range<usize>, stride: usize, lists: &mut Lists<ROWS>) {
        let groups = depth.start / 4..depth.end.div_ceil(4);
        lists.reset(outs.len(), 2 * groups.len(), 2 * groups.len(), 4 * groups.len() * stride);
        let strips = outs.start / ROWS..outs.end.div_ceil(ROWS);
        let line = Strips::<T>::LINE;
        let values = lists.values.chunks_exact_mut(groups.len() * line);
        let offsets = lists.offsets.chunks_exact_mut(groups.len() * line);
        for ((strip, values), offsets) in strips.zip(values).zip(offsets) {
            let strip = self.0.strip(strip);
            // SAFETY: `Kernels` are only used where the CPU has their instructions.
            unsafe {
                V::list_strip(
                    &strip.values[groups.start * line..groups.end * line],
                    &strip.codes[2 * groups.start..2 * groups.end],
                    stride as u32,
                    values,
                    offsets,
                );
            }
        }
    }

    fn fetch(&self, outs: Range<usize>, depth: Range<usize>, part: usize, parts: usize) {
        let (first, end) = (outs.start / ROWS, outs.end.div_ceil(ROWS));
        let strips = (end - first).div_ceil(parts);
        let groups = depth.start / 4..depth.end.div_ceil(4);
        for strip in (first + part * strips).min(end)..(first + (part + 1) * strips).min(end) {
            let strip = self.0.strip(strip);
            fetch(&strip.values[groups.start * Strips::<T>::LINE..groups.end * Strips::<T>::LINE]);
            fetch(&strip.codes[2 * groups.start..2 * groups.end]);
        }
    }

    unsafe fn multiply<V: Kernels>(lists: &Lists<ROWS>, panel: &[f32], _: usize, vectors: usize, out: &mut [f32]) {
        // SAFETY: the caller's.
        unsafe { V::multiply_rows(lists, panel, vectors, out) }
    }
}

/// Asks for memory, into the second cache.
fn fetch<T>(memory: &[T]) {
    for line in memory.chunks(64 / size_of::<T>()) {
        // SAFETY: x86-64 has SSE; a prefetch never faults.
        unsafe { _mm_prefetch::<_MM_HINT_T1>(line.as_ptr().cast()) };
    }
}

/// Widens the values of a strip's lines and finds their activations, for panels whose lines are `stride` tokens apart.
///
/// # Safety
/// The CPU has `V`'s instructions.
#[inline(always)]
pub(super) unsafe fn list_strip<V: Vector, T: KernelElement>(
    lines: &[T],
    codes: &[u32],
    stride: u32,
    values: &mut [f32],
    offsets: &mut [u32],
) {
    const LINE: usize = 2 * ROWS;
    assert!(lines.len() == values.len() && lines.len() == offsets.len() && lines.len() == codes.len() * ROWS);
    let lines = lines.as_chunks::<LINE>().0.iter().zip(codes.as_chunks::<2>().0);
    let lists = values.as_chunks_mut::<LINE>().0.iter_mut().zip(offsets.as_chunks_mut::<LINE>().0);
    let mut first = 0;
    for ((line, codes), (values, offsets)) in lines.zip(lists) {
        // SAFETY: the caller's; a line has first and second values of `ROWS` rows, and so do the lists.
        unsafe {
            let (a, b) = V::line::<T, 0>(line.as_ptr());
            a.store(values.as_mut_ptr());
            b.store(values[ROWS..].as_mut_ptr());
            if V::LANES < ROWS {
                let (a, b) = V::line::<T, 1>(line.as_ptr());
                a.store(values[V::LANES..].as_mut_ptr());
                b.store(values[ROWS + V::LANES..].as_mut_ptr());
            }
        }
        for (codes, offsets) in codes.iter().zip(offsets.as_chunks_mut::<ROWS>().0) {
            for (row, offset) in offsets.iter_mut().enumerate() {
                *offset = first + (codes >> (2 * row) & 3) * stride;
            }
        }
        first += 4 * stride;
    }
}

impl<T: KernelElement> Factor for KeptOfColumns<'_, T> {
    type Block = Lists<1>;

    fn shape<V: Kernels>() -> (usize, usize) {
        // Here rows are the depth, and strips are taken whole.
        (V::LIST_VECTORS, V::LIST_DEPTH.next_multiple_of(ROWS))
    }

    fn outs(&self) -> usize {
        self.0.cols()
    }

    fn depth(&self) -> usize {
        self.0.rows()
    }

    fn prepare<V: Kernels>(&self, outs: Range<usize>, depth: Range<usize>, stride: usize, lists: &mut Lists<1>) {
        // A column may be kept in every row.
        let capacity = depth.len();
        lists.reset(outs.len(), 0, capacity, depth.len() * stride);
        let Lists { values, offsets, lengths, .. } = lists;
        for_each_kept(self.0, depth.clone(), outs.clone(), |row, col, value| {
            let out = col - outs.start;
            let place = out * capacity + lengths[out] as usize;
            values[place] = value;
            offsets[place] = ((row - depth.start) * stride) as u32;
            lengths[out] += 1;
        });
    }

    fn fetch(&self, _: Range<usize>, _: Range<usize>, _: usize, _: usize) {}

    unsafe fn multiply<V: Kernels>(lists: &Lists<1>, panel: &[f32], _: usize, vectors: usize, out: &mut [f32]) {
        // SAFETY: the caller's.
        unsafe { V::multiply_columns(lists, panel, vectors, out) }
    }
}

/// Adds to each line of `out`, of `vectors` vectors, the products of an output's list with the panel.
///
/// # Safety
/// The CPU has `V`'s instructions; lines of the panel are at least `vectors` vectors long, as in the panel that the lists
/// were made for.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector, const I: usize>(
    lists: &Lists<I>,
    panel: &[f32],
    vectors: usize,
    out: &mut [f32],
) {
    assert!(lists.panel_len <= panel.len() && out.len() == lists.lengths.len() * vectors * V::LANES);
    // SAFETY: offsets are starts of lines of the panel; `out` has a line for each list.
    unsafe {
        match vectors {
            1 => walk::<V, I, 1, 4>(lists, panel, out),
            2 => walk::<V, I, 2, 4>(lists, panel, out),
            3 => walk::<V, I, 3, 2>(lists, panel, out),
            4 => walk::<V, I, 4, 2>(lists, panel, out),
            5 => walk::<V, I, 5, 2>(lists, panel, out),
            6 => walk::<V, I, 6, 2>(lists, panel, out),
            7 => walk::<V, I, 7, 1>(lists, panel, out),
            8 => walk::<V, I, 8, 1>(lists, panel, out),
            9 => walk::<V, I, 9, 1>(lists, panel, out),
            10 => walk::<V, I, 10, 1>(lists, panel, out),
            11 => walk::<V, I, 11, 1>(lists, panel, out),
            12 => walk::<V, I, 12, 1>(lists, panel, out),
            _ => unreachable!("panels are at most LIST_VECTORS wide"),
        }
    }
}

/// Entries of a list that are taken together: so few branches are foreseen, where one an entry is not (measured).
const UNROLLED: usize = 8;

/// One list after the other. Narrow panels take `S` of its entries at once into sums of their own, so that additions
/// need not wait for each other.
///
/// # Safety
/// As [`multiply`]; `out` has `N` vectors for each list.
#[inline(always)]
unsafe fn walk<V: Vector, const I: usize, const N: usize, const S: usize>(
    lists: &Lists<I>,
    panel: &[f32],
    out: &mut [f32],
) {
    // SAFETY: the caller's; a list's length is at most its capacity.
    unsafe {
        let panel = panel.as_ptr();
        for (out_index, length) in lists.lengths.iter().enumerate() {
            let start = lists.start(out_index);
            let (mut values, mut offsets) = (lists.values.as_ptr().add(start), lists.offsets.as_ptr().add(start));
            let line = out.as_mut_ptr().add(out_index * N * V::LANES);
            let mut sums = [[V::zero(); N]; S];
            for (n, sum) in sums[0].iter_mut().enumerate() {
                *sum = V::load(line.add(n * V::LANES));
            }
            let mut left = *length as usize;
            while left >= UNROLLED {
                for s in 0..UNROLLED {
                    add_product(*values.add(s * I), panel.add(*offsets.add(s * I) as usize), &mut sums[s % S]);
                }
                (values, offsets) = (values.add(UNROLLED * I), offsets.add(UNROLLED * I));
                left -= UNROLLED;
            }
            for s in 0..left {
                add_product(*values.add(s * I), panel.add(*offsets.add(s * I) as usize), &mut sums[0]);
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

/// Adds the products of one kept weight with `N` vectors of tokens, which start at `x`.
///
/// # Safety
/// The CPU has `V`'s instructions; `x` is valid for `N` vectors.
#[inline(always)]
unsafe fn add_product<V: Vector, const N: usize>(weight: f32, x: *const f32, sums: &mut [V; N]) {
    // SAFETY: the caller's.
    unsafe {
        let w = V::splat(weight);
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = w.multiply_add(V::load(x.add(n * V::LANES)), *sum);
        }
    }
}
