//! What operators name by number, since schemas without strings cost less: rules, activations and estimators. The package's `_ops.py` has the
//! names.

use twofour::{
    estimate::Estimator,
    layer::{Activation, MaskRule},
    select::Transposable,
};

use super::failure::{Failure, Result};

/// The activation of that number.
///
/// # Errors
/// A `RuntimeError` where there is none.
pub(super) fn activation(number: i64) -> Result<Activation> {
    Ok(match number {
        0 => Activation::Identity,
        1 => Activation::Relu,
        2 => Activation::Silu,
        3 => Activation::Gelu,
        other => return Err(Failure::runtime(format!("there is no activation number {other}"))),
    })
}

/// The mask rule of that number.
///
/// # Errors
/// A `RuntimeError` where there is none.
pub(super) fn rule(number: i64) -> Result<MaskRule> {
    Ok(match number {
        0 => MaskRule::Magnitude,
        1 => MaskRule::Transposable(Transposable::GreedyAbs),
        2 => MaskRule::Transposable(Transposable::GreedySigned),
        3 => MaskRule::Transposable(Transposable::Causal1122),
        4 => MaskRule::Transposable(Transposable::Optimal),
        5 => MaskRule::SoftThreshold,
        other => return Err(Failure::runtime(format!("there is no mask rule number {other}"))),
    })
}

/// The estimator of that number, with a seed.
///
/// # Errors
/// A `RuntimeError` where there is none.
pub(super) fn estimator(number: i64, seed: i64) -> Result<Estimator> {
    let seed = seed as u64;
    Ok(match number {
        0 => Estimator::Magnitude,
        1 => Estimator::SoftThreshold,
        2 => Estimator::MvueApproximate { seed },
        3 => Estimator::Mvue { seed },
        other => return Err(Failure::runtime(format!("there is no estimator number {other}"))),
    })
}
