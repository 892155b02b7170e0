//! GEMMs with a packed weight.

use std::borrow::Cow;

use twofour::kernel::{Activation, Epilogue, SparseWeightRef};

use super::{Failure, Float, Result, ScalarType, Tensor, for_floats, on_torch_threads};
use crate::torch::{
    numbers::activation,
    shape::{dimension, expect_packed, rows_and_last, with_last},
    tensor::Device,
};
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

fn forward<T: Float>(
    x: &Tensor,
    packed: &Tensor,
    bias: Option<&Tensor>,
    out_features: i64,
    activation: Activation,
) -> Result<Tensor> {
    let rows = dimension("out_features", out_features)?;
    let (tokens, cols) = rows_and_last(x, "the input")?;
    let memory = packed_memory::<T>(packed, (rows, cols), x)?;
    let weight = SparseWeightRef::<T>::new(rows, cols, &memory)?;
    let values = x.elements::<T>("the input", T::SCALAR)?;
    let bias = bias.map(|bias| widened(bias, T::SCALAR)).transpose()?;
    let mut y = with_last(x, Device::HOST, out_features, T::SCALAR)?;
    let epilogue = Epilogue { bias: bias.as_deref(), activation };
    on_torch_threads(|| weight.linear(&values, tokens, epilogue, y.elements_mut()?).map_err(Failure::from))?;
    Ok(y)
}

/// `dx = dy · W`, `dy` of shape `[..., out_features]`.
pub(super) fn input_gradient(dy: Tensor, packed: Tensor, in_features: i64) -> Result<Tensor> {
    let dtype = dy.dtype()?;
    for_floats!(dtype, "the output gradient", backward::<T>(&dy, &packed, in_features))
}

fn backward<T: Float>(dy: &Tensor, packed: &Tensor, in_features: i64) -> Result<Tensor> {
    let cols = dimension("in_features", in_features)?;
    let (tokens, rows) = rows_and_last(dy, "the output gradient")?;
    let memory = packed_memory::<T>(packed, (rows, cols), dy)?;
    let weight = SparseWeightRef::<T>::new(rows, cols, &memory)?;
    let values = dy.elements::<T>("the output gradient", T::SCALAR)?;
    let mut dx = with_last(dy, Device::HOST, in_features, T::SCALAR)?;
    on_torch_threads(|| weight.input_gradient(&values, tokens, dx.elements_mut()?).map_err(Failure::from))?;
    Ok(dx)
}

/// The memory of a packed weight; a copy where it is not aligned, as after loading from a file.
fn packed_memory<'a, T: Float>(packed: &'a Tensor, shape: (usize, usize), x: &Tensor) -> Result<Memory<'a>> {
    let expected = twofour::kernel::packed_bytes::<T>(shape.0, shape.1)? / size_of::<T>();
    expect_packed(packed, expected, T::SCALAR, shape, x)?;
    Ok(Memory::of(packed.bytes("the packed weight")?))
}

/// Bytes at an address that kernels can load from.
pub(super) enum Memory<'a> {
    Borrowed(&'a [u8]),
    Copied { buffer: Vec<u8>, start: usize, len: usize },
}

impl<'a> Memory<'a> {
    pub(super) fn of(bytes: &'a [u8]) -> Self {
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

/// A bias in f32.
pub(super) fn widened(bias: &Tensor, expected: ScalarType) -> Result<Cow<'_, [f32]>> {
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
