//! The head that scores the vocabulary for masked tokens.

use std::fmt::Debug;

use twofour::{file::StoredElement, kernel::KernelElement};

use crate::{
    Result,
    model::{
        TransformerConfig,
        checkpoint::StoredParts,
        families::bert::OWN_DECODER,
        inference::{linear::LinearPart, parts::Parts, passes::narrowed, weight::Weight},
    },
};

/// The head that scores the vocabulary for masked tokens.
pub(super) trait MaskedHead: Debug + Send + Sync {
    /// The sum of `-log p` of the tokens that belong to rows of hidden states.
    fn loss(&self, rows: &[f32], targets: &[u32]) -> Result<f64>;
}

/// The layer that scores the vocabulary: with the embedding's values where it has none of its own.
pub(super) fn masked_decoder<T: KernelElement + StoredElement>(
    parts: &StoredParts<'_>,
    config: &TransformerConfig,
) -> Result<LinearPart<T>> {
    let shape = (config.vocabulary(), config.width);
    let values: Vec<T> = match parts.has_linear(OWN_DECODER) {
        true => narrowed(&parts.values(&format!("{OWN_DECODER}.weight"))?),
        false => parts.table("embedding.weight", [shape.0, shape.1])?,
    };
    let bias = Parts::<T>::vector(parts, "embedding.bias", shape.0)?;
    Ok(LinearPart::of(Weight::Dense(values), shape, Some(bias)))
}
