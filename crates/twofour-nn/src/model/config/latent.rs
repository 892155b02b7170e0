//! Multi-head latent attention.

use std::ops::Range;

use super::{AttentionConfig, TransformerConfig, expect_size};
use crate::{Error, Result};

/// Keys and values that linear layers make of one narrow vector of each token, its latent, behind a norm; the rotated
/// part of a key is one for all heads (DeepSeek-V2; Liu et al., 2024).
///
/// The block's first layer makes, side by side, the latent of the queries, or the queries themselves where they have
/// none, the latent of keys and values, and the rotated part of the keys. A head of queries, as it is stored, is what
/// is not rotated, then what is; one of the second layer of keys and values what is not rotated of the key, then the
/// value.
#[derive(Debug, Clone, PartialEq)]
pub struct LatentConfig {
    /// Elements of the latent of the queries; none where queries are made at once.
    pub queries: Option<usize>,
    /// Elements of the latent of keys and values.
    pub keys: usize,
    /// Elements of a head of values; no more than [`AttentionConfig::head_dim`], those of a head of queries and keys.
    pub value_dim: usize,
    /// Whether pairs of rotated elements are stored as neighbours, not in two halves.
    pub is_interleaved: bool,
    /// What rotated elements are multiplied by.
    pub factor: f32,
}

impl LatentConfig {
    /// The epsilon of the norms of latents.
    pub(in crate::model) const EPSILON: f32 = 1e-6;

    pub(super) fn validate(&self, attention: &AttentionConfig) -> Result<()> {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = *attention;
        for (what, size) in [
            ("elements of the latent of queries", self.queries.unwrap_or(1)),
            ("elements of the latent of keys and values", self.keys),
            ("elements of a head of values", self.value_dim),
        ] {
            expect_size(what, size, 24)?;
        }
        if self.value_dim > head_dim {
            let (what, found) = ("elements of a head of values", format!("{} beside {head_dim}", self.value_dim));
            return Err(Error::Setting { what, found, expected: "no more than of keys" });
        }
        if heads != kv_heads || attention.rotated.is_none_or(|rotated| rotated >= head_dim) {
            let found = format!("{kv_heads} for {heads}, {:?} of {head_dim} elements rotated", attention.rotated);
            let (what, expected) = ("heads of keys of latents", "as many as of queries, each rotated in part");
            return Err(Error::Setting { what, found, expected });
        }
        if !(self.factor.is_finite() && self.factor > 0.0) {
            let (what, found) = ("the factor of rotated elements", self.factor.to_string());
            return Err(Error::Setting { what, found, expected: "a number above 0" });
        }
        Ok(())
    }
}

impl TransformerConfig {
    /// The output and input features of the linear layers that read latents, by their names within a block, with the
    /// places of their inputs in what the block's first layer makes of a token.
    pub(in crate::model) fn of_latents(&self) -> Vec<(&'static str, usize, Range<usize>)> {
        let Some(latent) = &self.attention.latent else { return vec![] };
        let AttentionConfig { heads, head_dim, .. } = self.attention;
        let keys = ("attn.key_value", heads * (head_dim - self.rotated() + latent.value_dim));
        let first = latent.queries.unwrap_or(self.query_width());
        let queries = latent.queries.map(|queries| ("attn.query", self.query_width(), 0..queries));
        queries.into_iter().chain([(keys.0, keys.1, first..first + latent.keys)]).collect()
    }

    /// Output features of the first linear layer of an attention block.
    pub(in crate::model) fn attention_outputs(&self) -> usize {
        match &self.attention.latent {
            Some(latent) => latent.queries.unwrap_or(self.query_width()) + latent.keys + self.rotated(),
            None => self.qkv_width(),
        }
    }

    /// Elements of what a token's attention gives to its output layer.
    pub(in crate::model) fn value_width(&self) -> usize {
        self.attention.heads * self.attention.latent.as_ref().map_or(self.attention.head_dim, |own| own.value_dim)
    }
}
