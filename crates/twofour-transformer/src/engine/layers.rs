//! Operations between linear layers.

use std::fmt::Debug;

use twofour::layer::Accumulate;

use super::{
    AttentionShape, DistillationWeights, Elementwise, ErrorMeasure, LinearOperations, Nonlinearity, NormGradients,
    NormInput, NormParameters, NormStatistics,
};
use crate::Result;

/// What is between linear layers: embeddings, norms, attention, activations, sums, the loss; and their gradients.
pub trait LayerOperations: LinearOperations {
    /// What the backward pass of attention reads beside its operands.
    type AttentionState: Debug + Send;

    /// Cosines and sines of rotary position embedding.
    type Rotary: Debug + Send + Sync;

    /// `out[t] = table[ids[t]]` for a table `[vocabulary, width]` of [`Kind::Compute`](super::Kind::Compute). Tokens
    /// must be below the vocabulary.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn embedding(&self, table: &Self::Buffer, width: usize, ids: &Self::Buffer, out: &mut Self::Buffer) -> Result<()>;

    /// The gradient of the table: each row is the sum of the rows of `d_out` that read it, in order of token.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn embedding_gradient(
        &self,
        d_out: &Self::Buffer,
        width: usize,
        ids: &Self::Buffer,
        accumulate: Accumulate,
        d_table: &mut Self::Buffer,
    ) -> Result<()>;

    /// Normalizes each token to `y`. The bits of the norm of a sum are those of [`LayerOperations::add`] and the norm
    /// of its result.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn norm(
        &self,
        norm: NormParameters<'_, Self::Buffer>,
        input: NormInput<'_, Self::Buffer>,
        y: &mut Self::Buffer,
        statistics: NormStatistics<&mut Self::Buffer>,
    ) -> Result<()>;

    /// Adds the gradient for the input of [`LayerOperations::norm`] to `dx`, and writes or adds those of the
    /// parameters. `saved` are the input, or the sum, and the statistics.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn norm_gradient(
        &self,
        norm: NormParameters<'_, Self::Buffer>,
        saved: (&Self::Buffer, NormStatistics<&Self::Buffer>),
        dy: &Self::Buffer,
        dx: &mut Self::Buffer,
        accumulate: Accumulate,
        gradients: NormGradients<'_, Self::Buffer>,
    ) -> Result<()>;

    /// The table of rotary position embedding for up to `positions` positions: element `i` of the lower half of a head
    /// is paired with element `i` of the upper half and rotated by `position · frequencies[i]`. A head has twice as
    /// many elements as there are frequencies.
    ///
    /// # Errors
    /// Not enough memory.
    fn rotary(&self, positions: usize, frequencies: &[f64]) -> Result<Self::Rotary>;

    /// Attention of every head, `softmax(scores) v` with the shape's [`ScoreOptions`](super::ScoreOptions), with
    /// queries and keys rotated if there is a table. `qkv` is `[tokens, (heads + 2 kv_heads) head_dim]`: queries of all
    /// heads, then keys, then values. `merged` is `[tokens, heads head_dim]`. The state and `qkv`, in which an engine
    /// may rotate queries and keys, are what [`LayerOperations::attention_gradient`] needs.
    ///
    /// # Errors
    /// Operands that do not fit, more positions than the table has.
    fn attention(
        &self,
        shape: AttentionShape,
        qkv: &mut Self::Buffer,
        rotary: Option<&Self::Rotary>,
        merged: &mut Self::Buffer,
    ) -> Result<Self::AttentionState>;

    /// The gradient of [`LayerOperations::attention`] for the `qkv` that it was called with, from that of its output.
    /// `saved` are its state, and `qkv` and `merged` as it left them.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn attention_gradient(
        &self,
        shape: AttentionShape,
        saved: (Self::AttentionState, &Self::Buffer, &Self::Buffer),
        rotary: Option<&Self::Rotary>,
        d_merged: &Self::Buffer,
        d_qkv: &mut Self::Buffer,
    ) -> Result<()>;

    /// Takes a state of attention back where there is no backward pass: a step that is repeated must free no memory.
    fn release_attention(&self, state: Self::AttentionState) {
        drop(state);
    }

    /// `y = function(x)`, element by element.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn activation(&self, function: Elementwise, x: &Self::Buffer, y: &mut Self::Buffer) -> Result<()>;

    /// `dy ← dy · function'(x)`; and with `bias`, [`LinearOperations::bias_gradient`] of the result: the gradients of
    /// what is before an activation, and of the bias of the linear layer that made it.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn activation_gradient(
        &self,
        function: Elementwise,
        x: &Self::Buffer,
        dy: &mut Self::Buffer,
        bias: Option<(Accumulate, &mut Self::Buffer)>,
    ) -> Result<()>;

    /// `y = function(gate) ⊙ up` for `x` of rows that hold `width` elements of the gate and then `width` of `up`; `y`
    /// is `[tokens, width]`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn gated(&self, function: Nonlinearity, width: usize, x: &Self::Buffer, y: &mut Self::Buffer) -> Result<()>;

    /// The gradient of [`LayerOperations::gated`] for `x`, `[tokens, 2 width]`, from `dy`, `[tokens, width]`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn gated_gradient(
        &self,
        function: Nonlinearity,
        width: usize,
        x: &Self::Buffer,
        dy: &Self::Buffer,
        dx: &mut Self::Buffer,
    ) -> Result<()>;

    /// `x[t, i] ← factors[i] · x[t, i]` for factors of [`Kind::Wide`](super::Kind::Wide), `[width]`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn scale_rows(&self, factors: &Self::Buffer, x: &mut Self::Buffer) -> Result<()>;

    /// `y ← y + x`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn add(&self, x: &Self::Buffer, y: &mut Self::Buffer) -> Result<()>;

    /// Cross-entropy of `logits` `[tokens, classes]` and targets, which must be below `classes`: adds the sum of `-log
    /// softmax(logits)[target]` to `loss`, [`Kind::Wide`](super::Kind::Wide) of one element. With a `gradient_scale`,
    /// `logits` are overwritten with their gradient, `softmax - one_hot`, times that scale.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn cross_entropy(
        &self,
        classes: usize,
        logits: &mut Self::Buffer,
        targets: &Self::Buffer,
        gradient_scale: Option<f32>,
        loss: &mut Self::Buffer,
    ) -> Result<()>;

    /// The loss of a student: adds the sum over the rows of `logits` and `teacher`, both `[tokens, classes]`, of
    /// [`DistillationWeights`]' loss to `loss`, [`Kind::Wide`](super::Kind::Wide) of one element. `logits` are
    /// overwritten with their gradient times `gradient_scale`. Targets must be below `classes`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn distillation(
        &self,
        weights: DistillationWeights,
        classes: usize,
        scores: (&mut Self::Buffer, &Self::Buffer),
        targets: &Self::Buffer,
        gradient_scale: f32,
        loss: &mut Self::Buffer,
    ) -> Result<()>;

    /// Adds the sum over the rows of `x` and `target`, both `[tokens, width]`, of `weight` times their error to `loss`,
    /// [`Kind::Wide`](super::Kind::Wide) of one element, and writes the gradient for `x`, times `gradient_scale`, to
    /// `dx`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn squared_error(
        &self,
        measure: ErrorMeasure,
        width: usize,
        rows: (&Self::Buffer, &Self::Buffer),
        scaling: (f32, f32),
        dx: &mut Self::Buffer,
        loss: &mut Self::Buffer,
    ) -> Result<()>;
}
