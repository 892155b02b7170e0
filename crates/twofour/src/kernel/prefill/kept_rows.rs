//! A 2:4 weight, listed per row: two entries for every group, so that two bits say where an entry's activations are.
//!
//! A list is its values and one word of positions. An entry that is loaded with the address of its activations keeps the loads that
//! need it waiting; a word's bits are taken apart beside them.

use std::{
    arch::x86_64::{_mm_loadu_ps, _mm_movehl_ps, _mm_movelh_ps, _mm_storeu_ps, _mm_unpackhi_ps, _mm_unpacklo_ps},
    ops::Range,
};

use super::{
    super::{
        aligned::Aligned,
        element::KernelElement,
        strips::{ROWS, Strip, StripsRef},
        vector::Vector,
    },
    Factor, GROUP, Kernels, Lines,
    ahead::fetch,
    walk::{Entries, Lists, UNROLLED},
};

/// Groups whose positions a word holds.
const WORD_GROUPS: usize = 16;

/// Groups whose values are listed together: two entries of each fill a register of 128 bits.
const PAIR: usize = 2;

/// Values that a list of so many groups has room for.
fn capacity(groups: usize) -> usize {
    2 * groups.next_multiple_of(PAIR)
}

/// The weight itself: outputs are rows.
#[derive(Debug)]
pub(super) struct KeptOfRows<'a, T>(pub StripsRef<'a, T>);

impl<T> Clone for KeptOfRows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for KeptOfRows<'_, T> {}

/// What rows keep of some groups: lists of equal length, one after the other.
#[derive(Debug)]
pub(super) struct RowLists {
    values: Aligned<f32>,
    /// For each list, two bits for each entry, the first entry's lowest.
    positions: Vec<u64>,
    outs: usize,
    groups: usize,
    /// Tokens from one line of a panel to the next.
    stride: usize,
}

impl Default for RowLists {
    fn default() -> Self {
        Self { values: Aligned::zeroed(0), positions: Vec::new(), outs: 0, groups: 0, stride: 0 }
    }
}

impl RowLists {
    fn capacity(&self) -> usize {
        capacity(self.groups)
    }

    /// Makes room, also for rows that complete the last strip.
    fn reset(&mut self, outs: usize, groups: usize, stride: usize) {
        assert!(groups <= WORD_GROUPS, "a list's positions fill at most one word");
        (self.outs, self.groups, self.stride) = (outs, groups, stride);
        let rows = outs.next_multiple_of(ROWS);
        if self.values.len() < rows * self.capacity() {
            self.values = Aligned::zeroed(rows * self.capacity());
        }
        self.positions.resize(rows, 0);
    }
}

impl Lists for RowLists {
    type Entries = RowEntries;

    fn outs(&self) -> usize {
        self.outs
    }

    fn panel_len(&self) -> usize {
        GROUP * self.groups * self.stride
    }

    #[inline(always)]
    unsafe fn list(&self, out: usize, panel: *const f32) -> (RowEntries, usize) {
        // SAFETY: the list exists, as the trait requires; there are a word and room for `capacity` values for every list.
        unsafe {
            let values = self.values.as_ptr().add(out * self.capacity());
            let positions = *self.positions.get_unchecked(out);
            (RowEntries { values, positions, panel, stride: self.stride }, 2 * self.groups)
        }
    }
}

/// Entries of a row.
#[derive(Debug)]
pub(super) struct RowEntries {
    values: *const f32,
    positions: u64,
    /// The line of the next entry's group.
    panel: *const f32,
    stride: usize,
}

impl Entries for RowEntries {
    #[inline(always)]
    unsafe fn entry(&self, i: usize) -> (f32, *const f32) {
        let position = (self.positions >> (2 * i)) as usize & 3;
        // SAFETY: the list has the entry, as the trait requires; its group has `GROUP` lines in the panel.
        unsafe { (*self.values.add(i), self.panel.add(i / 2 * GROUP * self.stride).add(position * self.stride)) }
    }

    #[inline(always)]
    unsafe fn advance(&mut self) {
        // SAFETY: the list has `UNROLLED` entries more, as the trait requires, and so many lines more are in the panel.
        unsafe {
            self.values = self.values.add(UNROLLED);
            self.panel = self.panel.add(UNROLLED / 2 * GROUP * self.stride);
        }
        self.positions >>= 2 * UNROLLED;
    }
}

impl<T: KernelElement> Factor for KeptOfRows<'_, T> {
    type Block = RowLists;

    fn shape<V: Kernels>() -> (usize, usize) {
        const { assert!(V::LIST_DEPTH <= WORD_GROUPS * GROUP) };
        (V::LIST_VECTORS, V::LIST_DEPTH)
    }

    fn outs(&self) -> usize {
        self.0.rows()
    }

    fn depth(&self) -> usize {
        self.0.cols()
    }

    fn prepare<V: Kernels>(
        &self,
        _: V::Has,
        outs: Range<usize>,
        depth: Range<usize>,
        stride: usize,
        lists: &mut RowLists,
    ) {
        let groups = depth.start / GROUP..depth.end.div_ceil(GROUP);
        lists.reset(outs.len(), groups.len(), stride);
        let strips = outs.start / ROWS..outs.end.div_ceil(ROWS);
        let values = ROWS * lists.capacity();
        let lists = lists.values.chunks_exact_mut(values).zip(lists.positions.as_chunks_mut().0);
        for (strip, (values, positions)) in strips.zip(lists) {
            // SAFETY: the first argument is proof that the CPU has the instructions.
            unsafe { V::list_strip(self.0.strip(strip), groups.clone(), values, positions) };
        }
    }

    fn fetch(&self, outs: Range<usize>, depth: Range<usize>, part: usize, parts: usize) {
        let (first, end) = (outs.start / ROWS, outs.end.div_ceil(ROWS));
        let strips = (end - first).div_ceil(parts);
        let groups = depth.start / GROUP..depth.end.div_ceil(GROUP);
        for strip in (first + part * strips).min(end)..(first + (part + 1) * strips).min(end) {
            fetch(self.0.strip(strip).bytes_of(groups.clone()));
        }
    }

    unsafe fn multiply<V: Kernels>(lists: &RowLists, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: the CPU has `V`'s instructions and the lists are of this panel's depth and stride, as the trait requires.
        unsafe { V::multiply_lists(lists, panel, vectors, out) }
    }
}

/// Lists what a strip's rows keep of some groups: values, widened, `[rows, groups completed to pairs, 2]`, and a word of positions for each row.
///
/// # Safety
/// The CPU has `V`'s instructions.
#[inline(always)]
pub(super) unsafe fn list_strip<V: Vector, T: KernelElement>(
    strip: Strip<'_, T>,
    groups: Range<usize>,
    values: &mut [f32],
    positions: &mut [u64; ROWS],
) {
    /// Groups whose positions fill half a word.
    const HALF: usize = WORD_GROUPS / 2;
    assert!(T::GROUPS == 1 && groups.len() <= WORD_GROUPS);
    let capacity = capacity(groups.len());
    assert!(values.len() == ROWS * capacity);
    let mut words = [[0_u32; ROWS]; 2];
    for (pair, first) in groups.clone().step_by(PAIR).enumerate() {
        // First and second values of one group and of the next.
        let mut columns = [[0.0; ROWS]; 2 * PAIR];
        for (i, columns) in columns.as_chunks_mut::<2>().0.iter_mut().enumerate().take(groups.end - first) {
            let (line, codes) = strip.line(first + i);
            // SAFETY: the CPU has `V`'s instructions, as this function requires; a line has first and second values of `ROWS` rows, and `columns` have room for them.
            unsafe {
                let (a, b) = V::line::<T, 0>(line.as_ptr());
                a.store(columns[0].as_mut_ptr());
                b.store(columns[1].as_mut_ptr());
                if V::LANES < ROWS {
                    let (a, b) = V::line::<T, 1>(line.as_ptr());
                    a.store(columns[0][V::LANES..].as_mut_ptr());
                    b.store(columns[1][V::LANES..].as_mut_ptr());
                }
            }
            let group = PAIR * pair + i;
            for (row, word) in words[group / HALF].iter_mut().enumerate() {
                let four_bits = codes[0] >> (2 * row) & 3 | (codes[1] >> (2 * row) & 3) << 2;
                *word |= four_bits << (4 * (group % HALF));
            }
        }
        for (four, rows) in values.chunks_exact_mut(4 * capacity).enumerate() {
            // SAFETY: `columns` hold four rows from there on, `rows` those rows' lists; x86-64 has SSE.
            unsafe {
                let column = |i: usize| _mm_loadu_ps(columns[i][4 * four..].as_ptr());
                let (a, b, c, d) = (column(0), column(1), column(2), column(3));
                let (ab, cd) = (_mm_unpacklo_ps(a, b), _mm_unpacklo_ps(c, d));
                let rows = rows.as_mut_ptr().add(2 * PAIR * pair);
                _mm_storeu_ps(rows, _mm_movelh_ps(ab, cd));
                _mm_storeu_ps(rows.add(capacity), _mm_movehl_ps(cd, ab));
                let (ab, cd) = (_mm_unpackhi_ps(a, b), _mm_unpackhi_ps(c, d));
                _mm_storeu_ps(rows.add(2 * capacity), _mm_movelh_ps(ab, cd));
                _mm_storeu_ps(rows.add(3 * capacity), _mm_movehl_ps(cd, ab));
            }
        }
    }
    for ((positions, low), high) in positions.iter_mut().zip(words[0]).zip(words[1]) {
        *positions = u64::from(high) << 32 | u64::from(low);
    }
}
