//! Scores that say how much each element of a weight matters: **criteria**.
//!
//! | criterion | score of `w` at row `i`, input feature `j` | requires |
//! |---|---|---|
//! | [`Magnitude`] | `\|w\|` or `w²` | nothing |
//! | [`Random`] | uniform, from a counter | a seed |
//! | [`Saliency`] | `\|w · g\|` | a gradient |
//! | [`Movement`] | `-Σ w · g` over steps | gradients of fine-tuning |
//! | [`ActivationNorm`] | `‖x_j‖₂` | [`InputNorms`] |
//! | [`Wanda`] | `\|w\| · ‖x_j‖₂` | [`InputNorms`] |
//! | [`Ria`] | `(\|w\| / Σ_i \|w\| + \|w\| / Σ_j \|w\|) · ‖x_j‖₂^½` | [`InputNorms`] |
//! | [`OptimalBrainDamage`] | `½ w² H_jj` | [`Hessian::diagonal`] |
//! | [`OptimalBrainSurgeon`] | `½ w² / (H⁻¹)_jj` | [`Hessian::inverse_diagonal`] |
//!
//! [`InputNorms`]: crate::calibration::InputNorms
//! [`Hessian::diagonal`]: crate::calibration::Hessian::diagonal
//! [`Hessian::inverse_diagonal`]: crate::calibration::Hessian::inverse_diagonal
//!
//! [`mask`] turns scores into the mask of a weight, [`global_masks`] into those of several weights that share one
//! threshold. Both read a weight row by row: no second copy of it is made, whatever its dtype.
//!
//! A criterion of your own implements one trait:
//!
//! ```
//! use twofour::{MatrixRef, Pattern, Result, criterion::{self, Criterion, Scorer, Weight}, select::Sparsity};
//!
//! /// Prefers elements near the end of a row.
//! struct Late;
//!
//! impl Criterion for Late {
//!     fn scorer<'a>(&'a self, _weight: &Weight<'a>) -> Result<Scorer<'a>> {
//!         Ok(Box::new(|_row, weights, scores| {
//!             for (col, (score, weight)) in scores.iter_mut().zip(weights).enumerate() {
//!                 *score = weight.abs() * (1 + col) as f32;
//!             }
//!         }))
//!     }
//! }
//!
//! let w = [4.0f32, 3.0, 2.0, 1.5];
//! let mask = criterion::mask(MatrixRef::new(1, 4, &w)?, &Late, Sparsity::Groups(Pattern::TWO_FOUR))?;
//! assert_eq!(mask.row_words(0), [0b0110]);
//! # Ok::<(), twofour::Error>(())
//! ```
//!
//! # Rules
//! A weight that is NaN or infinite is an error with its place, whatever the criterion; so is a NaN score. An infinite
//! score is the highest. Scores of -0.0 and +0.0 are equal. Ties go to the lower index. The same input gives the same
//! mask with any number of threads.

mod activation;
mod gradient;
mod hessian;
mod magnitude;
mod random;
mod select;
mod weight;

pub use activation::{ActivationNorm, Ria, Wanda, WandaVariant};
pub use gradient::{Movement, Saliency};
pub use hessian::{OptimalBrainDamage, OptimalBrainSurgeon};
pub use magnitude::{Magnitude, Norm};
pub use random::Random;
pub use select::{GlobalWeight, Normalization, global_masks, mask, mask_along, scores};
pub use weight::Weight;

use crate::{Error, Result};

/// Scores of one row: called with its index, its weights, and where the scores go.
pub type Scorer<'a> = Box<dyn Fn(usize, &[f32], &mut [f32]) + Send + Sync + 'a>;

/// A rule that scores the elements of a weight: the higher, the more an element is worth keeping.
pub trait Criterion: Sync {
    /// Returns what scores this weight's rows, after a look at the whole weight where the scores require one, and after
    /// checking that the criterion's statistics have its shape.
    ///
    /// # Errors
    /// [`Error::Length`] for statistics of another shape, and the criterion's own.
    fn scorer<'a>(&'a self, weight: &Weight<'a>) -> Result<Scorer<'a>>;
}

/// An error unless a statistic has as many elements as the weight requires.
fn expect_length(what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found { Ok(()) } else { Err(Error::Length { what, expected, found }) }
}
