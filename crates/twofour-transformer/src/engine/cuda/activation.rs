//! 2:4 activations of the CUDA engine.

use twofour::{
    layer::{Accumulate, InputActivation, SparseActivationSettings},
    select::Transposable,
};
use twofour_cuda::layer::{LayerContext, PackedActivation, SparseActivationLinear};

use super::{CudaBuffer, rows_of};
use crate::{
    Result,
    engine::{LinearShape, SparseActivation},
};

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

impl SparseActivation<CudaBuffer> for CudaPackedActivation {
    fn linear(
        &self,
        shape: LinearShape,
        weight: &CudaBuffer,
        bias: Option<&CudaBuffer>,
        y: &mut CudaBuffer,
    ) -> Result<()> {
        let bias = bias.map(CudaBuffer::slice);
        Ok(self.layer.forward(&self.packed, weight.slice(), shape.out_features, bias, y.slice_mut())?)
    }

    fn weight_gradient(
        &self,
        shape: LinearShape,
        dy: &CudaBuffer,
        accumulate: Accumulate,
        dw: &mut CudaBuffer,
    ) -> Result<()> {
        let (dy, dw) = (dy.slice(), dw.slice_mut());
        Ok(self.layer.weight_gradient(dy, &self.packed, shape.out_features, accumulate, dw)?)
    }
}
