//! The rules of a recipe's sparsifier.

use std::fmt;

use serde::{Deserialize, Serialize};
use twofour::{
    Mask, MatrixRef,
    criterion::{Magnitude, Norm},
    sparsify::{NearlyDiagonal, ParameterRule, Unstructured, WeightNorm},
};

/// The norm of blocks and of the elements inside them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum BlockNorm {
    /// The magnitude.
    L1,
    /// The square.
    #[default]
    L2,
}

/// The rule by which masks are chosen.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum SparsifierRule {
    /// [`WeightNorm`]: of the share `level` of blocks with the lowest norms, the `zeros` lowest elements. 2:4 is blocks
    /// of `[1, 4]` with two zeros.
    WeightNorm {
        /// Rows and columns of a block.
        block: [usize; 2],
        /// Pruned elements of a chosen block.
        zeros: usize,
        /// The norm.
        norm: BlockNorm,
    },
    /// [`NearlyDiagonal`]: all but a band of that many diagonals, whatever the level.
    NearlyDiagonal {
        /// Diagonals of the band; an odd number.
        nearliness: u32,
    },
    /// [`Unstructured`]: the share `level` of the whole weight, by magnitude.
    Unstructured,
}

impl SparsifierRule {
    /// Two zeros in every block of four in a row.
    pub const TWO_OF_FOUR: Self = SparsifierRule::WeightNorm { block: [1, 4], zeros: 2, norm: BlockNorm::L2 };

    /// An error for numbers that the rule excludes.
    ///
    /// # Errors
    /// Those of [`WeightNorm::new`] and [`NearlyDiagonal::new`].
    pub fn check(&self) -> twofour::Result<()> {
        match *self {
            SparsifierRule::WeightNorm { block: [rows, cols], zeros, .. } => {
                WeightNorm::new((rows, cols), zeros).map(|_| ())
            }
            SparsifierRule::NearlyDiagonal { nearliness } => NearlyDiagonal::new(nearliness.into()).map(|_| ()),
            SparsifierRule::Unstructured => Ok(()),
        }
    }
}

impl ParameterRule for SparsifierRule {
    fn mask(&self, weight: MatrixRef<'_, f32>, level: f64) -> twofour::Result<Mask> {
        match *self {
            SparsifierRule::WeightNorm { block: [rows, cols], zeros, norm } => {
                let norm = match norm {
                    BlockNorm::L1 => Norm::L1,
                    BlockNorm::L2 => Norm::L2,
                };
                WeightNorm::new((rows, cols), zeros)?.with_norm(norm).mask(weight, level)
            }
            SparsifierRule::NearlyDiagonal { nearliness } => {
                NearlyDiagonal::new(nearliness.into())?.mask(weight, level)
            }
            SparsifierRule::Unstructured => Unstructured(Magnitude::default()).mask(weight, level),
        }
    }
}

/// What it prunes, in words.
impl fmt::Display for SparsifierRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            SparsifierRule::WeightNorm { block: [rows, cols], zeros, .. } => {
                write!(f, "{zeros} of {} in blocks [{rows}, {cols}]", rows * cols)
            }
            SparsifierRule::NearlyDiagonal { nearliness } => write!(f, "all but {nearliness} diagonals"),
            SparsifierRule::Unstructured => f.write_str("the lowest magnitudes"),
        }
    }
}
