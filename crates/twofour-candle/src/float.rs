//! The float types that layers compute in, and reading tensors of them as slices.

use std::borrow::Cow;

use candle_core::{DType, Storage, Tensor, WithDType};
use half::{bf16, f16};
use rayon::prelude::*;
use twofour::kernel::KernelElement;

use crate::{Error, Result};

/// A float that both candle and the kernels know.
pub(crate) trait Float: KernelElement + WithDType {}

impl Float for f32 {}
impl Float for bf16 {}
impl Float for f16 {}

/// Elements that one task converts.
const TASK: usize = 1 << 14;

/// The same numbers in another type; borrowed where it is the same type.
pub(crate) fn convert<A: Float, B: Float>(values: &[A]) -> Cow<'_, [B]> {
    match bytemuck_same::<A, B>() {
        true => Cow::Borrowed(bytemuck::cast_slice(values)),
        false => {
            let mut out = vec![B::zero(); values.len()];
            write_converted(values, &mut out);
            Cow::Owned(out)
        }
    }
}

/// Lets `f` write `out` in type `B`, then converts what it wrote; in place where it is the same type.
pub(crate) fn write_as<A: Float, B: Float>(out: &mut [A], f: impl FnOnce(&mut [B]) -> Result<()>) -> Result<()> {
    if bytemuck_same::<A, B>() {
        return f(bytemuck::cast_slice_mut(out));
    }
    let mut buffer = vec![B::zero(); out.len()];
    f(&mut buffer)?;
    write_converted(&buffer, out);
    Ok(())
}

/// Lets `f` change values in type `B`: in place where it is the same type, and otherwise widened before and rounded
/// after.
pub(crate) fn update_as<A: Float, B: Float>(values: &mut [A], f: impl FnOnce(&mut [B]) -> Result<()>) -> Result<()> {
    if bytemuck_same::<A, B>() {
        return f(bytemuck::cast_slice_mut(values));
    }
    let mut buffer = convert::<A, B>(values).into_owned();
    f(&mut buffer)?;
    write_converted(&buffer, values);
    Ok(())
}

fn bytemuck_same<A: Float, B: Float>() -> bool {
    <A as WithDType>::DTYPE == <B as WithDType>::DTYPE
}

fn write_converted<A: Float, B: Float>(from: &[A], to: &mut [B]) {
    to.par_chunks_mut(TASK).zip(from.par_chunks(TASK)).for_each(|(to, from)| {
        for (t, f) in to.iter_mut().zip(from) {
            *t = twofour::Arithmetic::from_f32(twofour::Element::to_f32(*f));
        }
    });
}

/// Calls `f` with the elements of a CPU tensor of type `T`, made contiguous if it is not.
pub(crate) fn with_elements<T: WithDType, R>(
    what: &'static str,
    tensor: &Tensor,
    f: impl FnOnce(&[T]) -> Result<R>,
) -> Result<R> {
    expect_cpu(what, tensor)?;
    if tensor.dtype() != T::DTYPE {
        return Err(Error::DType { what, found: tensor.dtype(), expected: format!("{:?}", T::DTYPE) });
    }
    let tensor = tensor.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let Storage::Cpu(storage) = &*storage else {
        return Err(Error::Device { what, found: tensor.device().location() });
    };
    let start = layout.start_offset();
    f(&storage.as_slice::<T>()?[start..start + layout.shape().elem_count()])
}

/// An error unless the tensor is on the CPU.
pub(crate) fn expect_cpu(what: &'static str, tensor: &Tensor) -> Result<()> {
    if tensor.device().is_cpu() { Ok(()) } else { Err(Error::Device { what, found: tensor.device().location() }) }
}

/// An error unless the tensor is where layers of this crate compute: on the CPU or, with the feature `cuda`, on a GPU.
pub(crate) fn expect_device(what: &'static str, tensor: &Tensor) -> Result<()> {
    if cfg!(feature = "cuda") && tensor.device().is_cuda() { Ok(()) } else { expect_cpu(what, tensor) }
}

/// Runs `$body` with `$T` bound to the float type of `$dtype`; an error for any other dtype.
macro_rules! for_float {
    ($what:expr, $dtype:expr, $T:ident => $body:expr) => {
        match $dtype {
            candle_core::DType::F32 => {
                type $T = f32;
                $body
            }
            candle_core::DType::BF16 => {
                type $T = half::bf16;
                $body
            }
            candle_core::DType::F16 => {
                type $T = half::f16;
                $body
            }
            found => Err($crate::float::not_a_float($what, found)),
        }
    };
}
pub(crate) use for_float;

/// The error for a dtype that layers do not compute in.
pub(crate) fn not_a_float(what: &'static str, found: DType) -> Error {
    Error::DType { what, found, expected: "F32, BF16 or F16".to_owned() }
}

/// An error unless a slice has the expected length.
pub(crate) fn expect_length(what: &'static str, found: usize, expected: Option<usize>) -> Result<()> {
    match expected {
        Some(expected) if expected == found => Ok(()),
        _ => Err(Error::Length { what, expected: expected.unwrap_or(usize::MAX), found }),
    }
}
