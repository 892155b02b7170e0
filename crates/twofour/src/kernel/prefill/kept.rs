//! What a 2:4 weight keeps, listed per output, and the kernel that walks the lists.

use std::{
    arch::x86_64::{_mm_loadu_ps, _mm_movehl_ps, _mm_movelh_ps, _mm_storeu_ps, _mm_unpackhi_ps, _mm_unpacklo_ps},
    ops::Range,
};

use bytemuck::{Pod, Zeroable};

use super::{
    super::{
        KernelElement,
        aligned::Aligned,
        decode::vector::Vector,
        strips::{ROWS, Strips},
    },
    Factor, Kernels, Lines,
    ahead::{Ahead, fetch},
};

/// A kept weight and where its activations start, counted in elements of the panel.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
pub(super) struct Kept {
    value: f32,
    offset: u32,
}

/// For each output, in order of depth, what it keeps: one list after the other.
#[derive(Debug)]
pub(super) struct Lists {
    kept: Aligned<Kept>,
    lengths: Vec<u32>,
    /// Places for each list.
    capacity: usize,
    /// Elements of the panels that the offsets point into.
    panel_len: usize,
}

impl Default for Lists {
    fn default() -> Self {
        Self { kept: Aligned::zeroed(0), lengths: Vec::new(), capacity: 0, panel_len: 0 }
    }
}

impl Lists {
    /// Makes room; the lists have so many entries each. There is room for outputs that complete the last strip, too.
    fn reset(&mut self, outs: usize, length: usize, capacity: usize, panel_len: usize) {
        self.lengths.clear();
        self.lengths.resize(outs, length as u32);
        self.capacity = capacity;
        self.panel_len = panel_len;
        let places = outs.next_multiple_of(ROWS) * capacity;
        if self.kept.len() < places {
            self.kept = Aligned::zeroed(places);
        }
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
        let groups = depth.start / 4..depth.end.div_ceil(4);
        lists.reset(outs.len(), 2 * groups.len(), 2 * groups.len(), 4 * groups.len() * stride);
        let strips = outs.start / ROWS..outs.end.div_ceil(ROWS);
        let line = Strips::<T>::LINE;
        let lists = lists.kept.chunks_exact_mut(groups.len() * line);
        for (strip, lists) in strips.zip(lists) {
            let strip = self.0.strip(strip);
            let (values, codes) =
                (&strip.values[groups.start * line..groups.end * line], &strip.codes[2 * groups.start..2 * groups.end]);
            // SAFETY: `Kernels` are only used where the CPU has their instructions.
            unsafe { V::list_strip(values, codes, stride as u32, lists) };
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

    unsafe fn multiply<V: Kernels>(lists: &Lists, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: the caller's.
        unsafe { V::multiply_lists(lists, panel, vectors, out) }
    }
}

/// Lists what a strip's rows keep, values widened, for panels whose lines are `stride` tokens apart: `[rows, 2 * groups]`.
///
/// # Safety
/// The CPU has `V`'s instructions.
#[inline(always)]
pub(super) unsafe fn list_strip<V: Vector, T: KernelElement>(
    lines: &[T],
    codes: &[u32],
    stride: u32,
    lists: &mut [Kept],
) {
    const LINE: usize = 2 * ROWS;
    assert!(lines.len() == lists.len() && lines.len() == codes.len() * ROWS);
    let capacity = codes.len();
    let lines = lines.as_chunks::<LINE>().0.iter().zip(codes.as_chunks::<2>().0);
    for (group, (line, codes)) in lines.enumerate() {
        let mut values = [[0.0; ROWS]; 2];
        // SAFETY: the caller's; a line has first and second values of `ROWS` rows.
        unsafe {
            let (a, b) = V::line::<T, 0>(line.as_ptr());
            a.store(values[0].as_mut_ptr());
            b.store(values[1].as_mut_ptr());
            if V::LANES < ROWS {
                let (a, b) = V::line::<T, 1>(line.as_ptr());
                a.store(values[0][V::LANES..].as_mut_ptr());
                b.store(values[1][V::LANES..].as_mut_ptr());
            }
        }
        let first = 4 * group as u32 * stride;
        let mut offsets = [[0; ROWS]; 2];
        for (codes, offsets) in codes.iter().zip(&mut offsets) {
            for (row, offset) in offsets.iter_mut().enumerate() {
                *offset = first + (codes >> (2 * row) & 3) * stride;
            }
        }
        for (four, lists) in lists.chunks_exact_mut(4 * capacity).enumerate() {
            // SAFETY: `values` and `offsets` hold four rows from there on, `lists` those rows' lists; x86-64 has SSE.
            unsafe {
                let (v1, v2) =
                    (_mm_loadu_ps(values[0][4 * four..].as_ptr()), _mm_loadu_ps(values[1][4 * four..].as_ptr()));
                let (o1, o2) = (
                    _mm_loadu_ps(offsets[0][4 * four..].as_ptr().cast()),
                    _mm_loadu_ps(offsets[1][4 * four..].as_ptr().cast()),
                );
                let (first, second) = (_mm_unpacklo_ps(v1, o1), _mm_unpacklo_ps(v2, o2));
                let lists = lists.as_mut_ptr().add(2 * group);
                let list = |row: usize| lists.add(row * capacity).cast::<f32>();
                _mm_storeu_ps(list(0), _mm_movelh_ps(first, second));
                _mm_storeu_ps(list(1), _mm_movehl_ps(second, first));
                let (first, second) = (_mm_unpackhi_ps(v1, o1), _mm_unpackhi_ps(v2, o2));
                _mm_storeu_ps(list(2), _mm_movelh_ps(first, second));
                _mm_storeu_ps(list(3), _mm_movehl_ps(second, first));
            }
        }
    }
}

impl<T: KernelElement> Factor for KeptOfColumns<'_, T> {
    type Block = Lists;

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

    fn prepare<V: Kernels>(&self, outs: Range<usize>, depth: Range<usize>, stride: usize, lists: &mut Lists) {
        // A column may be kept in every row.
        let capacity = depth.len();
        lists.reset(outs.len(), 0, capacity, depth.len() * stride);
        let Lists { kept, lengths, .. } = lists;
        for_each_kept(self.0, depth.clone(), outs.clone(), |row, col, value| {
            let out = col - outs.start;
            let offset = ((row - depth.start) * stride) as u32;
            kept[out * capacity + lengths[out] as usize] = Kept { value, offset };
            lengths[out] += 1;
        });
    }

    fn fetch(&self, _: Range<usize>, _: Range<usize>, _: usize, _: usize) {}

    unsafe fn multiply<V: Kernels>(lists: &Lists, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
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
pub(super) unsafe fn multiply<V: Vector>(lists: &Lists, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
    assert!(lists.panel_len <= panel.data.len() && out.len() == lists.lengths.len() * vectors * V::LANES);
    // SAFETY: offsets are starts of lines of the panel; `out` has a line for each list.
    unsafe {
        match vectors {
            1 => walk::<V, 1, 4>(lists, panel, out),
            2 => walk::<V, 2, 4>(lists, panel, out),
            3 => walk::<V, 3, 2>(lists, panel, out),
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

/// Entries of a list that are taken together: so few branches are foreseen, where one an entry is not (measured).
const UNROLLED: usize = 8;

/// One list after the other. Narrow panels take `S` of its entries at once into sums of their own, so that additions
/// need not wait for each other.
///
/// # Safety
/// As [`multiply`]; `out` has `N` vectors for each list.
#[inline(always)]
unsafe fn walk<V: Vector, const N: usize, const S: usize>(lists: &Lists, panel: Lines<'_>, out: &mut [f32]) {
    let mut ahead = Ahead::new(panel.next, lists.lengths.len());
    // SAFETY: the caller's; a list's length is at most its capacity.
    unsafe {
        let panel = panel.data.as_ptr();
        for (out_index, length) in lists.lengths.iter().enumerate() {
            ahead.fetch();
            let mut kept = lists.kept.as_ptr().add(out_index * lists.capacity);
            let line = out.as_mut_ptr().add(out_index * N * V::LANES);
            let mut sums = [[V::zero(); N]; S];
            for (n, sum) in sums[0].iter_mut().enumerate() {
                *sum = V::load(line.add(n * V::LANES));
            }
            let mut left = *length as usize;
            while left >= UNROLLED {
                for s in 0..UNROLLED {
                    add_product(*kept.add(s), panel, &mut sums[s % S]);
                }
                kept = kept.add(UNROLLED);
                left -= UNROLLED;
            }
            for s in 0..left {
                add_product(*kept.add(s), panel, &mut sums[0]);
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
/// The CPU has `V`'s instructions; `panel` is valid for `N` vectors from the weight's offset on.
#[inline(always)]
unsafe fn add_product<V: Vector, const N: usize>(kept: Kept, panel: *const f32, sums: &mut [V; N]) {
    // SAFETY: the caller's.
    unsafe {
        let (w, x) = (V::splat(kept.value), panel.add(kept.offset as usize));
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = w.multiply_add(V::load(x.add(n * V::LANES)), *sum);
        }
    }
}
