//! The kernel that walks lists of what is kept.

use super::{super::vector::Vector, Lines, ahead::Ahead};

/// For each output, in order of depth, what it keeps.
pub(super) trait Lists {
    /// A place in a list.
    type Entries: Entries;

    /// How many lists there are.
    fn outs(&self) -> usize;

    /// Elements of a panel, from its start, that entries may point at.
    fn panel_len(&self) -> usize;

    /// A list's start for a panel, and its length.
    ///
    /// # Safety
    /// There is a list of this number; the panel has [`Lists::panel_len`] elements.
    unsafe fn list(&self, out: usize, panel: *const f32) -> (Self::Entries, usize);
}

/// Entries of a list from some place on.
pub(super) trait Entries {
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

/// Adds to each line of `out`, of `vectors` vectors, the products of an output's list with the panel.
///
/// # Safety
/// The CPU has `V`'s instructions; lines of the panel are at least `vectors` vectors long, as in the panel that the lists
/// were made for.
#[inline(always)]
pub(super) unsafe fn multiply<V: Vector, L: Lists>(lists: &L, panel: Lines<'_>, vectors: usize, out: &mut [f32]) {
    assert!(lists.panel_len() <= panel.data.len() && out.len() == lists.outs() * vectors * V::LANES);
    // SAFETY: entries point at lines of the panel; `out` has a line for each list.
    unsafe {
        match vectors {
            1 => walk::<V, L, 1, 4>(lists, panel, out),
            2 => walk::<V, L, 2, 4>(lists, panel, out),
            3 => walk::<V, L, 3, 2>(lists, panel, out),
            4 => walk::<V, L, 4, 2>(lists, panel, out),
            5 => walk::<V, L, 5, 2>(lists, panel, out),
            6 => walk::<V, L, 6, 2>(lists, panel, out),
            7 => walk::<V, L, 7, 1>(lists, panel, out),
            8 => walk::<V, L, 8, 1>(lists, panel, out),
            9 => walk::<V, L, 9, 1>(lists, panel, out),
            10 => walk::<V, L, 10, 1>(lists, panel, out),
            11 => walk::<V, L, 11, 1>(lists, panel, out),
            12 => walk::<V, L, 12, 1>(lists, panel, out),
            _ => unreachable!("panels are at most LIST_VECTORS wide"),
        }
    }
}

/// Entries of a list that are taken together: so few branches are foreseen, where one an entry is not (measured). Even, so that
/// a row's groups are taken whole.
pub(super) const UNROLLED: usize = 8;

/// One list after the other. Narrow panels take `S` of its entries at once into sums of their own, so that additions
/// need not wait for each other.
///
/// # Safety
/// As [`multiply`]; `out` has `N` vectors for each list.
#[inline(always)]
unsafe fn walk<V: Vector, L: Lists, const N: usize, const S: usize>(lists: &L, panel: Lines<'_>, out: &mut [f32]) {
    let mut ahead = Ahead::new(panel.next, lists.outs());
    // SAFETY: the CPU has `V`'s instructions, as this function requires; lists are asked for entries that they have, whose activations lie in the panel.
    unsafe {
        let panel = panel.data.as_ptr();
        for out_index in 0..lists.outs() {
            ahead.fetch();
            let (mut entries, mut left) = lists.list(out_index, panel);
            let line = out.as_mut_ptr().add(out_index * N * V::LANES);
            let mut sums = [[V::zero(); N]; S];
            for (n, sum) in sums[0].iter_mut().enumerate() {
                *sum = V::load(line.add(n * V::LANES));
            }
            while left >= UNROLLED {
                for s in 0..UNROLLED {
                    add_product(entries.entry(s), &mut sums[s % S]);
                }
                entries.advance();
                left -= UNROLLED;
            }
            for s in 0..left {
                add_product(entries.entry(s), &mut sums[0]);
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

/// Adds the products of a kept weight with its `N` vectors of tokens.
///
/// # Safety
/// The CPU has `V`'s instructions; `N` vectors of activations can be read.
#[inline(always)]
unsafe fn add_product<V: Vector, const N: usize>((value, x): (f32, *const f32), sums: &mut [V; N]) {
    // SAFETY: the CPU has `V`'s instructions and `N` vectors are there at `x`, as this function requires.
    unsafe {
        let w = V::splat(value);
        for (n, sum) in sums.iter_mut().enumerate() {
            *sum = w.multiply_add(V::load(x.add(n * V::LANES)), *sum);
        }
    }
}
