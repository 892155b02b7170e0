//! Transposable selection: masks of 4x4 tiles that keep at most two elements in every row and in every column.
//!
//! Such a mask makes a weight 2:4 along its rows and its transpose 2:4 as well, so that both the product and the input
//! gradient can be computed sparse (Hubara et al., NeurIPS 2021; Hu et al., ICML 2024).
//!
//! | name | rule |
//! |---|---|
//! | `greedy` | take elements from the largest magnitude down while their row and column have room |
//! | `greedy-signed` | the same by signed value: torch's default, which prunes large negative weights |
//! | `causal1122` | rows in order, by signed value, at most 1, 1, 2, 2 elements of them |
//! | `optimal` | the pattern of largest kept magnitude among the 90 with two elements in each row and column |
//!
//! The greedy rules order a tile's elements with the sorting networks that torch's GPU kernels use, whose comparators
//! exchange equal keys, so that masks agree with torch bit for bit, ties included. The greedy rule may keep seven
//! elements of 16.
//!
//! Where the matrix ends inside a tile, elements past its edge are ordered after all others and never kept.

mod network;
mod optimal;

use std::{fmt, str::FromStr};

use super::band::{self, BandRule};
use crate::{Element, Error, Mask, MatrixRef, Result};

/// A rule that chooses the mask of a 4x4 tile; see the [module](self).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Transposable {
    /// From the largest magnitude down (torch's `largest_abs_values_greedy`).
    GreedyAbs,
    /// From the largest signed value down (torch's `largest_values_greedy` and default).
    GreedySigned,
    /// Rows in order, at most 1, 1, 2, 2 elements each, by signed value (torch's `causal1122`).
    Causal1122,
    /// The best of the 90 patterns. Sums are f32 and cannot overflow: in a tile with elements of magnitude above
    /// `f32::MAX / 8` the same comparison runs on scaled magnitudes, and infinite ones are kept before all finite ones.
    Optimal,
}

impl Transposable {
    /// All rules.
    pub const ALL: [Transposable; 4] =
        [Transposable::GreedyAbs, Transposable::GreedySigned, Transposable::Causal1122, Transposable::Optimal];

    /// Its name, as commands take it.
    pub fn name(self) -> &'static str {
        match self {
            Transposable::GreedyAbs => "greedy",
            Transposable::GreedySigned => "greedy-signed",
            Transposable::Causal1122 => "causal1122",
            Transposable::Optimal => "optimal",
        }
    }
}

impl fmt::Display for Transposable {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Transposable {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        Self::ALL.into_iter().find(|rule| rule.name() == name).ok_or_else(|| Error::UnknownSelector {
            name: name.to_owned(),
            known: "greedy, greedy-signed, causal1122, optimal",
        })
    }
}

/// A tile's values and which of its elements exist: bit `4 * row + col` of `inside`.
#[derive(Debug, Clone, Copy)]
struct Tile {
    values: [f32; 16],
    inside: u16,
}

impl Tile {
    fn select(&self, rule: Transposable) -> u16 {
        match rule {
            Transposable::GreedyAbs => network::greedy(&self.keys(f32::abs), self.inside),
            Transposable::GreedySigned => network::greedy(&self.keys(|v| v), self.inside),
            Transposable::Causal1122 => network::causal1122(&self.keys(|v| v), self.inside),
            Transposable::Optimal => optimal::best(&self.values.map(f32::abs), self.inside),
        }
    }

    /// Sorting keys; what does not exist comes last.
    fn keys(&self, key: impl Fn(f32) -> f32) -> [f32; 16] {
        std::array::from_fn(|i| if self.inside >> i & 1 == 1 { key(self.values[i]) } else { f32::NEG_INFINITY })
    }
}

/// The mask of a tile of `values`, of which the elements in `inside` exist: bit `4 * row + col` of both.
pub(crate) fn select(values: [f32; 16], inside: u16, rule: Transposable) -> u16 {
    Tile { values, inside }.select(rule)
}

/// A mask that is 2:4 along rows and along columns, chosen tile by tile.
///
/// `matrix` may have any shape. The result is the same on every engine and with any number of threads.
///
/// # Errors
/// [`Error::NotANumber`] with the place of the first NaN.
///
/// ```
/// use twofour::{Axis, MatrixRef, Pattern, select::{self, Transposable}};
/// let w: Vec<f32> = (0..64).map(|i| ((i * 37) % 64) as f32 - 31.5).collect();
/// let mask = select::transposable(MatrixRef::new(8, 8, &w)?, Transposable::Optimal)?;
/// mask.verify(Pattern::TWO_FOUR, Axis::Row)?;
/// mask.verify(Pattern::TWO_FOUR, Axis::Column)?;
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn transposable<T: Element>(matrix: MatrixRef<'_, T>, rule: Transposable) -> Result<Mask> {
    band::mask(matrix, &rule)
}

impl<T: Element> BandRule<T> for Transposable {
    fn height(&self) -> usize {
        4
    }

    fn choose(&self, band: MatrixRef<'_, T>, words: &mut [u64]) -> bool {
        let (height, cols) = (band.rows(), band.cols());
        let stride = words.len() / height;
        let mut nan = false;
        for first in (0..cols).step_by(4) {
            let width = (cols - first).min(4);
            let mut tile = Tile { values: [0.0; 16], inside: 0 };
            for r in 0..height {
                for (c, value) in band.row(r)[first..first + width].iter().enumerate() {
                    tile.values[4 * r + c] = value.to_f32();
                    tile.inside |= 1 << (4 * r + c);
                }
            }
            // The rules compare, and NaN has no order.
            if tile.values.iter().any(|v| v.is_nan()) {
                nan = true;
                continue;
            }
            let kept = tile.select(*self);
            for r in 0..height {
                // A tile's four columns never straddle two words.
                words[r * stride + first / 64] |= u64::from(kept >> (4 * r) & 15) << (first % 64);
            }
        }
        nan
    }
}

#[cfg(test)]
mod tests;
