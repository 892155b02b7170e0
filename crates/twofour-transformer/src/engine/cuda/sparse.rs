//! The 2:4 layer of the CUDA engine.

use twofour::{
    DataType, Mask,
    layer::{Accumulate, Activation, SparseLinearSettings},
};
use twofour_cuda::layer::{self, Forward, LayerContext, Precision, SparseLinear};

use super::{CudaBuffer, CudaStepGuard};
use crate::{
    Result,
    engine::{LayerRefresh, SparseLayer, SparsePrecision},
};

/// A trainable 2:4 weight in device memory.
#[derive(Debug)]
pub struct CudaSparseLinear(SparseLinear);

impl CudaSparseLinear {
    pub(super) fn new(
        context: &LayerContext,
        master: &CudaBuffer,
        shape: (usize, usize),
        (dtype, precision): (DataType, SparsePrecision),
        settings: SparseLinearSettings,
    ) -> Result<Self> {
        let master = master.slice();
        Ok(Self(match precision {
            SparsePrecision::Activations => SparseLinear::new(context, master, shape, dtype, settings)?,
            SparsePrecision::Fp8 => {
                SparseLinear::with_precision(context, master, shape, dtype, Precision::Float8, settings)?
            }
        }))
    }

    /// The layer over device memory.
    pub fn layer(&self) -> &SparseLinear {
        &self.0
    }
}

impl SparseLayer<CudaBuffer> for CudaSparseLinear {
    fn settings(&self) -> SparseLinearSettings {
        self.0.settings()
    }

    fn remask(&mut self, master: &CudaBuffer) -> Result<()> {
        Ok(self.0.remask(master.slice())?)
    }

    fn repack(&mut self, master: &CudaBuffer) -> Result<()> {
        Ok(self.0.repack(master.slice())?)
    }

    fn forward(&self, x: &CudaBuffer, tokens: usize, bias: Option<&CudaBuffer>, y: &mut CudaBuffer) -> Result<()> {
        let bias = bias.map(CudaBuffer::slice);
        let forward = Forward { bias, activation: Activation::Identity, pre_activation: None };
        Ok(self.0.forward(x.slice(), tokens, forward, y.slice_mut())?)
    }

    fn input_gradient(&self, dy: &CudaBuffer, tokens: usize, dx: &mut CudaBuffer) -> Result<()> {
        Ok(self.0.input_gradient(dy.slice(), tokens, dx.slice_mut())?)
    }

    fn weight_gradient(
        &self,
        dy: &CudaBuffer,
        x: &CudaBuffer,
        tokens: usize,
        accumulate: Accumulate,
        dw: &mut CudaBuffer,
    ) -> Result<()> {
        Ok(self.0.weight_gradient(dy.slice(), x.slice(), tokens, accumulate, dw.slice_mut())?)
    }

    fn flips(&self) -> Result<u64> {
        Ok(self.0.flips()?)
    }

    fn mask(&self) -> Result<Mask> {
        Ok(self.0.mask()?)
    }

    fn mask_hash(&self) -> Result<u64> {
        Ok(self.0.mask_hash()?)
    }

    fn set_mask(&mut self, master: &CudaBuffer, mask: Mask) -> Result<()> {
        Ok(self.0.set_mask(master.slice(), &mask)?)
    }

    fn scale(&self) -> Result<Option<f32>> {
        Ok(self.0.scale()?)
    }

    fn set_scale(&mut self, scale: f32) -> Result<()> {
        Ok(self.0.set_scale(scale)?)
    }

    fn seed(&self) -> Result<u64> {
        Ok(self.0.seed()?)
    }

    fn set_seed(&mut self, seed: u64) -> Result<()> {
        Ok(self.0.set_seed(seed)?)
    }

    fn bytes(&self) -> usize {
        self.0.bytes()
    }
}

pub(super) fn refresh(
    layers: Vec<LayerRefresh<'_, CudaBuffer, CudaSparseLinear>>,
    guard: &CudaStepGuard,
) -> Result<()> {
    let of = |LayerRefresh { layer, master, selects_mask, .. }| {
        let CudaSparseLinear(layer) = layer;
        layer::Refresh { layer, master: CudaBuffer::slice(master), selects_mask }
    };
    Ok(layer::refresh_together(layers.into_iter().map(of).collect(), guard.skip()?)?)
}
