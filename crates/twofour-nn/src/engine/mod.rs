//! What a model computes with: the operations that blocks, models and the trainer are written over, once.
//!
//! | item | |
//! |---|---|
//! | [`Engine`] | memory and operations of a device |
//! | [`Buffer`], [`Kind`] | the engine's memory |
//! | [`SparseLayer`] | a trainable 2:4 weight: mask, packed weight and its GEMMs |
//! | [`cpu::CpuEngine`] | f32 on the CPU |
//! | `cuda::CudaEngine` | f32, f16 or bf16 on an NVIDIA GPU (feature `cuda`) |
//!
//! Conventions of all operations:
//!
//! - Matrices are row-major. `tokens` rows of activations come first: `x` is `[tokens, in]`, `y` and `dy` are `[tokens, out]`, a weight is
//!   `[out, in]`.
//! - GEMMs and sums accumulate in f32. A call with the same operands returns the same bits: no sum depends on the order in which threads finish.
//! - An operation overwrites its outputs unless its documentation says that it adds to them. Gradients of parameters take an [`Accumulate`].
//! - Calls may return before the work is done; they run in order. [`Engine::read`], [`Engine::findings`], [`Engine::gradient_norm`] and the methods of
//!   [`SparseLayer`] that return numbers or masks wait. A training step waits once, for its findings: whether its gradients are finite, and what clips
//!   them, is decided where they are ([`Engine::StepGuard`]).
//! - Lengths and kinds are checked; an operand that does not fit is an error and nothing is launched.

mod buffer;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod operands;
mod phase;
mod sparse;

use std::fmt::Debug;

use twofour::{
    DataType,
    layer::{Accumulate, Activation, SparseLinearSettings},
    select::Transposable,
};

use crate::Result;

pub use crate::cpu::masking::mask_words_of_row;
pub use buffer::{Buffer, Kind};
pub use operands::{
    AdamWState, AdamWStep, AttentionShape, LayerRefresh, LinearShape, Nonlinearity, OptimizerStep, PrunedDecay,
    SecondMoment, SgdState, SgdStep, StepFindings, StepLimits,
};
pub use phase::StepPhase;
pub use sparse::SparseLayer;

/// Memory and operations of a device.
///
/// An engine whose compute type is f32 accepts a [`Kind::Wide`] buffer wherever [`Kind::Compute`] is required, so that parameters need no copies.
pub trait Engine: Debug + Send + Sync + Sized + 'static {
    /// Memory.
    type Buffer: Buffer;
    /// What the backward pass of attention reads beside its operands.
    type AttentionState: Debug + Send;
    /// Cosines and sines of rotary position embedding.
    type Rotary: Debug + Send + Sync;
    /// A 2:4 activation, packed along features and along tokens.
    type PackedActivation: Debug + Send;
    /// A trainable 2:4 weight.
    type SparseLinear: SparseLayer<Self::Buffer>;

    /// What decides about a step's update, in the engine's memory: whether loss and gradients are finite, and what gradients are multiplied by.
    type StepGuard: Debug + Send;

    /// The engine's name, as in `cpu`.
    fn name(&self) -> &'static str;

    /// The type of activations and of GEMM operands: f32, bf16 or f16.
    fn compute_type(&self) -> DataType;

    /// Memory of zeros.
    ///
    /// # Errors
    /// Not enough memory.
    fn zeros(&self, kind: Kind, len: usize) -> Result<Self::Buffer>;

    /// Sets all elements of a [`Kind::Wide`] or [`Kind::Compute`] buffer to zero.
    ///
    /// # Errors
    /// Those of the device.
    fn clear(&self, buffer: &mut Self::Buffer) -> Result<()>;

    /// Overwrites a [`Kind::Wide`] or [`Kind::Compute`] buffer with f32 values, rounded to its type.
    ///
    /// # Errors
    /// Another length or kind.
    fn write(&self, buffer: &mut Self::Buffer, values: &[f32]) -> Result<()>;

    /// Overwrites a [`Kind::Index`] buffer.
    ///
    /// # Errors
    /// Another length or kind.
    fn write_ids(&self, buffer: &mut Self::Buffer, ids: &[u32]) -> Result<()>;

    /// The elements of a [`Kind::Wide`] or [`Kind::Compute`] buffer as f32. Waits.
    ///
    /// # Errors
    /// Another kind.
    fn read(&self, buffer: &Self::Buffer) -> Result<Vec<f32>>;

    /// Rounds a [`Kind::Wide`] buffer to a [`Kind::Compute`] one of the same length.
    ///
    /// # Errors
    /// Another length or kind.
    fn round(&self, from: &Self::Buffer, to: &mut Self::Buffer) -> Result<()>;

    /// `out[t] = table[ids[t]]` for a table `[vocabulary, width]` of [`Kind::Compute`]. Tokens must be below the vocabulary.
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

    /// `y = (x - mean) / sqrt(variance + epsilon) · gain + bias` for each token; the parameters, gain and bias, are [`Kind::Wide`], `[width]`.
    /// `statistics`, of [`Kind::Wide`], `[tokens]` each, receive mean and reciprocal standard deviation of each token.
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

    /// [`Engine::add`] and [`Engine::layer_norm`] of the sum, as where a norm follows a residual addition: `sum ← sum + x`, and `y` is its norm. The bits are those
    /// of the two calls.
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

    /// Adds the gradient for `x` to `dx`, and writes or adds those for gain and bias, of [`Kind::Wide`]. `saved` are `x`, the gain, and the statistics of
    /// [`Engine::layer_norm`].
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

    /// `y = x / sqrt(mean of x² + epsilon) · gain` for each token; the gain is [`Kind::Wide`], `[width]`. `statistics`, of [`Kind::Wide`], `[tokens]`, is for
    /// [`Engine::rms_norm_gradient`] alone: an engine may leave it as it is.
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

    /// [`Engine::add`] and [`Engine::rms_norm`] of the sum: `sum ← sum + x`, and `y` is its norm. The bits are those of the two calls.
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

    /// Adds the gradient for `x` to `dx`, and writes or adds that for the gain, of [`Kind::Wide`]. `saved` are `x`, the gain, and the statistics of
    /// [`Engine::rms_norm`], which had the same `epsilon`.
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

    /// The table of rotary position embedding for up to `positions` positions: element `i` of the lower half of a head is paired with element `i` of the upper
    /// half and rotated by `position · frequencies[i]`. A head has twice as many elements as there are frequencies.
    ///
    /// # Errors
    /// Not enough memory.
    fn rotary(&self, positions: usize, frequencies: &[f64]) -> Result<Self::Rotary>;

    /// Attention of every head, `softmax(q kᵀ / sqrt(head_dim)) v`, with queries and keys rotated if there is a table. `qkv` is
    /// `[tokens, (heads + 2 kv_heads) head_dim]`: queries of all heads, then keys, then values. `merged` is `[tokens, heads head_dim]`. The state and
    /// `qkv`, in which an engine may rotate queries and keys, are what [`Engine::attention_gradient`] needs.
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

    /// The gradient of [`Engine::attention`] for the `qkv` that it was called with, from that of its output. `saved` are its state, and `qkv` and `merged` as it left
    /// them.
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

    /// `y = activation(x)`, element by element. GELU is `x · Φ(x)`, not its approximation by `tanh`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn activation(&self, activation: Activation, x: &Self::Buffer, y: &mut Self::Buffer) -> Result<()>;

    /// `dy ← dy · activation'(x)`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn activation_gradient(&self, activation: Activation, x: &Self::Buffer, dy: &mut Self::Buffer) -> Result<()>;

    /// `y = max(x, 0)²`, element by element.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn squared_relu(&self, x: &Self::Buffer, y: &mut Self::Buffer) -> Result<()>;

    /// `dy ← dy · 2 max(x, 0)`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn squared_relu_gradient(&self, x: &Self::Buffer, dy: &mut Self::Buffer) -> Result<()>;

    /// `max(x, 0)²` of `x`, `[tokens, width]`, pruned by the rule to 2:4 along tokens and along features at once, and packed along both: the input of a linear
    /// layer with a 2:4 activation (Haziza et al., 2025). `old` is a packed activation that is not needed any more: of the same shape, its memory is used again, which a
    /// step that is repeated requires.
    ///
    /// # Errors
    /// Operands that do not fit; a NaN, where the engine looks for one; a shape or a type that no kernel of the engine supports.
    fn pack_squared_relu(
        &self,
        rule: Transposable,
        x: &Self::Buffer,
        width: usize,
        old: Option<Self::PackedActivation>,
    ) -> Result<Self::PackedActivation>;

    /// [`Engine::linear`] of a packed activation.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn packed_linear(
        &self,
        shape: LinearShape,
        x: &Self::PackedActivation,
        weight: &Self::Buffer,
        bias: Option<&Self::Buffer>,
        y: &mut Self::Buffer,
    ) -> Result<()>;

    /// [`Engine::weight_gradient`] of a packed activation.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn packed_weight_gradient(
        &self,
        shape: LinearShape,
        dy: &Self::Buffer,
        x: &Self::PackedActivation,
        accumulate: Accumulate,
        dw: &mut Self::Buffer,
    ) -> Result<()>;

    /// [`Engine::activation_gradient`], and [`Engine::bias_gradient`] of its result: the gradients of what is before an activation, and of the bias of the
    /// linear layer that made it. The bits are those of the two calls.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn activation_and_bias_gradient(
        &self,
        activation: Activation,
        x: &Self::Buffer,
        dy: &mut Self::Buffer,
        accumulate: Accumulate,
        db: &mut Self::Buffer,
    ) -> Result<()> {
        self.activation_gradient(activation, x, dy)?;
        self.bias_gradient(dy, accumulate, db)
    }

    /// `y = function(gate) ⊙ up` for `x` of rows that hold `width` elements of the gate and then `width` of `up`; `y` is `[tokens, width]`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn gated(&self, function: Nonlinearity, width: usize, x: &Self::Buffer, y: &mut Self::Buffer) -> Result<()>;

    /// The gradient of [`Engine::gated`] for `x`, `[tokens, 2 width]`, from `dy`, `[tokens, width]`.
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

    /// `y = x · Wᵀ + bias` for a dense weight; weight and bias are [`Kind::Compute`].
    ///
    /// # Errors
    /// Operands that do not fit.
    fn linear(
        &self,
        shape: LinearShape,
        x: &Self::Buffer,
        weight: &Self::Buffer,
        bias: Option<&Self::Buffer>,
        y: &mut Self::Buffer,
    ) -> Result<()>;

    /// `dx = dy · W` for a dense weight.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn input_gradient(
        &self,
        shape: LinearShape,
        dy: &Self::Buffer,
        weight: &Self::Buffer,
        dx: &mut Self::Buffer,
    ) -> Result<()>;

    /// `dw = dyᵀ · x`, or added to it; `dw` is [`Kind::Wide`].
    ///
    /// # Errors
    /// Operands that do not fit.
    fn weight_gradient(
        &self,
        shape: LinearShape,
        dy: &Self::Buffer,
        x: &Self::Buffer,
        accumulate: Accumulate,
        dw: &mut Self::Buffer,
    ) -> Result<()>;

    /// `db` = column sums of `dy`, or added to it; `db` is [`Kind::Wide`].
    ///
    /// # Errors
    /// Operands that do not fit.
    fn bias_gradient(&self, dy: &Self::Buffer, accumulate: Accumulate, db: &mut Self::Buffer) -> Result<()>;

    /// A 2:4 layer over a master weight `[out_features, in_features]` of [`Kind::Wide`]: selects its mask and packs it.
    ///
    /// # Errors
    /// A NaN in the master weight, settings that exclude each other, a shape that no kernel of the engine supports.
    fn sparse_linear(
        &self,
        master: &Self::Buffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
    ) -> Result<Self::SparseLinear>;

    /// [`Engine::sparse_linear`] with GEMMs in 8-bit floats: weights and inputs in e4m3, and, where masks are transposable, output gradients in e5m2. Each
    /// tensor has one scale, from its largest magnitude when it is rounded; that of zeros is 1. Input gradients under other masks and weight gradients are
    /// computed in the compute type. An engine without such GEMMs rounds operands and computes in the compute type.
    ///
    /// # Errors
    /// Those of [`Engine::sparse_linear`]; a device that is too old.
    fn float8_sparse_linear(
        &self,
        master: &Self::Buffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
    ) -> Result<Self::SparseLinear>;

    /// Rounds to `kept` a weight of [`Kind::Wide`] with rows of `cols` elements, and sets all but the `count` largest magnitudes of every group of four in a row
    /// to zero. Of equal magnitudes the lower index is kept; a NaN counts as the largest.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn keep_of_four(&self, count: u32, weight: &Self::Buffer, cols: usize, kept: &mut Self::Buffer) -> Result<()>;

    /// Rounds to `masked` a weight of [`Kind::Wide`] with rows of `cols` elements, with +0.0 in place of every element that a mask prunes. The mask is of
    /// [`Kind::Index`], `[rows, mask_words_of_row(cols)]` ([`mask_words_of_row`]): bit `b` of word `j` of a row stands for column `32 j + b`, 1 where the element is kept.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn apply_mask(
        &self,
        mask: &Self::Buffer,
        cols: usize,
        weight: &Self::Buffer,
        masked: &mut Self::Buffer,
    ) -> Result<()>;

    /// Writes +0.0 in place of every element that a mask, as [`Engine::apply_mask`] has it, prunes of values of [`Kind::Wide`].
    ///
    /// # Errors
    /// Operands that do not fit.
    fn apply_mask_in_place(&self, mask: &Self::Buffer, cols: usize, values: &mut Self::Buffer) -> Result<()>;

    /// `y ← y + x`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn add(&self, x: &Self::Buffer, y: &mut Self::Buffer) -> Result<()>;

    /// Cross-entropy of `logits` `[tokens, classes]` and targets, which must be below `classes`: adds the sum of `-log softmax(logits)[target]` to
    /// `loss`, [`Kind::Wide`] of one element. With a `gradient_scale`, `logits` are overwritten with their gradient, `softmax - one_hot`, times that scale.
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

    /// The guard of a training loop, with room for the flips of that many 2:4 layers.
    ///
    /// # Errors
    /// Not enough memory.
    fn step_guard(&self, layers: usize) -> Result<Self::StepGuard>;

    /// Computes the norm of gradients, all of [`Kind::Wide`], and the factor that removes their loss scale and clips the norm, and takes note of the loss,
    /// [`Kind::Wide`] of one element. Where the norm or the loss is not finite, the calls that take the guard change nothing until it judges again.
    ///
    /// # Errors
    /// Another kind.
    fn judge(
        &self,
        gradients: &[&Self::Buffer],
        loss: &Self::Buffer,
        limits: StepLimits,
        guard: &mut Self::StepGuard,
    ) -> Result<()>;

    /// What the guard found, and the flips of layers: at most as many as the guard has room for. Waits.
    ///
    /// # Errors
    /// More layers; those of the device.
    fn findings(&self, guard: &mut Self::StepGuard, layers: &[&Self::SparseLinear]) -> Result<StepFindings>;

    /// [`SparseLayer::remask`] if it `selects_mask`, otherwise [`SparseLayer::repack`]; nothing where the guard skips the step.
    ///
    /// # Errors
    /// Those of [`SparseLayer::remask`].
    fn refresh(
        &self,
        layer: &mut Self::SparseLinear,
        master: &Self::Buffer,
        selects_mask: bool,
        guard: &Self::StepGuard,
    ) -> Result<()>;

    /// [`Engine::refresh`] of several layers, with the same bits: one layer may leave a device idle at its end.
    ///
    /// # Errors
    /// [`Error::InLayer`](crate::Error::InLayer) with those of [`Engine::refresh`].
    fn refresh_together(
        &self,
        layers: Vec<LayerRefresh<'_, Self::Buffer, Self::SparseLinear>>,
        guard: &Self::StepGuard,
    ) -> Result<()> {
        layers.into_iter().try_for_each(|LayerRefresh { name, layer, master, selects_mask }| {
            self.refresh(layer, master, selects_mask, guard).map_err(|error| error.in_layer(name))
        })
    }

    /// The root of the sum of the squares of all elements of [`Kind::Wide`] buffers: NaN or infinite where an element is. Waits.
    ///
    /// # Errors
    /// Another kind.
    fn gradient_norm(&self, gradients: &[&Self::Buffer]) -> Result<f64>;

    /// An AdamW step: `g ← g · gradient_scale` (plus pruned decay), `m ← β₁ m + (1 - β₁) g`, `v ← β₂ v + (1 - β₂) g²`,
    /// `w ← w (1 - η · weight_decay) - η m̂ / (√v̂ + ε)`, in f32 in this order. The bits are the same on all engines. Returns the sum of the magnitudes
    /// of the second moment's change, or of their logarithms, where [`SecondMoment::Watched`] or [`SecondMoment::WatchedByLogarithm`] asks for it (and then waits), and otherwise 0; engines take that sum in orders of their own.
    /// With a guard, the gradient is multiplied by the guard's factor, `gradient_scale` must be 1, and a skipped step changes nothing and returns 0.
    ///
    /// # Errors
    /// Operands that do not fit; what the engine does not support.
    fn adamw(
        &self,
        step: &AdamWStep,
        state: AdamWState<'_, Self::Buffer, Self::SparseLinear>,
        guard: Option<&Self::StepGuard>,
    ) -> Result<f64>;

    /// [`Engine::adamw`] of several parameters with the same numbers: for the many vectors of a model, whose calls take longer than their bytes. The bits are those of
    /// a call for each. Returns the sum of what they return.
    ///
    /// # Errors
    /// Those of [`Engine::adamw`].
    fn adamw_together(
        &self,
        step: &AdamWStep,
        states: Vec<AdamWState<'_, Self::Buffer, Self::SparseLinear>>,
        guard: Option<&Self::StepGuard>,
    ) -> Result<f64> {
        states.into_iter().try_fold(0.0, |sum, state| Ok(sum + self.adamw(step, state, guard)?))
    }

    /// Announces learning rate and number, counted from 1, of the next [`Engine::adamw`] calls of a [`Engine::repeat`]ed step: it has those at each repetition,
    /// whatever its calls were given when they were captured.
    ///
    /// # Errors
    /// Those of the device.
    fn begin_update(&self, _learning_rate: f64, _step: u64) -> Result<()> {
        Ok(())
    }

    /// Runs `work`, or repeats what it launched at an earlier call with the same key: the same calls with the same numbers on the same memory, but for learning
    /// rate and number of [`Engine::begin_update`]. `work` changes nothing but the engine's memory, and neither waits nor writes from host memory. It may run
    /// twice in a call, the first time without effect.
    ///
    /// # Errors
    /// Those of `work`, and of the device.
    fn repeat(&self, _key: u64, mut work: impl FnMut() -> Result<()>) -> Result<()> {
        work()
    }

    /// What a person should know about how the engine works, such as why it repeats no steps: each message once.
    fn take_note(&self) -> Option<String> {
        None
    }

    /// Says which phase of a step begins. Engines that measure phases take note of it.
    ///
    /// # Errors
    /// Those of the device.
    fn begin_phase(&self, _: StepPhase) -> Result<()> {
        Ok(())
    }

    /// A step of stochastic gradient descent: `g ← g · gradient_scale + weight_decay · w` (plus pruned decay), `m ← momentum · m + g`, `w ← w - η m`, in f32 in
    /// this order. The bits are the same on all engines. With a guard, the gradient is multiplied by the guard's factor, `gradient_scale` must be 1, and a skipped
    /// step changes nothing. The numbers are arguments of the launch, which [`Engine::repeat`] would repeat.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn sgd(
        &self,
        step: &SgdStep,
        state: SgdState<'_, Self::Buffer, Self::SparseLinear>,
        guard: Option<&Self::StepGuard>,
    ) -> Result<()>;

    /// Runs work that calls the engine many times. An engine with a pool of threads runs it inside the pool.
    fn scope<R: Send>(work: impl FnOnce() -> R + Send) -> R {
        work()
    }

    /// Bytes of memory that is in use, if the engine knows.
    fn memory_in_use(&self) -> Option<usize> {
        None
    }
}
