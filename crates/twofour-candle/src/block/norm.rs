//! The parameters of a layer norm.

use candle_core::{DType, Device, Result, Tensor, Var};

use crate::ops;

/// Gain and bias of a layer normalisation, `[width]` each, f32.
#[derive(Debug, Clone)]
pub struct LayerNorm {
    gain: Var,
    bias: Var,
    eps: f32,
}

impl LayerNorm {
    /// Added to the variance.
    pub const EPS: f32 = 1e-5;

    /// Gain one, bias zero.
    ///
    /// # Errors
    /// Those of allocating on `device`.
    pub fn new(width: usize, device: &Device) -> Result<Self> {
        Ok(LayerNorm {
            gain: Var::ones(width, DType::F32, device)?,
            bias: Var::zeros(width, DType::F32, device)?,
            eps: Self::EPS,
        })
    }

    /// The norm with these parameters, both `[width]`.
    ///
    /// # Errors
    /// Shapes that differ.
    pub fn from_parameters(gain: Var, bias: Var) -> Result<Self> {
        if gain.rank() != 1 || gain.dims() != bias.dims() {
            candle_core::bail!(
                "layer norm: gain has shape {:?} and bias {:?}; both must be [width]",
                gain.dims(),
                bias.dims()
            );
        }
        Ok(LayerNorm { gain, bias, eps: Self::EPS })
    }

    /// The gain, `[width]`.
    pub fn gain(&self) -> &Var {
        &self.gain
    }

    /// The bias, `[width]`.
    pub fn bias(&self) -> &Var {
        &self.bias
    }

    /// What is added to the variance.
    pub fn eps(&self) -> f32 {
        self.eps
    }

    /// The norm as a fused operator on the tape.
    ///
    /// # Errors
    /// As [`ops::layer_norm()`].
    pub fn forward(&self, x: &Tensor) -> Result<Tensor> {
        ops::layer_norm(x, &self.gain, &self.bias, self.eps)
    }

    /// The norm by candle's elementary operators.
    pub(crate) fn reference(&self, x: &Tensor) -> Result<Tensor> {
        candle_nn::ops::layer_norm_slow(x, &self.gain, &self.bias, self.eps)
    }
}
