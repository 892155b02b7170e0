//! The linear layer as an operator on candle's tape.

use candle_core::{CpuStorage, CustomOp1, DType, Layout, Shape, Tensor, WithDType, bail};
use twofour::{
    kernel::{Activation, Epilogue},
    layer::{self, Accumulate},
};
use twofour_transformer::cpu::dense;

use super::{LinearOperand, weight::Weight};
use crate::float::{Float, expect_cpu, for_float, with_elements};
use crate::tape::{Arguments, CpuArgument, Gradients, TapeOperator, record};
use crate::{Error, Result};

const INPUT: &str = "the input of a linear layer";
const GRADIENT: &str = "the gradient of a linear layer";

/// An error unless the input of a layer has the dtype of its activations and a last dimension of as many elements as
/// the layer has inputs.
pub(super) fn expect_input(x: &Tensor, activations: DType, in_features: usize) -> Result<()> {
    if x.dtype() != activations {
        return Err(Error::DType { what: INPUT, found: x.dtype(), expected: format!("{activations:?}") });
    }
    if x.dims().last() != Some(&in_features) {
        let expected = format!("[.., {in_features}]");
        return Err(Error::Shape { what: INPUT, found: x.dims().to_vec(), expected });
    }
    Ok(())
}

/// `y = x·Wᵀ + bias` for `x` of shape `[.., in]`, recorded on candle's tape where anything it depends on is.
pub(super) fn apply(operand: LinearOperand, x: &Tensor) -> Result<Tensor> {
    expect_cpu(INPUT, x)?;
    for_float!(INPUT, x.dtype(), T => { let _: Option<T> = None; Ok(()) })?;
    expect_input(x, operand.weight().map_or(x.dtype(), Tensor::dtype), operand.in_features)?;
    let x = x.contiguous()?;
    let (weight, bias) = (operand.weight.clone(), operand.bias.clone());
    let operator = LinearOperator(operand);
    match weight {
        None => Ok(x.apply_op1(operator)?),
        Some(weight) => record(operator, Arguments { x: &x, weight: &weight, bias: bias.as_ref() }),
    }
}

/// The weight and the bias are arguments so that their gradients reach them; what is multiplied is in the operand.
struct LinearOperator(LinearOperand);

impl LinearOperator {
    /// `dense` is the weight where it is dense.
    fn run_as<T: Float>(
        &self,
        (x, layout): CpuArgument<'_>,
        dense: Option<CpuArgument<'_>>,
    ) -> Result<(CpuStorage, Shape)> {
        let operand = &self.0;
        let x = elements::<T>(x, layout)?;
        let tokens = rows(layout.dims());
        let dims = (tokens, operand.out_features, operand.in_features);
        let epilogue = Epilogue { bias: operand.bias_values.as_deref(), activation: Activation::Identity };
        let mut y = vec![T::zero(); tokens * operand.out_features];
        match (&operand.product, dense) {
            // The storage that the tape has locked already, rather than locking it a second time.
            (Weight::Dense(_), Some((w, w_layout))) => crate::float::write_as::<T, f32>(&mut y, |y| {
                let x = crate::float::convert::<T, f32>(x);
                Ok(dense::forward(&x, elements(w, w_layout)?, dims, epilogue, y)?)
            })?,
            (product, _) => product.forward(x, dims, epilogue, &mut y)?,
        }
        Ok((T::to_cpu_storage_owned(y), with_last(layout.dims(), operand.out_features)))
    }

    /// The parameters that are not arguments have no gradient.
    fn gradients_as<T: Float>(&self, x: &Tensor, parameters: [Option<&Tensor>; 2], dy: &Tensor) -> Result<Gradients> {
        let (operand, [weight, bias]) = (&self.0, parameters);
        let tokens = rows(x.dims());
        let dims = (tokens, operand.out_features, operand.in_features);
        with_elements::<T, _>(GRADIENT, dy, |dy| {
            let mut gradients = [None, None, None];
            if x.track_op() {
                let mut dx = vec![T::zero(); x.elem_count()];
                operand.product.input_gradient(dy, dims, &mut dx)?;
                gradients[0] = Some(Tensor::from_vec(dx, x.shape(), x.device())?);
            }
            if let Some(weight) = weight.filter(|w| w.track_op()) {
                let mut dw = vec![T::zero(); weight.elem_count()];
                with_elements::<T, _>(INPUT, x, |x| operand.product.weight_gradient(dy, x, dims, &mut dw))?;
                gradients[1] = Some(Tensor::from_vec(dw, weight.shape(), weight.device())?);
            }
            if let Some(bias) = bias.filter(|b| b.track_op()) {
                let mut db = vec![0f32; operand.out_features];
                layer::bias_gradient(dy, tokens, Accumulate::Overwrite, &mut db)?;
                gradients[2] = Some(Tensor::from_vec(db, bias.shape(), bias.device())?.to_dtype(bias.dtype())?);
            }
            Ok(gradients)
        })
    }
}

impl TapeOperator for LinearOperator {
    const NAME: &str = "linear";

    fn on_cpu(&self, Arguments { x, weight, .. }: Arguments<CpuArgument<'_>>) -> Result<(CpuStorage, Shape)> {
        for_float!(INPUT, storage_dtype(x.0), T => self.run_as::<T>(x, Some(weight)))
    }

    fn gradients(&self, Arguments { x, weight, bias }: Arguments<&Tensor>, dy: &Tensor) -> Result<Gradients> {
        for_float!(GRADIENT, x.dtype(), T => self.gradients_as::<T>(x, [Some(weight), bias], dy))
    }
}

/// Where the weight is packed alone, and so not on the tape.
impl CustomOp1 for LinearOperator {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> candle_core::Result<(CpuStorage, Shape)> {
        let found: Result<_> = for_float!(INPUT, storage_dtype(x), T => self.run_as::<T>((x, layout), None));
        Ok(found?)
    }

    fn bwd(&self, x: &Tensor, _: &Tensor, dy: &Tensor) -> candle_core::Result<Option<Tensor>> {
        let found: Result<Gradients> = for_float!(GRADIENT, x.dtype(), T => self.gradients_as::<T>(x, [None; 2], dy));
        let [dx, _, _] = found?;
        Ok(dx)
    }
}

pub(super) fn storage_dtype(storage: &CpuStorage) -> candle_core::DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

pub(super) fn elements<'a, T: WithDType>(storage: &'a CpuStorage, layout: &Layout) -> candle_core::Result<&'a [T]> {
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&storage.as_slice::<T>()?[start..end]),
        None => bail!("a linear layer's argument is not contiguous: strides {:?}", layout.stride()),
    }
}

/// The number of rows of `[.., n]`.
pub(super) fn rows(dims: &[usize]) -> usize {
    dims.iter().rev().skip(1).product()
}

pub(super) fn with_last(dims: &[usize], last: usize) -> Shape {
    let mut dims = dims.to_vec();
    if let Some(n) = dims.last_mut() {
        *n = last;
    }
    Shape::from(dims)
}
