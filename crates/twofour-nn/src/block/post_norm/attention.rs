//! The post-norm self-attention block.

use twofour::layer::Accumulate;

use super::SavedSum;
use crate::{
    Error, Result,
    block::{BatchShape, Norm, Workspace},
    engine::{AttentionShape, Engine, ScoreOptions},
    linear::Linear,
    parameter::Parameter,
};

/// `norm(x + out(attention(qkv(x))))` for `x: [batch, positions, width]`. Every position attends to all of its sequence; positions are in `x` alone.
#[derive(Debug)]
pub struct PostNormAttention<E: Engine> {
    /// `[3 width, width]`: queries, keys, values.
    pub qkv: Linear<E>,
    /// `[width, width]`.
    pub out: Linear<E>,
    /// The norm behind.
    pub norm: Norm<E>,
    heads: usize,
}

/// What the backward pass of a [`PostNormAttention`] reads.
#[derive(Debug)]
pub struct SavedPostNormAttention<E: Engine> {
    shape: BatchShape,
    x: E::Buffer,
    qkv: E::Buffer,
    merged: E::Buffer,
    state: E::AttentionState,
    sum: SavedSum<E>,
}

impl<E: Engine> PostNormAttention<E> {
    /// A block of these layers with that many heads.
    ///
    /// # Errors
    /// Heads that do not divide the width, or leave an odd number of elements for each; layers whose shapes do not fit.
    pub fn new(qkv: Linear<E>, out: Linear<E>, norm: Norm<E>, heads: usize) -> Result<Self> {
        let width = norm.width();
        if heads == 0 || !width.is_multiple_of(2 * heads) {
            let found = format!("{heads} for width {width}");
            let expected = "a divisor of the width that leaves an even number of elements for each";
            return Err(Error::Setting { what: "heads", found, expected });
        }
        for (linear, shape) in [(&qkv, (3 * width, width)), (&out, (width, width))] {
            if (linear.out_features(), linear.in_features()) != shape {
                let found = format!("[{}, {}]", linear.out_features(), linear.in_features());
                let what = "a layer of an attention block";
                let error = Error::Setting { what, found, expected: "[3 width, width] or [width, width]" };
                return Err(error.in_layer(linear.name()));
            }
        }
        Ok(PostNormAttention { qkv, out, norm, heads })
    }

    fn shape(&self, BatchShape { batch, positions }: BatchShape) -> AttentionShape {
        let (heads, head_dim) = (self.heads, self.norm.width() / self.heads);
        AttentionShape {
            batch,
            positions,
            heads,
            kv_heads: heads,
            head_dim,
            causal: false,
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
    ) -> Result<(E::Buffer, SavedPostNormAttention<E>)> {
        let (tokens, width, own) = (shape.tokens(), self.norm.width(), self.shape(shape));
        let mut qkv = workspace.compute(engine, tokens * own.qkv_width())?;
        self.qkv.forward(engine, &x, tokens, &mut qkv)?;
        let mut merged = workspace.compute(engine, tokens * width)?;
        let state = engine.attention(own, &mut qkv, None, &mut merged)?;
        let mut sum = workspace.compute(engine, tokens * width)?;
        self.out.forward(engine, &merged, tokens, &mut sum)?;
        let (y, sum) = SavedSum::normalized(engine, workspace, &self.norm, (&x, sum, tokens))?;
        Ok((y, SavedPostNormAttention { shape, x, qkv, merged, state, sum }))
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
        saved: SavedPostNormAttention<E>,
        dy: E::Buffer,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let SavedPostNormAttention { shape, x, qkv, merged, state, sum } = saved;
        let (tokens, width, own) = (shape.tokens(), self.norm.width(), self.shape(shape));
        let d_sum = sum.gradient(engine, workspace, &mut self.norm, (dy, tokens), accumulate)?;
        self.out.parameter_gradients(engine, &d_sum, &merged, tokens, accumulate)?;
        let mut d_merged = workspace.compute(engine, tokens * width)?;
        self.out.input_gradient(engine, &d_sum, tokens, &mut d_merged)?;
        let mut d_qkv = workspace.compute(engine, tokens * own.qkv_width())?;
        engine.attention_gradient(own, (state, &qkv, &merged), None, &d_merged, &mut d_qkv)?;
        self.qkv.parameter_gradients(engine, &d_qkv, &x, tokens, accumulate)?;
        let mut dx = d_merged;
        self.qkv.input_gradient(engine, &d_qkv, tokens, &mut dx)?;
        engine.add(&d_sum, &mut dx)?;
        workspace.give([x, qkv, merged, d_qkv, d_sum]);
        Ok(dx)
    }
}

impl<E: Engine> SavedPostNormAttention<E> {
    /// Gives the buffers back where there is no backward pass.
    pub fn release(self, workspace: &mut Workspace<E>) {
        workspace.give([self.x, self.qkv, self.merged]);
        self.sum.release(workspace);
    }
}
