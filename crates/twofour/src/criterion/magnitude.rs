//! Magnitude.

use super::{Criterion, Scorer, Weight};
use crate::Result;

/// The power of a weight that is its score.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Norm {
    /// `|w|`.
    #[default]
    L1,
    /// `w²`: inside one weight the order of [`Norm::L1`], but for squares that underflow or overflow in f32; between
    /// weights another normalization.
    L2,
}

/// Scores an element by its magnitude.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub struct Magnitude {
    /// The power.
    pub norm: Norm,
}

impl Criterion for Magnitude {
    fn scorer<'a>(&'a self, _weight: &Weight<'a>) -> Result<Scorer<'a>> {
        let fill = |score: fn(f32) -> f32| -> Scorer<'a> {
            Box::new(move |_, weights, scores| {
                for (out, w) in scores.iter_mut().zip(weights) {
                    *out = score(*w);
                }
            })
        };
        Ok(match self.norm {
            Norm::L1 => fill(f32::abs),
            Norm::L2 => fill(|w| w * w),
        })
    }
}
