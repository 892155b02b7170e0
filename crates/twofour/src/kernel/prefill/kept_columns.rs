//! The transpose of a 2:4 weight, listed per column: a column may be kept in any row, so that an entry says where its activations are.

use std::ops::Range;

use bytemuck::{Pod, Zeroable};

use super::{
    super::{
        aligned::Aligned,
        element::KernelElement,
        strips::{ROWS, StripsRef},
    },
    Factor, Kernels, Lines,
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

/// A kept weight and where its activations start, counted in elements of the panel.
#[derive(Debug, Clone, Copy, Pod, Zeroable)]
#[repr(C)]
struct Kept {
    value: f32,
    offset: u32,
}

/// What columns keep: one list after the other, in order of row.
#[derive(Debug)]
pub(super) struct ColumnLists {
    kept: Aligned<Kept>,
    lengths: Vec<usize>,
    /// Places for each list.
    capacity: usize,
    panel_len: usize,
}

impl Default for ColumnLists {
    fn default() -> Self {
        Self { kept: Aligned::zeroed(0), lengths: Vec::new(), capacity: 0, panel_len: 0 }
    }
}

impl ColumnLists {
    /// Empty lists with so much room each.
    fn reset(&mut self, outs: usize, capacity: usize, panel_len: usize) {
        self.lengths.clear();
        self.lengths.resize(outs, 0);
        (self.capacity, self.panel_len) = (capacity, panel_len);
        if self.kept.len() < outs * capacity {
            self.kept = Aligned::zeroed(outs * capacity);
        }
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
        // SAFETY: the list exists, as the trait requires, and has `capacity` entries, of which its length are in use.
        unsafe {
            let kept = self.kept.as_ptr().add(out * self.capacity);
            (ColumnEntries { kept, panel }, *self.lengths.get_unchecked(out))
        }
    }
}

/// Entries of a column.
#[derive(Debug)]
pub(super) struct ColumnEntries {
    kept: *const Kept,
    panel: *const f32,
}

impl Entries for ColumnEntries {
    #[inline(always)]
    unsafe fn entry(&self, i: usize) -> (f32, *const f32) {
        // SAFETY: the list has the entry, as the trait requires; its offset is the start of a line of the panel.
        unsafe {
            let kept = *self.kept.add(i);
            (kept.value, self.panel.add(kept.offset as usize))
        }
    }

    #[inline(always)]
    unsafe fn advance(&mut self) {
        // SAFETY: the list has `UNROLLED` entries more, as the trait requires.
        self.kept = unsafe { self.kept.add(UNROLLED) };
    }
}

/// Calls `f(row, column, value)` for what `rows` keep in `cols`, in order of column for each row. The rows start at a
/// multiple of [`ROWS`], the columns at one of 4.
#[inline(always)]
fn for_each_kept<T: KernelElement>(
    weight: StripsRef<'_, T>,
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
        let capacity = depth.len();
        lists.reset(outs.len(), capacity, depth.len() * stride);
        let ColumnLists { kept, lengths, .. } = lists;
        for_each_kept(self.0, depth.clone(), outs.clone(), |row, col, value| {
            let out = col - outs.start;
            let offset = ((row - depth.start) * stride) as u32;
            kept[out * capacity + lengths[out]] = Kept { value, offset };
            lengths[out] += 1;
        });
    }

    fn fetch(&self, _: Range<usize>, _: Range<usize>, _: usize, _: usize) {}

    unsafe fn multiply<V: Kernels>(lists: &ColumnLists, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
        // SAFETY: the CPU has `V`'s instructions and the lists are of this panel's depth and stride, as the trait requires.
        unsafe { V::multiply_lists(lists, panel, vectors, out) }
    }
}
