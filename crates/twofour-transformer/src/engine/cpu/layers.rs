//! Operations between linear layers on the CPU.

use twofour::layer::Accumulate;

use super::{CpuAttention, CpuBuffer, CpuEngine, attention, buffer::expect_length, norm, rows_of};
use crate::{
    Error, Result,
    cpu::{self, rope::Table, rows},
    engine::{
        AttentionShape, Buffer as _, DistillationWeights, Elementwise, ErrorMeasure, LayerOperations,
        LinearOperations as _, Nonlinearity, NormGradients, NormInput, NormParameters, NormStatistics,
    },
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

    fn norm(
        &self,
        norm: NormParameters<'_, CpuBuffer>,
        input: NormInput<'_, CpuBuffer>,
        y: &mut CpuBuffer,
        statistics: NormStatistics<&mut CpuBuffer>,
    ) -> Result<()> {
        match input {
            NormInput::Tensor(x) => norm::forward(norm, x, y, statistics),
            NormInput::Sum(x, sum) => {
                self.add(x, sum)?;
                norm::forward(norm, sum, y, statistics)
            }
        }
    }

    fn norm_gradient(
        &self,
        norm: NormParameters<'_, CpuBuffer>,
        saved: (&CpuBuffer, NormStatistics<&CpuBuffer>),
        dy: &CpuBuffer,
        dx: &mut CpuBuffer,
        accumulate: Accumulate,
        gradients: NormGradients<'_, CpuBuffer>,
    ) -> Result<()> {
        norm::gradient(norm, saved, (dy, dx), accumulate, gradients)
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

    fn activation(&self, function: Elementwise, x: &CpuBuffer, y: &mut CpuBuffer) -> Result<()> {
        expect_length("the output of an activation", x.len(), y.len())?;
        let (x, y) = (x.floats()?, y.floats_mut()?);
        match function {
            Elementwise::Hidden(function) => cpu::nonlinearity::forward(function, x, y),
            Elementwise::SoftCap(cap) => cpu::soft_cap::forward(cap, x, y),
        }
        Ok(())
    }

    fn activation_gradient(
        &self,
        function: Elementwise,
        x: &CpuBuffer,
        dy: &mut CpuBuffer,
        bias: Option<(Accumulate, &mut CpuBuffer)>,
    ) -> Result<()> {
        expect_length("the gradient of an activation", x.len(), dy.len())?;
        match function {
            Elementwise::Hidden(function) => {
                cpu::nonlinearity::gradient_in_place(function, x.floats()?, dy.floats_mut()?);
            }
            Elementwise::SoftCap(cap) => cpu::soft_cap::gradient_in_place(cap, x.floats()?, dy.floats_mut()?),
        }
        bias.map_or(Ok(()), |(accumulate, db)| self.bias_gradient(dy, accumulate, db))
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

    fn distillation(
        &self,
        weights: DistillationWeights,
        classes: usize,
        (logits, teacher): (&mut CpuBuffer, &CpuBuffer),
        targets: &CpuBuffer,
        gradient_scale: f32,
        loss: &mut CpuBuffer,
    ) -> Result<()> {
        expect_length("logits", targets.len() * classes, logits.len())?;
        expect_length("the teacher's logits", logits.len(), teacher.len())?;
        expect_length("the loss", 1, loss.len())?;
        let targets = targets.ids()?;
        expect_tokens("targets", targets, classes)?;
        let scores = (logits.floats_mut()?, teacher.floats()?);
        let sum = cpu::distillation::loss_and_gradient(weights, classes, scores, targets, gradient_scale);
        loss.floats_mut()?[0] += sum as f32;
        Ok(())
    }

    fn squared_error(
        &self,
        measure: ErrorMeasure,
        width: usize,
        (x, target): (&CpuBuffer, &CpuBuffer),
        scaling: (f32, f32),
        dx: &mut CpuBuffer,
        loss: &mut CpuBuffer,
    ) -> Result<()> {
        rows_of("rows with an error", x, width)?;
        expect_length("target rows", x.len(), target.len())?;
        expect_length("the gradient of rows", x.len(), dx.len())?;
        expect_length("the loss", 1, loss.len())?;
        let rows = (x.floats()?, target.floats()?);
        let sum = cpu::squared_error::loss_and_gradient(measure, width, rows, scaling, dx.floats_mut()?);
        loss.floats_mut()?[0] += sum as f32;
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
