//! Models that compute the hidden states of sequences.

use std::fmt::Debug;

use super::{
    config::{TokenInput, TransformerConfig},
    expect_below,
};
use crate::{Error, Result};

/// A sequence that an [`Encoder`](super::Encoder) reads.
#[derive(Debug, Clone, Copy)]
pub struct EncoderInput<'a> {
    /// The tokens.
    pub tokens: &'a [u32],
    /// The type of each token; type 0 where there are none.
    pub types: Option<&'a [u32]>,
}

impl EncoderInput<'_> {
    /// An error unless a model of that description reads the sequence.
    pub(super) fn expect_fit(&self, config: &TransformerConfig) -> Result<()> {
        let TokenInput { context, vocabulary, token_types, .. } = *config.tokens()?;
        let EncoderInput { tokens, types } = *self;
        if tokens.is_empty() || tokens.len() > context {
            let found = format!("{} tokens for a context of {context}", tokens.len());
            return Err(Error::Setting { what: "a sequence", found, expected: "from 1 token to the context" });
        }
        if let Some(types) = types.filter(|types| types.len() != tokens.len()) {
            return Err(Error::length("token types", tokens.len(), types.len()));
        }
        expect_below("inputs", tokens, vocabulary)?;
        expect_below("token types", types.unwrap_or_default(), token_types)
    }
}

/// A model that computes hidden states of sequences, on the CPU or on a GPU.
pub(crate) trait HiddenStates: Debug + Send + Sync {
    /// The model's description.
    fn config(&self) -> &TransformerConfig;

    /// The last hidden states of each sequence, `[tokens, width]`.
    fn hidden(&self, inputs: &[EncoderInput<'_>]) -> Result<Vec<Vec<f32>>>;
}
