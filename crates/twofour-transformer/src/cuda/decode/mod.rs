//! What generating text takes beside the linear layers, for a few tokens of each sequence at a time: embedding,
//! normalization, attention over a cache of keys and values, gated activations, and the choice of a token.
//!
//! Functions launch work on the stream of a [`LayerContext`](twofour_cuda::layer::LayerContext) and return; they check
//! devices, data types and lengths first. The residual stream is f32; the inputs and outputs of GEMMs, tables and the
//! cache are of one type, f32, f16 or bf16. Arithmetic is in f32, without atomic operations on floats: results repeat
//! bit for bit on one kind of device.
//!
//! What changes from token to token (ids, and the number of tokens of each sequence) is read from device memory: a CUDA
//! graph ([`CapturedWork`](twofour_cuda::layer::CapturedWork)) of one step is replayed at every position.
//!
//! | task | items |
//! |---|---|
//! | embedding | [`TokenEmbedding`], [`embed_tokens`] |
//! | residual addition and normalization, to floats or to 8-bit integers | [`TokenNorm`], [`Normalized`], [`normalize_tokens`] |
//! | rotation, the cache, attention | [`CacheShape`], [`CachedAttention`], [`CachedTokens`] |
//! | gated activations to 8-bit integers | [`gate_to_i8`] |
//! | the most likely token | [`ChosenTokens`], [`choose_tokens`] |
//! | dense layers of 8-bit integers; of integers with inputs of floats, to compare 2:4 with | [`DenseInt8Linear`], [`WeightOnlyLinear`] |
//!
//! [`crate::cuda::gated_forward`] is the gated activation to floats, and
//! [`PackedLinear`](twofour_cuda::layer::PackedLinear) the 2:4 layer.

mod attention;
mod choice;
mod dense_int8;
mod embedding;
mod gate;
mod norm;
mod weight_only;

pub use attention::{CacheShape, CachedAttention, CachedTokens, HeadNorms};
pub use choice::{ChosenTokens, choose_tokens};
pub use dense_int8::DenseInt8Linear;
pub use embedding::{TokenEmbedding, embed_tokens};
pub use gate::gate_to_i8;
pub use norm::{Normalized, TokenNorm, TokenNormTensors, normalize_tokens};
pub use weight_only::WeightOnlyLinear;
