//! SAM's neck: convolutions over the grid of hidden states.

use twofour::kernel::{Activation, KernelElement};

use super::TransformerConfig;
use crate::{
    Result,
    model::{
        config::NormKind,
        inference::{
            linear::{Linear, LinearPart},
            norm::Norm,
            parts::Parts,
            passes::{narrowed, widened},
            weight::Weight,
        },
    },
};

/// The neighbours of a place and itself.
const NINE: usize = 9;

/// ε of the neck's norms, whatever the configuration says.
pub(in crate::model) const EPSILON: f32 = 1e-6;

/// A convolution of 1x1, a norm over channels, a convolution of 3x3, and a norm.
#[derive(Debug)]
pub(super) struct Neck<T: KernelElement> {
    reduce: Linear<T>,
    reduce_norm: Norm,
    convolution: Linear<T>,
    norm: Norm,
    channels: usize,
}

impl<T: KernelElement> Neck<T> {
    pub(super) fn build(config: &TransformerConfig, parts: &impl Parts<T>, channels: usize) -> Result<Self> {
        let norm = |name: &str| {
            Norm::read(NormKind::Layer, EPSILON, |part| parts.vector(&format!("neck.{name}.{part}"), channels))
        };
        let linear = |values: &[f32], inputs: usize| {
            Linear::new(vec![LinearPart::of(Weight::Dense(narrowed(values)), (channels, inputs), None)])
        };
        Ok(Neck {
            reduce: linear(&parts.vector("neck.reduce.weight", channels * config.width)?, config.width)?,
            reduce_norm: norm("reduce_norm")?,
            convolution: linear(&convolution_rows(parts, channels)?, NINE * channels)?,
            norm: norm("norm")?,
            channels,
        })
    }

    /// The neck's output for hidden states `x: [images · tokens, width]`: `[images · tokens, channels]`.
    pub(super) fn forward(&self, config: &TransformerConfig, x: &[f32]) -> Result<Vec<f32>> {
        let tokens = x.len() / config.width;
        let y = widened(&self.reduce.forward(&narrowed(x), tokens, Activation::Identity)?);
        let y = neighbours(&self.reduce_norm.forward::<T>(&y), config.image()?.grid(), self.channels);
        let y = widened(&self.convolution.forward(&y, tokens, Activation::Identity)?);
        Ok(self.norm.normalized(&y))
    }
}

/// The weight of the convolution of 3x3, stored as `[channels, channels, 3, 3]`, for rows of [`neighbours`]:
/// `[channels, 9 · channels]`.
pub(in crate::model) fn convolution_rows<T: KernelElement>(parts: &impl Parts<T>, channels: usize) -> Result<Vec<f32>> {
    let stored = parts.vector("neck.convolution.weight", channels * channels * NINE)?;
    let of_output = |stored: &[f32]| {
        (0..NINE).flat_map(|place| stored.iter().skip(place).step_by(NINE).copied()).collect::<Vec<f32>>()
    };
    Ok(stored.chunks_exact(channels * NINE).flat_map(of_output).collect())
}

/// The values at each place and around it, row by row, `[images · rows · columns, 9 · channels]`; zeros outside the
/// image.
fn neighbours<T: KernelElement>(x: &[T], [rows, columns]: [usize; 2], channels: usize) -> Vec<T> {
    let mut y = Vec::with_capacity(x.len() * NINE);
    for image in x.chunks_exact(rows * columns * channels) {
        for (row, column) in (0..rows).flat_map(|row| (0..columns).map(move |column| (row, column))) {
            for place in 0..NINE {
                // One more than the place's own row and column, so that neither is negative.
                let (row, column) = (row + place / 3, column + place % 3);
                if (1..=rows).contains(&row) && (1..=columns).contains(&column) {
                    y.extend_from_slice(&image[((row - 1) * columns + column - 1) * channels..][..channels]);
                } else {
                    y.extend(std::iter::repeat_n(T::ZERO, channels));
                }
            }
        }
    }
    y
}
