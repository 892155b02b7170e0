//! Operations between linear layers.

use std::fmt::Debug;

use twofour::layer::Accumulate;

use super::{AttentionShape, LinearOperations, Nonlinearity};
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

    /// `y = (x - mean) / sqrt(variance + epsilon) · gain + bias` for each token; the parameters, gain and bias, are
    /// [`Kind::Wide`](super::Kind::Wide), `[width]`. `statistics`, of [`Kind::Wide`](super::Kind::Wide), `[tokens]`
    /// each, receive mean and reciprocal standard deviation of each token.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn layer_norm(
        &self,
        x: &Self::Buffer,
        parameters: [&Self::Buffer; 2],
        epsilon: f32,
        y: &mut Self::Buffer,
        statistics: [&mut Self::Buffer; 2],
    ) -> Result<()>;

    /// [`LayerOperations::add`] and [`LayerOperations::layer_norm`] of the sum, as where a norm follows a residual
    /// addition: `sum ← sum + x`, and `y` is its norm. The bits are those of the two calls.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn add_layer_norm(
        &self,
        x: &Self::Buffer,
        sum: &mut Self::Buffer,
        parameters: [&Self::Buffer; 2],
        epsilon: f32,
        y: &mut Self::Buffer,
        statistics: [&mut Self::Buffer; 2],
    ) -> Result<()> {
        self.add(x, sum)?;
        self.layer_norm(sum, parameters, epsilon, y, statistics)
    }

    /// Adds the gradient for `x` to `dx`, and writes or adds those for gain and bias, of
    /// [`Kind::Wide`](super::Kind::Wide). `saved` are `x`, the gain, and the statistics of
    /// [`LayerOperations::layer_norm`].
    ///
    /// # Errors
    /// Operands that do not fit.
    fn layer_norm_gradient(
        &self,
        saved: (&Self::Buffer, &Self::Buffer, [&Self::Buffer; 2]),
        dy: &Self::Buffer,
        dx: &mut Self::Buffer,
        accumulate: Accumulate,
        gradients: [&mut Self::Buffer; 2],
    ) -> Result<()>;

    /// `y = x / sqrt(mean of x² + epsilon) · gain` for each token; the gain is [`Kind::Wide`](super::Kind::Wide),
    /// `[width]`. `statistics`, of [`Kind::Wide`](super::Kind::Wide), `[tokens]`, is for
    /// [`LayerOperations::rms_norm_gradient`] alone: an engine may leave it as it is.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn rms_norm(
        &self,
        x: &Self::Buffer,
        gain: &Self::Buffer,
        epsilon: f32,
        y: &mut Self::Buffer,
        statistics: &mut Self::Buffer,
    ) -> Result<()>;

    /// [`LayerOperations::add`] and [`LayerOperations::rms_norm`] of the sum: `sum ← sum + x`, and `y` is its norm. The
    /// bits are those of the two calls.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn add_rms_norm(
        &self,
        x: &Self::Buffer,
        sum: &mut Self::Buffer,
        gain: &Self::Buffer,
        epsilon: f32,
        y: &mut Self::Buffer,
        statistics: &mut Self::Buffer,
    ) -> Result<()> {
        self.add(x, sum)?;
        self.rms_norm(sum, gain, epsilon, y, statistics)
    }

    /// Adds the gradient for `x` to `dx`, and writes or adds that for the gain, of [`Kind::Wide`](super::Kind::Wide).
    /// `saved` are `x`, the gain, and the statistics of [`LayerOperations::rms_norm`], which had the same `epsilon`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn rms_norm_gradient(
        &self,
        saved: (&Self::Buffer, &Self::Buffer, &Self::Buffer),
        epsilon: f32,
        dy: &Self::Buffer,
        dx: &mut Self::Buffer,
        accumulate: Accumulate,
        d_gain: &mut Self::Buffer,
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

    /// `y = function(x)`, element by element.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn activation(&self, function: Nonlinearity, x: &Self::Buffer, y: &mut Self::Buffer) -> Result<()>;

    /// `dy ← dy · function'(x)`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn activation_gradient(&self, function: Nonlinearity, x: &Self::Buffer, dy: &mut Self::Buffer) -> Result<()>;

    /// [`LayerOperations::activation_gradient`], and [`LinearOperations::bias_gradient`] of its result: the gradients
    /// of what is before an activation, and of the bias of the linear layer that made it. The bits are those of the two
    /// calls.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn activation_and_bias_gradient(
        &self,
        function: Nonlinearity,
        x: &Self::Buffer,
        dy: &mut Self::Buffer,
        accumulate: Accumulate,
        db: &mut Self::Buffer,
    ) -> Result<()> {
        self.activation_gradient(function, x, dy)?;
        self.bias_gradient(dy, accumulate, db)
    }

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

    /// `y = cap · tanh(x / cap)`, element by element: scores that are bounded (Gemma 2).
    ///
    /// # Errors
    /// Operands that do not fit; an engine without it.
    fn soft_cap(&self, cap: f32, x: &Self::Buffer, y: &mut Self::Buffer) -> Result<()>;

    /// `dy ← dy · (1 - tanh(x / cap)²)`.
    ///
    /// # Errors
    /// Those of [`LayerOperations::soft_cap`].
    fn soft_cap_gradient(&self, cap: f32, x: &Self::Buffer, dy: &mut Self::Buffer) -> Result<()>;

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
}
