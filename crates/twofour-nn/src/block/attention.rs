//! The pre-norm self-attention block.

use std::sync::Arc;

use twofour::layer::Accumulate;

use super::{BatchShape, LayerNorm, Workspace};
use crate::{
    Error, Result,
    engine::{AttentionShape, Engine},
    linear::Linear,
    parameter::Parameter,
};

/// `x + out(attention(qkv(layer_norm(x))))` for `x: [batch, positions, width]`.
///
/// Attention is causal, with `heads` heads of `width / heads` elements; queries and keys are rotated by their position.
#[derive(Debug)]
pub struct AttentionBlock<E: Engine> {
    /// The norm in front.
    pub norm: LayerNorm<E>,
    /// `[3 width, width]`: queries, keys, values.
    pub qkv: Linear<E>,
    /// `[width, width]`.
    pub out: Linear<E>,
    heads: usize,
    rotary: Arc<E::Rotary>,
}

/// What the backward pass of an [`AttentionBlock`] reads.
#[derive(Debug)]
pub struct SavedAttention<E: Engine> {
    shape: BatchShape,
    x: E::Buffer,
    statistics: [E::Buffer; 2],
    normalized: E::Buffer,
    qkv: E::Buffer,
    merged: E::Buffer,
    state: E::AttentionState,
}

impl<E: Engine> AttentionBlock<E> {
    /// A block of `heads` heads with the rotary table of their size.
    ///
    /// # Errors
    /// A width that `heads` does not divide into even parts, or layers whose shapes do not fit.
    pub fn new(
        norm: LayerNorm<E>,
        qkv: Linear<E>,
        out: Linear<E>,
        heads: usize,
        rotary: Arc<E::Rotary>,
    ) -> Result<Self> {
        let width = norm.width();
        if heads == 0 || !width.is_multiple_of(2 * heads) {
            let (what, found) = ("heads", format!("{heads} for width {width}"));
            let expected = "a divisor of the width that leaves an even number of elements for each head";
            return Err(Error::Setting { what, found, expected });
        }
        for (linear, expected) in [(&qkv, 3 * width), (&out, width)] {
            if (linear.out_features(), linear.in_features()) != (expected, width) {
                let found = format!("[{}, {}]", linear.out_features(), linear.in_features());
                let error =
                    Error::Setting { what: "a layer of an attention block", found, expected: "[3w, w] or [w, w]" };
                return Err(error.in_layer(linear.name()));
            }
        }
        Ok(AttentionBlock { norm, qkv, out, heads, rotary })
    }

    fn shape(&self, BatchShape { batch, positions }: BatchShape) -> AttentionShape {
        let heads = self.heads;
        AttentionShape { batch, positions, heads, kv_heads: heads, head_dim: self.norm.width() / heads, causal: true }
    }

    /// The block's output, and what its backward pass needs.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    pub fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        x: E::Buffer,
        shape: BatchShape,
    ) -> Result<(E::Buffer, SavedAttention<E>)> {
        let (tokens, width) = (shape.tokens(), self.norm.width());
        let (normalized, statistics) = self.norm.forward(engine, workspace, &x, tokens)?;
        let mut qkv = workspace.compute(engine, tokens * 3 * width)?;
        self.qkv.forward(engine, &normalized, tokens, &mut qkv)?;
        let mut merged = workspace.compute(engine, tokens * width)?;
        let state = engine.attention(self.shape(shape), &qkv, Some(&self.rotary), &mut merged)?;
        let mut y = workspace.compute(engine, tokens * width)?;
        self.out.forward(engine, &merged, tokens, &mut y)?;
        engine.add(&x, &mut y)?;
        Ok((y, SavedAttention { shape, x, statistics, normalized, qkv, merged, state }))
    }

    /// The parameters: those of the norm, then of the linear layers.
    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<E>> {
        let linears = self.qkv.parameters_mut().chain(self.out.parameters_mut());
        self.norm.parameters_mut().into_iter().chain(linears)
    }

    /// Turns the gradient of the output into that of the input.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    pub fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        saved: SavedAttention<E>,
        dy: E::Buffer,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let SavedAttention { shape, x, statistics, normalized, qkv, merged, state } = saved;
        let (tokens, width) = (shape.tokens(), self.norm.width());
        self.out.parameter_gradients(engine, &dy, &merged, tokens, accumulate)?;
        let mut d_merged = workspace.compute(engine, tokens * width)?;
        self.out.input_gradient(engine, &dy, tokens, &mut d_merged)?;
        let mut d_qkv = workspace.compute(engine, tokens * 3 * width)?;
        let saved = (state, &qkv, &merged);
        engine.attention_gradient(self.shape(shape), saved, Some(&self.rotary), &d_merged, &mut d_qkv)?;
        self.qkv.parameter_gradients(engine, &d_qkv, &normalized, tokens, accumulate)?;
        let mut d_normalized = d_merged;
        self.qkv.input_gradient(engine, &d_qkv, tokens, &mut d_normalized)?;
        let mut dx = dy;
        self.norm.backward(engine, (&x, &statistics), &d_normalized, &mut dx, accumulate)?;
        workspace.give([x, normalized, qkv, merged, d_qkv, d_normalized].into_iter().chain(statistics));
        Ok(dx)
    }
}

impl<E: Engine> SavedAttention<E> {
    /// Gives the buffers back where there is no backward pass.
    pub fn release(self, workspace: &mut Workspace<E>) {
        workspace.give([self.x, self.normalized, self.qkv, self.merged].into_iter().chain(self.statistics));
    }
}
