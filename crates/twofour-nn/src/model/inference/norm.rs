//! The norms of a model for inference.

use twofour::{Arithmetic, kernel::KernelElement};

use super::{
    parts::Parts,
    passes::{add, for_rows, narrowed, widened},
};
use crate::{
    Result,
    cpu::{layer_norm, rms_norm},
    model::config::{NormKind, NormPlace, TransformerConfig},
};

/// A norm with its parameters.
#[derive(Debug, Clone)]
pub(crate) struct Norm {
    gain: Vec<f32>,
    /// The bias of layer normalization; none in root-mean-square normalization.
    bias: Option<Vec<f32>>,
    epsilon: f32,
}

impl Norm {
    /// The norm of that kind whose parameters `values` returns by the last part of their names, `weight` and `bias`.
    pub(crate) fn read(kind: NormKind, epsilon: f32, values: impl Fn(&str) -> Result<Vec<f32>>) -> Result<Self> {
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

/// Normalizes each head of the queries and of the keys of `qkv: [tokens, qkv_width]`.
pub(crate) fn normalize_heads(config: &TransformerConfig, [query, key]: &[Norm; 2], qkv: &mut [f32]) {
    let (queries, keys) = (config.query_width(), config.kv_width());
    for row in qkv.chunks_exact_mut(config.qkv_width()) {
        let (q, kv) = row.split_at_mut(queries);
        q.copy_from_slice(&query.normalized(q));
        let k = &mut kv[..keys];
        k.copy_from_slice(&key.normalized(k));
    }
}

/// The connection of a block to the residual stream: its norms, and the factors of its output.
#[derive(Debug)]
pub(crate) struct Residual {
    place: NormPlace,
    norm: Norm,
    /// The norm of the block's output, where it has one of its own.
    post_norm: Option<Norm>,
    factors: Option<Vec<f32>>,
}

impl Residual {
    /// Builds it for the block whose parts' names begin with `block`.
    pub(crate) fn build<T: KernelElement>(
        config: &TransformerConfig,
        parts: &impl Parts<T>,
        block: &str,
    ) -> Result<Self> {
        let (place, width) = (config.norm.place, config.width);
        let norm = |name: &str| {
            let of = |part: &str| parts.vector(&format!("{block}.{name}.{part}"), width);
            Norm::read(config.norm.kind, config.norm.epsilon, of)
        };
        let factors = config.layer_scale.then(|| parts.vector(&format!("{block}.scale"), width)).transpose()?;
        let post_norm = (place == NormPlace::Around).then(|| norm("post_norm")).transpose()?;
        Ok(Residual { place, norm: norm("norm")?, post_norm, factors })
    }

    /// What the block reads of the residual stream `x`.
    pub(crate) fn input<T: Arithmetic>(&self, x: &[f32]) -> Vec<T> {
        match self.place {
            NormPlace::Before | NormPlace::Around | NormPlace::Parallel => self.norm.forward(x),
            NormPlace::After => narrowed(x),
        }
    }

    /// Adds the block's output `y` to the residual stream.
    pub(crate) fn add<T: KernelElement>(&self, x: &mut [f32], y: &[T]) {
        match (&self.post_norm, &self.factors) {
            (None, None) => add(x, y),
            (norm, factors) => {
                let mut y = widened(y);
                if let Some(norm) = norm {
                    y = norm.normalized(&y);
                }
                let width = factors.as_ref().map_or(1, Vec::len);
                for_rows(x, width, |first, x| {
                    let rows = x.chunks_exact_mut(width).zip(y[first * width..].chunks_exact(width));
                    rows.for_each(|(x, y)| match factors {
                        None => x.iter_mut().zip(y).for_each(|(x, y)| *x += y),
                        Some(factors) => x.iter_mut().zip(y).zip(factors).for_each(|((x, y), f)| *x += f * y),
                    });
                });
            }
        }
        if self.place == NormPlace::After {
            let y = self.norm.normalized(x);
            x.copy_from_slice(&y);
        }
    }
}
