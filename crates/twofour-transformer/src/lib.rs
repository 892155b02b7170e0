//! What a transformer needs beside its 2:4 layers, forward and backward, on CPUs and NVIDIA GPUs.
//!
//! | module | contents |
//! |---|---|
//! | [`AttentionShape`], [`ScoreOptions`] | the shape of attention: heads, mask, window, scale, soft cap |
//! | [`DistillationWeights`], [`ErrorMeasure`] | losses beside the cross-entropy |
//! | [`random`] | counter-based random numbers |
//! | [`cpu`] | operations over f32 slices on the CPU |
//! | `cuda` | operations over device memory, and their kernels (feature `cuda`) |
//! | [`engine`] | memory and operations of a device, over which models are written once; the CPU's and a GPU's |
//! | [`parameter`] | a trainable parameter |
//! | [`weight`] | what a linear layer computes with: a dense, 2:4 or masked weight |

mod attention;
pub mod cpu;
#[cfg(feature = "cuda")]
pub mod cuda;
pub mod engine;
mod error;
mod loss;
mod operands;
pub mod parameter;
pub mod random;
pub mod weight;

pub use attention::{AttentionShape, ScoreOptions};
pub use error::{Error, Result};
pub use loss::{DistillationWeights, ErrorMeasure};
