//! What an encoder's first layer reads.

use twofour::{file::StoredElement, kernel::KernelElement};

use super::{EncoderInput, TransformerConfig};
use crate::{
    Result,
    model::{
        checkpoint::StoredParts,
        config::{NormKind, TokenInput},
        inference::{norm::Norm, parts::Parts, passes::widened},
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
            input.expect_fit(config)?;
            self.add(config, *input, &mut x);
        }
        Ok(self.norm.normalized(&x))
    }

    /// Adds the embeddings of a sequence to the end of `x`.
    fn add(&self, config: &TransformerConfig, EncoderInput { tokens, types }: EncoderInput<'_>, x: &mut Vec<f32>) {
        let width = config.width;
        let row = |table: &'_ [T], index: usize| widened(&table[index * width..][..width]);
        for (position, &token) in tokens.iter().enumerate() {
            let (word, kind) = (row(&self.words, token as usize), types.map_or(0, |types| types[position]));
            let kind = row(&self.types, kind as usize);
            let place = &self.positions[position * width..][..width];
            x.extend(word.iter().zip(kind).zip(place).map(|((word, kind), place)| word + kind + place.to_f32()));
        }
    }
}
