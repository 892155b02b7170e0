//! Operations between linear layers on the CPU.

use twofour::layer::Accumulate;

use super::{CpuAttention, CpuBuffer, CpuEngine, attention, buffer::expect_length, rows_of};
use crate::{
    Error, Result,
    cpu::{self, rope::Table, rows},
    engine::{AttentionShape, Buffer as _, LayerOperations, Memory as _, Nonlinearity},
};

impl LayerOperations for CpuEngine {
    type AttentionState = CpuAttention;
    type Rotary = Table;

    fn embedding(&self, table: &CpuBuffer, width: usize, ids: &CpuBuffer, out: &mut CpuBuffer) -> Result<()> {
        expect_length("embedded tokens", ids.len() * width, out.len())?;
        expect_tokens("inputs", ids.ids()?, rows_of("the embedding's table", table, width)?)?;
        cpu::embedding::forward(table.floats()?, width, ids.ids()?, out.floats_mut()?);
        Ok(())
    }

    fn embedding_gradient(
        &self,
        d_out: &CpuBuffer,
        width: usize,
        ids: &CpuBuffer,
        accumulate: Accumulate,
        d_table: &mut CpuBuffer,
    ) -> Result<()> {
        expect_length("the gradient of embedded tokens", ids.len() * width, d_out.len())?;
        expect_tokens("inputs", ids.ids()?, rows_of("the embedding's gradient", d_table, width)?)?;
        cpu::embedding::gradient(d_out.floats()?, width, ids.ids()?, accumulate, d_table.floats_mut()?);
        Ok(())
    }

    fn layer_norm(
        &self,
        x: &CpuBuffer,
        [gain, bias]: [&CpuBuffer; 2],
        epsilon: f32,
        y: &mut CpuBuffer,
        [mean, rstd]: [&mut CpuBuffer; 2],
    ) -> Result<()> {
        let tokens = rows_of("the input of a norm", x, gain.len())?;
        expect_length("the bias of a norm", gain.len(), bias.len())?;
        expect_length("the output of a norm", x.len(), y.len())?;
        expect_length("the means of a norm", tokens, mean.len())?;
        expect_length("the deviations of a norm", tokens, rstd.len())?;
        let (x, parameters) = (x.floats()?, [gain.floats()?, bias.floats()?]);
        let statistics = [mean.floats_mut()?, rstd.floats_mut()?];
        cpu::layer_norm::forward(x, parameters, epsilon, y.floats_mut()?, statistics);
        Ok(())
    }

    fn layer_norm_gradient(
        &self,
        (x, gain, [mean, rstd]): (&CpuBuffer, &CpuBuffer, [&CpuBuffer; 2]),
        dy: &CpuBuffer,
        dx: &mut CpuBuffer,
        accumulate: Accumulate,
        gradients: [&mut CpuBuffer; 2],
    ) -> Result<()> {
        let (tokens, width) = (rows_of("the input of a norm", x, gain.len())?, gain.len());
        expect_length("the gradient of a norm's output", x.len(), dy.len())?;
        expect_length("the gradient of a norm's input", x.len(), dx.len())?;
        expect_length("the means of a norm", tokens, mean.len())?;
        expect_length("the deviations of a norm", tokens, rstd.len())?;
        let mut sums = vec![0f32; 2 * width];
        let saved = (x.floats()?, gain.floats()?, [mean.floats()?, rstd.floats()?]);
        cpu::layer_norm::backward(saved, dy.floats()?, dx.floats_mut()?, &mut sums);
        for (gradient, sums) in gradients.into_iter().zip(sums.chunks(width.max(1))) {
            expect_length("the gradient of a norm's parameter", width, gradient.len())?;
            let gradient = gradient.floats_mut()?;
            match accumulate {
                Accumulate::Overwrite => gradient.copy_from_slice(sums),
                Accumulate::Add => gradient.iter_mut().zip(sums).for_each(|(g, s)| *g += s),
            }
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        x: &CpuBuffer,
        gain: &CpuBuffer,
        epsilon: f32,
        y: &mut CpuBuffer,
        _: &mut CpuBuffer,
    ) -> Result<()> {
        rows_of("the input of a norm", x, gain.len())?;
        expect_length("the output of a norm", x.len(), y.len())?;
        cpu::rms_norm::forward(x.floats()?, gain.floats()?, epsilon, y.floats_mut()?);
        Ok(())
    }

    fn rms_norm_gradient(
        &self,
        (x, gain, _): (&CpuBuffer, &CpuBuffer, &CpuBuffer),
        epsilon: f32,
        dy: &CpuBuffer,
        dx: &mut CpuBuffer,
        accumulate: Accumulate,
        d_gain: &mut CpuBuffer,
    ) -> Result<()> {
        rows_of("the input of a norm", x, gain.len())?;
        expect_length("the gradient of a norm's output", x.len(), dy.len())?;
        expect_length("the gradient of a norm's input", x.len(), dx.len())?;
        expect_length("the gradient of a norm's parameter", gain.len(), d_gain.len())?;
        if accumulate == Accumulate::Overwrite {
            self.clear(d_gain)?;
        }
        cpu::rms_norm::backward(
            x.floats()?,
            gain.floats()?,
            epsilon,
            dy.floats()?,
            dx.floats_mut()?,
            d_gain.floats_mut()?,
        );
        Ok(())
    }

    fn rotary(&self, positions: usize, frequencies: &[f64]) -> Result<Table> {
        Ok(Table::of(0..positions, frequencies))
    }

    fn attention(
        &self,
        shape: AttentionShape,
        qkv: &mut CpuBuffer,
        rotary: Option<&Table>,
        merged: &mut CpuBuffer,
    ) -> Result<CpuAttention> {
        attention::forward(shape, qkv, rotary, merged)
    }

    fn attention_gradient(
        &self,
        shape: AttentionShape,
        (state, _, _): (CpuAttention, &CpuBuffer, &CpuBuffer),
        rotary: Option<&Table>,
        d_merged: &CpuBuffer,
        d_qkv: &mut CpuBuffer,
    ) -> Result<()> {
        attention::gradient(shape, state, rotary, d_merged, d_qkv)
    }

    fn activation(&self, function: Nonlinearity, x: &CpuBuffer, y: &mut CpuBuffer) -> Result<()> {
        expect_length("the output of an activation", x.len(), y.len())?;
        cpu::nonlinearity::forward(function, x.floats()?, y.floats_mut()?);
        Ok(())
    }

    fn activation_gradient(&self, function: Nonlinearity, x: &CpuBuffer, dy: &mut CpuBuffer) -> Result<()> {
        expect_length("the gradient of an activation", x.len(), dy.len())?;
        cpu::nonlinearity::gradient_in_place(function, x.floats()?, dy.floats_mut()?);
        Ok(())
    }

    fn gated(&self, function: Nonlinearity, width: usize, x: &CpuBuffer, y: &mut CpuBuffer) -> Result<()> {
        let tokens = rows_of("the input of a gated function", x, 2 * width)?;
        expect_length("the output of a gated function", tokens * width, y.len())?;
        cpu::nonlinearity::gated(function, width, x.floats()?, y.floats_mut()?);
        Ok(())
    }

    fn gated_gradient(
        &self,
        function: Nonlinearity,
        width: usize,
        x: &CpuBuffer,
        dy: &CpuBuffer,
        dx: &mut CpuBuffer,
    ) -> Result<()> {
        let tokens = rows_of("the input of a gated function", x, 2 * width)?;
        expect_length("the gradient of a gated function's output", tokens * width, dy.len())?;
        expect_length("the gradient of a gated function's input", x.len(), dx.len())?;
        cpu::nonlinearity::gated_gradient(function, width, x.floats()?, dy.floats()?, dx.floats_mut()?);
        Ok(())
    }

    fn scale_rows(&self, factors: &CpuBuffer, x: &mut CpuBuffer) -> Result<()> {
        rows_of("rows that are scaled", x, factors.len())?;
        let factors = factors.floats()?;
        rows::for_each(x.floats_mut()?, factors.len(), |_, x| {
            let rows = x.chunks_exact_mut(factors.len());
            rows.for_each(|row| row.iter_mut().zip(factors).for_each(|(x, factor)| *x *= factor));
        });
        Ok(())
    }

    fn soft_cap(&self, cap: f32, x: &CpuBuffer, y: &mut CpuBuffer) -> Result<()> {
        expect_length("bounded scores", x.len(), y.len())?;
        cpu::soft_cap::forward(cap, x.floats()?, y.floats_mut()?);
        Ok(())
    }

    fn soft_cap_gradient(&self, cap: f32, x: &CpuBuffer, dy: &mut CpuBuffer) -> Result<()> {
        expect_length("the gradient of bounded scores", x.len(), dy.len())?;
        cpu::soft_cap::gradient_in_place(cap, x.floats()?, dy.floats_mut()?);
        Ok(())
    }

    fn add(&self, x: &CpuBuffer, y: &mut CpuBuffer) -> Result<()> {
        expect_length("a sum", x.len(), y.len())?;
        let x = x.floats()?;
        rows::for_each(y.floats_mut()?, 1, |first, y| {
            y.iter_mut().zip(&x[first..]).for_each(|(y, x)| *y += x);
        });
        Ok(())
    }

    fn cross_entropy(
        &self,
        classes: usize,
        logits: &mut CpuBuffer,
        targets: &CpuBuffer,
        gradient_scale: Option<f32>,
        loss: &mut CpuBuffer,
    ) -> Result<()> {
        expect_length("logits", targets.len() * classes, logits.len())?;
        expect_length("the loss", 1, loss.len())?;
        let targets = targets.ids()?;
        expect_tokens("targets", targets, classes)?;
        let logits = logits.floats_mut()?;
        loss.floats_mut()?[0] += cpu::cross_entropy::loss(logits, classes, targets) as f32;
        if let Some(scale) = gradient_scale {
            cpu::cross_entropy::gradient_in_place(logits, classes, targets, scale);
        }
        Ok(())
    }
}

/// An error for the first token that is not below the vocabulary.
fn expect_tokens(what: &'static str, ids: &[u32], vocabulary: usize) -> Result<()> {
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocabulary) {
        None => Ok(()),
        Some((position, &token)) => Err(Error::Token { what, token, position, vocabulary }),
    }
}
