//! A 2:4 weight, listed per row: two entries for every group, so that two bits say where an entry's activations are.
//!
//! A list is its values and one word of positions. An entry that is loaded with the address of its activations keeps
//! the loads that need it waiting; a word's bits are taken apart beside them.

use std::ops::Range;

use super::{
    GROUP,
    walk::{Entries, UNROLLED},
};
use crate::kernel::{
    aligned::Aligned,
    format::KernelElement,
    strips::{ROWS, Strip, StripsRef},
    vector::{Has, Vector, Work, parts},
};

/// Groups whose positions a word holds.
pub(super) const WORD_GROUPS: usize = 16;

/// Groups whose values are listed together: two entries of each fill a register of 128 bits.
const PAIR: usize = 2;

/// Values that a list of so many groups has room for.
fn capacity(groups: usize) -> usize {
    2 * groups.next_multiple_of(PAIR)
}

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

/// Where lists of rows are.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    values: *const f32,
    positions: *const u64,
    capacity: usize,
    groups: usize,
    stride: usize,
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

// SAFETY: there are a word and room for `capacity` values for every list; a group has GROUP lines in the panel.
unsafe impl Entries for RowEntries {
    type Lists = RowLists;

    fn outs(lists: &RowLists) -> usize {
        lists.outs
    }

    fn panel_len(lists: &RowLists) -> usize {
        GROUP * lists.groups * lists.stride
    }

    type View = View;

    #[inline(always)]
    fn view(lists: &RowLists) -> View {
        let (values, positions) = (lists.values.as_ptr(), lists.positions.as_ptr());
        View { values, positions, capacity: lists.capacity(), groups: lists.groups, stride: lists.stride }
    }

    #[inline(always)]
    unsafe fn list(view: View, out: usize, panel: *const f32) -> (RowEntries, usize) {
        // SAFETY: the list exists, as the trait requires, so a word and `(out + 1) * capacity` values do.
        unsafe {
            let (values, positions) = (view.values.add(out * view.capacity), *view.positions.add(out));
            (RowEntries { values, positions, panel, stride: view.stride }, 2 * view.groups)
        }
    }

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

/// Lists what some rows keep of some groups, for panels whose lines are `stride` tokens apart.
pub(super) struct ListRows<'a, T: KernelElement> {
    pub(super) weight: StripsRef<'a, T>,
    pub(super) rows: Range<usize>,
    pub(super) groups: Range<usize>,
    pub(super) stride: usize,
    pub(super) lists: &'a mut RowLists,
}

impl<T: KernelElement> Work for ListRows<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, _: Has<V>) {
        let Self { weight, rows, groups, stride, lists } = self;
        lists.reset(rows.len(), groups.len(), stride);
        let strips = rows.start / ROWS..rows.end.div_ceil(ROWS);
        let values = ROWS * lists.capacity();
        let lists = lists.values.chunks_exact_mut(values).zip(lists.positions.as_chunks_mut().0);
        for (strip, (values, positions)) in strips.zip(lists) {
            // SAFETY: there is proof of the instructions.
            unsafe { list_strip::<V, T>(weight.strip_of(strip), groups.clone(), values, positions) };
        }
    }
}

/// Lists what a strip's rows keep of some groups: values, widened, `[rows, groups completed to pairs, 2]`, and a word
/// of positions for each row.
///
/// # Safety
/// The CPU has `V`'s instructions.
#[inline(always)]
unsafe fn list_strip<V: Vector, T: KernelElement>(
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
            // SAFETY: the CPU has `V`'s instructions, as this function requires; a line has first and second values of
            // ROWS rows, and so have `columns`.
            unsafe {
                for part in 0..parts::<V>() {
                    let [first, second] = T::load_line::<V>(line.as_ptr(), part);
                    V::store(first, columns[0][part * V::LANES..].as_mut_ptr());
                    V::store(second, columns[1][part * V::LANES..].as_mut_ptr());
                }
            }
            let group = PAIR * pair + i;
            for (row, word) in words[group / HALF].iter_mut().enumerate() {
                let four_bits = codes[0] >> (2 * row) & 3 | (codes[1] >> (2 * row) & 3) << 2;
                *word |= four_bits << (4 * (group % HALF));
            }
        }
        for (four, rows) in values.chunks_exact_mut(4 * capacity).enumerate() {
            let mut column = [columns[0].as_ptr(); 4];
            for i in 0..4 {
                column[i] = columns[i][4 * four..4 * four + 4].as_ptr();
            }
            // SAFETY: `columns` hold four rows from there on, and the lists of those rows have room for `capacity`
            // values each.
            unsafe {
                let rows = rows.as_mut_ptr().add(2 * PAIR * pair);
                let rows = [rows, rows.add(capacity), rows.add(2 * capacity), rows.add(3 * capacity)];
                V::transpose(column, rows);
            }
        }
    }
    for ((positions, low), high) in positions.iter_mut().zip(words[0]).zip(words[1]) {
        *positions = u64::from(high) << 32 | u64::from(low);
    }
}
