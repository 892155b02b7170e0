//! Attention by batched GEMMs and a softmax kernel, for every shape and type. The scores of a part of the heads at a
//! time are in the workspace.
//!
//! The query heads of a group follow one another, so that a group is one matrix `[group · positions, head_dim]`, and
//! the GEMMs of the keys' and values' gradients sum over it.

use twofour_cuda::{
    DataType, DevicePtr, Result,
    cublaslt::{CublasLtPlan, DenseProblem, WORKSPACE_BYTES},
    layer::LayerContext,
};

use super::{Gradients, Tensors};
use crate::AttentionShape;
use crate::cuda::raw::softmax::{Softmax, SoftmaxParameters};

/// Most bytes of scores and probabilities at a time.
const MAX_SCORES: usize = 512 << 20;

/// Most GEMMs of one launch.
const MAX_BATCHES: usize = 65_535;

/// The GEMMs and sizes of a part of the heads.
struct Parts {
    context: LayerContext,
    shape: AttentionShape,
    dtype: DataType,
    /// Groups of a part, and parts.
    groups: usize,
    parts: usize,
    /// Rows of a group's matrix of queries.
    rows: usize,
}

impl Parts {
    fn new(context: &LayerContext, shape: AttentionShape, dtype: DataType) -> Self {
        let all = shape.batch * shape.kv_heads;
        let rows = shape.heads / shape.kv_heads * shape.positions;
        let bytes = rows.saturating_mul(shape.positions).saturating_mul(4 + dtype.bytes());
        let most = (MAX_SCORES / bytes.max(1)).clamp(1, all.min(MAX_BATCHES));
        // Parts are equal, so that one plan is for all.
        let groups = (1..=most).rev().find(|groups| all.is_multiple_of(*groups)).unwrap_or(1);
        Self { context: context.clone(), shape, dtype, groups, parts: all / groups, rows }
    }

    fn plan(&self, problem: DenseProblem) -> Result<CublasLtPlan> {
        self.context.dense_batched(problem, self.groups)
    }

    fn problem(&self, output: DataType, (rows, cols, reduction): (usize, usize, usize)) -> DenseProblem {
        DenseProblem {
            element: self.dtype,
            output,
            rows,
            cols,
            reduction,
            a_transposed: false,
            b_transposed: false,
            accumulate: false,
        }
    }

    /// `[rows, head_dim] · [positions, head_dim]ᵀ` to f32 `[rows, positions]`.
    fn scores(&self) -> Result<CublasLtPlan> {
        let problem = self.problem(DataType::F32, (self.shape.positions, self.rows, self.shape.head_dim));
        self.plan(DenseProblem { a_transposed: true, ..problem })
    }

    /// `[rows, positions] · [positions, head_dim]` to `[rows, head_dim]`.
    fn weighted(&self) -> Result<CublasLtPlan> {
        self.plan(self.problem(self.dtype, (self.shape.head_dim, self.rows, self.shape.positions)))
    }

    /// `[rows, positions]ᵀ · [rows, head_dim]` to `[positions, head_dim]`.
    fn gathered(&self) -> Result<CublasLtPlan> {
        let problem = self.problem(self.dtype, (self.shape.head_dim, self.shape.positions, self.rows));
        self.plan(DenseProblem { b_transposed: true, ..problem })
    }

    /// Bytes of scores, of probabilities, and of the scores that the gradient through a soft cap reads again.
    fn bytes(&self) -> [usize; 3] {
        let count = self.groups * self.rows * self.shape.positions;
        let capped = if self.shape.scores.soft_cap.is_some() { 4 * count } else { 0 };
        [4 * count, self.dtype.bytes() * count, capped]
    }

    /// Bytes of a part's queries, of its keys, and of its log-sum-exps.
    fn steps(&self) -> (u64, u64, u64) {
        let queries = self.groups * self.rows;
        let row = self.shape.head_dim * self.dtype.bytes();
        ((queries * row) as u64, (self.groups * self.shape.positions * row) as u64, 4 * queries as u64)
    }

    /// Launches the softmax of a part, or its gradient.
    fn softmax(&self, is_gradient: bool, [scores, probabilities, lse, capped]: [DevicePtr; 4]) -> Result<()> {
        let kernels = Softmax::of(&self.context, self.dtype)?;
        let parameters = SoftmaxParameters {
            scores,
            probabilities,
            lse,
            capped,
            positions: self.shape.positions as u32,
            scale: self.shape.scale(),
            causal: u32::from(self.shape.causal),
            window: self.shape.window(),
            soft_cap: self.shape.soft_cap(),
        };
        // SAFETY: the workspace has room for the scores and probabilities of the part, the log-sum-exps have been found
        // to be as many, and the stream is of their device.
        unsafe { kernels.run(self.context.raw(), is_gradient, (self.groups * self.rows) as u32, &parameters) }
    }
}

/// Plans the GEMMs and loads the kernels of both passes, and allocates their workspace.
pub(super) fn prepare(context: &LayerContext, shape: AttentionShape, dtype: DataType) -> Result<()> {
    let parts = Parts::new(context, shape, dtype);
    parts.scores()?;
    parts.weighted()?;
    parts.gathered()?;
    Softmax::of(context, dtype)?;
    let [scores, probabilities, capped] = parts.bytes();
    context.work().parts([scores, probabilities, capped, parts.steps().2 as usize, WORKSPACE_BYTES])?;
    Ok(())
}

/// Launches attention.
pub(super) fn forward(context: &LayerContext, shape: AttentionShape, dtype: DataType, at: &Tensors) -> Result<()> {
    let parts = Parts::new(context, shape, dtype);
    let (scores_plan, weighted) = (parts.scores()?, parts.weighted()?);
    let [scores_bytes, probability_bytes, _] = parts.bytes();
    let (query, key, lse) = parts.steps();
    let stream = context.raw();
    let mut work = context.work();
    let [scores, probabilities, workspace] = work.parts([scores_bytes, probability_bytes, WORKSPACE_BYTES])?;
    for part in 0..parts.parts as u64 {
        let (q, k, v) = (at.q + part * query, at.k + part * key, at.v + part * key);
        // SAFETY: the tensors have been found to be as long as the shape requires, the workspace has room for the
        // scores, and the stream is of their device.
        unsafe { scores_plan.run(stream, k, q, scores, workspace) }?;
        parts.softmax(false, [scores, probabilities, at.lse + part * lse, 0])?;
        // SAFETY: as for the scores.
        unsafe { weighted.run(stream, v, probabilities, at.out + part * query, workspace) }?;
    }
    Ok(())
}

/// Launches the gradients. Probabilities are computed again from the queries and keys.
pub(super) fn backward(
    context: &LayerContext,
    shape: AttentionShape,
    dtype: DataType,
    at: &Tensors,
    to: &Gradients,
) -> Result<()> {
    let parts = Parts::new(context, shape, dtype);
    let (scores_plan, weighted, gathered) = (parts.scores()?, parts.weighted()?, parts.gathered()?);
    let [scores_bytes, probability_bytes, capped_bytes] = parts.bytes();
    let (query, key, lse_bytes) = parts.steps();
    let stream = context.raw();
    let mut work = context.work();
    let [gradients, probabilities, capped, lse, workspace] =
        work.parts([scores_bytes, probability_bytes, capped_bytes, lse_bytes as usize, WORKSPACE_BYTES])?;
    // Without a soft cap nothing reads the scores after the softmax.
    let scores = if capped_bytes > 0 { capped } else { gradients };
    for part in 0..parts.parts as u64 {
        let (q, k, v) = (at.q + part * query, at.k + part * key, at.v + part * key);
        let (dout, dq) = (to.dout + part * query, to.dq + part * query);
        let (dk, dv) = (to.dk + part * key, to.dv + part * key);
        // SAFETY: the tensors have been found to be as long as the shape requires, the workspace has room for the
        // scores, and the stream is of their device.
        unsafe { scores_plan.run(stream, k, q, scores, workspace) }?;
        parts.softmax(false, [scores, probabilities, lse, 0])?;
        // SAFETY: as for the scores.
        unsafe {
            gathered.run(stream, dout, probabilities, dv, workspace)?;
            scores_plan.run(stream, v, dout, gradients, workspace)?;
        }
        parts.softmax(true, [gradients, probabilities, lse, scores])?;
        // SAFETY: as for the scores.
        unsafe {
            weighted.run(stream, k, probabilities, dq, workspace)?;
            gathered.run(stream, q, probabilities, dk, workspace)?;
        }
    }
    Ok(())
}
