//! f32 on the CPU, in parallel on rayon's current pool.

mod activation;
mod attention;
mod buffer;
mod sparse;
#[cfg(test)]
mod tests;

use twofour::{
    DataType,
    kernel::Epilogue,
    layer::{self, Accumulate, Activation, PackedActivation, SparseLinearSettings},
    select::Transposable,
};

use super::{
    AdamWState, AdamWStep, AttentionShape, Buffer as _, Engine, Kind, LinearShape, Nonlinearity, SgdState, SgdStep,
    SparseLayer as _, StepFindings, StepLimits, mask_words_of_row, operands::expect_unscaled,
};
use crate::{
    Error, Result,
    cpu::{self, adamw::AdamWSlices, rope::Table, rows, sgd::SgdSlices},
    optim::clip_factor,
};

pub use attention::CpuAttention;
pub use buffer::CpuBuffer;
use buffer::expect_length;
pub use sparse::CpuSparseLinear;

/// The CPU. Its compute type is f32, so parameters have no copies.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuEngine;

/// What was decided about a step.
#[derive(Debug, Clone, Copy)]
pub struct CpuStepGuard {
    loss: f64,
    norm: f64,
    /// What gradients are multiplied by.
    factor: f32,
}

impl CpuStepGuard {
    fn skips(&self) -> bool {
        !(self.loss.is_finite() && self.norm.is_finite())
    }
}

/// Number of rows of `width` elements in a buffer.
fn rows_of(what: &'static str, buffer: &CpuBuffer, width: usize) -> Result<usize> {
    let rows = buffer.len().checked_div(width).unwrap_or(0);
    expect_length(what, rows * width, buffer.len())?;
    Ok(rows)
}

impl LinearShape {
    fn expect(&self, x: &CpuBuffer, y: &CpuBuffer, weight: &CpuBuffer) -> Result<(usize, usize, usize)> {
        let LinearShape { tokens, out_features, in_features } = *self;
        expect_length("the input of a linear layer", tokens * in_features, x.len())?;
        expect_length("the output of a linear layer", tokens * out_features, y.len())?;
        expect_length("the weight of a linear layer", out_features * in_features, weight.len())?;
        Ok((tokens, out_features, in_features))
    }
}

impl Engine for CpuEngine {
    type Buffer = CpuBuffer;
    type AttentionState = CpuAttention;
    type Rotary = Table;
    type PackedActivation = PackedActivation<f32>;
    type SparseLinear = CpuSparseLinear;
    type StepGuard = CpuStepGuard;

    fn name(&self) -> &'static str {
        "cpu"
    }

    fn compute_type(&self) -> DataType {
        DataType::F32
    }

    fn zeros(&self, kind: Kind, len: usize) -> Result<CpuBuffer> {
        Ok(CpuBuffer::zeros(kind, len))
    }

    fn clear(&self, buffer: &mut CpuBuffer) -> Result<()> {
        buffer.floats_mut()?.fill(0.0);
        Ok(())
    }

    fn write(&self, buffer: &mut CpuBuffer, values: &[f32]) -> Result<()> {
        expect_length("values to write", buffer.len(), values.len())?;
        buffer.floats_mut()?.copy_from_slice(values);
        Ok(())
    }

    fn write_ids(&self, buffer: &mut CpuBuffer, ids: &[u32]) -> Result<()> {
        expect_length("tokens to write", buffer.len(), ids.len())?;
        buffer.ids_mut()?.copy_from_slice(ids);
        Ok(())
    }

    fn read(&self, buffer: &CpuBuffer) -> Result<Vec<f32>> {
        Ok(buffer.floats()?.to_vec())
    }

    fn round(&self, from: &CpuBuffer, to: &mut CpuBuffer) -> Result<()> {
        self.write(to, from.floats()?)
    }

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

    fn activation(&self, activation: Activation, x: &CpuBuffer, y: &mut CpuBuffer) -> Result<()> {
        expect_length("the output of an activation", x.len(), y.len())?;
        cpu::activation::forward(activation, x.floats()?, y.floats_mut()?);
        Ok(())
    }

    fn activation_gradient(&self, activation: Activation, x: &CpuBuffer, dy: &mut CpuBuffer) -> Result<()> {
        expect_length("the gradient of an activation", x.len(), dy.len())?;
        cpu::activation::backward_in_place(activation, x.floats()?, dy.floats_mut()?);
        Ok(())
    }

    fn squared_relu(&self, x: &CpuBuffer, y: &mut CpuBuffer) -> Result<()> {
        activation::squared_relu(x, y)
    }

    fn squared_relu_gradient(&self, x: &CpuBuffer, dy: &mut CpuBuffer) -> Result<()> {
        activation::squared_relu_gradient(x, dy)
    }

    fn pack_squared_relu(
        &self,
        rule: Transposable,
        x: &CpuBuffer,
        width: usize,
        old: Option<PackedActivation<f32>>,
    ) -> Result<PackedActivation<f32>> {
        drop(old);
        activation::pack(rule, x, width)
    }

    fn packed_linear(
        &self,
        shape: LinearShape,
        x: &PackedActivation<f32>,
        weight: &CpuBuffer,
        bias: Option<&CpuBuffer>,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        activation::linear(shape, x, weight, bias, y)
    }

    fn packed_weight_gradient(
        &self,
        shape: LinearShape,
        dy: &CpuBuffer,
        x: &PackedActivation<f32>,
        accumulate: Accumulate,
        dw: &mut CpuBuffer,
    ) -> Result<()> {
        activation::weight_gradient(shape, dy, x, accumulate, dw)
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

    fn linear(
        &self,
        shape: LinearShape,
        x: &CpuBuffer,
        weight: &CpuBuffer,
        bias: Option<&CpuBuffer>,
        y: &mut CpuBuffer,
    ) -> Result<()> {
        let dims = shape.expect(x, y, weight)?;
        let bias = bias.map(CpuBuffer::floats).transpose()?;
        expect_length("the bias of a linear layer", shape.out_features, bias.map_or(shape.out_features, <[f32]>::len))?;
        let epilogue = Epilogue { bias, activation: Activation::Identity };
        cpu::dense::forward(x.floats()?, weight.floats()?, dims, epilogue, y.floats_mut()?)
    }

    fn input_gradient(&self, shape: LinearShape, dy: &CpuBuffer, weight: &CpuBuffer, dx: &mut CpuBuffer) -> Result<()> {
        let dims = shape.expect(dx, dy, weight)?;
        cpu::dense::input_gradient(dy.floats()?, weight.floats()?, dims, dx.floats_mut()?)
    }

    fn weight_gradient(
        &self,
        shape: LinearShape,
        dy: &CpuBuffer,
        x: &CpuBuffer,
        accumulate: Accumulate,
        dw: &mut CpuBuffer,
    ) -> Result<()> {
        let dims = shape.expect(x, dy, dw)?;
        cpu::dense::weight_gradient(dy.floats()?, x.floats()?, dims, accumulate, dw.floats_mut()?)
    }

    fn bias_gradient(&self, dy: &CpuBuffer, accumulate: Accumulate, db: &mut CpuBuffer) -> Result<()> {
        let tokens = rows_of("the output gradient", dy, db.len())?;
        Ok(layer::bias_gradient(dy.floats()?, tokens, accumulate, db.floats_mut()?)?)
    }

    fn sparse_linear(
        &self,
        master: &CpuBuffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
    ) -> Result<CpuSparseLinear> {
        CpuSparseLinear::new(master, shape, settings)
    }

    fn float8_sparse_linear(
        &self,
        master: &CpuBuffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
    ) -> Result<CpuSparseLinear> {
        CpuSparseLinear::with_float8(master, shape, settings)
    }

    fn keep_of_four(&self, count: u32, weight: &CpuBuffer, cols: usize, kept: &mut CpuBuffer) -> Result<()> {
        rows_of("a weight to prune", weight, cols)?;
        expect_length("a pruned weight", weight.len(), kept.len())?;
        cpu::keep_of_four::keep(count, weight.floats()?, cols, kept.floats_mut()?);
        Ok(())
    }

    fn apply_mask(&self, mask: &CpuBuffer, cols: usize, weight: &CpuBuffer, masked: &mut CpuBuffer) -> Result<()> {
        let rows = rows_of("a weight to mask", weight, cols)?;
        expect_length("a mask", rows * mask_words_of_row(cols), mask.len())?;
        expect_length("a masked weight", weight.len(), masked.len())?;
        cpu::masking::apply(mask.ids()?, cols, weight.floats()?, masked.floats_mut()?);
        Ok(())
    }

    fn apply_mask_in_place(&self, mask: &CpuBuffer, cols: usize, values: &mut CpuBuffer) -> Result<()> {
        let rows = rows_of("values to mask", values, cols)?;
        expect_length("a mask", rows * mask_words_of_row(cols), mask.len())?;
        cpu::masking::apply_in_place(mask.ids()?, cols, values.floats_mut()?);
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

    fn step_guard(&self, _: usize) -> Result<CpuStepGuard> {
        Ok(CpuStepGuard { loss: 0.0, norm: 0.0, factor: 1.0 })
    }

    fn judge(
        &self,
        gradients: &[&CpuBuffer],
        loss: &CpuBuffer,
        limits: StepLimits,
        guard: &mut CpuStepGuard,
    ) -> Result<()> {
        let StepLimits { clip_norm, loss_scale } = limits;
        expect_length("the loss", 1, loss.len())?;
        let norm = self.gradient_norm(gradients)? / f64::from(loss_scale);
        let factor = clip_factor(norm, clip_norm) / f64::from(loss_scale);
        *guard = CpuStepGuard { loss: f64::from(loss.floats()?[0]), norm, factor: factor as f32 };
        Ok(())
    }

    fn findings(&self, guard: &mut CpuStepGuard, layers: &[&CpuSparseLinear]) -> Result<StepFindings> {
        let flips = layers.iter().map(|layer| layer.flips()).collect::<Result<_>>()?;
        Ok(StepFindings { loss: guard.loss, norm: guard.norm, flips })
    }

    fn refresh(
        &self,
        layer: &mut CpuSparseLinear,
        master: &CpuBuffer,
        selects_mask: bool,
        guard: &CpuStepGuard,
    ) -> Result<()> {
        match (guard.skips(), selects_mask) {
            (true, _) => Ok(()),
            (false, true) => layer.remask(master),
            (false, false) => layer.repack(master),
        }
    }

    fn gradient_norm(&self, gradients: &[&CpuBuffer]) -> Result<f64> {
        let mut sum = 0.0;
        for gradient in gradients {
            sum += cpu::adamw::sum_of_squares(gradient.floats()?);
        }
        Ok(sum.sqrt())
    }

    fn adamw(
        &self,
        step: &AdamWStep,
        state: AdamWState<'_, CpuBuffer, CpuSparseLinear>,
        guard: Option<&CpuStepGuard>,
    ) -> Result<f64> {
        let Some(gradient_scale) = scale_of(guard, step.gradient_scale)? else { return Ok(0.0) };
        let step = &AdamWStep { gradient_scale, ..*step };
        let AdamWState { master, gradient, first, second, copy, sparse } = state;
        for (what, found) in [("a gradient", gradient), ("a first moment", &*first), ("a second moment", &*second)] {
            expect_length(what, master.len(), found.len())?;
        }
        let mask = sparse.map(|sparse| sparse.layer().mask());
        if let Some(mask) = mask {
            expect_length("a masked parameter", mask.rows() * mask.cols(), master.len())?;
        }
        let slices = AdamWSlices {
            parameter: master.floats_mut()?,
            gradient: gradient.floats()?,
            first: first.floats_mut()?,
            second: second.floats_mut()?,
        };
        let changes = cpu::adamw::step(step, slices, mask);
        if let Some(copy) = copy {
            self.round(master, copy)?;
        }
        Ok(changes)
    }

    fn sgd(
        &self,
        step: &SgdStep,
        state: SgdState<'_, CpuBuffer, CpuSparseLinear>,
        guard: Option<&CpuStepGuard>,
    ) -> Result<()> {
        let Some(gradient_scale) = scale_of(guard, step.gradient_scale)? else { return Ok(()) };
        let step = &SgdStep { gradient_scale, ..*step };
        let SgdState { master, gradient, momentum, copy, sparse } = state;
        expect_length("a gradient", master.len(), gradient.len())?;
        expect_length("a momentum", master.len(), momentum.len())?;
        let mask = sparse.map(|sparse| sparse.layer().mask());
        if let Some(mask) = mask {
            expect_length("a masked parameter", mask.rows() * mask.cols(), master.len())?;
        }
        let slices = SgdSlices {
            parameter: master.floats_mut()?,
            gradient: gradient.floats()?,
            momentum: momentum.floats_mut()?,
        };
        cpu::sgd::step(step, slices, mask);
        copy.map_or(Ok(()), |copy| self.round(master, copy))
    }

    /// On a thread of rayon's pool: from outside, each of a step's many parallel loops would wake the pool and wait for it.
    fn scope<R: Send>(work: impl FnOnce() -> R + Send) -> R {
        rayon::scope(|_| work())
    }
}

/// What an optimizer multiplies gradients by; none where the guard skips the step.
fn scale_of(guard: Option<&CpuStepGuard>, own: f32) -> Result<Option<f32>> {
    match guard {
        Some(guard) if guard.skips() => Ok(None),
        Some(guard) => expect_unscaled("cpu", own).map(|()| Some(guard.factor)),
        None => Ok(Some(own)),
    }
}

/// An error for the first token that is not below the vocabulary.
fn expect_tokens(what: &'static str, ids: &[u32], vocabulary: usize) -> Result<()> {
    match ids.iter().enumerate().find(|(_, id)| **id as usize >= vocabulary) {
        None => Ok(()),
        Some((position, &token)) => Err(Error::Token { what, token, position, vocabulary }),
    }
}
