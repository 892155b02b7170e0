//! What operators name by number ([`crate::names`]), and seeds in tensors.

use std::borrow::Cow;

use twofour::{
    estimate::Estimator,
    layer::{Activation, MaskRule},
};

use super::{
    failure::{Failure, Result},
    scalar_type::ScalarType,
    tensor::{Device, Tensor},
};
use crate::names;

/// The activation of that number.
///
/// # Errors
/// A `RuntimeError` where there is none.
pub(super) fn activation(number: i64) -> Result<Activation> {
    numbered("activation", &names::ACTIVATIONS, number)
}

/// The mask rule of that number.
///
/// # Errors
/// A `RuntimeError` where there is none.
pub(super) fn rule(number: i64) -> Result<MaskRule> {
    numbered("mask rule", &MaskRule::CHOOSING, number)
}

/// The estimator of that number, with a seed.
///
/// # Errors
/// A `RuntimeError` where there is none.
pub(super) fn estimator(number: i64, seed: i64) -> Result<Estimator> {
    numbered("estimator", &Estimator::all(seed as u64), number)
}

fn numbered<T: Copy>(what: &str, all: &[T], number: i64) -> Result<T> {
    let found = usize::try_from(number).ok().and_then(|number| all.get(number));
    found.copied().ok_or_else(|| Failure::runtime(format!("there is no {what} number {number}")))
}

/// The type of a packed weight: torch's number of a type, or -1 for that of the dense weight.
///
/// # Errors
/// A `NotImplementedError` where there is none.
pub(super) fn packed_type(number: i64, weight: ScalarType) -> Result<ScalarType> {
    if number == -1 {
        return Ok(weight);
    }
    ScalarType::of(number).ok_or_else(|| {
        Failure::not_implemented(format!(
            "weights cannot be packed as {}; use float32, bfloat16 or float16",
            ScalarType::name_of(number)
        ))
    })
}

/// The scales in a tensor of float32 in the host's memory: `len`, or none.
///
/// # Errors
/// A `NotImplementedError` for another type, a `RuntimeError` for another number of elements.
pub(super) fn scales<'a>(scales: &'a Tensor, what: &str, len: usize) -> Result<Cow<'a, [f32]>> {
    expect_scales(scales, what, len)?;
    scales.elements::<f32>(what, ScalarType::F32)
}

/// An error unless a tensor has `len` numbers of float32, or none.
///
/// # Errors
/// Those of [`scales`].
pub(super) fn expect_scales(scales: &Tensor, what: &str, len: usize) -> Result<()> {
    match (scales.dtype()?, scales.numel()) {
        (ScalarType::F32, found) if found == len || found == 0 => Ok(()),
        (ScalarType::F32, found) => Err(Failure::runtime(format!("{what} must be {len} numbers, not {found}"))),
        (found, _) => Err(Failure::not_implemented(format!("{what} have dtype {}; float32 is required", found.name()))),
    }
}

/// The error for a type that products of 8-bit floats are not rounded to.
pub(super) fn no_result(dtype: ScalarType) -> Failure {
    let name = dtype.name();
    Failure::not_implemented(format!(
        "a product of 8-bit floats is float32, float16 or bfloat16, not {name}: round it afterwards"
    ))
}

/// The number in a tensor of one int64; waits for a device that it is on.
///
/// # Errors
/// A `NotImplementedError` for another type, a `RuntimeError` for another number of elements.
pub(super) fn seed(seed: &Tensor) -> Result<i64> {
    expect_seed(seed)?;
    let host = seed.copied_to(Device::HOST, "the seed")?;
    Ok(host.elements::<i64>("the seed", ScalarType::I64)?[0])
}

/// An error unless a tensor is one int64.
///
/// # Errors
/// Those of [`seed`].
pub(super) fn expect_seed(seed: &Tensor) -> Result<()> {
    match (seed.dtype()?, seed.numel()) {
        (ScalarType::I64, 1) => Ok(()),
        (ScalarType::I64, len) => Err(Failure::runtime(format!("the seed must be one number, not {len}"))),
        (found, _) => Err(Failure::not_implemented(format!("the seed has dtype {}; int64 is required", found.name()))),
    }
}

/// An error unless the output gradient and the input of a layer have as many tokens.
///
/// # Errors
/// A `RuntimeError`.
pub(super) fn expect_tokens(of_gradient: usize, of_input: usize) -> Result<()> {
    if of_gradient == of_input {
        return Ok(());
    }
    Err(Failure::runtime(format!(
        "the output gradient has {of_gradient} tokens, the input {of_input}: both must have as many"
    )))
}
