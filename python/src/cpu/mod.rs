//! What kernels for tensors in the host's memory share.

mod masks;
mod memory;
mod threads;

use std::borrow::Cow;

use half::{bf16, f16};
use twofour::{Arithmetic, Element};

pub(crate) use masks::{from_tiles, to_tiles};
pub(crate) use memory::Memory;
pub(crate) use threads::{note_forks, on_torch_threads};

use crate::{
    pool,
    torch::{Failure, Result, ScalarType, Tensor, torch_threads},
};

/// Runs passes over a weight on a pool of as many threads as torch computes with.
pub(crate) fn on_pool<R: Send>(f: impl FnOnce() -> R + Send) -> Result<R> {
    pool::on_pool(torch_threads(), f).map_err(|e| Failure::runtime(format!("no threads: {e}")))
}

/// A float of torch that kernels multiply.
pub(crate) trait Float: twofour::layer::PackedElement {
    /// torch's name for it.
    const SCALAR: ScalarType;
}
impl Float for f32 {
    const SCALAR: ScalarType = ScalarType::F32;
}
impl Float for bf16 {
    const SCALAR: ScalarType = ScalarType::Bf16;
}
impl Float for f16 {
    const SCALAR: ScalarType = ScalarType::F16;
}

/// Calls a generic function with the Rust type of a tensor's floats.
macro_rules! for_floats {
    ($dtype:expr, $what:expr, $function:ident::<$T:ident>($($argument:expr),*)) => {
        match $dtype {
            $crate::torch::ScalarType::F32 => $function::<f32>($($argument),*),
            $crate::torch::ScalarType::Bf16 => $function::<half::bf16>($($argument),*),
            $crate::torch::ScalarType::F16 => $function::<half::f16>($($argument),*),
            other => Err($crate::cpu::not_a_float($what, other)),
        }
    };
}
pub(crate) use for_floats;

/// The error for a type without arithmetic.
pub(crate) fn not_a_float(what: &str, found: ScalarType) -> Failure {
    Failure::not_implemented(format!("{what} has dtype {}; float32, bfloat16 or float16 is required", found.name()))
}

/// The elements of a tensor of floats in f32.
pub(crate) fn widened<'a, T: Float>(x: &'a Tensor, what: &str) -> Result<Cow<'a, [f32]>> {
    if T::SCALAR == ScalarType::F32 {
        return x.elements(what, ScalarType::F32);
    }
    Ok(Cow::Owned(to_f32(&x.elements::<T>(what, T::SCALAR)?)))
}

/// A bias of any floats, in f32.
pub(crate) fn bias_of(bias: &Tensor, expected: ScalarType) -> Result<Cow<'_, [f32]>> {
    match bias.dtype()? {
        ScalarType::F32 => widened::<f32>(bias, "the bias"),
        ScalarType::Bf16 => widened::<bf16>(bias, "the bias"),
        ScalarType::F16 => widened::<f16>(bias, "the bias"),
        // An error that names the type of the other operands.
        _ => bias.elements("the bias", expected),
    }
}

/// Values in f32.
pub(crate) fn to_f32<T: Element>(values: &[T]) -> Vec<f32> {
    values.iter().map(|v| v.to_f32()).collect()
}

/// Writes sums, rounded to the type of a tensor of floats that this call made.
pub(crate) fn round_into(y: &mut Tensor, sums: &[f32]) -> Result<()> {
    fn narrow<T: Arithmetic>(to: &mut [T], from: &[f32]) {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = T::from_f32(*from));
    }
    match y.dtype()? {
        ScalarType::F32 => y.elements_mut::<f32>()?.copy_from_slice(sums),
        ScalarType::F16 => narrow(y.elements_mut::<f16>()?, sums),
        ScalarType::Bf16 => narrow(y.elements_mut::<bf16>()?, sums),
        other => return Err(not_a_float("the result", other)),
    }
    Ok(())
}
