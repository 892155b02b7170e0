//! A weight in compressed sparse rows: its rows are lists already.

use std::{marker::PhantomData, time::Duration};

use super::{
    Panels, column_blocks,
    panels::Lines,
    unpack,
    walk::{self, Entries, UNROLLED},
};
use crate::{
    Error, Result,
    kernel::{
        Engine,
        arguments::{expect_bias, expect_len},
        engine::Cpu,
        epilogue::Epilogue,
        format::KernelElement,
        scratch::Scratch,
        share::{share_expecting, threads},
        vector::{Has, Vector, Work},
    },
};

/// Registers of tokens in the widest panel: activations of many columns are read in no order, and wider ones leave the
/// second cache.
const VECTORS: usize = 4;

/// A weight `[rows, cols]` whose elements are listed row by row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Listed<'a, T> {
    rows: usize,
    cols: usize,
    /// Where each row begins; `[rows + 1]`, ascending, the last is the number of columns and values.
    starts: &'a [usize],
    /// Below `cols`.
    columns: &'a [u32],
    values: &'a [T],
}

impl<'a, T: KernelElement> Listed<'a, T> {
    /// A view of compressed sparse rows.
    ///
    /// # Panics
    /// Where the parts do not fit each other.
    pub(crate) fn of_csr(rows: usize, cols: usize, starts: &'a [usize], columns: &'a [u32], values: &'a [T]) -> Self {
        assert!(starts.len() == rows + 1 && starts.is_sorted() && starts[rows] == columns.len());
        assert!(columns.len() == values.len() && columns.iter().all(|col| (*col as usize) < cols));
        Listed { rows, cols, starts, columns, values }
    }

    /// `y = act(x · Wᵀ + bias)`.
    ///
    /// # Errors
    /// [`Error::Length`] where `x`, `y` or the bias does not fit; [`Error::Engine`].
    pub(crate) fn linear(
        self,
        engine: Engine,
        x: &[T],
        tokens: usize,
        epilogue: Epilogue<'_>,
        y: &mut [T],
    ) -> Result<(), Error> {
        expect_len("x", x, tokens, self.cols)?;
        expect_len("y", y, tokens, self.rows)?;
        expect_bias(&epilogue, self.rows)?;
        Cpu::detect(engine)?.run(Product { weight: self, x, tokens, epilogue, y });
        Ok(())
    }
}

struct Product<'a, T: KernelElement> {
    weight: Listed<'a, T>,
    x: &'a [T],
    tokens: usize,
    epilogue: Epilogue<'a>,
    y: &'a mut [T],
}

impl<T: KernelElement> Work for Product<'_, T> {
    type Output = ();

    // Only the loop inside needs the instructions.
    #[inline(never)]
    fn run<V: Vector>(self, has: Has<V>) {
        let Self { weight, x, tokens, epilogue, y } = self;
        if y.is_empty() {
            return;
        }
        let (outs, depth) = (weight.rows, weight.cols);
        let most = VECTORS * V::LANES;
        for (i, y) in y.chunks_mut(most * outs).enumerate() {
            let count = most.min(tokens - i * most);
            let panels = Panels::pack(&x[i * most * depth..][..count * depth], count, depth, V::LANES, VECTORS);
            let block = outs.div_ceil(4 * threads()).max(1);
            let nanoseconds = (weight.values.len() / outs).saturating_mul(outs * panels.padded_tokens()) / 32;
            share_expecting(
                Duration::from_nanos(nanoseconds as u64),
                column_blocks(y, outs, block).into_iter(),
                || Scratch::take(block * panels.padded_tokens()),
                |products, mut y| {
                    let rows = y.cols();
                    let products = &mut products[..rows.len() * panels.padded_tokens()];
                    products.fill(0.0);
                    let starts = &weight.starts[rows.start..=rows.end];
                    for (i, panel) in panels.iter().enumerate() {
                        let lists = Lists { weight, starts, stride: panels.stride() };
                        let out = &mut products[rows.len() * panel.first..][..rows.len() * panel.width];
                        let lines = Lines { data: panels.lines(i, &(0..depth)), stride: panels.stride(), next: &[] };
                        let vectors = panel.width / V::LANES;
                        has.run(walk::Multiply::<Listing<'_, T>> { lists: &lists, panel: lines, vectors, out });
                    }
                    unpack(products, &panels, epilogue, &mut y);
                },
            );
        }
    }
}

/// Some rows of a weight, for panels whose lines are `stride` tokens apart.
#[derive(Debug)]
struct Lists<'a, T> {
    weight: Listed<'a, T>,
    /// Where the rows begin, and where the last one ends.
    starts: &'a [usize],
    stride: usize,
}

/// Entries of a row.
#[derive(Debug)]
struct Listing<'a, T> {
    columns: *const u32,
    values: *const T,
    panel: *const f32,
    stride: usize,
    lists: PhantomData<&'a T>,
}

/// Where lists are.
#[derive(Debug, Clone, Copy)]
struct View<T> {
    starts: *const usize,
    columns: *const u32,
    values: *const T,
    stride: usize,
}

// SAFETY: `Listed::of_csr` checks that beginnings ascend and end with the lists, and that columns are those of the
// weight, of each of which the panel has a line.
unsafe impl<'a, T: KernelElement> Entries for Listing<'a, T> {
    type Lists = Lists<'a, T>;
    type View = View<T>;

    fn outs(lists: &Self::Lists) -> usize {
        lists.starts.len() - 1
    }

    fn panel_len(lists: &Self::Lists) -> usize {
        lists.weight.cols * lists.stride
    }

    #[inline(always)]
    fn view(lists: &Self::Lists) -> View<T> {
        let Listed { columns, values, .. } = lists.weight;
        View { starts: lists.starts.as_ptr(), columns: columns.as_ptr(), values: values.as_ptr(), stride: lists.stride }
    }

    #[inline(always)]
    unsafe fn list(view: View<T>, out: usize, panel: *const f32) -> (Self, usize) {
        // SAFETY: the list exists, as the trait requires, so its beginning and its end do, and both lie in the lists.
        unsafe {
            let (start, end) = (*view.starts.add(out), *view.starts.add(out + 1));
            let (columns, values) = (view.columns.add(start), view.values.add(start));
            (Listing { columns, values, panel, stride: view.stride, lists: PhantomData }, end - start)
        }
    }

    #[inline(always)]
    unsafe fn entry(&self, i: usize) -> (f32, *const f32) {
        // SAFETY: the list has the entry, as the trait requires; the panel has a line for its column.
        unsafe { ((*self.values.add(i)).to_f32(), self.panel.add(*self.columns.add(i) as usize * self.stride)) }
    }

    #[inline(always)]
    unsafe fn advance(&mut self) {
        // SAFETY: the list has `UNROLLED` entries more, as the trait requires.
        unsafe {
            self.columns = self.columns.add(UNROLLED);
            self.values = self.values.add(UNROLLED);
        }
    }
}
