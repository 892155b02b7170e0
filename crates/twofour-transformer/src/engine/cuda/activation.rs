//! 2:4 activations of the CUDA engine.

use twofour::{
    layer::{Accumulate, InputActivation, SparseActivationSettings},
    select::Transposable,
};
use twofour_cuda::layer::{LayerContext, PackedActivation, SparseActivationLinear};

use super::{CudaBuffer, rows_of};
use crate::{Result, engine::LinearShape};

/// A 2:4 activation in device memory, and the layer that packed it.
#[derive(Debug)]
pub struct CudaPackedActivation {
    layer: SparseActivationLinear,
    packed: PackedActivation,
}

impl CudaPackedActivation {
    /// The activation.
    pub fn packed(&self) -> &PackedActivation {
        &self.packed
    }
}

pub(super) fn pack(
    context: &LayerContext,
    rule: Transposable,
    (x, width): (&CudaBuffer, usize),
    old: Option<CudaPackedActivation>,
) -> Result<CudaPackedActivation> {
    let (x, tokens) = (x.slice(), rows_of(x, width));
    let activation = InputActivation::SquaredRelu;
    let settings = SparseActivationSettings { rule, activation, ..Default::default() };
    let layer = SparseActivationLinear::new(context, x.dtype(), settings)?;
    let fits = |packed: &PackedActivation| (packed.tokens(), packed.in_features()) == (tokens, width);
    let mut packed = match old.map(|old| old.packed).filter(fits) {
        Some(packed) => packed,
        None => PackedActivation::new(context, x.dtype(), tokens, width)?,
    };
    layer.pack(x, &mut packed)?;
    Ok(CudaPackedActivation { layer, packed })
}

pub(super) fn linear(
    shape: LinearShape,
    x: &CudaPackedActivation,
    weight: &CudaBuffer,
    bias: Option<&CudaBuffer>,
    y: &mut CudaBuffer,
) -> Result<()> {
    let bias = bias.map(CudaBuffer::slice);
    Ok(x.layer.forward(&x.packed, weight.slice(), shape.out_features, bias, y.slice_mut())?)
}

pub(super) fn weight_gradient(
    shape: LinearShape,
    dy: &CudaBuffer,
    x: &CudaPackedActivation,
    accumulate: Accumulate,
    dw: &mut CudaBuffer,
) -> Result<()> {
    Ok(x.layer.weight_gradient(dy.slice(), &x.packed, shape.out_features, accumulate, dw.slice_mut())?)
}
