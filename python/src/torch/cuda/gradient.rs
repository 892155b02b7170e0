//! Gradients of a layer's parameters.

use twofour::layer::Accumulate;
use twofour_cuda::{
    DataType,
    layer::{
        self, DeviceSlice, LayerContext,
        borrowed::{self, MasterSlice, Sampling},
    },
};

use super::{Failure, Result, ScalarType, Tensor, context, data_type, half_type, slice, slice_mut, wide};
use crate::torch::{numbers, shape::rows_and_last};

/// `dyᵀ · x` with the 2:4 estimate of `dyᵀ` along tokens, for `dy` `[tokens, out_features]` and `x` `[tokens, in_features]` of one type. A seed on the
/// device is read when the kernel runs.
pub(super) fn sampled_weight_gradient(dy: Tensor, x: Tensor, estimator: i64, seed: Tensor) -> Result<Tensor> {
    let context = context::of(&dy)?;
    let sampling = sampling(&context, estimator, &seed)?;
    let ((tokens, rows), (x_tokens, cols)) = (dy.matrix("the output gradient")?, x.matrix("the input")?);
    numbers::expect_tokens(tokens, x_tokens)?;
    let (dy, x) = (dy.contiguous("the output gradient")?, x.contiguous("the input")?);
    if dy.dtype()? != x.dtype()? {
        let (dy, x) = (dy.dtype()?.name(), x.dtype()?.name());
        return Err(Failure::not_implemented(format!(
            "the output gradient has dtype {dy}, the input {x}; both must have the same"
        )));
    }
    if wide::is_wide(&dy)? {
        return wide::sampled_weight_gradient(&dy, &x, sampling);
    }
    half_type(&dy, "the output gradient")?;
    let mut dw = Tensor::empty_on(dy.device(), &[rows as i64, cols as i64], dy.dtype()?)?;
    let operands = (
        MasterSlice { data: slice(&context, &dy, "the output gradient")?, rows: tokens, cols: rows },
        MasterSlice { data: slice(&context, &x, "the input")?, rows: tokens, cols },
    );
    let out = slice_mut(&context, &mut dw, "the weight gradient")?;
    borrowed::sampled_weight_gradient(&context, operands, sampling, out)?;
    Ok(dw)
}

/// The estimator of that number, with a seed in the host's memory or on the device.
pub(super) fn sampling<'a>(context: &LayerContext, estimator: i64, seed: &'a Tensor) -> Result<Sampling<'a>> {
    numbers::expect_seed(seed)?;
    if seed.device().is_cuda() {
        return Ok(Sampling { estimator: numbers::estimator(estimator, 0)?, seed: Some(seed_slice(context, seed)?) });
    }
    Ok(Sampling { estimator: numbers::estimator(estimator, numbers::seed(seed)?)?, seed: None })
}

/// The bytes of one int64.
fn seed_slice<'a>(context: &LayerContext, seed: &'a Tensor) -> Result<DeviceSlice<'a>> {
    super::expect_device(context, seed, "the seed")?;
    // SAFETY: the tensor is one number of eight bytes, which it keeps alive as `slice` says.
    Ok(unsafe { DeviceSlice::from_raw(context.device(), seed.address(), 8, DataType::I8) })
}

/// The sums of `dy` over all dimensions but the last, in f32.
pub(super) fn bias_gradient(dy: Tensor) -> Result<Tensor> {
    let context = context::of(&dy)?;
    let (tokens, features) = rows_and_last(&dy, "the output gradient")?;
    if !matches!(data_type(&dy, "the output gradient")?, DataType::F32 | DataType::F16 | DataType::BF16)
        || dy.dtype()? == ScalarType::I16
    {
        return Err(Failure::not_implemented(format!(
            "the output gradient has dtype {}; a float is required",
            dy.dtype()?.name()
        )));
    }
    let dy = dy.contiguous("the output gradient")?;
    let mut db = Tensor::empty_on(dy.device(), &[features as i64], dy.dtype()?)?;
    let sums = slice_mut(&context, &mut db, "the bias gradient")?;
    layer::bias_gradient(&context, slice(&context, &dy, "the output gradient")?, tokens, Accumulate::Overwrite, sums)?;
    Ok(db)
}
