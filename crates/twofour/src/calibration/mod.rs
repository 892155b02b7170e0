//! Statistics of a layer's inputs, gathered while a model runs on calibration text.
//!
//! | statistic | memory for `n` input features | for |
//! |---|---|---|
//! | [`InputNorms`] | `8 n` bytes | [`Wanda`](crate::criterion::Wanda), [`Ria`](crate::criterion::Ria), [`ActivationNorm`](crate::criterion::ActivationNorm) |
//! | [`Hessian`] | `4 n²` bytes | [`sparsegpt`](mod@crate::solve::sparsegpt), [`OptimalBrainDamage`](crate::criterion::OptimalBrainDamage), [`OptimalBrainSurgeon`](crate::criterion::OptimalBrainSurgeon) |
//! | [`CrossProducts`] | `4 n²` bytes, or `4 m n` of `m` outputs | [`compensated`](crate::solve::compensated): making up for the errors of earlier layers |
//! | [`ActivationSample`] | `4 n` bytes a token | comparing weights by their outputs |
//!
//! [`Statistic`] is one of the first two, as a pruning method requires.
//!
//! All take batches `[tokens, features]`, row-major, of the activations that enter a linear layer. A batch with a NaN
//! or an infinity is an error with its place, and nothing of it is added.

mod cross;
mod hessian;
mod input_norms;
mod sample;
mod statistic;

pub use cross::{CrossProducts, DenseSide};
pub use hessian::Hessian;
pub use input_norms::InputNorms;
pub use sample::ActivationSample;
pub use statistic::{Statistic, StatisticKind};

use crate::{Error, Result};

/// The number of tokens of a batch.
fn tokens_of(batch: &[f32], features: usize) -> Result<usize> {
    match features {
        0 => Ok(0),
        _ if batch.len().is_multiple_of(features) => Ok(batch.len() / features),
        _ => {
            Err(Error::Multiple { what: "elements of a batch of activations", multiple: features, found: batch.len() })
        }
    }
}

/// An error with the place of the first activation that is not finite.
fn reject_not_finite(batch: &[f32], features: usize) -> Result<()> {
    match batch.iter().position(|v| !v.is_finite()) {
        None => Ok(()),
        Some(i) => Err(Error::Activation { token: i / features, feature: i % features, value: batch[i] }),
    }
}
