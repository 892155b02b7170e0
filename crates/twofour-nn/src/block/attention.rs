//! Self-attention.

use std::sync::Arc;

use twofour::layer::Accumulate;

use super::{BatchShape, Branch, HeadNorms, SavedHeadNorms, Workspace};
use crate::{
    Error, Result,
    engine::{AttentionShape, Engine, ScoreOptions},
    linear::Linear,
    parts::parts,
};

/// `out(attention(qkv(x)))` for `x: [batch, positions, width]`.
#[derive(Debug)]
pub struct Attention<E: Engine> {
    /// `[(heads + 2 kv_heads) head_dim, width]`: queries, keys, values.
    pub qkv: Linear<E>,
    /// `[width, heads head_dim]`.
    pub out: Linear<E>,
    heads: BlockHeads,
    /// Norms of queries and keys before they are rotated.
    norms: Option<HeadNorms<E>>,
    options: AttentionOptions<E>,
}

parts!(Attention<E> { qkv, norms, out });

/// The heads of [`Attention`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BlockHeads {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; a divisor of `heads`, which share them in groups.
    pub kv_heads: usize,
    /// Elements of a head; even.
    pub head_dim: usize,
}

/// What [`Attention`] may attend to, and how.
#[derive(Debug)]
pub struct AttentionOptions<E: Engine> {
    /// Whether a position attends to itself and earlier positions only.
    pub is_causal: bool,
    /// What becomes of scores.
    pub scores: ScoreOptions,
    /// The table by which queries and keys are rotated.
    pub rotary: Option<Arc<E::Rotary>>,
}

impl<E: Engine> AttentionOptions<E> {
    /// An encoder's: every position attends to all, without rotation.
    pub fn full() -> Self {
        AttentionOptions { is_causal: false, scores: ScoreOptions::default(), rotary: None }
    }

    /// A decoder's, with this rotation.
    pub fn causal(rotary: Arc<E::Rotary>) -> Self {
        AttentionOptions { is_causal: true, scores: ScoreOptions::default(), rotary: Some(rotary) }
    }
}

/// What the backward pass of [`Attention`] reads beside its input.
#[derive(Debug)]
pub struct SavedAttention<E: Engine> {
    qkv: E::Buffer,
    norms: Option<SavedHeadNorms<E>>,
    merged: E::Buffer,
    state: E::AttentionState,
}

impl<E: Engine> Attention<E> {
    /// Attention of these heads.
    ///
    /// # Errors
    /// Heads that do not fit each other, or layers whose shapes do not fit.
    pub fn new(qkv: Linear<E>, out: Linear<E>, heads: BlockHeads, options: AttentionOptions<E>) -> Result<Self> {
        let BlockHeads { heads: queries, kv_heads, head_dim } = heads;
        if kv_heads == 0 || !queries.is_multiple_of(kv_heads) || !head_dim.is_multiple_of(2) {
            let found = format!("{queries} with {kv_heads} key-value heads of {head_dim} elements");
            let expected = "a multiple of the key-value heads, with an even number of elements each";
            return Err(Error::Setting { what: "heads", found, expected });
        }
        let attention = Attention { qkv, out, heads, norms: None, options };
        let (width, shape) = (attention.width(), attention.shape(BatchShape { batch: 1, positions: 1 }));
        let layers = [(&attention.qkv, (shape.qkv_width(), width)), (&attention.out, (width, shape.width()))];
        for (linear, expected) in layers {
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
        Ok(attention)
    }

    /// Returns this attention with norms of queries and keys.
    ///
    /// # Errors
    /// Norms of another width than a head's.
    pub fn with_norms(self, norms: HeadNorms<E>) -> Result<Self> {
        if norms.width() != self.heads.head_dim {
            let found = format!("{} for heads of {}", norms.width(), self.heads.head_dim);
            return Err(Error::Setting { what: "the width of the norms of heads", found, expected: "a head's" });
        }
        Ok(Attention { norms: Some(norms), ..self })
    }

    fn shape(&self, BatchShape { batch, positions }: BatchShape) -> AttentionShape {
        let BlockHeads { heads, kv_heads, head_dim } = self.heads;
        let AttentionOptions { is_causal: causal, scores, .. } = self.options;
        AttentionShape { batch, positions, heads, kv_heads, head_dim, causal, scores }
    }
}

impl<E: Engine> Branch<E> for Attention<E> {
    type Saved = SavedAttention<E>;

    fn width(&self) -> usize {
        self.qkv.in_features()
    }

    fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        x: &E::Buffer,
        shape: BatchShape,
    ) -> Result<(E::Buffer, SavedAttention<E>)> {
        let (tokens, own) = (shape.tokens(), self.shape(shape));
        let mut qkv = workspace.compute(engine, tokens * own.qkv_width())?;
        self.qkv.forward(engine, x, tokens, &mut qkv)?;
        let norms = match &self.norms {
            Some(norms) => Some(norms.forward(engine, workspace, (&mut qkv, tokens), self.heads)?),
            None => None,
        };
        let mut merged = workspace.compute(engine, tokens * own.width())?;
        let state = engine.attention(own, &mut qkv, self.options.rotary.as_deref(), &mut merged)?;
        let mut y = workspace.compute(engine, tokens * self.width())?;
        self.out.forward(engine, &merged, tokens, &mut y)?;
        Ok((y, SavedAttention { qkv, norms, merged, state }))
    }

    fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (x, saved): (E::Buffer, SavedAttention<E>),
        dy: &E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let (tokens, own, SavedAttention { qkv, norms, merged, state }) = (shape.tokens(), self.shape(shape), saved);
        self.out.parameter_gradients(engine, dy, &merged, tokens, accumulate)?;
        let mut d_merged = workspace.compute(engine, tokens * own.width())?;
        self.out.input_gradient(engine, dy, tokens, &mut d_merged)?;
        let mut d_qkv = workspace.compute(engine, tokens * own.qkv_width())?;
        let saved = (state, &qkv, &merged);
        engine.attention_gradient(own, saved, self.options.rotary.as_deref(), &d_merged, &mut d_qkv)?;
        if let (Some(own), Some(saved)) = (&mut self.norms, norms) {
            own.backward(engine, workspace, (saved, &mut d_qkv, tokens), self.heads, accumulate)?;
        }
        self.qkv.parameter_gradients(engine, &d_qkv, &x, tokens, accumulate)?;
        let mut dx = x;
        self.qkv.input_gradient(engine, &d_qkv, tokens, &mut dx)?;
        workspace.give([qkv, merged, d_merged, d_qkv]);
        Ok(dx)
    }

    fn release(engine: &E, saved: SavedAttention<E>, workspace: &mut Workspace<E>) {
        engine.release_attention(saved.state);
        workspace.give(
            [saved.qkv, saved.merged].into_iter().chain(saved.norms.into_iter().flat_map(SavedHeadNorms::into_buffers)),
        );
    }
}
