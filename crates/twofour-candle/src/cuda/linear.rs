//! The trainable 2:4 layer on CUDA tensors.

use std::sync::Arc;

use candle_core::{CudaStorage, DType, Shape, Tensor, backend::BackendStorage as _};
use half::{bf16, f16};
use twofour::{Mask, layer::SparseLinearSettings};
use twofour_cuda::{
    DataType,
    layer::{Accumulate, DeviceSlice, Forward, SparseLinear},
};
use twofour_transformer::cuda as transformer;

use super::{
    context,
    memory::{Locked, Output, data_type, matrix, read},
};
use crate::{
    Result,
    tape::{Arguments, CudaArgument, Gradients, TapeOperator, record},
};

const MASTER: &str = "the weight";
const INPUT: &str = "the input of a linear layer";
const GRADIENT: &str = "the gradient of a linear layer";

/// Mask and packed weight, shared with forward passes that wait for their backward pass.
#[derive(Debug, Clone)]
pub(crate) struct Layer(Arc<SparseLinear>);

impl Layer {
    /// A layer over a master weight `[out, in]`, for activations of this dtype.
    pub(crate) fn new(master: &Tensor, activations: DType, settings: SparseLinearSettings) -> Result<Self> {
        let context = context::of(context::device_of(MASTER, master.device())?)?;
        let (dtype, shape) = (data_type("the activations", activations)?, master.dims2()?);
        let layer = with_master(master, &context, |slice| SparseLinear::new(&context, slice, shape, dtype, settings))?;
        Ok(Layer(Arc::new(layer)))
    }

    /// Chooses the mask anew and packs what it keeps.
    pub(crate) fn remask(&mut self, master: &Tensor) -> Result<()> {
        self.change(master, |layer, master| layer.remask(master))
    }

    /// Packs the master's present values under the mask as it is.
    pub(crate) fn repack(&mut self, master: &Tensor) -> Result<()> {
        self.change(master, |layer, master| layer.repack(master))
    }

    /// Sets the mask and packs what it keeps.
    pub(crate) fn set_mask(&mut self, master: &Tensor, mask: &Mask) -> Result<()> {
        self.change(master, |layer, master| layer.set_mask(master, mask))
    }

    /// Changes the layer in place, unless an earlier forward pass still waits for its backward pass.
    fn change(
        &mut self,
        master: &Tensor,
        change: impl FnOnce(&mut SparseLinear, DeviceSlice<'_>) -> twofour_cuda::Result<()>,
    ) -> Result<()> {
        let context = self.0.context().clone();
        match Arc::get_mut(&mut self.0) {
            Some(layer) => with_master(master, &context, |slice| change(layer, slice)),
            None => {
                let mut own = self.0.try_clone()?;
                with_master(master, &context, |slice| change(&mut own, slice))?;
                self.0 = Arc::new(own);
                Ok(())
            }
        }
    }

    /// An error for a NaN in the master weight that the mask was chosen from, with its place. Waits.
    pub(crate) fn check(&self) -> Result<()> {
        Ok(self.0.check()?)
    }

    /// Waits until the packed weight is there for all threads, where each of them has a stream of its own.
    pub(crate) fn publish(&self) -> Result<()> {
        let context = self.0.context();
        if context.is_per_thread() {
            context.synchronize()?;
        }
        Ok(())
    }

    /// The mask. Waits.
    pub(crate) fn mask(&self) -> Result<Mask> {
        Ok(self.0.mask()?)
    }

    /// The share of mask elements that the last change of the mask flipped. Waits.
    pub(crate) fn flip_rate(&self) -> Result<f64> {
        Ok(self.0.flip_rate()?)
    }

    /// An error for a mask that the layer cannot have.
    pub(crate) fn check_mask(&self, mask: &Mask) -> Result<()> {
        Ok(self.0.check_mask(mask)?)
    }

    /// Bytes of device memory.
    pub(crate) fn bytes(&self) -> usize {
        self.0.bytes()
    }

    /// What the mask keeps of the master as it is now, rounded to the activations' type, as a dense tensor of the
    /// master's dtype.
    pub(crate) fn kept(&self, master: &Tensor) -> Result<Tensor> {
        let mut layer = self.0.try_clone()?;
        with_master(master, self.0.context(), |slice| layer.repack(slice))?;
        let cpu = &candle_core::Device::Cpu;
        let dense = match layer.dtype() {
            DataType::BF16 => Tensor::from_vec(layer.packed::<bf16>()?.to_dense(), master.shape(), cpu)?,
            _ => Tensor::from_vec(layer.packed::<f16>()?.to_dense(), master.shape(), cpu)?,
        };
        Ok(dense.to_device(master.device())?.to_dtype(master.dtype())?)
    }

    /// `y = x·Wᵀ + bias`, recorded on candle's tape. Shapes and dtypes have been checked.
    pub(crate) fn apply(&self, x: &Tensor, weight: &Tensor, bias: Option<&Tensor>) -> Result<Tensor> {
        let (x, bias) = (x.contiguous()?, bias.map(Tensor::contiguous).transpose()?);
        record(LinearOperator(self.0.clone()), Arguments { x: &x, weight, bias: bias.as_ref() })
    }
}

/// Calls `f` with the elements of the master weight.
fn with_master<R>(
    master: &Tensor,
    context: &twofour_cuda::layer::LayerContext,
    f: impl FnOnce(DeviceSlice<'_>) -> twofour_cuda::Result<R>,
) -> Result<R> {
    let master = master.contiguous()?;
    let master = Locked::new(MASTER, &master);
    let master = master.read(context)?;
    Ok(f(master.slice())?)
}

/// The weight and the bias are arguments so that their gradients reach them; what is multiplied is the packed weight.
struct LinearOperator(Arc<SparseLinear>);

impl TapeOperator for LinearOperator {
    const NAME: &str = "linear";

    fn on_cuda(
        &self,
        Arguments { x: (x, layout), bias, .. }: Arguments<CudaArgument<'_>>,
    ) -> Result<(CudaStorage, Shape)> {
        let (layer, context) = (&*self.0, self.0.context());
        let (tokens, _) = matrix(layout.shape());
        let mut y = Output::new(&x.device, with_last(layout.shape(), layer.out_features()), x.dtype())?;
        let rounded = bias.map(|bias| rounded(bias, context, x.dtype())).transpose()?.flatten();
        {
            let x = read(INPUT, context, x, layout)?;
            let bias = match (&rounded, bias) {
                (Some(rounded), _) => Some(rounded.read(context)?),
                (None, Some((bias, layout))) => Some(read("the bias", context, bias, layout)?),
                (None, None) => None,
            };
            let epilogue = Forward { bias: bias.as_ref().map(|bias| bias.slice()), ..Forward::default() };
            layer.forward(x.slice(), tokens, epilogue, y.write(context)?.slice())?;
        }
        Ok(y.into_parts())
    }

    fn gradients(&self, Arguments { x, weight, bias }: Arguments<&Tensor>, dy: &Tensor) -> Result<Gradients> {
        let (layer, context) = (&*self.0, self.0.context());
        let device = context::device_of(INPUT, x.device())?;
        let (tokens, _) = matrix(x.shape());
        let dy = dy.contiguous()?;
        let dy = Locked::new(GRADIENT, &dy);
        let dy = dy.read(context)?;
        let output = |tensor: &Tensor| Output::new(device, tensor.shape(), tensor.dtype());
        let mut gradients = [None, None, None];
        if x.track_op() {
            let mut dx = output(x)?;
            layer.input_gradient(dy.slice(), tokens, dx.write(context)?.slice())?;
            gradients[0] = Some(dx.into_tensor());
        }
        if weight.track_op() {
            let (mut dw, x) = (output(weight)?, Locked::new(INPUT, x));
            let (x, to) = (x.read(context)?, Accumulate::Overwrite);
            layer.weight_gradient(dy.slice(), x.slice(), tokens, to, dw.write(context)?.slice())?;
            gradients[1] = Some(dw.into_tensor());
        }
        if let Some(bias) = bias.filter(|bias| bias.track_op()) {
            let mut db = output(bias)?;
            layer.bias_gradient(dy.slice(), tokens, Accumulate::Overwrite, db.write(context)?.slice())?;
            gradients[2] = Some(db.into_tensor());
        }
        Ok(gradients)
    }
}

/// The bias in the activations' dtype, where it is of another: f32.
pub(super) fn rounded(
    (bias, layout): CudaArgument<'_>,
    context: &twofour_cuda::layer::LayerContext,
    dtype: DType,
) -> Result<Option<Output>> {
    if bias.dtype() == dtype {
        return Ok(None);
    }
    let mut rounded = Output::new(&bias.device, layout.shape(), dtype)?;
    {
        let bias = read("the bias", context, bias, layout)?;
        transformer::convert(context, bias.slice(), rounded.write(context)?.slice())?;
    }
    Ok(Some(rounded))
}

/// A shape with another last dimension.
pub(super) fn with_last(shape: &Shape, last: usize) -> Shape {
    let mut dims = shape.dims().to_vec();
    if let Some(n) = dims.last_mut() {
        *n = last;
    }
    Shape::from(dims)
}
