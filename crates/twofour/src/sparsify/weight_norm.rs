//! Blocks by their norm, elements inside them by theirs.

use rayon::prelude::*;

use super::ParameterRule;
use crate::{
    Error, Mask, MatrixRef, Result,
    criterion::Norm,
    select::{nm::reject_nan, unstructured::key},
};

/// Chooses the share `level` of blocks whose mean norm is lowest, and in each of them prunes the `zeros` elements of
/// lowest norm (torch's `WeightNormSparsifier`).
///
/// With blocks of 1x4, two zeros and level 1 that is 2:4. A level of 0 or less keeps everything; of 1 or more, all
/// blocks are chosen. Blocks that the weight cuts off are chosen by the mean of the elements that they have. The number
/// of blocks chosen is rounded to the nearest, halves to even, and at level below 1 one block at least is not chosen.
/// Among equals the one of higher index is pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct WeightNorm {
    block: (usize, usize),
    zeros: usize,
    norm: Norm,
}

impl WeightNorm {
    /// Blocks of rows and columns, and how many elements of a chosen block are pruned; by the squared norm.
    ///
    /// # Errors
    /// [`Error::Setting`] for a block without elements, or for more zeros than it has elements.
    pub fn new(block: (usize, usize), zeros: usize) -> Result<Self> {
        let elements = block.0.checked_mul(block.1).unwrap_or(0);
        if elements == 0 {
            let value = block.0.min(block.1) as f64;
            return Err(Error::Setting { what: "rows or columns of a block", value, expected: "at least 1" });
        }
        if zeros > elements {
            let (value, expected) = (zeros as f64, "at most the elements of a block");
            return Err(Error::Setting { what: "zeros of a block", value, expected });
        }
        Ok(Self { block, zeros, norm: Norm::L2 })
    }

    /// The same with another norm.
    #[must_use]
    pub fn with_norm(self, norm: Norm) -> Self {
        Self { norm, ..self }
    }

    fn score(&self, weight: f32) -> f32 {
        match self.norm {
            Norm::L1 => weight.abs(),
            Norm::L2 => weight * weight,
        }
    }
}

impl ParameterRule for WeightNorm {
    /// # Errors
    /// [`Error::NotANumber`] with the place of the first NaN; [`Error::SparsityLevel`] for a level that is NaN.
    fn mask(&self, weight: MatrixRef<'_, f32>, level: f64) -> Result<Mask> {
        if level.is_nan() {
            return Err(Error::SparsityLevel { value: level });
        }
        reject_nan(weight)?;
        let (rows, cols) = (weight.rows(), weight.cols());
        if level <= 0.0 || self.zeros == 0 {
            return Ok(Mask::full(rows, cols));
        }
        let (height, width) = self.block;
        let (down, across) = (rows.div_ceil(height), cols.div_ceil(width));
        let blocks = down * across;
        let range = |index: usize, size: usize, end: usize| index * size..((index + 1) * size).min(end);
        let mut chosen = vec![level >= 1.0; blocks];
        if level < 1.0 && blocks > 0 {
            let mean = |block: usize| {
                let (r, c) = (range(block / across, height, rows), range(block % across, width, cols));
                let count = (r.len() * c.len()) as f32;
                let sum = r.flat_map(|row| &weight.row(row)[c.clone()]).fold(0f32, |sum, w| sum + self.score(*w));
                sum / count
            };
            let means: Vec<f32> = (0..blocks).into_par_iter().map(mean).collect();
            let count = ((level * blocks as f64).round_ties_even() as usize).min(blocks - 1);
            let mut order: Vec<usize> = (0..blocks).collect();
            order.par_sort_by_key(|&block| (key(means[block]), std::cmp::Reverse(block)));
            order[..count].iter().for_each(|&block| chosen[block] = true);
        }
        let mut mask = Mask::full(rows, cols);
        let mut order = Vec::new();
        for block in (0..blocks).filter(|&block| chosen[block]) {
            order.clear();
            for row in range(block / across, height, rows) {
                for col in range(block % across, width, cols) {
                    order.push((key(self.score(weight.row(row)[col])), std::cmp::Reverse((row, col))));
                }
            }
            order.sort_unstable();
            for (_, std::cmp::Reverse((row, col))) in order.iter().take(self.zeros) {
                mask.prune(*row, *col);
            }
        }
        Ok(mask)
    }
}
