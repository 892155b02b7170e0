//! Exchanging kept and pruned elements within groups while that makes a layer's error smaller.
//!
//! A row `w` under a mask has the error `e · H · eᵀ`, with `e` the pruned elements and `H` the Hessian of the inputs.
//! With `c = e · H`, pruning the kept element `u` and keeping the pruned element `p` in its place changes the error by
//!
//! ```text
//! 2 w_u c_u + w_u² H_uu  -  2 w_p c_p + w_p² H_pp  -  2 w_u w_p H_up
//! ```
//!
//! The exchange that lowers it most among all groups of the row is made, `c` is brought up to date, and so on. Every
//! exchange is exact, so the error falls until no exchange helps. From "SparseSwaps" (arXiv 2512.10922), with the
//! formula derived for the error itself. Kept weights do not change: refit them after it.

use rayon::prelude::*;

use super::normal::{Damped, finite_weight};
use crate::{Element, Mask, MatrixRef, Pattern, Result, calibration::Hessian, mask::set_bits};

/// Rows whose products with the Hessian are computed together.
const BAND: usize = 1024;

/// Settings of [`swaps`](swaps()).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Swaps {
    /// The pattern that the mask keeps to.
    pub pattern: Pattern,
    /// The most exchanges of a row.
    pub rounds: usize,
    /// What is added to the Hessian's diagonal, as a share of its mean.
    pub damping: f64,
}

impl Swaps {
    /// A hundred exchanges a row at most, damping 0.01.
    pub fn new(pattern: Pattern) -> Self {
        Self { pattern, rounds: 100, damping: 0.01 }
    }
}

/// Returns a mask with as many kept elements in each group, under which the layer's error is lower or the same. Ties go
/// to the lower column; the result is the same with any number of threads.
///
/// # Errors
/// [`NotANumber`](crate::Error::NotANumber) or [`Infinite`](crate::Error::Infinite) with the place;
/// [`Shape`](crate::Error::Shape) and [`Length`](crate::Error::Length) for a mask or a Hessian of another shape;
/// [`NoTokens`](crate::Error::NoTokens), [`Setting`](crate::Error::Setting).
pub fn swaps<T: Element>(dense: MatrixRef<'_, T>, mask: &Mask, hessian: &Hessian, settings: &Swaps) -> Result<Mask> {
    let (rows, cols) = (dense.rows(), dense.cols());
    mask.expect_shape("mask", rows, cols)?;
    let dense = finite_weight(dense, hessian)?;
    let mut mask = mask.clone();
    if dense.is_empty() {
        return Ok(mask);
    }
    let damped = Damped::new(hessian, settings.damping)?;
    let diagonal: Vec<f32> = damped.diagonal().collect();
    let stride = mask.words_per_row();
    let words = mask.words_mut().chunks_mut(BAND * stride);
    for (dense, words) in dense.chunks(BAND * cols).zip(words) {
        let mut pruned = dense.to_vec();
        pruned.par_chunks_mut(cols).zip(words.par_chunks(stride)).for_each(|(row, words)| {
            row.iter_mut().enumerate().filter(|(col, _)| is_kept(words, *col)).for_each(|(_, value)| *value = 0.0);
        });
        let mut products = vec![0f32; pruned.len()];
        damped.product(&pruned, &mut products);
        let rows = dense.par_chunks(cols).zip(products.par_chunks_mut(cols)).zip(words.par_chunks_mut(stride));
        rows.for_each(|((weight, products), words)| {
            let mut row = Row { weight, products, words, damped: &damped, diagonal: &diagonal };
            for _ in 0..settings.rounds {
                let Some((out, back)) = row.best(settings.pattern.m()) else { break };
                row.exchange(out, back);
            }
        });
    }
    Ok(mask)
}

fn is_kept(words: &[u64], col: usize) -> bool {
    words[col / 64] >> (col % 64) & 1 == 1
}

struct Row<'a> {
    weight: &'a [f32],
    /// `c`: the pruned elements times the Hessian.
    products: &'a mut [f32],
    words: &'a mut [u64],
    damped: &'a Damped,
    diagonal: &'a [f32],
}

impl Row<'_> {
    /// The kept and the pruned element whose exchange lowers the error most.
    fn best(&self, group: usize) -> Option<(usize, usize)> {
        let cols = self.weight.len();
        let mut best = None;
        // Rounding must not exchange to and fro.
        let mut least =
            -1e-6 * self.weight.iter().zip(&*self.products).map(|(w, c)| (w * c).abs()).fold(0f32, f32::max);
        for start in (0..cols).step_by(group) {
            let end = (start + group).min(cols);
            for out in (start..end).filter(|col| is_kept(self.words, *col)) {
                let (w, c) = (self.weight[out], self.products[out]);
                let added = 2.0 * w * c + w * w * self.diagonal[out];
                let row = self.damped.row(out);
                for back in (start..end).filter(|col| !is_kept(self.words, *col)) {
                    let (v, c) = (self.weight[back], self.products[back]);
                    let change = added - 2.0 * v * c + v * v * self.diagonal[back] - 2.0 * w * v * row[back];
                    if change < least {
                        (least, best) = (change, Some((out, back)));
                    }
                }
            }
        }
        best
    }

    fn exchange(&mut self, out: usize, back: usize) {
        let (w, v) = (self.weight[out], self.weight[back]);
        let rows = self.damped.row(out).iter().zip(self.damped.row(back));
        for (product, (of_out, of_back)) in self.products.iter_mut().zip(rows) {
            *product += w * of_out - v * of_back;
        }
        self.words[out / 64] &= !(1 << (out % 64));
        set_bits(self.words, back, 1);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Axis, select,
        solve::testing::{correlated, error_of, random},
    };

    /// No exchange of one kept for one pruned element of a group makes the error smaller: checked by computing the
    /// error anew.
    #[test]
    fn masks_end_where_no_exchange_helps() {
        for (pattern, cols) in
            [(Pattern::TWO_FOUR, 22), (Pattern::new(1, 3).unwrap(), 12), (Pattern::new(4, 8).unwrap(), 16)]
        {
            let rows = 3;
            let hessian = correlated(cols, 80);
            let w = random(rows * cols, 11);
            let matrix = MatrixRef::new(rows, cols, &w).unwrap();
            let first = select::magnitude(matrix, pattern, Axis::Row).unwrap();
            let settings = Swaps { damping: 0.0, ..Swaps::new(pattern) };
            let mask = swaps(matrix, &first, &hessian, &settings).unwrap();
            let error = |mask: &Mask| error_of(&hessian, &w, &mask.apply(matrix).unwrap());
            let (before, after) = (error(&first), error(&mask));
            assert!(after < before, "{pattern}: {after} {before}");
            mask.verify(pattern, Axis::Row).unwrap();
            assert_eq!(mask.count(), first.count());
            for row in 0..rows {
                for (out, back) in (0..cols).flat_map(|out| (0..cols).map(move |back| (out, back))) {
                    let same_group = out / pattern.m() == back / pattern.m();
                    if same_group && mask.is_kept(row, out) && !mask.is_kept(row, back) {
                        let mut other = mask.clone();
                        other.prune(row, out);
                        other.keep(row, back);
                        assert!(error(&other) >= after * (1.0 - 1e-4), "{pattern}: {row} {out} {back}");
                    }
                }
            }
        }
    }

    #[test]
    fn no_round_changes_nothing_and_one_round_is_the_best_single_exchange() {
        let cols = 16;
        let hessian = correlated(cols, 60);
        let w = random(cols, 2);
        let matrix = MatrixRef::new(1, cols, &w).unwrap();
        let first = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
        let error = |mask: &Mask| error_of(&hessian, &w, &mask.apply(matrix).unwrap());
        let after = |rounds| {
            let settings = Swaps { rounds, damping: 0.0, ..Swaps::new(Pattern::TWO_FOUR) };
            swaps(matrix, &first, &hessian, &settings).unwrap()
        };
        assert_eq!(after(0), first);
        let mut best = error(&first);
        for (out, back) in (0..cols).flat_map(|out| (0..cols).map(move |back| (out, back))) {
            if out / 4 == back / 4 && first.is_kept(0, out) && !first.is_kept(0, back) {
                let mut other = first.clone();
                other.prune(0, out);
                other.keep(0, back);
                best = best.min(error(&other));
            }
        }
        assert!((error(&after(1)) - best).abs() <= 1e-4 * best);
        assert!(swaps(matrix, &Mask::full(2, cols), &hessian, &Swaps::new(Pattern::TWO_FOUR)).is_err());
    }
}
