//! Masks near the diagonal.

use super::ParameterRule;
use crate::{Error, Mask, MatrixRef, Result};

/// Keeps a band around the diagonal, whatever the weight and the level (torch's `NearlyDiagonalSparsifier`).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct NearlyDiagonal {
    nearliness: i64,
}

impl NearlyDiagonal {
    /// A band of `nearliness` diagonals, an odd number; 0 or less keeps nothing.
    ///
    /// # Errors
    /// [`Error::Setting`] for a positive even number.
    pub fn new(nearliness: i64) -> Result<Self> {
        if nearliness > 0 && nearliness % 2 == 0 {
            let value = nearliness as f64;
            return Err(Error::Setting { what: "nearliness", value, expected: "an odd number, or 0 or less" });
        }
        Ok(Self { nearliness })
    }
}

impl ParameterRule for NearlyDiagonal {
    /// # Errors
    /// [`Error::Setting`] where the band is wider than the weight: more than `2 · min(rows, cols) - 1` diagonals.
    fn mask(&self, weight: MatrixRef<'_, f32>, _level: f64) -> Result<Mask> {
        let (rows, cols) = (weight.rows(), weight.cols());
        let mut mask = Mask::empty(rows, cols);
        let Ok(nearliness @ 1..) = usize::try_from(self.nearliness) else { return Ok(mask) };
        let distance = nearliness / 2;
        if distance >= rows.min(cols) {
            let (value, expected) = (self.nearliness as f64, "below twice the weight's smaller dimension");
            return Err(Error::Setting { what: "nearliness", value, expected });
        }
        for row in 0..rows {
            for col in row.saturating_sub(distance)..(row + distance + 1).min(cols) {
                mask.keep(row, col);
            }
        }
        Ok(mask)
    }
}
