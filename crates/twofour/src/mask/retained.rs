//! What a mask keeps of a matrix: counts and sums.

use crate::Element;

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
    ///
    /// Sums are taken in eight partial sums, element `i` in number `i % 8`, so that the loop can use vector instructions;
    /// their order does not depend on the machine.
    pub(crate) fn of_row<T: Element>(values: &[T], words: &[u64]) -> Self {
        const LANES: usize = 8;
        let mut total = Retained { elements: values.len(), ..Retained::default() };
        let (mut kept_l1, mut all_l1) = ([0f64; LANES], [0f64; LANES]);
        let (mut kept_l2, mut all_l2) = ([0f64; LANES], [0f64; LANES]);
        for (&word, values) in words.iter().zip(values.chunks(64)) {
            total.kept += word.count_ones() as usize;
            for (part, values) in values.chunks(LANES).enumerate() {
                let bits = word >> (LANES * part);
                for (lane, value) in values.iter().enumerate() {
                    let value = value.to_f32();
                    let kept = bits >> lane & 1 == 1;
                    total.nonzeros += usize::from(value != 0.0);
                    total.kept_negative_zeros += usize::from(kept & (value.to_bits() == (-0.0f32).to_bits()));
                    let magnitude = f64::from(value.abs());
                    let kept_magnitude = if kept { magnitude } else { 0.0 };
                    all_l1[lane] += magnitude;
                    kept_l1[lane] += kept_magnitude;
                    all_l2[lane] += magnitude * magnitude;
                    kept_l2[lane] += kept_magnitude * kept_magnitude;
                }
            }
        }
        [total.kept_l1, total.all_l1] = [kept_l1.iter().sum(), all_l1.iter().sum()];
        [total.kept_l2, total.all_l2] = [kept_l2.iter().sum(), all_l2.iter().sum()];
        total
    }

    /// Of all rows together, added up in their order: the sums do not depend on the number of threads.
    pub(crate) fn total(rows: &[Retained]) -> Self {
        rows.iter().fold(Retained::default(), |a, b| Retained {
            elements: a.elements + b.elements,
            nonzeros: a.nonzeros + b.nonzeros,
            kept: a.kept + b.kept,
            kept_negative_zeros: a.kept_negative_zeros + b.kept_negative_zeros,
            kept_l1: a.kept_l1 + b.kept_l1,
            all_l1: a.all_l1 + b.all_l1,
            kept_l2: a.kept_l2 + b.kept_l2,
            all_l2: a.all_l2 + b.all_l2,
        })
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
