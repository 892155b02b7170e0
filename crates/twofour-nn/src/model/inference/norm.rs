//! The norms of a model for inference.

use twofour::Arithmetic;

use super::passes::narrowed;
use crate::{
    cpu::{layer_norm, rms_norm},
    model::config::NormKind,
};

/// A norm with its parameters.
#[derive(Debug, Clone)]
pub(crate) struct Norm {
    gain: Vec<f32>,
    /// Of layer normalization; root-mean-square normalization has none.
    bias: Option<Vec<f32>>,
    epsilon: f32,
}

impl Norm {
    /// The norm of that kind whose parameters `values` returns by the last part of their names, `weight` and `bias`.
    pub(crate) fn read<E>(
        kind: NormKind,
        epsilon: f32,
        values: impl Fn(&str) -> Result<Vec<f32>, E>,
    ) -> Result<Self, E> {
        let bias = match kind {
            NormKind::Layer => Some(values("bias")?),
            NormKind::RootMeanSquare => None,
        };
        Ok(Norm { gain: values("weight")?, bias, epsilon })
    }

    /// Normalizes the rows of `x`.
    pub(crate) fn forward<T: Arithmetic>(&self, x: &[f32]) -> Vec<T> {
        narrowed(&self.normalized(x))
    }

    /// Normalizes the rows of `x`, in f32.
    pub(crate) fn normalized(&self, x: &[f32]) -> Vec<f32> {
        let mut y = vec![0f32; x.len()];
        match &self.bias {
            Some(bias) => {
                let rows = x.len() / self.gain.len().max(1);
                let (mut mean, mut rstd) = (vec![0f32; rows], vec![0f32; rows]);
                layer_norm::forward(x, [&self.gain, bias], self.epsilon, &mut y, [&mut mean, &mut rstd]);
            }
            None => rms_norm::forward(x, &self.gain, self.epsilon, &mut y),
        }
        y
    }
}
