//! Shapes and types of operands, checked the same way on every device.

use super::{
    failure::{Failure, Result},
    scalar_type::ScalarType,
    tensor::{Device, Tensor},
};

/// The rows and columns of an operand when all its dimensions but the last are one.
///
/// # Errors
/// A `RuntimeError` for a scalar.
pub(crate) fn rows_and_last(x: &Tensor, what: &str) -> Result<(usize, usize)> {
    match x.sizes().split_last() {
        Some((last, leading)) => Ok((leading.iter().product::<i64>() as usize, *last as usize)),
        None => Err(Failure::runtime(format!("{what} must have at least 1 dimension"))),
    }
}

/// A new tensor with the shape of `x`, but for the last dimension, beside it.
pub(crate) fn with_last(x: &Tensor, device: Device, last: usize, dtype: ScalarType) -> Result<Tensor> {
    let mut sizes = x.sizes().to_vec();
    if let Some(size) = sizes.last_mut() {
        *size = last as i64;
    }
    Tensor::empty_on(device, &sizes, dtype)
}

/// An error unless a packed weight of that shape has so many elements, and the type of the other operand.
///
/// # Errors
/// A `NotImplementedError` for another type, a `RuntimeError` for another length.
pub(crate) fn expect_packed(
    packed: &Tensor,
    expected_len: usize,
    expected: ScalarType,
    (rows, cols): (usize, usize),
    x: &Tensor,
) -> Result<()> {
    let found = packed.dtype()?;
    if found != expected {
        return Err(Failure::not_implemented(format!(
            "the packed weight has dtype {}, the other operand {}; both must have the same",
            found.name(),
            expected.name()
        )));
    }
    if packed.numel() != expected_len {
        return Err(Failure::runtime(format!(
            "shapes cannot be multiplied: an operand of shape {:?} and a packed weight of {rows} out_features and \
             {cols} in_features, which takes \
             {expected_len} elements where the tensor has {}",
            x.sizes(),
            packed.numel()
        )));
    }
    Ok(())
}

/// The same for a packed int4 weight, whose bytes are int8 for torch and go with floats of any type.
///
/// # Errors
/// Those of [`expect_packed`].
pub(crate) fn expect_packed_int4(
    packed: &Tensor,
    expected_len: usize,
    shape: (usize, usize),
    x: &Tensor,
) -> Result<()> {
    let found = packed.dtype()?;
    if found != ScalarType::I8 {
        let name = found.name();
        return Err(Failure::not_implemented(format!("the packed int4 weight has dtype {name}; int8 is required")));
    }
    expect_packed(packed, expected_len, ScalarType::I8, shape, x)
}
