//! The loop that walks lists of what is kept.

use super::{Lines, ahead::Ahead};
use crate::kernel::vector::{Has, Vector, Work};

/// Entries of a list of what is kept, in order of depth, from some place on.
///
/// # Safety
/// [`Entries::list`] returns no more entries than the list has, and entries point into the first [`Entries::panel_len`]
/// elements of the panel.
pub(super) unsafe trait Entries: Sized {
    /// A list for each output.
    type Lists;

    /// How many lists there are.
    fn outs(lists: &Self::Lists) -> usize;

    /// Elements of a panel, from its start, that entries may point at.
    fn panel_len(lists: &Self::Lists) -> usize;

    /// Where the lists are, for a loop that loads it once.
    type View: Copy;

    /// Where the lists are.
    fn view(lists: &Self::Lists) -> Self::View;

    /// A list's start for a panel, and its length.
    ///
    /// # Safety
    /// There is a list of this number, where the view is; the panel has [`Entries::panel_len`] elements.
    unsafe fn list(view: Self::View, out: usize, panel: *const f32) -> (Self, usize);

    /// The value of the entry `i` places on, and its activations.
    ///
    /// # Safety
    /// The list has such an entry.
    unsafe fn entry(&self, i: usize) -> (f32, *const f32);

    /// Goes [`UNROLLED`] places on.
    ///
    /// # Safety
    /// The list has so many entries more.
    unsafe fn advance(&mut self);
}

/// Adds to each line of `out`, of `vectors` registers, the products of an output's list with the panel.
pub(super) struct Multiply<'a, E: Entries> {
    pub(super) lists: &'a E::Lists,
    pub(super) panel: Lines<'a>,
    pub(super) vectors: usize,
    pub(super) out: &'a mut [f32],
}

impl<E: Entries> Work for Multiply<'_, E> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, _: Has<V>) {
        let Self { lists, panel, vectors, out } = self;
        assert!(E::panel_len(lists) <= panel.data.len() && out.len() == E::outs(lists) * vectors * V::LANES);
        assert!(panel.stride >= vectors * V::LANES);
        // SAFETY: there is proof of the instructions; `out` has a line for each list, and a line of the panel at least
        // as many registers, by the assertions.
        unsafe {
            match vectors {
                1 => walk::<V, E, 1, 4>(lists, panel, out),
                2 => walk::<V, E, 2, 4>(lists, panel, out),
                3 => walk::<V, E, 3, 2>(lists, panel, out),
                4 => walk::<V, E, 4, 2>(lists, panel, out),
                5 => walk::<V, E, 5, 2>(lists, panel, out),
                6 => walk::<V, E, 6, 2>(lists, panel, out),
                7 => walk::<V, E, 7, 1>(lists, panel, out),
                8 => walk::<V, E, 8, 1>(lists, panel, out),
                9 => walk::<V, E, 9, 1>(lists, panel, out),
                10 => walk::<V, E, 10, 1>(lists, panel, out),
                11 => walk::<V, E, 11, 1>(lists, panel, out),
                12 => walk::<V, E, 12, 1>(lists, panel, out),
                _ => unreachable!("panels are at most 12 registers wide"),
            }
        }
    }
}

/// Entries of a list that are taken together: so few branches are foreseen, where one an entry is not (measured). Even,
/// so that a row's groups are taken whole.
pub(super) const UNROLLED: usize = 8;

/// One list after the other. Narrow panels take `S` of its entries at once into sums of their own, so that additions
/// need not wait for each other.
///
/// # Safety
/// The CPU has `V`'s instructions; the panel is as long as the lists say, and `out` has `N` registers for each list.
#[inline(always)]
unsafe fn walk<V: Vector, E: Entries, const N: usize, const S: usize>(
    lists: &E::Lists,
    panel: Lines<'_>,
    out: &mut [f32],
) {
    let (outs, view) = (E::outs(lists), E::view(lists));
    let mut ahead = Ahead::new(panel.next, outs);
    // SAFETY: the CPU has `V`'s instructions, as this function requires; lists are asked for entries that they have,
    // whose activations lie in the panel.
    unsafe {
        let panel = panel.data.as_ptr();
        for out_index in 0..outs {
            ahead.fetch::<V>();
            let (mut entries, mut left) = E::list(view, out_index, panel);
            let line = out.as_mut_ptr().add(out_index * N * V::LANES);
            let mut sums = [[V::zero(); N]; S];
            for (n, sum) in sums[0].iter_mut().enumerate() {
                *sum = V::load(line.add(n * V::LANES));
            }
            while left >= UNROLLED {
                for s in 0..UNROLLED {
                    add_product::<V, N>(entries.entry(s), &mut sums[s % S]);
                }
                entries.advance();
                left -= UNROLLED;
            }
            for s in 0..left {
                add_product::<V, N>(entries.entry(s), &mut sums[0]);
            }
            let one = V::splat(1.0);
            let (first, others) = sums.split_at_mut(1);
            for (n, sum) in first[0].iter_mut().enumerate() {
                for other in others.iter() {
                    *sum = V::multiply_add(one, other[n], *sum);
                }
                V::store(*sum, line.add(n * V::LANES));
            }
        }
    }
}

/// Adds the products of a kept weight with its `N` registers of tokens.
///
/// # Safety
/// The CPU has `V`'s instructions; `N` registers of activations can be read.
#[inline(always)]
unsafe fn add_product<V: Vector, const N: usize>((value, x): (f32, *const f32), sums: &mut [V::Floats; N]) {
    // SAFETY: the CPU has `V`'s instructions and `N` registers are there at `x`, as this function requires.
    unsafe {
        let w = V::splat(value);
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = V::multiply_add(w, V::load(x.add(n * V::LANES)), *sum);
        }
    }
}
