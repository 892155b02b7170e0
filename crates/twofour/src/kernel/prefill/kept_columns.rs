//! The transpose of a 2:4 weight, listed per column: a column may be kept in any row, so that an entry says where its activations are.

use std::ops::Range;

use super::{
    super::{
        aligned::Aligned,
        element::KernelElement,
        strips::{ROWS, Strip, StripsRef},
    },
    Factor, GROUP, Kernels, Lines,
    walk::{Entries, Lists, UNROLLED},
};

/// The transpose of the weight: outputs are columns.
#[derive(Debug)]
pub(super) struct KeptOfColumns<'a, T>(pub StripsRef<'a, T>);

impl<T> Clone for KeptOfColumns<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for KeptOfColumns<'_, T> {}

/// What columns keep: one list after the other, in order of row.
#[derive(Debug)]
pub(super) struct ColumnLists {
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
    pub(super) fn rest(&mut self, out: usize) -> (&mut [f32], &mut [u32], &mut usize) {
        let length = &mut self.lengths[out];
        let free = out * self.capacity + *length..(out + 1) * self.capacity;
        (&mut self.values[free.clone()], &mut self.offsets[free], length)
    }
}

impl Lists for ColumnLists {
    type Entries = ColumnEntries;

    fn outs(&self) -> usize {
        self.lengths.len()
    }

    fn panel_len(&self) -> usize {
        self.panel_len
    }

    #[inline(always)]
    unsafe fn list(&self, out: usize, panel: *const f32) -> (ColumnEntries, usize) {
        // SAFETY: the list exists, as the trait requires, and has room for `capacity` entries, of which its length are in use.
        unsafe {
            let values = self.values.as_ptr().add(out * self.capacity);
            let offsets = self.offsets.as_ptr().add(out * self.capacity);
            (ColumnEntries { values, offsets, panel }, *self.lengths.get_unchecked(out))
        }
    }
}

/// Entries of a column.
#[derive(Debug)]
pub(super) struct ColumnEntries {
    values: *const f32,
    offsets: *const u32,
    panel: *const f32,
}

impl Entries for ColumnEntries {
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
pub(super) struct StripRows {
    /// How many; those that complete the strip are left out.
    pub(super) height: usize,
    /// Where the first row's activations start, counted in elements of the panel.
    pub(super) offset: u32,
    /// Elements of the panel from one row's activations to the next.
    pub(super) stride: u32,
}

/// Adds what some rows of a strip keep of a group of four columns to the lists from `first` on, in order of row.
#[inline(always)]
pub(super) fn list_group<T: KernelElement>(
    strip: Strip<'_, T>,
    group: usize,
    StripRows { height, offset, stride }: StripRows,
    first: usize,
    lists: &mut ColumnLists,
) {
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

impl<T: KernelElement> Factor for KeptOfColumns<'_, T> {
    type Block = ColumnLists;

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

    fn prepare<V: Kernels>(
        &self,
        _: V::Has,
        outs: Range<usize>,
        depth: Range<usize>,
        stride: usize,
        lists: &mut ColumnLists,
    ) {
        lists.reset(outs.len(), depth.len(), depth.len() * stride);
        for first in depth.clone().step_by(ROWS) {
            let (height, offset) = (ROWS.min(depth.end - first), ((first - depth.start) * stride) as u32);
            let rows = StripRows { height, offset, stride: stride as u32 };
            let groups = outs.start / GROUP..outs.end.div_ceil(GROUP);
            // SAFETY: the first argument is proof that the CPU has the instructions.
            unsafe { V::list_columns(self.0.strip(first / ROWS), groups, rows, lists) };
        }
    }

    fn fetch(&self, _: Range<usize>, _: Range<usize>, _: usize, _: usize) {}

    unsafe fn multiply<V: Kernels>(lists: &ColumnLists, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: the CPU has `V`'s instructions and the lists are of this panel's depth and stride, as the trait requires.
        unsafe { V::multiply_lists(lists, panel, vectors, out) }
    }
}
