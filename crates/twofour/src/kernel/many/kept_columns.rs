//! The transpose of a 2:4 weight, listed per column: a column may be kept in any row, so that an entry says where its
//! activations are.

use std::ops::Range;

use super::{
    GROUP,
    walk::{Entries, UNROLLED},
};
use crate::kernel::{
    aligned::Aligned,
    format::KernelElement,
    strips::{ROWS, Strip, StripsRef},
    vector::{Has, Vector, Work},
};

/// What columns keep: one list after the other, in order of row.
#[derive(Debug)]
pub struct ColumnLists {
    values: Aligned<f32>,
    /// Where each value's activations start, counted in elements of the panel.
    offsets: Aligned<u32>,
    lengths: Vec<usize>,
    /// Entries that a list has room for.
    capacity: usize,
    panel_len: usize,
}

impl Default for ColumnLists {
    fn default() -> Self {
        let (values, offsets) = (Aligned::zeroed(0), Aligned::zeroed(0));
        Self { values, offsets, lengths: Vec::new(), capacity: 0, panel_len: 0 }
    }
}

impl ColumnLists {
    /// Empty lists with room for so many entries each, and for a strip's rows behind them.
    fn reset(&mut self, outs: usize, entries: usize, panel_len: usize) {
        self.lengths.clear();
        self.lengths.resize(outs, 0);
        (self.capacity, self.panel_len) = (entries + ROWS, panel_len);
        if self.values.len() < outs * self.capacity {
            self.values = Aligned::zeroed(outs * self.capacity);
            self.offsets = Aligned::zeroed(outs * self.capacity);
        }
    }

    /// A list's memory behind its entries, at least [`ROWS`] elements, and its length.
    #[inline(always)]
    pub(in crate::kernel) fn rest(&mut self, out: usize) -> (&mut [f32], &mut [u32], &mut usize) {
        let length = &mut self.lengths[out];
        let free = out * self.capacity + *length..(out + 1) * self.capacity;
        (&mut self.values[free.clone()], &mut self.offsets[free], length)
    }

    /// How many lists there are.
    pub(in crate::kernel) fn outs(&self) -> usize {
        self.lengths.len()
    }
}

/// Where lists of columns are.
#[derive(Debug, Clone, Copy)]
pub(super) struct View {
    values: *const f32,
    offsets: *const u32,
    lengths: *const usize,
    capacity: usize,
}

/// Entries of a column.
#[derive(Debug)]
pub(super) struct ColumnEntries {
    values: *const f32,
    offsets: *const u32,
    panel: *const f32,
}

// SAFETY: a list has room for `capacity` entries, of which its length are in use; offsets are starts of lines of the
// panel.
unsafe impl Entries for ColumnEntries {
    type Lists = ColumnLists;

    fn outs(lists: &ColumnLists) -> usize {
        lists.outs()
    }

    fn panel_len(lists: &ColumnLists) -> usize {
        lists.panel_len
    }

    type View = View;

    #[inline(always)]
    fn view(lists: &ColumnLists) -> View {
        let (values, offsets) = (lists.values.as_ptr(), lists.offsets.as_ptr());
        View { values, offsets, lengths: lists.lengths.as_ptr(), capacity: lists.capacity }
    }

    #[inline(always)]
    unsafe fn list(view: View, out: usize, panel: *const f32) -> (ColumnEntries, usize) {
        // SAFETY: the list exists, as the trait requires, so a length and `(out + 1) * capacity` values and offsets do.
        unsafe {
            let (values, offsets) = (view.values.add(out * view.capacity), view.offsets.add(out * view.capacity));
            (ColumnEntries { values, offsets, panel }, *view.lengths.add(out))
        }
    }

    #[inline(always)]
    unsafe fn entry(&self, i: usize) -> (f32, *const f32) {
        // SAFETY: the list has the entry, as the trait requires; its offset is the start of a line of the panel.
        unsafe { (*self.values.add(i), self.panel.add(*self.offsets.add(i) as usize)) }
    }

    #[inline(always)]
    unsafe fn advance(&mut self) {
        // SAFETY: the list has `UNROLLED` entries more, as the trait requires.
        unsafe {
            self.values = self.values.add(UNROLLED);
            self.offsets = self.offsets.add(UNROLLED);
        }
    }
}

/// Rows of a strip whose kept values are listed by column.
#[derive(Debug, Clone, Copy)]
pub struct StripRows {
    /// How many; those that complete the strip are left out.
    pub(in crate::kernel) height: usize,
    /// Where the first row's activations start, counted in elements of the panel.
    pub(in crate::kernel) offset: u32,
    /// Elements of the panel from one row's activations to the next.
    pub(in crate::kernel) stride: u32,
}

/// Adds what some rows of a strip keep of some groups to lists of columns, whose first is that of the first group, in
/// order of row.
#[inline(always)]
pub(in crate::kernel) fn list<T: KernelElement>(
    strip: Strip<'_, T>,
    groups: Range<usize>,
    StripRows { height, offset, stride }: StripRows,
    lists: &mut ColumnLists,
) {
    for (group, first) in groups.zip((0..).step_by(GROUP)) {
        for row in 0..height {
            for (position, value) in strip.kept(row, group) {
                // Padding behind the last column multiplies nothing.
                if first + position < lists.lengths.len() {
                    let (values, offsets, length) = lists.rest(first + position);
                    (values[0], offsets[0]) = (value.to_f32(), offset + row as u32 * stride);
                    *length += 1;
                }
            }
        }
    }
}

/// Lists what some rows keep of some columns, for panels whose lines are `stride` tokens apart.
pub(super) struct ListColumns<'a, T: KernelElement> {
    pub(super) weight: StripsRef<'a, T>,
    pub(super) columns: Range<usize>,
    pub(super) rows: Range<usize>,
    pub(super) stride: usize,
    pub(super) lists: &'a mut ColumnLists,
}

impl<T: KernelElement> Work for ListColumns<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, _: Has<V>) {
        let Self { weight, columns, rows, stride, lists } = self;
        lists.reset(columns.len(), rows.len(), rows.len() * stride);
        for first in rows.clone().step_by(ROWS) {
            let (height, offset) = (ROWS.min(rows.end - first), ((first - rows.start) * stride) as u32);
            let rows = StripRows { height, offset, stride: stride as u32 };
            let groups = columns.start / GROUP..columns.end.div_ceil(GROUP);
            // SAFETY: there is proof of the instructions.
            unsafe { V::list_columns(weight.strip_of(first / ROWS), groups, rows, lists) };
        }
    }
}
