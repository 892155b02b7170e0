//! The attention blocks of a model.

use super::{LatentConfig, Rope};

/// The attention blocks of a model.
#[derive(Debug, Clone, PartialEq)]
pub struct AttentionConfig {
    /// Heads of queries.
    pub heads: usize,
    /// Heads of keys and values; a divisor of `heads`, which share them in groups.
    pub kv_heads: usize,
    /// Elements of a head.
    pub head_dim: usize,
    /// Whether a token attends to no token behind it.
    pub is_causal: bool,
    /// Whether queries, keys and values have biases.
    pub qkv_bias: bool,
    /// Whether the output has a bias.
    pub out_bias: bool,
    /// Whether queries and keys are normalized, head by head, before they are rotated.
    pub head_norms: bool,
    /// The factor of scores; `1 / √head_dim` where there is none.
    pub scale: Option<f32>,
    /// The bound of scores: `soft_cap * tanh(score / soft_cap)`.
    pub soft_cap: Option<f32>,
    /// The largest magnitude of queries, keys and values, to which they are clamped (MPT).
    pub qkv_bound: Option<f32>,
    /// The window of each layer; none for the whole sequence. Empty where no layer has one. In causal attention a
    /// window is the number of tokens that a token attends to, itself and those before it. In a model of images it is
    /// the side of square windows of patches, which are padded with zeros at the right and the lower edge.
    pub windows: Vec<Option<usize>>,
    /// The rotation in layers with a window, where it differs.
    pub local_rope: Option<Rope>,
    /// Number of elements of a head that are rotated, from the first on, where not all are.
    pub rotated: Option<usize>,
    /// Whether scores have a term for the distance of query and key, of rows and of columns (SAM).
    pub relative_positions: bool,
    /// Whether each head has a sink: a score beside those of the keys, of which the softmax makes a weight that falls
    /// on no value (gpt-oss).
    pub sinks: bool,
    /// The latents that keys and values are computed from, where there are any.
    pub latent: Option<LatentConfig>,
}

impl AttentionConfig {
    /// Causal attention over the whole sequence, without biases, norms and bounds.
    pub fn causal(heads: usize, kv_heads: usize, head_dim: usize) -> Self {
        AttentionConfig {
            heads,
            kv_heads,
            head_dim,
            is_causal: true,
            qkv_bias: false,
            out_bias: false,
            head_norms: false,
            scale: None,
            soft_cap: None,
            qkv_bound: None,
            windows: vec![],
            local_rope: None,
            rotated: None,
            relative_positions: false,
            sinks: false,
            latent: None,
        }
    }

    /// Full attention of so many heads that divide the width, with biases.
    pub fn full(width: usize, heads: usize) -> Self {
        let causal = Self::causal(heads, heads, width / heads.max(1));
        AttentionConfig { is_causal: false, qkv_bias: true, out_bias: true, ..causal }
    }
}
