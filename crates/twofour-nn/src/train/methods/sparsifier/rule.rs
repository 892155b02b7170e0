//! The rules of a recipe's sparsifier.

use std::fmt;

use serde::{Deserialize, Serialize};
use twofour::{
    Mask, MatrixRef,
    criterion::{Magnitude, Norm, mask},
    select::Sparsity,
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
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
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
    /// The share `level` by any pattern: of blocks, rows, columns, elements, or groups of N:M. V:N:M has no level but
    /// 1.
    Pattern(PatternText),
}

/// A pattern, stored as its text.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(try_from = "String", into = "String")]
pub struct PatternText(pub Sparsity);

impl PatternText {
    /// The level at which all of the pattern is there: the share that is pruned, or 1 of N:M and V:N:M.
    pub(super) fn target(self) -> f64 {
        match self.0 {
            Sparsity::Groups(_) | Sparsity::Vectors { .. } => 1.0,
            // Checked where the pattern was read, and where the plan is.
            sparsity => sparsity.level().unwrap_or(1.0),
        }
    }

    /// The mask at a level.
    fn mask(self, weight: MatrixRef<'_, f32>, level: f64) -> twofour::Result<Mask> {
        let by = |sparsity| mask(weight, &Magnitude::default(), sparsity);
        match self.0 {
            Sparsity::Groups(pattern) if level < 1.0 => {
                let (n, m) = (pattern.n(), pattern.m());
                WeightNorm::new((1, m), m - n)?.mask(weight, level)
            }
            Sparsity::Vectors { .. } if level <= 0.0 => by(Sparsity::Tensor(0.0)),
            sparsity => by(sparsity.with_level(level)),
        }
    }
}

impl TryFrom<String> for PatternText {
    type Error = twofour::Error;

    fn try_from(text: String) -> twofour::Result<Self> {
        text.parse().map(PatternText)
    }
}

impl From<PatternText> for String {
    fn from(pattern: PatternText) -> String {
        pattern.0.to_string()
    }
}

impl SparsifierRule {
    /// Two zeros in every block of four in a row.
    pub const TWO_OF_FOUR: Self = SparsifierRule::WeightNorm { block: [1, 4], zeros: 2, norm: BlockNorm::L2 };

    /// An error for numbers that the rule excludes.
    ///
    /// # Errors
    /// Those of [`WeightNorm::new`], [`NearlyDiagonal::new`] and [`Sparsity::level`].
    pub fn check(&self) -> twofour::Result<()> {
        match *self {
            SparsifierRule::WeightNorm { block: [rows, cols], zeros, .. } => {
                WeightNorm::new((rows, cols), zeros).map(|_| ())
            }
            SparsifierRule::NearlyDiagonal { nearliness } => NearlyDiagonal::new(nearliness.into()).map(|_| ()),
            SparsifierRule::Unstructured => Ok(()),
            SparsifierRule::Pattern(pattern) => pattern.0.level().map(|_| ()),
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
            SparsifierRule::Pattern(pattern) => pattern.mask(weight, level),
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
            SparsifierRule::Pattern(pattern) => write!(f, "to {}", pattern.0),
        }
    }
}
