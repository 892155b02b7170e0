//! The 2:4 layer of the CPU engine.

use twofour::{
    F8E4M3, F8E5M2, Mask, MatrixRef,
    layer::{Accumulate, Activation, Forward, InputGradient, MaskRule, SparseLinear, SparseLinearSettings},
};

use super::CpuBuffer;
use crate::{
    Result,
    cpu::float8,
    engine::{SparseLayer, SparsePrecision},
};

/// A trainable 2:4 weight on the CPU, in f32.
#[derive(Debug, Clone)]
pub struct CpuSparseLinear {
    layer: SparseLinear<f32>,
    /// The packed weight's values rounded to e4m3, where GEMMs in 8-bit floats are simulated.
    float8: Option<SparseLinear<f32>>,
}

impl CpuSparseLinear {
    /// A layer; in 8-bit floats its GEMMs have the operands that they would have in these.
    pub(super) fn new(
        master: &CpuBuffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
        precision: SparsePrecision,
    ) -> Result<Self> {
        let layer = SparseLinear::new(MatrixRef::new(shape.0, shape.1, master.floats()?)?, settings)?;
        let mut own = Self { layer, float8: None };
        if precision == SparsePrecision::Fp8 {
            let given = SparseLinearSettings { rule: MaskRule::Given, ..settings };
            let zeros = vec![0f32; shape.0 * shape.1];
            own.float8 = Some(SparseLinear::new(MatrixRef::new(shape.0, shape.1, &zeros)?, given)?);
            own.round()?;
        }
        Ok(own)
    }

    /// Whether GEMMs in 8-bit floats are simulated.
    pub fn is_float8(&self) -> bool {
        self.float8.is_some()
    }

    /// Rounds the packed weight after it has changed.
    fn round(&mut self) -> Result<()> {
        let Some(float8) = &mut self.float8 else { return Ok(()) };
        let rounded = float8::round::<F8E4M3>(&self.layer.packed().to_dense());
        let matrix = MatrixRef::new(self.layer.out_features(), self.layer.in_features(), &rounded)?;
        float8.set_mask(matrix, self.layer.mask().clone())?;
        Ok(())
    }

    /// Whether the input gradient is sparse on a GPU, and so in 8-bit floats.
    fn has_float8_gradient(&self) -> bool {
        let settings = self.layer.settings();
        matches!(settings.rule, MaskRule::Transposable(_)) || settings.input_gradient == InputGradient::PackedTranspose
    }

    /// The layer over slices.
    pub fn layer(&self) -> &SparseLinear<f32> {
        &self.layer
    }

    fn matrix<'a>(&self, master: &'a CpuBuffer) -> Result<MatrixRef<'a, f32>> {
        Ok(MatrixRef::new(self.layer.out_features(), self.layer.in_features(), master.floats()?)?)
    }
}

impl SparseLayer<CpuBuffer> for CpuSparseLinear {
    fn settings(&self) -> SparseLinearSettings {
        self.layer.settings()
    }

    fn remask(&mut self, master: &CpuBuffer) -> Result<()> {
        self.layer.remask(self.matrix(master)?)?;
        self.round()
    }

    fn repack(&mut self, master: &CpuBuffer) -> Result<()> {
        self.layer.repack(self.matrix(master)?)?;
        self.round()
    }

    fn forward(&self, x: &CpuBuffer, tokens: usize, bias: Option<&CpuBuffer>, y: &mut CpuBuffer) -> Result<()> {
        let bias = bias.map(CpuBuffer::floats).transpose()?;
        let forward = Forward { bias, activation: Activation::Identity, pre_activation: None };
        match &self.float8 {
            None => Ok(self.layer.forward(x.floats()?, tokens, forward, y.floats_mut()?)?),
            Some(rounded) => {
                Ok(rounded.forward(&float8::round::<F8E4M3>(x.floats()?), tokens, forward, y.floats_mut()?)?)
            }
        }
    }

    fn input_gradient(&self, dy: &CpuBuffer, tokens: usize, dx: &mut CpuBuffer) -> Result<()> {
        match self.float8.as_ref().filter(|_| self.has_float8_gradient()) {
            None => Ok(self.layer.input_gradient(dy.floats()?, tokens, dx.floats_mut()?)?),
            Some(rounded) => {
                Ok(rounded.input_gradient(&float8::round::<F8E5M2>(dy.floats()?), tokens, dx.floats_mut()?)?)
            }
        }
    }

    fn weight_gradient(
        &self,
        dy: &CpuBuffer,
        x: &CpuBuffer,
        tokens: usize,
        accumulate: Accumulate,
        dw: &mut CpuBuffer,
    ) -> Result<()> {
        Ok(self.layer.weight_gradient(dy.floats()?, x.floats()?, tokens, accumulate, dw.floats_mut()?)?)
    }

    fn flips(&self) -> Result<u64> {
        Ok(self.layer.flips())
    }

    fn mask(&self) -> Result<Mask> {
        Ok(self.layer.mask().clone())
    }

    fn mask_hash(&self) -> Result<u64> {
        let mask = self.mask()?;
        let words = (0..mask.rows()).flat_map(|row| mask.row_words(row));
        Ok(words.fold(0xCBF2_9CE4_8422_2325, |hash, word| (hash ^ word).wrapping_mul(0x100_0000_01B3).rotate_left(23)))
    }

    fn set_mask(&mut self, master: &CpuBuffer, mask: Mask) -> Result<()> {
        self.layer.set_mask(self.matrix(master)?, mask)?;
        self.round()
    }

    fn scale(&self) -> Result<Option<f32>> {
        Ok(self.layer.scale())
    }

    fn set_scale(&mut self, scale: f32) -> Result<()> {
        self.layer.set_scale(scale);
        Ok(())
    }

    fn seed(&self) -> Result<u64> {
        Ok(self.layer.seed())
    }

    fn set_seed(&mut self, seed: u64) -> Result<()> {
        self.layer.set_seed(seed);
        Ok(())
    }

    fn bytes(&self) -> usize {
        let mask = self.layer.mask();
        self.layer.bytes()
            + self.float8.as_ref().map_or(0, SparseLinear::bytes)
            + mask.rows() * mask.cols().div_ceil(64) * 8
    }
}

#[cfg(test)]
mod tests {
    use twofour::select::Transposable;

    use super::*;
    use crate::engine::{Buffer as _, Kind};

    const SHAPE: (usize, usize) = (8, 12);
    const TOKENS: usize = 4;

    fn buffer(len: usize, seed: usize) -> CpuBuffer {
        let mut buffer = CpuBuffer::zeros(Kind::Wide, len);
        let values = buffer.floats_mut().unwrap();
        values.iter_mut().enumerate().for_each(|(i, v)| *v = ((i * 7 + seed) as f32 * 1.3).sin());
        buffer
    }

    fn product(a: &[f32], b: &[f32], (rows, inner, cols): (usize, usize, usize)) -> Vec<f32> {
        let sum = |i: usize| (0..inner).map(|k| a[i / cols * inner + k] * b[k * cols + i % cols]).sum();
        (0..rows * cols).map(sum).collect()
    }

    fn close(found: &CpuBuffer, expected: &[f32], what: &str) {
        let found = found.floats().unwrap();
        assert_eq!(found.len(), expected.len());
        for (a, b) in found.iter().zip(expected) {
            assert!((a - b).abs() < 1e-5, "{what}: {a}, not {b}");
        }
    }

    #[test]
    fn products_are_those_of_rounded_operands() {
        let rules = [MaskRule::Magnitude, MaskRule::SoftThreshold, MaskRule::Transposable(Transposable::Optimal)];
        for rule in rules {
            let settings = SparseLinearSettings { rule, ..Default::default() };
            let (out, inputs) = SHAPE;
            let mut master = buffer(out * inputs, 1);
            let mut layer = CpuSparseLinear::new(&master, SHAPE, settings, SparsePrecision::Fp8).unwrap();
            assert!(layer.is_float8());
            // The scale follows the weight.
            master.floats_mut().unwrap().iter_mut().for_each(|v| *v *= 0.01);
            layer.remask(&master).unwrap();
            let exact = layer.layer().packed().to_dense();
            let weight = float8::round::<F8E4M3>(&exact);
            assert!(weight != exact);
            let (x, dy) = (buffer(TOKENS * inputs, 2), buffer(TOKENS * out, 3));
            let mut y = CpuBuffer::zeros(Kind::Wide, TOKENS * out);
            layer.forward(&x, TOKENS, None, &mut y).unwrap();
            let transposed: Vec<f32> = (0..out * inputs).map(|i| weight[i % out * inputs + i / out]).collect();
            let rounded = float8::round::<F8E4M3>(x.floats().unwrap());
            close(&y, &product(&rounded, &transposed, (TOKENS, inputs, out)), "forward");
            let mut dx = CpuBuffer::zeros(Kind::Wide, TOKENS * inputs);
            layer.input_gradient(&dy, TOKENS, &mut dx).unwrap();
            let expected = match rule {
                MaskRule::Transposable(_) => {
                    product(&float8::round::<F8E5M2>(dy.floats().unwrap()), &weight, (TOKENS, out, inputs))
                }
                _ => product(dy.floats().unwrap(), &exact, (TOKENS, out, inputs)),
            };
            close(&dx, &expected, "input gradient");
            // A weight of zeros has a scale, too.
            master.floats_mut().unwrap().fill(0.0);
            layer.repack(&master).unwrap();
            layer.forward(&x, TOKENS, None, &mut y).unwrap();
            assert!(y.floats().unwrap().iter().all(|v| *v == 0.0) && y.len() == TOKENS * out);
        }
    }
}
