//! What a transformer needs beside the sparse layer, over device memory: normalization, embedding, attention, gated
//! activations, the loss and the optimizers; [`decode`] has what generating text needs.
//!
//! Functions launch work on the stream of a [`LayerContext`](twofour_cuda::layer::LayerContext) and return; they check
//! devices, data types and lengths first. Activations are f32, f16 or bf16, and all tensors of a call are of one type,
//! unless it says otherwise. Statistics, gradients of parameters and losses are f32. Ids and targets are u32, held as
//! elements of [`DataType::I32`](twofour_cuda::DataType::I32)
//! ([`DeviceBuffer::from_ids`](twofour_cuda::layer::DeviceBuffer::from_ids)). Matrices are row-major, and `tokens` is
//! `batch * positions`.
//!
//! Arithmetic is in f32. There are no atomic operations on floats: results repeat bit for bit on one kind of device.
//!
//! | task | items |
//! |---|---|
//! | normalization | [`Norm`], [`norm_forward`], [`norm_backward`] |
//! | embedding | [`Embedding`], [`embedding_forward`], [`embedding_gradient`] |
//! | heads with rotary embedding | [`split_heads`], [`split_heads_gradient`], [`merge_heads`], [`merge_heads_gradient`] |
//! | rotary embedding, softmax | [`rotate`], [`rotate_gradient`], [`rotate_projection`], [`rotate_projection_gradient`], [`softmax()`], [`softmax_gradient`] |
//! | attention | [`attention_forward`], [`attention_backward`], [`attention_forward_projected`], [`attention_backward_projected`], [`prepare_attention`] |
//! | attention over images, whole or in windows, with relative positions; neighbours in a grid; factors of columns | [`ImageAttention`], [`image_attention`], [`neighbours`], [`scale_rows`] |
//! | activations | [`ElementFunction`], [`activation_forward`], [`activation_backward`] |
//! | gated activations | [`Gate`], [`gated_forward`], [`gated_backward`], [`clamped_gate_forward`] |
//! | losses | [`cross_entropy`], [`cross_entropy_loss`], [`distillation`], [`squared_error`] |
//! | gradient norm and AdamW | [`clip_gradients`], [`StepSchedule`], [`adamw`], [`adamw_in_phase`], [`adamw_together`] |
//! | gradient descent with momentum | [`sgd`] |
//! | pruning to `N:4`, masks of any pattern | [`keep_of_four`], [`apply_mask`], [`apply_mask_in_place`] |
//! | sums of rows with weights | [`RowSums`], [`weighted_rows`] |
//! | the sources of all kernels | [`sources`] |
//! | sums, copies, conversions, constants | [`add`], [`add_in_place`], [`copy`], [`convert`], [`fill`] |
//!
//! Kernels are loaded, and memory is allocated, by the first call of a kind: [`prepare`] loads the kernels of a data
//! type, and after one more run of a step a CUDA graph can capture it.

mod activation;
mod attention;
pub mod decode;
mod embedding;
mod gated;
mod grid;
mod heads;
mod image;
mod keep_of_four;
mod kernels;
mod loss;
mod masking;
mod norm;
mod optimizer;
mod pointwise;
mod raw;
mod sgd;
mod shape;
mod softmax;
mod squared_error;
mod weighted_rows;

pub use activation::{activation_backward, activation_backward_in_place, activation_forward};
pub use attention::{
    AttentionEngine, AttentionGradients, AttentionInputs, attention_backward, attention_backward_projected,
    attention_forward, attention_forward_projected, attention_reads_projection, prepare_attention,
};
pub use embedding::{Embedding, embedding_forward, embedding_gradient};
pub use gated::{ClampedGate, Gate, clamped_gate_forward, gated_backward, gated_forward};
pub use grid::round_to_grid;
pub use heads::{
    Rotary, SplitHeads, SplitHeadsMut, merge_heads, merge_heads_gradient, rotate, rotate_gradient, rotate_projection,
    rotate_projection_gradient, split_heads, split_heads_gradient,
};
pub use image::{ImageAttention, ImageAttentionTensors, image_attention, neighbours, scale_rows};
pub use keep_of_four::keep_of_four;
pub use kernels::{prepare, sources};
pub use loss::{IGNORED_TARGET, LossFactor, cross_entropy, cross_entropy_loss, distillation};
pub use masking::{apply_mask, apply_mask_in_place, mask_words_of_row};
pub use norm::{Norm, NormBackward, NormForward, NormInput, NormKind, norm_backward, norm_forward};
pub use optimizer::{
    AdamWPhase, AdamWTensors, ClippedGradients, GradientClip, PrunedDecay, SecondMoment, StepSchedule, adamw,
    adamw_in_phase, adamw_together, clip_gradients,
};
pub use pointwise::{
    add, add_in_place, convert, copy, fill, scale_in_place, soft_cap, soft_cap_gradient, soft_cap_in_place,
};
pub use sgd::{SgdSettings, SgdTensors, sgd};
pub use softmax::{softmax, softmax_gradient};
pub use squared_error::squared_error;
pub use twofour_cuda::raw::{adamw::AdamWSettings, elementwise::ElementFunction};
pub use weighted_rows::{RowSums, weighted_rows};
