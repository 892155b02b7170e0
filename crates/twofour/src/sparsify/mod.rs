//! Masks of named parameters over the life of a training run: [`Sparsifier`].
//!
//! | step | call |
//! |---|---|
//! | name the parameters, each with a rule and a level | [`Sparsifier::prepare`] |
//! | set the levels of an epoch by a [`Schedule`] | [`Sparsifier::set_epoch`], of one parameter [`Sparsifier::set_level`] |
//! | choose the masks anew | [`Sparsifier::step`], of one parameter [`Sparsifier::step_one`] |
//! | use them: forward with `W ∘ M`, mask the gradient | [`Sparsifier::masked`], [`Sparsifier::apply`] |
//! | save and load them with a checkpoint | [`Sparsifier::tensors`], [`Sparsifier::save`], [`Sparsifier::load`] |
//! | write the zeros into the weights and end | [`Sparsifier::squash_mask`] |
//!
//! A rule is anything that implements [`ParameterRule`]: [`WeightNorm`] and [`NearlyDiagonal`] choose the masks of
//! `torch.ao.pruning`, [`Unstructured`] those of any [criterion](crate::criterion).
//!
//! The weights stay the caller's, dense. A mask is chosen from the dense weight, so pruned elements regrow when they
//! have become large again; [`Regrowth::Never`] chooses from the masked weight, as `torch.ao.pruning` does.
//!
//! ```
//! use std::collections::BTreeMap;
//! use twofour::{MatrixRef, sparsify::{CubicSchedule, Regrowth, Sparsifier, WeightNorm}};
//! let mut weights = BTreeMap::from([("up.weight", vec![0.1f32, -3.0, 2.0, 0.5, 1.0, 4.0, 0.2, 0.3])]);
//!
//! let mut sparsifier = Sparsifier::new(Regrowth::FromDense);
//! // In all blocks of four (level 1) the two smallest elements go: 2:4.
//! sparsifier.prepare("up.weight", 1, 8, WeightNorm::new((1, 4), 2)?, 1.0)?;
//! let schedule = CubicSchedule { start_level: 0.0, start: 0, every: 1, times: 4, zero_before: true };
//! for epoch in 0..=4 {
//!     sparsifier.set_epoch(&schedule, epoch);
//!     sparsifier.step(|name| MatrixRef::new(1, 8, weights.get(name)?).ok())?;
//!     // A training step with sparsifier.masked("up.weight", weight) goes here.
//! }
//! let mut slices: BTreeMap<_, _> = weights.iter_mut().map(|(name, weight)| (*name, weight.as_mut_slice())).collect();
//! sparsifier.squash_mask(|name| slices.remove(name))?;
//! assert_eq!(weights["up.weight"], [0.0, -3.0, 2.0, 0.0, 1.0, 4.0, 0.0, 0.0]);
//! # Ok::<(), twofour::Error>(())
//! ```

mod checkpoint;
mod diagonal;
mod schedule;
mod sparsifier;
mod unstructured;
mod weight_norm;

pub use diagonal::NearlyDiagonal;
pub use schedule::{ConstantSchedule, CubicSchedule, IterativeSchedule, LambdaSchedule, OneShotSchedule, Schedule};
pub use sparsifier::{Regrowth, Sparsifier, SquashedParameter};
pub use unstructured::Unstructured;
pub use weight_norm::WeightNorm;

use crate::{Mask, MatrixRef, Result};

/// A rule that chooses the mask of a parameter at a level of sparsity.
pub trait ParameterRule: Send + Sync {
    /// Returns the mask of a weight. What a level means is the rule's affair; 0 keeps everything in those that have
    /// levels.
    ///
    /// # Errors
    /// The rule's own.
    fn mask(&self, weight: MatrixRef<'_, f32>, level: f64) -> Result<Mask>;
}
