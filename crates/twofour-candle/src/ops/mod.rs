//! Differentiable fused operators for the CPU and, with the feature `cuda`, for CUDA tensors.
//!
//! candle's own `layer_norm`, `rms_norm`, `softmax_last_dim` and `rope` are applied without a backward pass: gradients
//! upstream of them are missing and nothing says so. The operators here compute the same values in one pass over memory
//! and carry a hand-written backward. They compute in f32; bf16 and f16 inputs are widened and the result narrowed.
//! On a GPU kernels do so in registers, on the stream of the tensors, and wait for nothing.
//!
//! | operator | forward | reference |
//! |---|---|---|
//! | [`layer_norm()`] | `(x - mean) / sqrt(var + eps) * gain + bias` over the last dimension | `candle_nn::ops::layer_norm_slow` |
//! | [`rms_norm()`] | `x / sqrt(mean(x^2) + eps) * gain` over the last dimension | `candle_nn::ops::rms_norm_slow` |
//! | [`softmax()`] | over the last dimension | `candle_nn::ops::softmax` |
//! | [`rope()`] | rotary position embedding, halves paired | `candle_nn::rotary_emb::rope_slow` |
//! | [`activate()`] | ReLU, exact GELU, SiLU | candle's element-wise operators |
//! | [`cross_entropy()`] | mean negative log-likelihood of class indices | `candle_nn::loss::cross_entropy` |
//!
//! The loops are those of [`twofour_transformer::cpu`], over slices.

mod activation;
mod cross_entropy;
pub(crate) mod layer_norm;
mod rms_norm;
pub(crate) mod rope;
pub(crate) mod rows;
mod softmax;

#[cfg(test)]
pub(crate) mod gradient_check;

pub use activation::activate;
pub use cross_entropy::cross_entropy;
pub use layer_norm::layer_norm;
pub use rms_norm::rms_norm;
pub use rope::rope;
pub use softmax::softmax;
