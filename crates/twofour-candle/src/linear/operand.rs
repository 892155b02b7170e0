//! A linear layer on raw f32 slices, for use inside other operators.

use std::sync::Arc;

use candle_core::Tensor;
use twofour::kernel::{Activation, Epilogue};
use twofour::layer::{self, Accumulate};

use super::weight::{self, Weight};
use crate::Result;
use crate::float::{expect_length, with_elements};

/// A linear layer's products on f32 slices: what another operator runs inside its own forward and backward.
///
/// It is the layer as it was when [`AnyLinear::operand`](super::AnyLinear::operand) made it, and cheap to make: a
/// packed weight is shared, a dense one is the layer's own tensor, only the bias is copied. Make one for each forward
/// pass and keep it for the backward pass; do not keep it over an optimizer's step, which changes a dense weight in
/// place.
///
/// Slices are row-major: `x`, `dx` are `[tokens, in]`, `y`, `dy` are `[tokens, out]`, `dw` is `[out, in]`, `db` is
/// `[out]`. All products run in parallel on rayon's current pool.
#[derive(Debug, Clone)]
pub struct LinearOperand {
    pub(super) product: Weight,
    pub(super) bias_values: Option<Arc<[f32]>>,
    pub(super) out_features: usize,
    pub(super) in_features: usize,
    pub(super) weight: Option<Tensor>,
    pub(super) bias: Option<Tensor>,
}

impl LinearOperand {
    /// Number of outputs.
    pub fn out_features(&self) -> usize {
        self.out_features
    }

    /// Number of inputs.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// The tensor to store the weight gradient under; `None` where the layer is compressed and has none.
    pub fn weight(&self) -> Option<&Tensor> {
        self.weight.as_ref()
    }

    /// The tensor to store the bias gradient under; `None` where there is no bias or the layer is compressed.
    pub fn bias(&self) -> Option<&Tensor> {
        self.bias.as_ref()
    }

    /// `y = act(x·Wᵀ + bias)`.
    ///
    /// A weight in bf16 or f16 is multiplied with `x` rounded to that type; one in i8 with `x` quantized for each
    /// token.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where a slice does not fit.
    pub fn forward(&self, x: &[f32], tokens: usize, activation: Activation, y: &mut [f32]) -> Result<()> {
        self.product.forward(x, self.dims(tokens), Epilogue { bias: self.bias_values.as_deref(), activation }, y)
    }

    /// `dx = dy·W`.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where a slice does not fit,
    /// [`Error::WrongForm`](crate::Error::WrongForm) for an i8 weight.
    pub fn input_gradient(&self, dy: &[f32], tokens: usize, dx: &mut [f32]) -> Result<()> {
        self.product.input_gradient(dy, self.dims(tokens), dx)
    }

    /// `dw = dyᵀ·x`: dense, or what a sparse layer's [`WeightGradient`](super::WeightGradient) asks for.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where a slice does not fit; [`Error::TwoFour`](crate::Error::TwoFour)
    /// for a NaN or an infinity that is to be estimated.
    pub fn weight_gradient(&self, dy: &[f32], x: &[f32], tokens: usize, dw: &mut [f32]) -> Result<()> {
        self.product.weight_gradient(dy, x, self.dims(tokens), dw)
    }

    /// `db = Σ dy` over tokens.
    ///
    /// # Errors
    /// [`Error::Length`](crate::Error::Length) where a slice does not fit.
    pub fn bias_gradient(&self, dy: &[f32], tokens: usize, db: &mut [f32]) -> Result<()> {
        expect_length("the bias gradient", db.len(), Some(self.out_features))?;
        expect_length("the output gradient", dy.len(), tokens.checked_mul(self.out_features))?;
        Ok(layer::bias_gradient(dy, tokens, Accumulate::Overwrite, db)?)
    }

    fn dims(&self, tokens: usize) -> weight::Dims {
        (tokens, self.out_features, self.in_features)
    }
}

/// The bias as f32 values.
pub(super) fn bias_values(bias: Option<&Tensor>) -> Result<Option<Arc<[f32]>>> {
    let Some(bias) = bias else { return Ok(None) };
    let bias = bias.to_dtype(candle_core::DType::F32)?;
    with_elements("the bias", &bias, |values| Ok(Some(Arc::from(values))))
}
