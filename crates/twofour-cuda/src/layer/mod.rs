//! The 2:4 sparse linear layer over device memory.
//!
//! This module decides when a mask is chosen, what is packed and reused, and which GEMM computes which gradient;
//! [`twofour::layer`] does so for slices on the CPU, with the same names and enums. Front ends call one of the two. The
//! kernels below it, over raw pointers, are in [`crate::raw`].
//!
//! | type | for |
//! |---|---|
//! | [`LayerContext`] | the device, the stream, plans and workspace of all layers |
//! | [`SparseLinear`] | training with a 2:4 weight and a dense master weight |
//! | [`SparseActivationLinear`] | training with a 2:4 activation and a dense weight |
//! | [`PackedLinear`] | inference with a packed 2:4 weight |
//! | [`DenseLinear`] | a dense weight, by cuBLASLt |
//! | [`borrowed`] | the same passes over tensors that another framework owns |
//! | [`CapturedWork`] | calls that were captured in a CUDA graph |
//! | [`DeviceSlice`], [`DeviceSliceMut`], [`DeviceBuffer`] | length-checked device memory, borrowed or owned |
//!
//! With many tokens a product with a packed weight is a dense GEMM where that is measured to be faster: the first call
//! for a shape times both. [`LayerContext::repeatable`] has none of that.
//!
//! Calls launch work on the context's stream and return. Results repeat bit for bit in a process. After
//! [`SparseLinear::prepare`] a CUDA graph can capture calls, because what changes from step to step (seeds, step
//! numbers and learning rates) is in device memory.

pub mod borrowed;
mod captured;
mod dense;
mod dense_linear;
mod dense_plans;
mod forward;
mod gradient;
mod host_form;
mod int4;
mod kernels;
mod mask;
mod packed;
mod packed_gemm;
mod quantized;
mod random;
mod sparse_activation;
mod sparse_linear;
mod weight;

pub use captured::CapturedWork;
pub use dense_linear::DenseLinear;
pub use forward::{Forward, activation_gradient};
pub use gradient::{activation_and_bias_gradient, bias_gradient};
pub use packed::PackedLinear;
#[doc(hidden)]
pub use random::{RandomForm, random_buffer};
pub use sparse_activation::{PackedActivation, SparseActivationLinear};
pub use sparse_linear::{Precision, Refresh, SparseLinear, flip_counts, refresh_together};
pub use twofour::layer::{
    Accumulate, InputActivation, InputGradient, MaskRule, PrunedGradient, SparseActivationSettings,
    SparseLinearSettings, WeightGradient,
};

use crate::{Error, Result};
pub use crate::{
    context::{LayerContext, Work},
    freed::FreeNote,
    memory::{DeviceBuffer, DeviceSlice, DeviceSliceMut},
    plans::Plans,
};

/// Returns `rows * cols`, checked.
fn elements(rows: usize, cols: usize) -> Result<usize> {
    rows.checked_mul(cols).ok_or(Error::TooLarge { rows, cols })
}
