//! What a model computes with: the operations that blocks, models and the trainer are written over, once.
//!
//! | item | |
//! |---|---|
//! | [`Engine`] | memory and operations of a device: [`Memory`], [`LinearOperations`], [`LayerOperations`] and [`StepOperations`] |
//! | [`Buffer`], [`Kind`] | the engine's memory |
//! | [`SparseLayer`], [`SparseActivation`] | a trainable 2:4 weight: mask, packed weight and its GEMMs; a 2:4 activation |
//! | [`cpu::CpuEngine`] | f32 on the CPU |
//! | `cuda::CudaEngine` | f32, f16 or bf16 on an NVIDIA GPU (feature `cuda`) |
//!
//! Conventions of all operations:
//!
//! - Matrices are row-major. `tokens` rows of activations come first: `x` is `[tokens, in]`, `y` and `dy` are `[tokens,
//!   out]`, a weight is `[out, in]`.
//! - GEMMs and sums accumulate in f32. A call with the same operands returns the same bits: no sum depends on the order
//!   in which threads finish.
//! - An operation overwrites its outputs unless its documentation says that it adds to them. Gradients of parameters
//!   take an [`Accumulate`](twofour::layer::Accumulate).
//! - Calls may return before the work is done; they run in order. [`Memory::read`], [`StepOperations::findings`],
//!   [`StepOperations::gradient_norm`] and the methods of [`SparseLayer`] that return numbers or masks wait. A training
//!   step waits once, for its findings: whether its gradients are finite, and what clips them, is decided where they
//!   are ([`StepOperations::StepGuard`]).
//! - Lengths and kinds are checked; an operand that does not fit is an error and nothing is launched.

mod buffer;
mod clip;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
mod layers;
mod linear;
mod memory;
mod norm;
mod phase;
mod sparse;
mod step;

pub use buffer::{Buffer, Kind};
pub use clip::clip_factor;
pub use layers::LayerOperations;
pub use linear::LinearOperations;
pub use memory::Memory;
pub use norm::{NormGradients, NormInput, NormParameters, NormStatistics};
pub use phase::StepPhase;
pub use sparse::{SparseActivation, SparseLayer};
pub use step::StepOperations;

pub use crate::operands::{
    AdamWStep, Elementwise, Kept, LayerRefresh, LinearShape, Nonlinearity, OptimizerStep, ParameterState, PrunedDecay,
    SecondMoment, SgdStep, SparsePrecision, StepFindings, StepLimits,
};
pub use crate::{AttentionShape, DistillationWeights, ErrorMeasure, ScoreOptions, cpu::masking::mask_words_of_row};

/// Memory and operations of a device.
pub trait Engine: StepOperations {
    /// Runs work that calls the engine many times. An engine with a pool of threads runs it inside the pool.
    fn scope<R: Send>(work: impl FnOnce() -> R + Send) -> R {
        work()
    }
}
