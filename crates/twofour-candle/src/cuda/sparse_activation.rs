//! The layer over 2:4 activations on CUDA tensors.

use std::sync::OnceLock;

use candle_core::{CudaStorage, Shape, Tensor, backend::BackendStorage as _};
use twofour::{Mask, layer::SparseActivationSettings};
use twofour_cuda::layer::{Accumulate, PackedActivation, SparseActivationLinear};

use super::{
    context,
    linear::with_last,
    memory::{Locked, Output, data_type, matrix, read},
};
use crate::{
    Result,
    tape::{Arguments, CudaArgument, Gradients, TapeOperator, record},
};

const INPUT: &str = "the input of a linear layer";
const GRADIENT: &str = "the gradient of a linear layer";

/// `y = P(f(x))·Wᵀ + bias`, recorded on candle's tape. Shapes and dtypes have been checked.
pub(crate) fn apply(
    settings: SparseActivationSettings,
    x: &Tensor,
    weight: &Tensor,
    bias: Option<&Tensor>,
) -> Result<Tensor> {
    let (x, weight) = (x.contiguous()?, weight.contiguous()?);
    let operator = Operator { settings, packed: OnceLock::new() };
    let bias = bias.map(Tensor::contiguous).transpose()?;
    record(operator, Arguments { x: &x, weight: &weight, bias: bias.as_ref() })
}

/// The mask of `P(f(x))`, `[tokens, in]`. Waits.
///
/// # Errors
/// An input with a NaN, with its place.
pub(crate) fn mask_of(settings: SparseActivationSettings, x: &Tensor) -> Result<Mask> {
    let context = context::of(context::device_of(INPUT, x.device())?)?;
    let (x, dtype, (tokens, in_features)) = (x.contiguous()?, data_type(INPUT, x.dtype())?, matrix(x.shape()));
    let layer = SparseActivationLinear::new(&context, dtype, settings)?;
    let mut packed = PackedActivation::new(&context, dtype, tokens, in_features)?;
    layer.pack(Locked::new(INPUT, &x).read(&context)?.slice(), &mut packed)?;
    packed.check()?;
    Ok(packed.mask()?)
}

struct Operator {
    settings: SparseActivationSettings,
    /// What the forward pass leaves to the backward pass.
    packed: OnceLock<(SparseActivationLinear, PackedActivation)>,
}

impl TapeOperator for Operator {
    const NAME: &str = "sparse activation linear";

    fn on_cuda(&self, arguments: Arguments<CudaArgument<'_>>) -> Result<(CudaStorage, Shape)> {
        let Arguments { x: (x, layout), weight: (weight, weight_layout), bias } = arguments;
        let context = context::of(&x.device)?;
        let dtype = data_type(INPUT, x.dtype())?;
        let (tokens, in_features) = matrix(layout.shape());
        let out_features = weight_layout.dims().first().copied().unwrap_or(0);
        let layer = SparseActivationLinear::new(&context, dtype, self.settings)?;
        let mut packed = PackedActivation::new(&context, dtype, tokens, in_features)?;
        let mut y = Output::new(&x.device, with_last(layout.shape(), out_features), x.dtype())?;
        {
            let x = read(INPUT, &context, x, layout)?;
            let weight = read("the weight", &context, weight, weight_layout)?;
            let bias = bias.map(|(bias, layout)| read("the bias", &context, bias, layout)).transpose()?;
            layer.pack(x.slice(), &mut packed)?;
            let bias = bias.as_ref().map(|bias| bias.slice());
            layer.forward(&packed, weight.slice(), out_features, bias, y.write(&context)?.slice())?;
        }
        // Candle runs an operator's forward pass once.
        let _ = self.packed.set((layer, packed));
        Ok(y.into_parts())
    }

    fn gradients(&self, Arguments { x, weight, bias }: Arguments<&Tensor>, dy: &Tensor) -> Result<Gradients> {
        let device = context::device_of(INPUT, x.device())?;
        let context = context::of(device)?;
        let Some((layer, packed)) = self.packed.get() else {
            return Err(candle_core::Error::Msg("linear: a backward pass without a forward pass".into()).into());
        };
        let out_features = weight.dim(0)?;
        let dy = dy.contiguous()?;
        let dy = Locked::new(GRADIENT, &dy);
        let dy = dy.read(&context)?;
        let output = |tensor: &Tensor| Output::new(device, tensor.shape(), tensor.dtype());
        let mut gradients = [None, None, None];
        if x.track_op() {
            let (mut dx, x, weight) = (output(x)?, Locked::new(INPUT, x), Locked::new("the weight", weight));
            let (x, weight) = (x.read(&context)?, weight.read(&context)?);
            let weight = (weight.slice(), out_features);
            layer.input_gradient(dy.slice(), weight, x.slice(), packed, dx.write(&context)?.slice())?;
            gradients[0] = Some(dx.into_tensor());
        }
        if weight.track_op() {
            let (mut dw, to) = (output(weight)?, Accumulate::Overwrite);
            layer.weight_gradient(dy.slice(), packed, out_features, to, dw.write(&context)?.slice())?;
            gradients[1] = Some(dw.into_tensor());
        }
        if let Some(bias) = bias.filter(|bias| bias.track_op()) {
            let mut db = output(bias)?;
            let tokens = packed.tokens();
            layer.bias_gradient(dy.slice(), tokens, Accumulate::Overwrite, db.write(&context)?.slice())?;
            gradients[2] = Some(db.into_tensor());
        }
        Ok(gradients)
    }
}
