//! The 2:4 sparse linear layer over slices, on the CPU.
//!
//! When a mask is chosen, what is packed and reused, and which product computes which gradient is decided here, and in
//! `twofour_cuda::layer` for device memory, under the same names and with the same enums. Front ends call one of the
//! two.
//!
//! | type | for |
//! |---|---|
//! | [`SparseLinear`] | training with a 2:4 weight and a dense master weight |
//! | [`SparseActivationLinear`] | training with a 2:4 activation and a dense weight |
//! | [`PackedLinear`] | inference with a packed 2:4 weight |
//!
//! | tensor | shape, row-major |
//! |---|---|
//! | master weight, weight gradient | `[out_features, in_features]` |
//! | `x`, `dx` | `[tokens, in_features]` |
//! | `y`, `dy`, pre-activation | `[tokens, out_features]` |
//! | bias, bias gradient | `[out_features]` |
//!
//! A training step of [`SparseLinear`] chooses the mask and packs the weight once, in one pass
//! ([`SparseLinear::remask`]), and reuses both over all micro-steps:
//!
//! ```
//! use twofour::{MatrixRef, kernel::Activation, layer::{Accumulate, Forward, SparseLinear, SparseLinearSettings}};
//! let master = [0.1f32, -3.0, 2.0, 0.0, 1.0, 4.0, 3.0, 2.0];
//! let mut layer = SparseLinear::<f32>::new(MatrixRef::new(2, 4, &master)?, SparseLinearSettings::default())?;
//! let (x, mut y) = ([1.0, 10.0, 100.0, 1000.0], [0.0; 2]);
//! layer.forward(&x, 1, Forward::default(), &mut y)?;
//! assert_eq!(y, [170.0, 340.0]);
//! let (dy, mut dx, mut dw) = ([1.0, 1.0], [0.0; 4], [0f32; 8]);
//! layer.input_gradient(&dy, 1, &mut dx)?;
//! assert_eq!(dx, [0.0, 1.0, 5.0, 0.0]);
//! layer.weight_gradient(&dy, &x, 1, Accumulate::Overwrite, &mut dw)?;
//! assert_eq!(dw, [1.0, 10.0, 100.0, 1000.0, 1.0, 10.0, 100.0, 1000.0]);
//! // The optimizer updates the master weight; then, once per optimizer step:
//! let flips = layer.remask(MatrixRef::new(2, 4, &[5.0, -3.0, 2.0, 0.0, 1.0, 4.0, 3.0, 2.0])?)?;
//! assert_eq!(flips, 2);
//! # Ok::<(), twofour::Error>(())
//! ```

mod activation;
mod dense;
mod gated_gelu;
mod gradient;
mod packed;
mod remask;
mod settings;
mod sparse_activation;
mod sparse_linear;

pub use crate::kernel::Activation;
pub use activation::{activate, activation_gradient};
pub use gated_gelu::{gated_gelu, gated_gelu_gradient};
pub use gradient::{
    bias_gradient, estimated_weight_gradient, gradient_estimate, masked_weight_gradient, weight_gradient,
};
pub use packed::{PackedElement, PackedLinear, PackedWeight};
pub use remask::remask;
pub use settings::{
    Accumulate, InputActivation, InputGradient, MaskRule, PrunedGradient, SparseActivationSettings,
    SparseLinearSettings, WeightGradient,
};
pub use sparse_activation::{PackedActivation, SparseActivationLinear};
pub use sparse_linear::{Forward, SparseLinear};
