//! GEMMs with a packed weight.

use std::borrow::Cow;

use twofour::kernel::{Activation, Epilogue, SparseWeightRef};

use super::{Failure, Float, Result, ScalarType, Tensor, dimension, for_floats, on_torch_threads};
use half::{bf16, f16};

/// `y = x · Wᵀ`, `x` of shape `[..., in_features]`.
pub(super) fn linear(x: Tensor, packed: Tensor, out_features: i64) -> Result<Tensor> {
    let dtype = x.dtype()?;
    for_floats!(dtype, "the input", forward::<T>(&x, &packed, None, out_features, Activation::Identity))
}

/// `y = activation(x · Wᵀ + bias)`.
pub(super) fn linear_bias(x: Tensor, packed: Tensor, bias: Tensor, out_features: i64, act: i64) -> Result<Tensor> {
    let dtype = x.dtype()?;
    let activation = activation(act)?;
    for_floats!(dtype, "the input", forward::<T>(&x, &packed, Some(&bias), out_features, activation))
}

/// The activation of that number.
fn activation(number: i64) -> Result<Activation> {
    Ok(match number {
        0 => Activation::Identity,
        1 => Activation::Relu,
        2 => Activation::Silu,
        3 => Activation::Gelu,
        other => return Err(Failure::runtime(format!("there is no activation number {other}"))),
    })
}

fn forward<T: Float>(
    x: &Tensor,
    packed: &Tensor,
    bias: Option<&Tensor>,
    out_features: i64,
    activation: Activation,
) -> Result<Tensor> {
    let rows = dimension("out_features", out_features)?;
    let Some((cols, _)) = x.sizes().split_last() else {
        return Err(Failure::runtime("the input must have at least 1 dimension"));
    };
    let cols = *cols as usize;
    let memory = packed_memory::<T>(packed, rows, cols, x.sizes())?;
    let weight = SparseWeightRef::<T>::new(rows, cols, &memory)?;
    let values = x.elements::<T>("the input", T::SCALAR)?;
    let bias = bias.map(|bias| widened(bias, T::SCALAR)).transpose()?;
    let mut y = with_last(x, out_features, T::SCALAR)?;
    let tokens = tokens(x);
    let epilogue = Epilogue { bias: bias.as_deref(), activation };
    on_torch_threads(|| weight.linear(&values, tokens, epilogue, y.elements_mut()?).map_err(Failure::from))?;
    drop(memory);
    Ok(y)
}

/// `dx = dy · W`, `dy` of shape `[..., out_features]`.
pub(super) fn input_gradient(dy: Tensor, packed: Tensor, in_features: i64) -> Result<Tensor> {
    let dtype = dy.dtype()?;
    for_floats!(dtype, "the output gradient", backward::<T>(&dy, &packed, in_features))
}

fn backward<T: Float>(dy: &Tensor, packed: &Tensor, in_features: i64) -> Result<Tensor> {
    let cols = dimension("in_features", in_features)?;
    let Some((rows, _)) = dy.sizes().split_last() else {
        return Err(Failure::runtime("the output gradient must have at least 1 dimension"));
    };
    let rows = *rows as usize;
    let memory = packed_memory::<T>(packed, rows, cols, dy.sizes())?;
    let weight = SparseWeightRef::<T>::new(rows, cols, &memory)?;
    let values = dy.elements::<T>("the output gradient", T::SCALAR)?;
    let mut dx = with_last(dy, in_features, T::SCALAR)?;
    on_torch_threads(|| weight.input_gradient(&values, tokens(dy), dx.elements_mut()?).map_err(Failure::from))?;
    drop(memory);
    Ok(dx)
}

/// The memory of a packed weight; a copy where it is not aligned, as after loading from a file.
fn packed_memory<'a, T: Float>(packed: &'a Tensor, rows: usize, cols: usize, x: &[i64]) -> Result<Memory<'a>> {
    let found = packed.dtype()?;
    if found != T::SCALAR {
        return Err(Failure::not_implemented(format!(
            "the packed weight has dtype {}, the other operand {}; both must have the same",
            found.name(),
            T::SCALAR.name()
        )));
    }
    let bytes = packed.bytes("the packed weight")?;
    let expected = twofour::kernel::packed_bytes::<T>(rows, cols)?;
    if bytes.len() != expected {
        return Err(Failure::runtime(format!(
            "shapes cannot be multiplied: an operand of shape {x:?} and a packed weight of {rows} out_features and {cols} in_features, which \
             takes {expected} bytes where the tensor has {}",
            bytes.len()
        )));
    }
    Ok(Memory::of(bytes))
}

/// Bytes at an address that kernels can load from.
enum Memory<'a> {
    Borrowed(&'a [u8]),
    Copied { buffer: Vec<u8>, start: usize, len: usize },
}

impl<'a> Memory<'a> {
    fn of(bytes: &'a [u8]) -> Self {
        use twofour::kernel::PACKED_ALIGNMENT as ALIGNMENT;
        if bytes.is_empty() || bytes.as_ptr().addr().is_multiple_of(ALIGNMENT) {
            return Memory::Borrowed(bytes);
        }
        let mut buffer = vec![0; bytes.len() + ALIGNMENT];
        let start = buffer.as_ptr().addr().wrapping_neg() % ALIGNMENT;
        buffer[start..][..bytes.len()].copy_from_slice(bytes);
        Memory::Copied { buffer, start, len: bytes.len() }
    }
}

impl std::ops::Deref for Memory<'_> {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        match self {
            Memory::Borrowed(bytes) => bytes,
            Memory::Copied { buffer, start, len } => &buffer[*start..][..*len],
        }
    }
}

/// The number of rows that an operand has when all its dimensions but the last are one.
fn tokens(x: &Tensor) -> usize {
    x.sizes().split_last().map_or(0, |(_, leading)| leading.iter().product::<i64>() as usize)
}

/// A new tensor with the shape of `x`, but for the last dimension.
fn with_last(x: &Tensor, last: i64, dtype: ScalarType) -> Result<Tensor> {
    let mut sizes = x.sizes().to_vec();
    if let Some(size) = sizes.last_mut() {
        *size = last;
    }
    Tensor::empty(&sizes, dtype)
}

/// A bias in f32.
fn widened(bias: &Tensor, expected: ScalarType) -> Result<Cow<'_, [f32]>> {
    fn widen<T: twofour::Element>(values: &[T]) -> Vec<f32> {
        values.iter().map(|v| v.to_f32()).collect()
    }
    Ok(match bias.dtype()? {
        ScalarType::F32 => bias.elements("the bias", ScalarType::F32)?,
        ScalarType::Bf16 => Cow::Owned(widen(&bias.elements::<bf16>("the bias", ScalarType::Bf16)?)),
        ScalarType::F16 => Cow::Owned(widen(&bias.elements::<f16>("the bias", ScalarType::F16)?)),
        _ => bias.elements("the bias", expected)?,
    })
}
