//! Weights of float32. Sparse tensor cores multiply no 2:4 matrix of 32-bit numbers (TF32 has 1:2), so such a weight is
//! "packed" as what it is, dense with zeros, and torch's dense GEMM multiplies it: right, and as fast as a dense layer.

use twofour::{
    Compressed, MatrixRef,
    estimate::Estimator,
    layer::{Activation, MaskRule},
};
use twofour_cuda::layer::borrowed::{self, MaskSlice, MasterSlice, Sampling};

use super::{context, number, select_into, slice, slice_mut};
use crate::torch::{
    Device, Failure, Result, ScalarType, Tensor,
    operands::{expect_packed, rows_and_last, with_last},
};

/// Whether a tensor is of float32.
pub(crate) fn is_wide(tensor: &Tensor) -> Result<bool> {
    Ok(tensor.dtype()? == ScalarType::F32)
}

/// What a mask keeps of a contiguous weight, and its transpose where asked. Rules but [`MaskRule::Given`] write the
/// mask.
pub(crate) fn packed_by(
    weight: &Tensor,
    rule: MaskRule,
    scale: Option<f64>,
    mask: &mut Tensor,
    transpose: bool,
    check: bool,
) -> Result<(Tensor, Tensor)> {
    let (context, (rows, cols)) = (context::of(weight)?, weight.matrix("the weight")?);
    let master = MasterSlice { data: slice(&context, weight, "the weight")?, rows, cols };
    select_into(&context, master, rule, mask, check)?;
    let mut kept = Tensor::empty_on(weight.device(), &[(rows * cols) as i64], ScalarType::F32)?;
    let out = slice_mut(&context, &mut kept, "the packed weight")?;
    if rule == MaskRule::SoftThreshold {
        let scale = scale.map(|scale| number(weight.device(), scale as f32)).transpose()?;
        let factor = scale.as_ref().map(|scale| slice(&context, scale, "the scale")).transpose()?;
        let sampling = Sampling { estimator: Estimator::SoftThreshold, seed: None };
        borrowed::estimate(&context, master, sampling, factor, out)?;
    } else {
        borrowed::keep(&context, master, MaskSlice::new(slice_mut(&context, mask, "the mask")?), out)?;
    }
    let transposed = match transpose {
        true => kept.as_matrix((cols, rows), (1, cols))?.copied_to(weight.device(), "the transpose")?.flat()?,
        false => Tensor::empty_on(weight.device(), &[0], ScalarType::F32)?,
    };
    Ok((kept, transposed))
}

/// `y = activation(x · Wᵀ + bias)`; of any type without input features.
pub(crate) fn linear(
    x: &Tensor,
    packed: &Tensor,
    bias: Option<&Tensor>,
    rows: usize,
    activation: Activation,
) -> Result<Tensor> {
    let ((tokens, cols), dtype) = (rows_and_last(x, "the input")?, x.dtype()?);
    expect_packed(packed, rows.saturating_mul(cols), dtype, (rows, cols), x)?;
    let (x, packed) = (x.contiguous("the input")?, packed.contiguous("the packed weight")?);
    if let Some(bias) = bias
        && (bias.dtype()? != dtype || bias.sizes() != [rows as i64])
    {
        let (found, sizes) = (bias.dtype()?.name(), bias.sizes());
        return Err(Failure::runtime(format!(
            "the bias must be {rows} elements of {}; it is {sizes:?} of {found}",
            dtype.name()
        )));
    }
    let mut y = with_last(&x, x.device(), rows, dtype)?;
    let weight_t = packed.as_matrix((cols, rows), (1, cols))?;
    y.as_matrix((tokens, rows), (rows, 1))?.set_product(&x.as_matrix((tokens, cols), (cols, 1))?, &weight_t, bias)?;
    if activation != Activation::Identity {
        let context = context::of(&x)?;
        borrowed::activate(&context, activation, slice_mut(&context, &mut y, "the output")?)?;
    }
    Ok(y)
}

/// `dx = dy · W`.
pub(crate) fn input_gradient(dy: &Tensor, packed: &Tensor, cols: usize) -> Result<Tensor> {
    let (tokens, rows) = rows_and_last(dy, "the output gradient")?;
    expect_packed(packed, rows.saturating_mul(cols), ScalarType::F32, (rows, cols), dy)?;
    let (dy, packed) = (dy.contiguous("the output gradient")?, packed.contiguous("the packed weight")?);
    let dx = with_last(&dy, dy.device(), cols, ScalarType::F32)?;
    let weight = packed.as_matrix((rows, cols), (cols, 1))?;
    dx.as_matrix((tokens, cols), (cols, 1))?.set_product(&dy.as_matrix((tokens, rows), (rows, 1))?, &weight, None)?;
    Ok(dx)
}

/// `dw = dyᵀ · x` with the estimate of `dyᵀ` along tokens, for contiguous matrices.
pub(crate) fn sampled_weight_gradient(dy: &Tensor, x: &Tensor, sampling: Sampling<'_>) -> Result<Tensor> {
    let ((tokens, rows), (_, cols)) = (dy.matrix("the output gradient")?, x.matrix("the input")?);
    let context = context::of(dy)?;
    let dy_t = dy.as_matrix((rows, tokens), (1, rows))?.copied_to(dy.device(), "the output gradient")?;
    let matrix = MasterSlice { data: slice(&context, &dy_t, "the output gradient")?, rows, cols: tokens };
    let mut estimate = Tensor::empty_on(dy.device(), &[rows as i64, tokens as i64], ScalarType::F32)?;
    borrowed::estimate(&context, matrix, sampling, None, slice_mut(&context, &mut estimate, "the estimate")?)?;
    let mut dw = Tensor::empty_on(dy.device(), &[rows as i64, cols as i64], ScalarType::F32)?;
    dw.set_product(&estimate, x, None)?;
    Ok(dw)
}

/// The dense weight.
pub(crate) fn unpack(packed: &Tensor, rows: usize, cols: usize) -> Result<Tensor> {
    expect_len(packed, rows, cols)?;
    let packed = packed.contiguous("the packed weight")?;
    packed.as_matrix((rows, cols), (cols, 1))?.copied_to(packed.device(), "the packed weight")
}

/// The canonical form, in the host's memory.
pub(crate) fn compressed(packed: &Tensor, rows: usize, cols: usize) -> Result<Compressed<f32>> {
    expect_len(packed, rows, cols)?;
    let host = packed.copied_to(Device::HOST, "the packed weight")?;
    let values = host.elements::<f32>("the packed weight", ScalarType::F32)?;
    Ok(Compressed::from_dense(MatrixRef::new(rows, cols, &values)?)?)
}

fn expect_len(packed: &Tensor, rows: usize, cols: usize) -> Result<()> {
    let (expected, found) = (rows.checked_mul(cols), packed.numel());
    if expected != Some(found) {
        return Err(Failure::runtime(format!("a packed weight of shape {:?} has not {found} elements", (rows, cols))));
    }
    Ok(())
}
