//! What an encoder's first layer reads.

use twofour::{file::StoredElement, kernel::KernelElement};

use super::{EncoderInput, TransformerConfig};
use crate::{
    Error, Result,
    model::{
        checkpoint::StoredParts,
        config::{NormKind, TokenInput},
        inference::{build::Parts, norm::Norm, passes::widened},
    },
};

/// Embeddings of tokens, positions and token types, added and normalized.
#[derive(Debug)]
pub(in crate::model) struct Embeddings<T> {
    words: Vec<T>,
    positions: Vec<T>,
    types: Vec<T>,
    norm: Norm,
}

impl<T: KernelElement + StoredElement> Embeddings<T> {
    pub(in crate::model) fn build(config: &TransformerConfig, parts: &StoredParts<'_>) -> Result<Self> {
        let (width, TokenInput { vocabulary, context, token_types, .. }) = (config.width, *config.tokens()?);
        Ok(Embeddings {
            words: parts.table("embedding.weight", [vocabulary, width])?,
            positions: parts.table("positions.weight", [context, width])?,
            types: parts.table("types.weight", [token_types, width])?,
            norm: Norm::read(NormKind::Layer, config.norm.epsilon, |part| {
                Parts::<T>::vector(parts, &format!("embedding.norm.{part}"), width)
            })?,
        })
    }
}

impl<T: KernelElement> Embeddings<T> {
    /// The hidden states of sequences, one after the other, before the first layer: `[tokens, width]`.
    pub(in crate::model) fn forward(
        &self,
        config: &TransformerConfig,
        inputs: &[EncoderInput<'_>],
    ) -> Result<Vec<f32>> {
        let mut x = vec![];
        for input in inputs {
            self.add(config, *input, &mut x)?;
        }
        Ok(self.norm.normalized(&x))
    }

    /// Adds the embeddings of a sequence to the end of `x`.
    fn add(
        &self,
        config: &TransformerConfig,
        EncoderInput { tokens, types }: EncoderInput<'_>,
        x: &mut Vec<f32>,
    ) -> Result<()> {
        let (width, TokenInput { context, vocabulary, token_types, .. }) = (config.width, *config.tokens()?);
        if tokens.is_empty() || tokens.len() > context {
            let found = format!("{} tokens for a context of {context}", tokens.len());
            return Err(Error::Setting { what: "a sequence", found, expected: "from 1 token to the context" });
        }
        if let Some(types) = types.filter(|types| types.len() != tokens.len()) {
            return Err(Error::Length { what: "token types", expected: tokens.len(), found: types.len() });
        }
        let row = |table: &'_ [T], what: &'static str, token: u32, position: usize, vocabulary: usize| {
            let missing = || Error::Token { what, token, position, vocabulary };
            table.chunks_exact(width).nth(token as usize).map(widened).ok_or_else(missing)
        };
        for (position, &token) in tokens.iter().enumerate() {
            let kind = types.map_or(0, |types| types[position]);
            let word = row(&self.words, "inputs", token, position, vocabulary)?;
            let kind = row(&self.types, "token types", kind, position, token_types)?;
            let place = &self.positions[position * width..][..width];
            x.extend(word.iter().zip(kind).zip(place).map(|((word, kind), place)| word + kind + place.to_f32()));
        }
        Ok(())
    }
}
