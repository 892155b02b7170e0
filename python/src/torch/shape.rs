//! Shapes of operands, checked the same way on every device.

use super::{
    failure::{Failure, Result},
    scalar_type::ScalarType,
    tensor::{Device, Tensor},
};

/// The rows and columns of an operand when all its dimensions but the last are one.
///
/// # Errors
/// A `RuntimeError` for a scalar.
pub(super) fn rows_and_last(x: &Tensor, what: &str) -> Result<(usize, usize)> {
    match x.sizes().split_last() {
        Some((last, leading)) => Ok((leading.iter().product::<i64>() as usize, *last as usize)),
        None => Err(Failure::runtime(format!("{what} must have at least 1 dimension"))),
    }
}

/// A new tensor with the shape of `x`, but for the last dimension, beside it.
pub(super) fn with_last(x: &Tensor, device: Device, last: i64, dtype: ScalarType) -> Result<Tensor> {
    let mut sizes = x.sizes().to_vec();
    if let Some(size) = sizes.last_mut() {
        *size = last;
    }
    Tensor::empty_on(device, &sizes, dtype)
}

/// A dimension that an operator was told.
///
/// # Errors
/// A `RuntimeError` for a negative one.
pub(super) fn dimension(what: &str, value: i64) -> Result<usize> {
    usize::try_from(value).map_err(|_| Failure::runtime(format!("{what} must not be negative, and is {value}")))
}

/// An error unless a packed weight of that shape has so many elements, and the type of the other operand.
///
/// # Errors
/// A `NotImplementedError` for another type, a `RuntimeError` for another length.
pub(super) fn expect_packed(
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
            "shapes cannot be multiplied: an operand of shape {:?} and a packed weight of {rows} out_features and {cols} in_features, which takes \
             {expected_len} elements where the tensor has {}",
            x.sizes(),
            packed.numel()
        )));
    }
    Ok(())
}

/// An error unless both operands are of 8-bit floats.
///
/// # Errors
/// A `NotImplementedError`.
pub(super) fn expect_float8(x: &Tensor, packed: &Tensor) -> Result<()> {
    for (tensor, what) in [(x, "the input"), (packed, "the packed weight")] {
        let found = tensor.dtype()?;
        if !matches!(found, ScalarType::E4m3 | ScalarType::E5m2) {
            let name = found.name();
            return Err(Failure::not_implemented(format!(
                "{what} has dtype {name}; float8_e4m3fn or float8_e5m2 is required"
            )));
        }
    }
    Ok(())
}

/// The same for a packed int4 weight, whose bytes are int8 for torch and go with floats of any type.
///
/// # Errors
/// Those of [`expect_packed`].
pub(super) fn expect_packed_int4(
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
