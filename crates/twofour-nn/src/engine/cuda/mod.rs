//! NVIDIA GPUs, over [`twofour_cuda`]. Activations and GEMM operands are f32, f16 or bf16; 2:4 layers require f16 or bf16.

mod activation;
mod attention;
mod buffer;
mod control;
mod guard;
mod norm;
mod optimizer;
mod repeat;
mod sgd;
mod sparse;

use std::sync::Mutex;

use twofour::{
    DataType,
    layer::{Accumulate, Activation, SparseLinearSettings},
    select::Transposable,
};
use twofour_cuda::{
    Device,
    layer::{self, DeviceBuffer, LayerContext},
    measure::PhaseMarks,
    transformer::{self, DenseLinear, ElementFunction, Embedding, Gate, LossFactor, NormInput},
};

use super::{
    AdamWState, AdamWStep, AttentionShape, Buffer as _, Engine, Kind, LayerRefresh, LinearShape, Nonlinearity,
    SgdState, SgdStep, SparseLayer as _, StepFindings, StepLimits, StepPhase,
};
use crate::{Error, Result};

pub use activation::CudaPackedActivation;
pub use attention::{CudaAttention, CudaRotary};
pub use buffer::CudaBuffer;
use buffer::Pool;
pub use guard::CudaStepGuard;
use optimizer::Optimizer;
use repeat::Repeats;
pub use sparse::CudaSparseLinear;

/// A GPU and a stream of it.
#[derive(Debug)]
pub struct CudaEngine {
    context: LayerContext,
    compute: DataType,
    optimizer: Mutex<Optimizer>,
    /// The factor of gradients in [`Engine::sgd`], and its copy in device memory.
    gradient_scale: Mutex<Option<(f32, DeviceBuffer)>>,
    pool: Pool,
    /// Where phases begin, while they are measured.
    phases: Mutex<Option<PhaseMarks>>,
    repeats: Mutex<Repeats>,
}

impl CudaEngine {
    /// The engine on a device, with activations and GEMMs in `compute`: f32, f16 or bf16. It times no GEMMs to choose among them, so that a run that is
    /// resumed by another process repeats bit for bit; [`CudaEngine::on`] with another context does otherwise.
    ///
    /// # Errors
    /// Another type; those of creating a stream and of loading kernels.
    pub fn new(device: &Device, compute: DataType) -> Result<Self> {
        let stream = LayerContext::new(device)?.stream().clone();
        Self::on(LayerContext::repeatable(device, stream), compute)
    }

    /// The engine on an existing context.
    ///
    /// # Errors
    /// Those of [`CudaEngine::new`].
    pub fn on(context: LayerContext, compute: DataType) -> Result<Self> {
        transformer::prepare(&context, compute)?;
        let optimizer = Mutex::new(Optimizer::new(&context)?);
        Ok(CudaEngine {
            context,
            compute,
            optimizer,
            gradient_scale: Mutex::new(None),
            pool: Pool::default(),
            phases: Mutex::default(),
            repeats: Mutex::default(),
        })
    }

    /// The context that work is launched on.
    pub fn context(&self) -> &LayerContext {
        &self.context
    }

    fn dtype(&self, kind: Kind) -> DataType {
        match kind {
            Kind::Wide => DataType::F32,
            Kind::Compute => self.compute,
            Kind::Index => DataType::I32,
        }
    }
}

/// Rows of `width` elements in a buffer; the operations check that there is no rest.
fn rows_of(buffer: &CudaBuffer, width: usize) -> usize {
    buffer.len().checked_div(width).unwrap_or(0)
}

impl Engine for CudaEngine {
    type Buffer = CudaBuffer;
    type AttentionState = CudaAttention;
    type Rotary = CudaRotary;
    type PackedActivation = CudaPackedActivation;
    type SparseLinear = CudaSparseLinear;
    type StepGuard = CudaStepGuard;

    fn name(&self) -> &'static str {
        "cuda"
    }

    fn compute_type(&self) -> DataType {
        self.compute
    }

    fn zeros(&self, kind: Kind, len: usize) -> Result<CudaBuffer> {
        CudaBuffer::zeros(&self.context, kind, self.dtype(kind), len)
    }

    fn clear(&self, buffer: &mut CudaBuffer) -> Result<()> {
        Ok(transformer::fill(&self.context, 0.0, buffer.slice_mut())?)
    }

    fn write(&self, buffer: &mut CudaBuffer, values: &[f32]) -> Result<()> {
        buffer.write(values)
    }

    fn write_ids(&self, buffer: &mut CudaBuffer, ids: &[u32]) -> Result<()> {
        buffer.write_ids(ids)
    }

    fn read(&self, buffer: &CudaBuffer) -> Result<Vec<f32>> {
        buffer.read()
    }

    fn round(&self, from: &CudaBuffer, to: &mut CudaBuffer) -> Result<()> {
        Ok(transformer::convert(&self.context, from.slice(), to.slice_mut())?)
    }

    fn embedding(&self, table: &CudaBuffer, width: usize, ids: &CudaBuffer, out: &mut CudaBuffer) -> Result<()> {
        let vocabulary = rows_of(table, width);
        let embedding = Embedding { tokens: ids.len(), vocabulary, width, positions: 0 };
        let mut status = self.pool.take(&self.context, DataType::I32, 1)?;
        let tables = (table.slice(), None);
        let status_at = status.as_slice_mut();
        transformer::embedding_forward(&self.context, embedding, ids.slice(), tables, out.slice_mut(), status_at)?;
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
        transformer::embedding_gradient(
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

    fn layer_norm(
        &self,
        x: &CudaBuffer,
        parameters: [&CudaBuffer; 2],
        epsilon: f32,
        y: &mut CudaBuffer,
        statistics: [&mut CudaBuffer; 2],
    ) -> Result<()> {
        norm::layer_forward(&self.context, NormInput::Tensor(x.slice()), parameters, epsilon, y, statistics)
    }

    fn add_layer_norm(
        &self,
        x: &CudaBuffer,
        sum: &mut CudaBuffer,
        parameters: [&CudaBuffer; 2],
        epsilon: f32,
        y: &mut CudaBuffer,
        statistics: [&mut CudaBuffer; 2],
    ) -> Result<()> {
        let input = NormInput::Sum(x.slice(), sum.slice_mut());
        norm::layer_forward(&self.context, input, parameters, epsilon, y, statistics)
    }

    fn layer_norm_gradient(
        &self,
        saved: (&CudaBuffer, &CudaBuffer, [&CudaBuffer; 2]),
        dy: &CudaBuffer,
        dx: &mut CudaBuffer,
        accumulate: Accumulate,
        gradients: [&mut CudaBuffer; 2],
    ) -> Result<()> {
        norm::layer_gradient(&self.context, saved, (dy, dx), accumulate, gradients)
    }

    fn rms_norm(
        &self,
        x: &CudaBuffer,
        gain: &CudaBuffer,
        epsilon: f32,
        y: &mut CudaBuffer,
        rstd: &mut CudaBuffer,
    ) -> Result<()> {
        norm::rms_forward(&self.context, NormInput::Tensor(x.slice()), gain, epsilon, y, rstd)
    }

    fn add_rms_norm(
        &self,
        x: &CudaBuffer,
        sum: &mut CudaBuffer,
        gain: &CudaBuffer,
        epsilon: f32,
        y: &mut CudaBuffer,
        rstd: &mut CudaBuffer,
    ) -> Result<()> {
        norm::rms_forward(&self.context, NormInput::Sum(x.slice(), sum.slice_mut()), gain, epsilon, y, rstd)
    }

    fn rms_norm_gradient(
        &self,
        saved: (&CudaBuffer, &CudaBuffer, &CudaBuffer),
        epsilon: f32,
        dy: &CudaBuffer,
        dx: &mut CudaBuffer,
        accumulate: Accumulate,
        d_gain: &mut CudaBuffer,
    ) -> Result<()> {
        norm::rms_gradient(&self.context, saved, epsilon, (dy, dx), accumulate, d_gain)
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

    fn activation(&self, activation: Activation, x: &CudaBuffer, y: &mut CudaBuffer) -> Result<()> {
        let function = ElementFunction::Activation(activation);
        Ok(transformer::activation_forward(&self.context, function, x.slice(), y.slice_mut())?)
    }

    fn activation_gradient(&self, activation: Activation, x: &CudaBuffer, dy: &mut CudaBuffer) -> Result<()> {
        Ok(layer::activation_gradient(&self.context, activation, x.slice(), dy.slice_mut())?)
    }

    fn squared_relu(&self, x: &CudaBuffer, y: &mut CudaBuffer) -> Result<()> {
        let function = ElementFunction::SquaredRelu;
        Ok(transformer::activation_forward(&self.context, function, x.slice(), y.slice_mut())?)
    }

    fn squared_relu_gradient(&self, x: &CudaBuffer, dy: &mut CudaBuffer) -> Result<()> {
        let function = ElementFunction::SquaredRelu;
        Ok(transformer::activation_backward_in_place(&self.context, function, x.slice(), dy.slice_mut())?)
    }

    fn pack_squared_relu(
        &self,
        rule: Transposable,
        x: &CudaBuffer,
        width: usize,
        old: Option<CudaPackedActivation>,
    ) -> Result<CudaPackedActivation> {
        activation::pack(&self.context, rule, (x, width), old)
    }

    fn packed_linear(
        &self,
        shape: LinearShape,
        x: &CudaPackedActivation,
        weight: &CudaBuffer,
        bias: Option<&CudaBuffer>,
        y: &mut CudaBuffer,
    ) -> Result<()> {
        activation::linear(shape, x, weight, bias, y)
    }

    fn packed_weight_gradient(
        &self,
        shape: LinearShape,
        dy: &CudaBuffer,
        x: &CudaPackedActivation,
        accumulate: Accumulate,
        dw: &mut CudaBuffer,
    ) -> Result<()> {
        activation::weight_gradient(shape, dy, x, accumulate, dw)
    }

    fn activation_and_bias_gradient(
        &self,
        activation: Activation,
        x: &CudaBuffer,
        dy: &mut CudaBuffer,
        accumulate: Accumulate,
        db: &mut CudaBuffer,
    ) -> Result<()> {
        let (context, tokens) = (&self.context, rows_of(dy, db.len()));
        let (x, dy, db) = (x.slice(), dy.slice_mut(), db.slice_mut());
        Ok(layer::activation_and_bias_gradient(context, activation, x, dy, tokens, accumulate, db)?)
    }

    fn gated(&self, function: Nonlinearity, width: usize, x: &CudaBuffer, y: &mut CudaBuffer) -> Result<()> {
        let shape = (rows_of(y, width), width);
        Ok(transformer::gated_forward(&self.context, gate(function)?, shape, x.slice(), y.slice_mut())?)
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
        Ok(transformer::gated_backward(&self.context, gate(function)?, shape, x, dy, dx)?)
    }

    fn linear(
        &self,
        shape: LinearShape,
        x: &CudaBuffer,
        weight: &CudaBuffer,
        bias: Option<&CudaBuffer>,
        y: &mut CudaBuffer,
    ) -> Result<()> {
        let (linear, x) = (dense(shape), (x.slice(), shape.tokens));
        let bias = bias.map(CudaBuffer::slice);
        Ok(linear.forward(&self.context, x, weight.slice(), bias, y.slice_mut())?)
    }

    fn input_gradient(
        &self,
        shape: LinearShape,
        dy: &CudaBuffer,
        weight: &CudaBuffer,
        dx: &mut CudaBuffer,
    ) -> Result<()> {
        let (dy, weight) = ((dy.slice(), shape.tokens), weight.slice());
        Ok(dense(shape).input_gradient(&self.context, dy, weight, Accumulate::Overwrite, dx.slice_mut())?)
    }

    fn weight_gradient(
        &self,
        shape: LinearShape,
        dy: &CudaBuffer,
        x: &CudaBuffer,
        accumulate: Accumulate,
        dw: &mut CudaBuffer,
    ) -> Result<()> {
        let (context, tokens) = (&self.context, shape.tokens);
        Ok(dense(shape).weight_gradient(context, dy.slice(), x.slice(), tokens, accumulate, dw.slice_mut())?)
    }

    fn bias_gradient(&self, dy: &CudaBuffer, accumulate: Accumulate, db: &mut CudaBuffer) -> Result<()> {
        let tokens = rows_of(dy, db.len());
        Ok(layer::bias_gradient(&self.context, dy.slice(), tokens, accumulate, db.slice_mut())?)
    }

    fn sparse_linear(
        &self,
        master: &CudaBuffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
    ) -> Result<CudaSparseLinear> {
        CudaSparseLinear::new(&self.context, master, shape, self.compute, settings)
    }

    fn float8_sparse_linear(
        &self,
        master: &CudaBuffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
    ) -> Result<CudaSparseLinear> {
        CudaSparseLinear::with_float8(&self.context, master, shape, self.compute, settings)
    }

    fn keep_of_four(&self, count: u32, weight: &CudaBuffer, cols: usize, kept: &mut CudaBuffer) -> Result<()> {
        Ok(transformer::keep_of_four(&self.context, count, weight.slice(), cols, kept.slice_mut())?)
    }

    fn apply_mask(&self, mask: &CudaBuffer, cols: usize, weight: &CudaBuffer, masked: &mut CudaBuffer) -> Result<()> {
        Ok(transformer::apply_mask(&self.context, mask.slice(), cols, weight.slice(), masked.slice_mut())?)
    }

    fn apply_mask_in_place(&self, mask: &CudaBuffer, cols: usize, values: &mut CudaBuffer) -> Result<()> {
        Ok(transformer::apply_mask_in_place(&self.context, mask.slice(), cols, values.slice_mut())?)
    }

    fn add(&self, x: &CudaBuffer, y: &mut CudaBuffer) -> Result<()> {
        Ok(transformer::add_in_place(&self.context, x.slice(), y.slice_mut())?)
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
                transformer::cross_entropy(context, shape, logits.slice_mut(), targets, factor, loss, add, at)?;
            }
            None => transformer::cross_entropy_loss(context, shape, logits.slice(), targets, loss, add, at)?,
        }
        self.pool.give(status);
        Ok(())
    }

    fn step_guard(&self, layers: usize) -> Result<CudaStepGuard> {
        CudaStepGuard::new(&self.context, layers)
    }

    fn judge(
        &self,
        gradients: &[&CudaBuffer],
        loss: &CudaBuffer,
        limits: StepLimits,
        guard: &mut CudaStepGuard,
    ) -> Result<()> {
        guard.judge(&self.context, gradients, loss, limits)
    }

    fn findings(&self, guard: &mut CudaStepGuard, layers: &[&CudaSparseLinear]) -> Result<StepFindings> {
        guard.findings(&self.context, layers)
    }

    fn refresh(
        &self,
        layer: &mut CudaSparseLinear,
        master: &CudaBuffer,
        selects_mask: bool,
        guard: &CudaStepGuard,
    ) -> Result<()> {
        // Packing again what a skipped step left as it was changes nothing.
        if selects_mask { layer.remask_unless(master, guard.skip()?) } else { layer.repack(master) }
    }

    fn refresh_together(
        &self,
        layers: Vec<LayerRefresh<'_, CudaBuffer, CudaSparseLinear>>,
        guard: &CudaStepGuard,
    ) -> Result<()> {
        sparse::refresh_together(layers, guard)
    }

    fn gradient_norm(&self, gradients: &[&CudaBuffer]) -> Result<f64> {
        optimizer::norm((&self.context, &self.pool), gradients)
    }

    fn begin_update(&self, learning_rate: f64, step: u64) -> Result<()> {
        self.optimizer()?.begin(learning_rate, step)
    }

    fn repeat(&self, key: u64, mut work: impl FnMut() -> Result<()>) -> Result<()> {
        self.repeat_step(key, &mut work)
    }

    fn take_note(&self) -> Option<String> {
        self.repeats().take_note()
    }

    fn begin_phase(&self, phase: StepPhase) -> Result<()> {
        match self.phases().as_mut() {
            Some(marks) => Ok(marks.begin(phase.name())?),
            None => Ok(()),
        }
    }

    fn adamw(
        &self,
        step: &AdamWStep,
        state: AdamWState<'_, CudaBuffer, CudaSparseLinear>,
        guard: Option<&CudaStepGuard>,
    ) -> Result<f64> {
        self.optimizer()?.step(&self.context, step, state, guard)
    }

    fn adamw_together(
        &self,
        step: &AdamWStep,
        states: Vec<AdamWState<'_, CudaBuffer, CudaSparseLinear>>,
        guard: Option<&CudaStepGuard>,
    ) -> Result<f64> {
        self.optimizer()?.step_together(&self.context, step, states, guard)
    }

    fn sgd(
        &self,
        step: &SgdStep,
        state: SgdState<'_, CudaBuffer, CudaSparseLinear>,
        guard: Option<&CudaStepGuard>,
    ) -> Result<()> {
        let mut scale = self.gradient_scale.lock().map_err(|_| control::after_panic())?;
        sgd::step(&self.context, &mut scale, step, state, guard)
    }
}

fn gate(function: Nonlinearity) -> Result<Gate> {
    Ok(match function {
        Nonlinearity::Relu => Gate::Relu,
        Nonlinearity::Gelu => Gate::Gelu,
        Nonlinearity::TanhGelu => Gate::TanhGelu,
        Nonlinearity::Silu => Gate::Silu,
        Nonlinearity::SquaredRelu => {
            let what = "a gate of squared ReLU".to_owned();
            return Err(Error::Unsupported { engine: "cuda", what, remedy: "use squared ReLU without a gate" });
        }
    })
}

fn dense(shape: LinearShape) -> DenseLinear {
    DenseLinear { out_features: shape.out_features, in_features: shape.in_features }
}
