//! The 2:4 layer of the CPU engine.

use twofour::{
    Mask, MatrixRef,
    layer::{Accumulate, Activation, Forward, SparseLinear, SparseLinearSettings},
};

use super::CpuBuffer;
use crate::{Result, engine::SparseLayer};

/// A trainable 2:4 weight on the CPU, in f32.
#[derive(Debug, Clone)]
pub struct CpuSparseLinear(SparseLinear<f32>);

impl CpuSparseLinear {
    pub(super) fn new(master: &CpuBuffer, shape: (usize, usize), settings: SparseLinearSettings) -> Result<Self> {
        Ok(Self(SparseLinear::new(MatrixRef::new(shape.0, shape.1, master.floats()?)?, settings)?))
    }

    /// The layer over slices.
    pub fn layer(&self) -> &SparseLinear<f32> {
        &self.0
    }

    fn matrix<'a>(&self, master: &'a CpuBuffer) -> Result<MatrixRef<'a, f32>> {
        Ok(MatrixRef::new(self.0.out_features(), self.0.in_features(), master.floats()?)?)
    }
}

impl SparseLayer<CpuBuffer> for CpuSparseLinear {
    fn settings(&self) -> SparseLinearSettings {
        self.0.settings()
    }

    fn remask(&mut self, master: &CpuBuffer) -> Result<()> {
        self.0.remask(self.matrix(master)?)?;
        Ok(())
    }

    fn repack(&mut self, master: &CpuBuffer) -> Result<()> {
        Ok(self.0.repack(self.matrix(master)?)?)
    }

    fn forward(&self, x: &CpuBuffer, tokens: usize, bias: Option<&CpuBuffer>, y: &mut CpuBuffer) -> Result<()> {
        let bias = bias.map(CpuBuffer::floats).transpose()?;
        let forward = Forward { bias, activation: Activation::Identity, pre_activation: None };
        Ok(self.0.forward(x.floats()?, tokens, forward, y.floats_mut()?)?)
    }

    fn input_gradient(&self, dy: &CpuBuffer, tokens: usize, dx: &mut CpuBuffer) -> Result<()> {
        Ok(self.0.input_gradient(dy.floats()?, tokens, dx.floats_mut()?)?)
    }

    fn weight_gradient(
        &self,
        dy: &CpuBuffer,
        x: &CpuBuffer,
        tokens: usize,
        accumulate: Accumulate,
        dw: &mut CpuBuffer,
    ) -> Result<()> {
        Ok(self.0.weight_gradient(dy.floats()?, x.floats()?, tokens, accumulate, dw.floats_mut()?)?)
    }

    fn flips(&self) -> Result<u64> {
        Ok(self.0.flips())
    }

    fn mask(&self) -> Result<Mask> {
        Ok(self.0.mask().clone())
    }

    fn mask_hash(&self) -> Result<u64> {
        let mask = self.mask()?;
        let words = (0..mask.rows()).flat_map(|row| mask.row_words(row));
        Ok(words.fold(0xCBF2_9CE4_8422_2325, |hash, word| (hash ^ word).wrapping_mul(0x100_0000_01B3).rotate_left(23)))
    }

    fn set_mask(&mut self, master: &CpuBuffer, mask: Mask) -> Result<()> {
        self.0.set_mask(self.matrix(master)?, mask)?;
        Ok(())
    }

    fn scale(&self) -> Result<Option<f32>> {
        Ok(self.0.scale())
    }

    fn set_scale(&mut self, scale: f32) -> Result<()> {
        self.0.set_scale(scale);
        Ok(())
    }

    fn seed(&self) -> Result<u64> {
        Ok(self.0.seed())
    }

    fn set_seed(&mut self, seed: u64) -> Result<()> {
        self.0.set_seed(seed);
        Ok(())
    }

    fn bytes(&self) -> usize {
        let mask = self.0.mask();
        self.0.bytes() + mask.rows() * mask.cols().div_ceil(64) * 8
    }
}
