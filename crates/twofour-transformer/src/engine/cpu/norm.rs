//! Norms of the CPU engine.

use twofour::layer::Accumulate;

use super::{CpuBuffer, buffer::expect_length, rows_of};
use crate::{
    Result,
    cpu::{layer_norm, rms_norm},
    engine::{Buffer as _, NormGradients, NormParameters, NormStatistics},
};

/// Returns the length of means where a norm has them: layer normalization has one for each token.
fn means(norm: &NormParameters<'_, CpuBuffer>, tokens: usize) -> usize {
    if norm.bias.is_some() { tokens } else { 0 }
}

pub(super) fn forward(
    norm: NormParameters<'_, CpuBuffer>,
    x: &CpuBuffer,
    y: &mut CpuBuffer,
    statistics: NormStatistics<&mut CpuBuffer>,
) -> Result<()> {
    let NormParameters { gain, bias, epsilon } = norm;
    let NormStatistics { mean, rstd } = statistics;
    let tokens = rows_of("the input of a norm", x, gain.len())?;
    expect_length("the output of a norm", x.len(), y.len())?;
    expect_length("the means of a norm", means(&norm, tokens), mean.as_ref().map_or(0, |mean| mean.len()))?;
    expect_length("the deviations of a norm", tokens, rstd.len())?;
    let (x, gain, y) = (x.floats()?, gain.floats()?, y.floats_mut()?);
    match (bias, mean) {
        (Some(bias), Some(mean)) => {
            expect_length("the bias of a norm", gain.len(), bias.len())?;
            layer_norm::forward(x, [gain, bias.floats()?], epsilon, y, [mean.floats_mut()?, rstd.floats_mut()?]);
        }
        _ => rms_norm::forward(x, gain, epsilon, y),
    }
    Ok(())
}

pub(super) fn gradient(
    norm: NormParameters<'_, CpuBuffer>,
    (x, statistics): (&CpuBuffer, NormStatistics<&CpuBuffer>),
    (dy, dx): (&CpuBuffer, &mut CpuBuffer),
    accumulate: Accumulate,
    gradients: NormGradients<'_, CpuBuffer>,
) -> Result<()> {
    let NormParameters { gain, epsilon, .. } = norm;
    let NormStatistics { mean, rstd } = statistics;
    let NormGradients { gain: d_gain, bias: d_bias } = gradients;
    let (tokens, width) = (rows_of("the input of a norm", x, gain.len())?, gain.len());
    expect_length("the gradient of a norm's output", x.len(), dy.len())?;
    expect_length("the gradient of a norm's input", x.len(), dx.len())?;
    expect_length("the means of a norm", means(&norm, tokens), mean.map_or(0, |mean| mean.len()))?;
    let biases = if norm.bias.is_some() { width } else { 0 };
    expect_length("the gradient of a norm's bias", biases, d_bias.as_ref().map_or(0, |bias| bias.len()))?;
    expect_length("the gradient of a norm's gain", width, d_gain.len())?;
    let (x, gain, dy, dx) = (x.floats()?, gain.floats()?, dy.floats()?, dx.floats_mut()?);
    let (Some(mean), Some(d_bias)) = (mean, d_bias) else {
        let d_gain = d_gain.floats_mut()?;
        if accumulate == Accumulate::Overwrite {
            d_gain.fill(0.0);
        }
        rms_norm::backward(x, gain, epsilon, dy, dx, d_gain);
        return Ok(());
    };
    expect_length("the deviations of a norm", tokens, rstd.len())?;
    let mut sums = vec![0f32; 2 * width];
    layer_norm::backward((x, gain, [mean.floats()?, rstd.floats()?]), dy, dx, &mut sums);
    for (gradient, sums) in [d_gain, d_bias].into_iter().zip(sums.chunks(width.max(1))) {
        let gradient = gradient.floats_mut()?;
        match accumulate {
            Accumulate::Overwrite => gradient.copy_from_slice(sums),
            Accumulate::Add => gradient.iter_mut().zip(sums).for_each(|(g, s)| *g += s),
        }
    }
    Ok(())
}
