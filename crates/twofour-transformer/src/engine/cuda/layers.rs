//! Operations between linear layers on a GPU.

use twofour::{DataType, layer::Accumulate};
use twofour_cuda::layer;

use super::{
    CudaAttention, CudaBuffer, CudaEngine, CudaRotary, attention,
    functions::{element_function, gate},
    norm, rows_of,
};
use crate::{
    Result, cuda as kernels,
    cuda::{ElementFunction, Embedding, LossFactor},
    engine::{
        AttentionShape, Buffer as _, DistillationWeights, Elementwise, ErrorMeasure, LayerOperations,
        LinearOperations as _, Nonlinearity, NormGradients, NormInput, NormParameters, NormStatistics,
    },
};

impl LayerOperations for CudaEngine {
    type AttentionState = CudaAttention;
    type Rotary = CudaRotary;

    fn embedding(&self, table: &CudaBuffer, width: usize, ids: &CudaBuffer, out: &mut CudaBuffer) -> Result<()> {
        let vocabulary = rows_of(table, width);
        let embedding = Embedding { tokens: ids.len(), vocabulary, width, positions: 0 };
        let mut status = self.pool.take(&self.context, DataType::I32, 1)?;
        let tables = (table.slice(), None);
        let status_at = status.as_slice_mut();
        kernels::embedding_forward(&self.context, embedding, ids.slice(), tables, out.slice_mut(), status_at)?;
        self.pool.give(status);
        Ok(())
    }

    fn embedding_gradient(
        &self,
        d_out: &CudaBuffer,
        width: usize,
        ids: &CudaBuffer,
        accumulate: Accumulate,
        d_table: &mut CudaBuffer,
    ) -> Result<()> {
        let vocabulary = rows_of(d_table, width);
        let embedding = Embedding { tokens: ids.len(), vocabulary, width, positions: 0 };
        let mut status = self.pool.take(&self.context, DataType::I32, 1)?;
        let tables = (d_table.slice_mut(), None);
        kernels::embedding_gradient(
            &self.context,
            embedding,
            ids.slice(),
            d_out.slice(),
            tables,
            accumulate,
            status.as_slice_mut(),
        )?;
        self.pool.give(status);
        Ok(())
    }

    fn norm(
        &self,
        norm: NormParameters<'_, CudaBuffer>,
        input: NormInput<'_, CudaBuffer>,
        y: &mut CudaBuffer,
        statistics: NormStatistics<&mut CudaBuffer>,
    ) -> Result<()> {
        norm::forward(&self.context, norm, input, y, statistics)
    }

    fn norm_gradient(
        &self,
        norm: NormParameters<'_, CudaBuffer>,
        saved: (&CudaBuffer, NormStatistics<&CudaBuffer>),
        dy: &CudaBuffer,
        dx: &mut CudaBuffer,
        accumulate: Accumulate,
        gradients: NormGradients<'_, CudaBuffer>,
    ) -> Result<()> {
        norm::gradient(&self.context, norm, saved, (dy, dx), accumulate, gradients)
    }

    fn rotary(&self, positions: usize, frequencies: &[f64]) -> Result<CudaRotary> {
        Ok(CudaRotary::new(positions, frequencies))
    }

    fn attention(
        &self,
        shape: AttentionShape,
        qkv: &mut CudaBuffer,
        rotary: Option<&CudaRotary>,
        merged: &mut CudaBuffer,
    ) -> Result<CudaAttention> {
        attention::forward((&self.context, &self.pool), shape, qkv, rotary, merged)
    }

    fn attention_gradient(
        &self,
        shape: AttentionShape,
        saved: (CudaAttention, &CudaBuffer, &CudaBuffer),
        rotary: Option<&CudaRotary>,
        d_merged: &CudaBuffer,
        d_qkv: &mut CudaBuffer,
    ) -> Result<()> {
        attention::gradient((&self.context, &self.pool), shape, saved, rotary, (d_merged, d_qkv))
    }

    fn release_attention(&self, state: CudaAttention) {
        attention::release(&self.pool, state);
    }

    fn activation(&self, function: Elementwise, x: &CudaBuffer, y: &mut CudaBuffer) -> Result<()> {
        let (context, x, y) = (&self.context, x.slice(), y.slice_mut());
        match function {
            Elementwise::Hidden(function) => kernels::activation_forward(context, element_function(function), x, y)?,
            Elementwise::SoftCap(cap) => kernels::soft_cap(context, cap, x, y)?,
        }
        Ok(())
    }

    /// One kernel has the gradients of an activation and of a bias.
    fn activation_gradient(
        &self,
        function: Elementwise,
        x: &CudaBuffer,
        dy: &mut CudaBuffer,
        bias: Option<(Accumulate, &mut CudaBuffer)>,
    ) -> Result<()> {
        let (context, x) = (&self.context, x.slice());
        match (function, bias) {
            (Elementwise::Hidden(function), bias) => match (element_function(function), bias) {
                (ElementFunction::Activation(activation), Some((accumulate, db))) => {
                    let tokens = rows_of(dy, db.len());
                    let (dy, db) = (dy.slice_mut(), db.slice_mut());
                    Ok(layer::activation_and_bias_gradient(context, activation, x, dy, tokens, accumulate, db)?)
                }
                (function, bias) => {
                    kernels::activation_backward_in_place(context, function, x, dy.slice_mut())?;
                    bias.map_or(Ok(()), |(accumulate, db)| self.bias_gradient(dy, accumulate, db))
                }
            },
            (Elementwise::SoftCap(cap), bias) => {
                kernels::soft_cap_gradient(context, cap, x, dy.slice_mut())?;
                bias.map_or(Ok(()), |(accumulate, db)| self.bias_gradient(dy, accumulate, db))
            }
        }
    }

    fn gated(&self, function: Nonlinearity, width: usize, x: &CudaBuffer, y: &mut CudaBuffer) -> Result<()> {
        let shape = (rows_of(y, width), width);
        Ok(kernels::gated_forward(&self.context, gate(function)?, shape, x.slice(), y.slice_mut())?)
    }

    fn gated_gradient(
        &self,
        function: Nonlinearity,
        width: usize,
        x: &CudaBuffer,
        dy: &CudaBuffer,
        dx: &mut CudaBuffer,
    ) -> Result<()> {
        let shape = (rows_of(dy, width), width);
        let (x, dy, dx) = (x.slice(), dy.slice(), dx.slice_mut());
        Ok(kernels::gated_backward(&self.context, gate(function)?, shape, x, dy, dx)?)
    }

    fn scale_rows(&self, factors: &CudaBuffer, x: &mut CudaBuffer) -> Result<()> {
        let shape = (rows_of(x, factors.len()), factors.len());
        Ok(kernels::scale_rows(&self.context, shape, factors.slice(), x.slice_mut())?)
    }

    fn add(&self, x: &CudaBuffer, y: &mut CudaBuffer) -> Result<()> {
        Ok(kernels::add_in_place(&self.context, x.slice(), y.slice_mut())?)
    }

    fn cross_entropy(
        &self,
        classes: usize,
        logits: &mut CudaBuffer,
        targets: &CudaBuffer,
        gradient_scale: Option<f32>,
        loss: &mut CudaBuffer,
    ) -> Result<()> {
        let (context, shape, targets) = (&self.context, (targets.len(), classes), targets.slice());
        let (loss, add) = (loss.slice_mut(), Accumulate::Add);
        let mut status = self.pool.take(context, DataType::I32, 1)?;
        let at = status.as_slice_mut();
        match gradient_scale {
            Some(host) => {
                let factor = LossFactor { host, device: None };
                kernels::cross_entropy(context, shape, logits.slice_mut(), targets, factor, loss, add, at)?;
            }
            None => kernels::cross_entropy_loss(context, shape, logits.slice(), targets, loss, add, at)?,
        }
        self.pool.give(status);
        Ok(())
    }

    fn distillation(
        &self,
        weights: DistillationWeights,
        classes: usize,
        (logits, teacher): (&mut CudaBuffer, &CudaBuffer),
        targets: &CudaBuffer,
        gradient_scale: f32,
        loss: &mut CudaBuffer,
    ) -> Result<()> {
        let (context, shape) = (&self.context, (targets.len(), classes));
        let factor = LossFactor { host: gradient_scale, device: None };
        let (scores, loss) = ((logits.slice_mut(), teacher.slice()), loss.slice_mut());
        let mut status = self.pool.take(context, DataType::I32, 1)?;
        let at = status.as_slice_mut();
        kernels::distillation(context, weights, shape, scores, targets.slice(), factor, loss, Accumulate::Add, at)?;
        self.pool.give(status);
        Ok(())
    }

    fn squared_error(
        &self,
        measure: ErrorMeasure,
        width: usize,
        (x, target): (&CudaBuffer, &CudaBuffer),
        scaling: (f32, f32),
        dx: &mut CudaBuffer,
        loss: &mut CudaBuffer,
    ) -> Result<()> {
        let (shape, rows) = ((rows_of(x, width), width), (x.slice(), target.slice()));
        Ok(kernels::squared_error(&self.context, measure, shape, rows, scaling, dx.slice_mut(), loss.slice_mut())?)
    }
}
