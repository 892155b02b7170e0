//! Rounding: the integers of kept weights that change a layer's outputs least.
//!
//! For a row `w` of the dense weight, the damped Hessian `H` of its inputs, and scales `s` that stay as they are, what
//! is looked for is the integers `q`, zero outside of the mask, with the least
//!
//! ```text
//! E(q) = (w - s q) · H · (w - s q)ᵀ
//! ```
//!
//! They begin as the refitted weight rounded to the nearest. Then each is set, one after the other, to the integer that
//! is best while all others stay:
//!
//! ```text
//! q_j ← round((s_j q_j + c_j / H_jj) / s_j)        with    c = (w - s q) · H
//! ```
//!
//! which never raises `E`, until none changes: coordinate descent, as in QuantEase (Behdin and others, "QuantEase:
//! Optimization-based Quantization for Language Models", arXiv:2309.01885), here on the mask alone. Scales are those of
//! the least squared error of a group, each element weighted by its `H_jj`.

use rayon::prelude::*;

use super::{
    Grid, Solved,
    normal::{Damped, finite_weight},
};
use crate::{
    Error, Mask, MatrixRef, Result, calibration::Hessian, first_error::first_error, mask::zero_pruned,
    quantization::ScaleRule,
};

/// The most times that each integer is looked at.
const SWEEPS: usize = 20;
/// Fewer changes in a sweep than this share of what is kept end it.
const SETTLED: f64 = 0.0005;
/// Rows that a thread takes at a time: each row of `H` is read once for all of them. Results do not depend on how many
/// threads there are.
const BAND: usize = 32;

/// Rounds the kept weights of a layer with the dense weight `dense: [rows, cols]` to integers times scales. `adjusted`
/// is what they are before: the dense weight under the mask, or what a solver or [`refit`](super::refit()) found.
///
/// Scales are values of f16; integers reach no farther than [`Bits::largest`](super::Bits::largest). The outputs change
/// no more than by rounding each weight to the nearest integer with the same scales, but for what the damping (0.01 of
/// the Hessian's mean diagonal) makes. The result is the same with any number of threads.
///
/// # Errors
/// [`Error::NotANumber`] or [`Error::Infinite`] with the place; [`Error::Shape`] and [`Error::Length`] for a mask, an
/// adjusted weight or a Hessian of another shape; [`Error::Scale`] where f16 cannot hold a scale; [`Error::NoTokens`],
/// [`Error::Setting`].
///
/// ```
/// use twofour::{MatrixRef, Pattern, calibration::Hessian, select, solve::{Bits, Grid, ScaleScope, round}};
/// // Features 0 and 1 are always equal: where one is rounded up, the other is rounded down.
/// let mut hessian = Hessian::new(8)?;
/// hessian.add(&[1.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0, -3.0, -3.0, 0.0, 0.0, 0.0, 0.0, 0.0, 1.0])?;
/// let w = MatrixRef::new(1, 8, &[1.4f32, 1.4, 0.0, 0.0, 0.0, 0.0, 0.0, 7.0])?;
/// let mask = select::magnitude(w, Pattern::TWO_FOUR, twofour::Axis::Row)?;
/// let found = round(w, &mask, w.data(), &hessian, Grid { bits: Bits::Int4, scope: ScaleScope::Row })?;
/// assert_eq!(found.weight[0] + found.weight[1], 3.0);
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn round(
    dense: MatrixRef<'_, f32>,
    mask: &Mask,
    adjusted: &[f32],
    hessian: &Hessian,
    grid: Grid,
) -> Result<Solved> {
    let (rows, cols) = (dense.rows(), dense.cols());
    mask.expect_shape("mask", rows, cols)?;
    if adjusted.len() != rows * cols {
        return Err(Error::Length { what: "the weight to round", expected: rows * cols, found: adjusted.len() });
    }
    MatrixRef::new(rows, cols, adjusted)?.expect_finite()?;
    let mut errors = finite_weight(dense, hessian)?;
    let width = grid.width(cols)?;
    let damped = Damped::new(hessian, super::Refit::default().damping)?;
    let mut weight = adjusted.to_vec();
    let mut integers = vec![0i8; rows * cols];
    let per_row = cols.div_ceil(width);
    let mut scales = vec![0f32; rows * per_row];
    if !weight.is_empty() {
        weight.par_chunks_mut(cols).enumerate().for_each(|(row, values)| zero_pruned(values, mask.row_words(row)));
        let importance: Vec<f32> = damped.diagonal().collect();
        let parts = weight.par_chunks_mut(cols).zip(integers.par_chunks_mut(cols)).zip(scales.par_chunks_mut(per_row));
        first_error(parts.enumerate(), |(row, ((weight, integers), scales))| {
            for (i, (part, importance)) in weight.chunks_mut(width).zip(importance.chunks(width)).enumerate() {
                scales[i] = best_scale(grid, part, importance).ok_or(Error::Scale { row, scale: i })?;
                for (value, integer) in part.iter_mut().zip(&mut integers[i * width..]) {
                    let nearest = grid.round(*value, scales[i]);
                    (*integer, *value) = (nearest as i8, nearest * scales[i]);
                }
            }
            Ok(())
        })?;
        errors.par_iter_mut().zip(&weight).for_each(|(error, own)| *error -= own);
        let mut pulls = vec![0f32; errors.len()];
        damped.product(&errors, &mut pulls);
        let bands = pulls.par_chunks_mut(BAND * cols).zip(integers.par_chunks_mut(BAND * cols));
        let bands = bands.zip(weight.par_chunks_mut(BAND * cols)).zip(scales.par_chunks(BAND * per_row));
        bands.enumerate().for_each(|(i, (((pulls, integers), weight), scales))| {
            let band = Band { grid, width, mask, first: i * BAND, damped: &damped, pulls, integers, weight, scales };
            band.descend();
        });
        errors.par_iter_mut().zip(dense.data()).zip(&weight).for_each(|((error, w), own)| *error = w - own);
    }
    let squared_error = hessian.squared_outputs(MatrixRef::new(rows, cols, &errors)?)?;
    Ok(Solved { weight, mask: mask.clone(), integers: Some(integers), scales: Some(scales), squared_error })
}

/// The scale of [`ScaleRule::LeastSquares`], with weights for the squares; `None` where f16 cannot hold it.
fn best_scale(grid: Grid, values: &[f32], importance: &[f32]) -> Option<f32> {
    let largest = values.iter().fold(0f32, |largest, value| largest.max(value.abs()));
    let error = |scale: f32| -> f64 {
        let squares = values.iter().zip(importance).map(|(value, importance)| {
            let off = f64::from(value - grid.round(*value, scale) * scale);
            off * off * f64::from(*importance)
        });
        squares.sum()
    };
    let mut best: Option<(f32, f64)> = None;
    for share in ScaleRule::LeastSquares.shares() {
        let scale = grid.scale(largest * share)?;
        let own = error(scale);
        if best.is_none_or(|(_, least)| own < least) {
            best = Some((scale, own));
        }
    }
    best.map(|(scale, _)| scale)
}

/// Rows whose integers are found together.
struct Band<'a> {
    grid: Grid,
    /// Columns that share a scale.
    width: usize,
    mask: &'a Mask,
    /// The first of the rows.
    first: usize,
    damped: &'a Damped,
    /// `c`.
    pulls: &'a mut [f32],
    integers: &'a mut [i8],
    weight: &'a mut [f32],
    scales: &'a [f32],
}

impl Band<'_> {
    fn descend(mut self) {
        let cols = self.damped.features();
        let rows = self.weight.len() / cols;
        let kept = self.mask.of_rows(self.first..self.first + rows).count();
        let diagonal: Vec<f32> = self.damped.diagonal().collect();
        for _ in 0..SWEEPS {
            let mut changed = 0;
            for (col, own) in diagonal.iter().enumerate() {
                let of_column = self.damped.row(col);
                for row in 0..rows {
                    changed += usize::from(self.improve(row, col, *own, of_column));
                }
            }
            if changed as f64 <= SETTLED * kept as f64 {
                return;
            }
        }
    }

    /// Sets an integer to the best one while all others stay; whether it changes.
    fn improve(&mut self, row: usize, col: usize, own: f32, of_column: &[f32]) -> bool {
        let cols = of_column.len();
        let scale = self.scales[row * cols.div_ceil(self.width) + col / self.width];
        if scale == 0.0 || !self.mask.is_kept(self.first + row, col) {
            return false;
        }
        let pulls = &mut self.pulls[row * cols..][..cols];
        let (at, before) = (row * cols + col, self.weight[row * cols + col]);
        let best = self.grid.round(before + pulls[col] / own, scale);
        if best as i8 == self.integers[at] {
            return false;
        }
        (self.integers[at], self.weight[at]) = (best as i8, best * scale);
        let change = best * scale - before;
        pulls.iter_mut().zip(of_column).for_each(|(pull, h)| *pull -= change * h);
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Axis, Pattern, select,
        solve::{
            Bits, ScaleScope,
            testing::{correlated, error_of, random},
        },
    };

    const GRIDS: [Grid; 4] = [
        Grid { bits: Bits::Int8, scope: ScaleScope::Row },
        Grid { bits: Bits::Int8, scope: ScaleScope::Group(20) },
        Grid { bits: Bits::Int4, scope: ScaleScope::Row },
        Grid { bits: Bits::Int4, scope: ScaleScope::Group(16) },
    ];

    fn magnitude(rows: usize, w: &[f32]) -> Mask {
        select::magnitude(MatrixRef::new(rows, w.len() / rows, w).unwrap(), Pattern::TWO_FOUR, Axis::Row).unwrap()
    }

    #[test]
    fn less_error_is_left_than_by_the_nearest_integers() {
        for (rows, cols) in [(1, 64), (70, 62), (33, 128)] {
            let (hessian, w) = (correlated(cols, 400), random(rows * cols, 3));
            let (matrix, mask) = (MatrixRef::new(rows, cols, &w).unwrap(), magnitude(rows, &w));
            for grid in GRIDS {
                let found = round(matrix, &mask, &w, &hessian, grid).unwrap();
                let (integers, scales) = (found.integers.unwrap(), found.scales.unwrap());
                let width = grid.width(cols).unwrap();
                let scale = |i: usize| scales[i / cols * cols.div_ceil(width) + i % cols / width];
                let mut nearest = vec![0f32; w.len()];
                for i in (0..w.len()).filter(|i| mask.is_kept(i / cols, i % cols)) {
                    nearest[i] = grid.round(w[i], scale(i)) * scale(i);
                    assert!(f32::from(integers[i]).abs() <= grid.bits.largest());
                    assert_eq!(found.weight[i], f32::from(integers[i]) * scale(i));
                }
                let (own, other) = (error_of(&hessian, &w, &found.weight), error_of(&hessian, &w, &nearest));
                assert!(own < other, "[{rows}, {cols}] {grid:?}: {own} {other}");
                assert!((own - found.squared_error).abs() <= 1e-3 * own);
                let pruned = |i: usize| mask.is_kept(i / cols, i % cols) || integers[i] == 0;
                assert!((0..w.len()).all(pruned) && found.mask == mask);
            }
        }
    }

    /// The best of all integers is found or nearly so, and no change of one integer is better.
    #[test]
    fn rows_small_enough_to_try_everything_come_near_the_best() {
        let (rows, cols, grid) = (6, 8, GRIDS[2]);
        let (hessian, w) = (correlated(cols, 200), random(rows * cols, 5));
        let damped = Damped::new(&hessian, 0.01).unwrap();
        let error = |row: &[f32], own: &[f32]| -> f64 {
            let off: Vec<f32> = row.iter().zip(own).map(|(a, b)| a - b).collect();
            let mut product = vec![0f32; cols];
            damped.product(&off, &mut product);
            off.iter().zip(&product).map(|(a, b)| f64::from(a * b)).sum()
        };
        for row in w.chunks(cols) {
            let mask = magnitude(1, row);
            let kept: Vec<usize> = (0..cols).filter(|col| mask.is_kept(0, *col)).collect();
            let found = round(MatrixRef::new(1, cols, row).unwrap(), &mask, row, &hessian, grid).unwrap();
            let scale = found.scales.unwrap()[0];
            let own = error(row, &found.weight);
            let mut best = f64::INFINITY;
            for code in 0..15usize.pow(4) {
                let mut values = vec![0f32; cols];
                for (i, col) in kept.iter().enumerate() {
                    values[*col] = (((code / 15usize.pow(i as u32)) % 15) as f32 - 7.0) * scale;
                }
                let all = error(row, &values);
                best = best.min(all);
                let others = kept.iter().filter(|col| values[**col] != found.weight[**col]).count();
                assert!(others > 1 || all >= own * (1.0 - 1e-4), "{all} {own}");
            }
            assert!(own <= 1.5 * best, "{own} {best}");
        }
    }

    #[test]
    fn results_do_not_depend_on_threads_or_on_the_rows_beside() {
        let (rows, cols) = (70, 64);
        let (hessian, w) = (correlated(cols, 300), random(rows * cols, 8));
        let of = |w: &[f32]| {
            let matrix = MatrixRef::new(w.len() / cols, cols, w).unwrap();
            round(matrix, &magnitude(w.len() / cols, w), w, &hessian, GRIDS[3]).unwrap()
        };
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
        assert_eq!(pool(1).install(|| of(&w)), pool(4).install(|| of(&w)));
    }

    #[test]
    fn what_has_no_scale_or_no_elements_and_bad_operands() {
        let hessian = correlated(8, 40);
        let full = Mask::full(1, 8);
        let of =
            |w: &[f32], mask: &Mask| round(MatrixRef::new(w.len() / 8, 8, w).unwrap(), mask, w, &hessian, GRIDS[2]);
        let zeros = of(&[0.0; 8], &full).unwrap();
        assert_eq!((zeros.weight, zeros.scales), (vec![0.0; 8], Some(vec![0.0])));
        assert!(of(&[], &Mask::empty(0, 8)).unwrap().weight.is_empty());
        let mut huge = random(8, 1);
        huge[3] = 1e30;
        assert!(matches!(of(&huge, &full), Err(Error::Scale { row: 0, scale: 0 })));
        huge[3] = f32::NAN;
        assert!(matches!(of(&huge, &full), Err(Error::NotANumber { row: 0, col: 3 })));
        assert!(matches!(of(&random(8, 1), &Mask::full(2, 8)), Err(Error::Shape { .. })));
        let w = random(8, 1);
        let matrix = MatrixRef::new(1, 8, &w).unwrap();
        assert!(matches!(round(matrix, &full, &w[..4], &hessian, GRIDS[2]), Err(Error::Length { .. })));
        assert!(round(matrix, &full, &w, &correlated(4, 40), GRIDS[2]).is_err());
        let none = Grid { bits: Bits::Int4, scope: ScaleScope::Group(0) };
        assert!(matches!(round(matrix, &full, &w, &hessian, none), Err(Error::Setting { .. })));
        assert!(matches!(round(matrix, &full, &w, &Hessian::new(8).unwrap(), GRIDS[2]), Err(Error::NoTokens { .. })));
    }
}
