//! The pre-norm self-attention block.

use std::sync::Arc;

use twofour::layer::Accumulate;

use super::{BatchShape, Norm, Normalized, Workspace};
use crate::{
    Error, Result,
    engine::{AttentionShape, Engine, ScoreOptions},
    linear::Linear,
    parameter::Parameter,
};

/// `x + out(attention(qkv(norm(x))))` for `x: [batch, positions, width]`.
///
/// In a decoder's block attention is causal, and queries and keys are rotated by their position; in that of [`AttentionBlock::full`] every position attends to all.
#[derive(Debug)]
pub struct AttentionBlock<E: Engine> {
    /// The norm in front.
    pub norm: Norm<E>,
    /// `[(heads + 2 kv_heads) head_dim, width]`: queries, keys, values.
    pub qkv: Linear<E>,
    /// `[width, heads head_dim]`.
    pub out: Linear<E>,
    heads: BlockHeads,
    /// None where attention is full.
    rotary: Option<Arc<E::Rotary>>,
}

/// The heads of an [`AttentionBlock`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHeads {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; a divisor of `heads`, which share them in groups.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
}

/// What the backward pass of an [`AttentionBlock`] reads.
#[derive(Debug)]
pub struct SavedAttention<E: Engine> {
    shape: BatchShape,
    input: Normalized<E>,
    qkv: E::Buffer,
    merged: E::Buffer,
    state: E::AttentionState,
}

impl<E: Engine> AttentionBlock<E> {
    /// A block of these heads with the rotary table of their size.
    ///
    /// # Errors
    /// Heads that do not fit each other, or layers whose shapes do not fit.
    pub fn new(
        norm: Norm<E>,
        qkv: Linear<E>,
        out: Linear<E>,
        heads: BlockHeads,
        rotary: Arc<E::Rotary>,
    ) -> Result<Self> {
        Self::with_rotary(norm, qkv, out, heads, Some(rotary))
    }

    /// A block of these heads whose positions attend to all positions, without rotation: an encoder's.
    ///
    /// # Errors
    /// Those of [`AttentionBlock::new`].
    pub fn full(norm: Norm<E>, qkv: Linear<E>, out: Linear<E>, heads: BlockHeads) -> Result<Self> {
        Self::with_rotary(norm, qkv, out, heads, None)
    }

    fn with_rotary(
        norm: Norm<E>,
        qkv: Linear<E>,
        out: Linear<E>,
        heads: BlockHeads,
        rotary: Option<Arc<E::Rotary>>,
    ) -> Result<Self> {
        let BlockHeads { heads: queries, kv_heads, head_dim } = heads;
        if kv_heads == 0 || !queries.is_multiple_of(kv_heads) || !head_dim.is_multiple_of(2) {
            let found = format!("{queries} with {kv_heads} key-value heads of {head_dim} elements");
            let expected = "a multiple of the key-value heads, with an even number of elements each";
            return Err(Error::Setting { what: "heads", found, expected });
        }
        let block = AttentionBlock { norm, qkv, out, heads, rotary };
        let (width, shape) = (block.norm.width(), block.shape(BatchShape { batch: 1, positions: 1 }));
        for (linear, expected) in [(&block.qkv, (shape.qkv_width(), width)), (&block.out, (width, shape.width()))] {
            if (linear.out_features(), linear.in_features()) != expected {
                let found = format!("[{}, {}]", linear.out_features(), linear.in_features());
                let error = Error::Setting {
                    what: "a layer of an attention block",
                    found,
                    expected: "[(heads + 2 kv_heads) head_dim, width] or [width, heads head_dim]",
                };
                return Err(error.in_layer(linear.name()));
            }
        }
        Ok(block)
    }

    fn shape(&self, BatchShape { batch, positions }: BatchShape) -> AttentionShape {
        let BlockHeads { heads, kv_heads, head_dim } = self.heads;
        AttentionShape {
            batch,
            positions,
            heads,
            kv_heads,
            head_dim,
            causal: self.rotary.is_some(),
            scores: ScoreOptions::default(),
        }
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
        let input = Normalized::new(engine, workspace, &self.norm, x, shape.tokens())?;
        let (mut y, saved) = self.branch(engine, workspace, input, shape)?;
        engine.add(&saved.input.x, &mut y)?;
        Ok((y, saved))
    }

    /// The block's output with the norm that follows it, which reads it as it is added, from an input whose norm is that of [`AttentionBlock::norm`]; and what the
    /// backward pass needs. The bits are those of [`AttentionBlock::forward`] between both norms.
    ///
    /// # Errors
    /// Those of [`AttentionBlock::forward`].
    pub fn forward_between(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        input: Normalized<E>,
        shape: BatchShape,
        next: &Norm<E>,
    ) -> Result<(Normalized<E>, SavedAttention<E>)> {
        let (y, saved) = self.branch(engine, workspace, input, shape)?;
        let output = Normalized::of_sum(engine, workspace, next, (&saved.input.x, y), shape.tokens())?;
        Ok((output, saved))
    }

    /// What is added to the block's input.
    fn branch(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        input: Normalized<E>,
        shape: BatchShape,
    ) -> Result<(E::Buffer, SavedAttention<E>)> {
        let (tokens, width, own) = (shape.tokens(), self.norm.width(), self.shape(shape));
        let mut qkv = workspace.compute(engine, tokens * own.qkv_width())?;
        self.qkv.forward(engine, &input.y, tokens, &mut qkv)?;
        let mut merged = workspace.compute(engine, tokens * own.width())?;
        let state = engine.attention(own, &mut qkv, self.rotary.as_deref(), &mut merged)?;
        let mut y = workspace.compute(engine, tokens * width)?;
        self.out.forward(engine, &merged, tokens, &mut y)?;
        Ok((y, SavedAttention { shape, input, qkv, merged, state }))
    }

    /// The parameters: those of the norm, then of the linear layers.
    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<E>> {
        let linears = self.qkv.parameters_mut().chain(self.out.parameters_mut());
        self.norm.parameters_mut().chain(linears)
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
        let SavedAttention { shape, input: Normalized { x, y: normalized, statistics }, qkv, merged, state } = saved;
        let (tokens, width, own) = (shape.tokens(), self.norm.width(), self.shape(shape));
        self.out.parameter_gradients(engine, &dy, &merged, tokens, accumulate)?;
        let mut d_merged = workspace.compute(engine, tokens * own.width())?;
        self.out.input_gradient(engine, &dy, tokens, &mut d_merged)?;
        let mut d_qkv = workspace.compute(engine, tokens * own.qkv_width())?;
        let saved = (state, &qkv, &merged);
        engine.attention_gradient(own, saved, self.rotary.as_deref(), &d_merged, &mut d_qkv)?;
        self.qkv.parameter_gradients(engine, &d_qkv, &normalized, tokens, accumulate)?;
        // Of the merged heads' size, which is most often the width.
        workspace.give([d_merged]);
        let mut d_normalized = workspace.compute(engine, tokens * width)?;
        self.qkv.input_gradient(engine, &d_qkv, tokens, &mut d_normalized)?;
        let mut dx = dy;
        self.norm.backward(engine, (&x, &statistics), &d_normalized, &mut dx, accumulate)?;
        workspace.give([x, normalized, qkv, merged, d_qkv, d_normalized].into_iter().chain(statistics.into_buffers()));
        Ok(dx)
    }
}

impl<E: Engine> SavedAttention<E> {
    /// Gives the buffers back where there is no backward pass.
    pub fn release(self, workspace: &mut Workspace<E>) {
        workspace.give([self.qkv, self.merged].into_iter().chain(self.input.into_buffers()));
    }
}
