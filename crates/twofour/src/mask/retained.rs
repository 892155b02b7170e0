//! What a mask keeps of a matrix: counts and sums.

use super::kept_or_zero;
use crate::{
    Element,
    widest::{Inlined, widest},
};

/// What a mask keeps of a matrix, counted and summed in one pass.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub(crate) struct Retained {
    /// All elements.
    pub(crate) elements: usize,
    /// Elements that are neither +0.0 nor -0.0.
    pub(crate) nonzeros: usize,
    /// Elements that the mask keeps.
    pub(crate) kept: usize,
    /// Elements that the mask keeps and that are -0.0.
    pub(crate) kept_negative_zeros: usize,
    kept_l1: f64,
    all_l1: f64,
    kept_l2: f64,
    all_l2: f64,
}

impl Retained {
    /// Of one row and the words of its mask.
    pub(crate) fn of_row<T: Element>(values: &[T], words: &[u64]) -> Self {
        widest(OfRow { values, words })
    }

    /// [`Retained::of_row`] where the row is at hand as it is pruned, too: with +0.0 in the place of what the mask does
    /// not keep.
    pub(crate) fn of_pruned<T: Element>(values: &[T], pruned: &[T], words: &[u64]) -> Self {
        widest(OfPruned { values, pruned, words })
    }

    /// Of all rows together, added up in their order: the sums do not depend on the number of threads.
    pub(crate) fn total(rows: &[Retained]) -> Self {
        rows.iter().copied().fold(Retained::default(), Retained::and)
    }

    /// Of these rows and those that follow.
    pub(crate) fn and(self, following: Self) -> Self {
        let (a, b) = (self, following);
        Retained {
            elements: a.elements + b.elements,
            nonzeros: a.nonzeros + b.nonzeros,
            kept: a.kept + b.kept,
            kept_negative_zeros: a.kept_negative_zeros + b.kept_negative_zeros,
            kept_l1: a.kept_l1 + b.kept_l1,
            all_l1: a.all_l1 + b.all_l1,
            kept_l2: a.kept_l2 + b.kept_l2,
            all_l2: a.all_l2 + b.all_l2,
        }
    }

    /// Whether every element is finite: no sum of finite f32 magnitudes overflows an f64.
    pub(crate) fn is_finite(&self) -> bool {
        self.all_l1.is_finite()
    }

    /// The share of elements that are not zero; 0 for a matrix without elements.
    pub(crate) fn density_before(&self) -> f64 {
        ratio(self.nonzeros as f64, self.elements as f64)
    }

    /// The share of elements that are kept; 0 for a matrix without elements.
    pub(crate) fn density(&self) -> f64 {
        ratio(self.kept as f64, self.elements as f64)
    }

    /// The share of `Σ|w|` that is kept; 1 where the matrix is all zero.
    pub(crate) fn l1(&self) -> f64 {
        if self.all_l1 == 0.0 { 1.0 } else { self.kept_l1 / self.all_l1 }
    }

    /// The share of `Σw²` that is kept; 1 where the matrix is all zero.
    pub(crate) fn l2(&self) -> f64 {
        if self.all_l2 == 0.0 { 1.0 } else { self.kept_l2 / self.all_l2 }
    }
}

/// Partial sums.
const LANES: usize = 8;

/// Counts and sums of a row, element `i` in number `i % 8`, so that loops over them use vector instructions; their
/// order does not depend on the machine.
#[derive(Default)]
struct Sums {
    nonzeros: [u32; LANES],
    kept_negative_zeros: [u32; LANES],
    all_l1: [f64; LANES],
    kept_l1: [f64; LANES],
    all_l2: [f64; LANES],
    kept_l2: [f64; LANES],
}

impl Sums {
    /// Adds an element and what the mask leaves of it in each lane; zeros past the row's end.
    #[inline(always)]
    fn add<T: Element>(&mut self, values: &[T; LANES], kept: &[T; LANES]) {
        for lane in 0..LANES {
            let (value, kept) = (values[lane].to_f32(), kept[lane].to_f32());
            self.nonzeros[lane] += u32::from(value != 0.0);
            self.kept_negative_zeros[lane] += u32::from(kept.to_bits() == (-0.0f32).to_bits());
            let (magnitude, kept) = (f64::from(value.abs()), f64::from(kept.abs()));
            self.all_l1[lane] += magnitude;
            self.kept_l1[lane] += kept;
            self.all_l2[lane] += magnitude * magnitude;
            self.kept_l2[lane] += kept * kept;
        }
    }

    /// The lanes together, of a row of so many elements with a mask.
    #[inline(always)]
    fn of(self, elements: usize, words: &[u64]) -> Retained {
        let count = |lanes: [u32; LANES]| lanes.iter().map(|count| *count as usize).sum();
        Retained {
            elements,
            nonzeros: count(self.nonzeros),
            kept: words.iter().map(|word| word.count_ones() as usize).sum(),
            kept_negative_zeros: count(self.kept_negative_zeros),
            kept_l1: self.kept_l1.iter().sum(),
            all_l1: self.all_l1.iter().sum(),
            kept_l2: self.kept_l2.iter().sum(),
            all_l2: self.all_l2.iter().sum(),
        }
    }
}

struct OfPruned<'a, T> {
    values: &'a [T],
    pruned: &'a [T],
    words: &'a [u64],
}

impl<T: Element> Inlined for OfPruned<'_, T> {
    type Output = Retained;

    #[inline(always)]
    fn run(self) -> Retained {
        let mut sums = Sums::default();
        let (whole, rest) = self.values.as_chunks::<LANES>();
        let (pruned, pruned_rest) = self.pruned.as_chunks::<LANES>();
        for (values, pruned) in whole.iter().zip(pruned) {
            sums.add(values, pruned);
        }
        let (mut values, mut pruned) = ([T::ZERO; LANES], [T::ZERO; LANES]);
        values[..rest.len()].copy_from_slice(rest);
        pruned[..rest.len()].copy_from_slice(pruned_rest);
        sums.add(&values, &pruned);
        sums.of(self.values.len(), self.words)
    }
}

struct OfRow<'a, T> {
    values: &'a [T],
    words: &'a [u64],
}

impl<T: Element> Inlined for OfRow<'_, T> {
    type Output = Retained;

    #[inline(always)]
    fn run(self) -> Retained {
        let mut sums = Sums::default();
        for (&word, values) in self.words.iter().zip(self.values.chunks(64)) {
            let mut all = [T::ZERO; 64];
            all[..values.len()].copy_from_slice(values);
            let mut kept = all;
            kept_or_zero(&mut kept, word);
            for (all, kept) in all.as_chunks::<LANES>().0.iter().zip(kept.as_chunks::<LANES>().0) {
                sums.add(all, kept);
            }
        }
        sums.of(self.values.len(), self.words)
    }
}

/// A share, 0 of nothing.
pub(super) fn ratio(part: f64, whole: f64) -> f64 {
    if whole == 0.0 { 0.0 } else { part / whole }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Mask, MatrixRef};

    /// The sums as one writes them down, for any row length and mask.
    #[test]
    fn what_is_retained_is_counted_and_summed() {
        for cols in [0, 1, 7, 8, 63, 64, 65, 130] {
            let w: Vec<f32> = (0..3 * cols).map(|i| ((i * 37 % 11) as f32 - 5.0) * 0.5).collect();
            let w: Vec<f32> = w.iter().enumerate().map(|(i, v)| if i % 13 == 0 { -0.0 } else { *v }).collect();
            let mask = Mask::from_fn(3, cols, |r, c| (r * 7 + c * 5) % 3 == 0);
            let matrix = MatrixRef::new(3, cols, &w).unwrap();
            let retained = mask.retained(matrix).unwrap();
            let pruned = mask.apply(matrix).unwrap();
            let of_pruned = |row| {
                let pruned = MatrixRef::new(3, cols, &pruned).unwrap().row(row);
                Retained::of_pruned(matrix.row(row), pruned, mask.row_words(row))
            };
            let rows: Vec<_> = (0..3).map(of_pruned).collect();
            assert_eq!(Retained::total(&rows), Retained { ..retained });
            let places = || (0..3 * cols).map(|i| (f64::from(w[i]), mask.is_kept(i / cols, i % cols)));
            assert_eq!(retained.elements, w.len());
            assert_eq!(retained.nonzeros, places().filter(|(v, _)| *v != 0.0).count());
            assert_eq!(retained.kept, mask.count());
            let negative = places().filter(|(v, kept)| *kept && *v == 0.0 && v.is_sign_negative()).count();
            assert_eq!(retained.kept_negative_zeros, negative);
            // Sums of multiples of a quarter are exact.
            let sum =
                |power: i32, all: bool| places().filter(|p| all || p.1).map(|p| p.0.abs().powi(power)).sum::<f64>();
            let share = |power| if sum(power, true) == 0.0 { 1.0 } else { sum(power, false) / sum(power, true) };
            assert_eq!((retained.l1(), retained.l2()), (share(1), share(2)));
            assert_eq!(retained.density(), mask.density());
            assert!(retained.is_finite());
        }
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            assert!(!Retained::of_row(&[1.0, value, f32::MAX], &[0]).is_finite());
        }
        assert!(Retained::of_row(&[f32::MAX; 1000], &[0; 16]).is_finite());
    }
}
