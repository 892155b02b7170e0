//! Pruning that also changes the kept weights: **solvers**; and all pruning methods by name.
//!
//! | function | what it does | requires |
//! |---|---|---|
//! | [`sparsegpt`](sparsegpt()) | prunes column by column and adjusts the later ones | a [`Hessian`] |
//! | [`alps`](alps()) | finds mask and weights together, by the method of multipliers | a [`Hessian`] |
//! | [`swaps`](swaps()) | exchanges kept and pruned elements within groups while that lowers the error | a mask, a [`Hessian`] |
//! | [`permutation`](permutation()) | orders columns so that a pattern costs less, before anything is pruned | a [`Hessian`] |
//! | [`compensated`](compensated()) | the weight that makes up for the errors of earlier layers: what is pruned in its place | a [`Hessian`], [`CrossProducts`](crate::calibration::CrossProducts) |
//! | [`refit`](refit()) | the best kept weights for a mask | a mask, a [`Hessian`] |
//! | [`round`](round()) | the best integers for kept weights | a mask, a [`Hessian`] |
//! | [`low_rank`](low_rank()) | two factors of a low rank for a matrix; beside a pruned weight ([`LowRankPart`]) for what it lost | nothing, norms or a [`Hessian`] |
//!
//! All of them make the layer's outputs on calibration inputs change as little as possible. [`METHODS`] lists what
//! prunes, criteria and solvers, by name; [`Pruning`] is a method with what follows it. A new solver is a file here and
//! its line in [`METHODS`].
//!
//! The operations that take their time are those of a [`Backend`]: [`Cpu`], or the GPU of the crate `twofour-cuda`.
//! Functions whose names end in `_on` compute on a given one.
//!
//! [`Hessian`]: crate::calibration::Hessian

mod alps;
mod backend;
mod compensate;
mod grid;
mod low_rank;
mod method;
mod normal;
mod permutation;
mod refit;
mod round;
pub mod sparsegpt;
mod swaps;
#[cfg(test)]
pub(crate) mod testing;

pub use alps::{Alps, alps, alps_on};
pub use backend::{AlpsState, Backend, Cpu, RefitRows, Values};
pub use compensate::{Compensation, compensated, compensated_on};
pub use grid::{Bits, Grid, ScaleScope};
pub use low_rank::{LowRank, LowRankForm, LowRankPart, Rank, low_rank};
pub use method::{METHODS, Method, Pruned, Pruning, method};
pub use permutation::{Permutation, permutation, permutation_on};
pub use refit::{Refit, refit, refit_on};
pub use round::round;
pub use sparsegpt::{Precision, Solved, SparseGpt, sparsegpt};
pub use swaps::{Swaps, swaps};
