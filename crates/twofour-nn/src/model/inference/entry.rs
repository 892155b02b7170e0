//! What is before the first layer of a decoder.

use twofour::kernel::{Activation, KernelElement};

use super::{
    linear::Linear,
    no_token,
    norm::Norm,
    parts::Parts,
    passes::{narrowed, widened},
    weight::Weight,
};
use crate::{
    Result,
    model::config::{Positions, TransformerConfig},
};

/// The tables of tokens and positions, and what follows them.
#[derive(Debug)]
pub(crate) struct Entry<T: KernelElement> {
    /// None where the head's weight is the table.
    words: Option<Weight<T>>,
    /// What leads from the width of the table to that of the model, where they differ.
    projected: Option<Linear<T>>,
    /// What is added at each position, where positions are learned.
    positions: Option<Vec<T>>,
    norm: Option<Norm>,
}

impl<T: KernelElement> Entry<T> {
    pub(crate) fn build(config: &TransformerConfig, parts: &impl Parts<T>) -> Result<Self> {
        let (input, width, table_width) = (config.tokens()?, config.width, config.table_width());
        let words = || parts.embedding([input.vocabulary, table_width]);
        let norm = || {
            let of = |part: &str| parts.vector(&format!("embedding.norm.{part}"), width);
            Norm::read(config.norm.kind, config.norm.epsilon, of)
        };
        Ok(Entry {
            words: (!config.is_tied()).then(words).transpose()?,
            projected: config.is_projected().then(|| parts.linear("project_in", (width, table_width))).transpose()?,
            positions: match config.positions {
                Positions::Rotary(_) | Positions::Alibi(_) => None,
                Positions::Learned => Some(parts.table("positions.weight", [input.context, width])?),
            },
            norm: input.is_normalized.then(norm).transpose()?,
        })
    }

    /// The residual stream of tokens at `position` and after, before the first layer; `head` is the linear layer whose
    /// weight may be the table.
    pub(crate) fn embed(
        &self,
        (config, head): (&TransformerConfig, Option<&Linear<T>>),
        tokens: &[u32],
        position: usize,
    ) -> Result<Vec<f32>> {
        let table_width = config.table_width();
        let row = |token: usize| match &self.words {
            Some(table) => table.row(token, table_width),
            None => head.and_then(|head| head.dense_row(token)),
        };
        let mut x = Vec::with_capacity(tokens.len() * table_width);
        for (index, &token) in tokens.iter().enumerate() {
            x.extend(row(token as usize).ok_or_else(|| no_token(token, index, config.vocabulary()))?);
        }
        if let Some(scale) = config.tokens()?.scale {
            // transformers multiplies in the type that the model computes in.
            let scale = T::from_f32(scale).to_f32();
            x.iter_mut().for_each(|x| *x *= scale);
        }
        if let Some(projected) = &self.projected {
            x = widened(&projected.forward(&narrowed(&x), tokens.len(), Activation::Identity)?);
        }
        if let Some(positions) = &self.positions {
            let added = &positions[position * config.width..][..x.len()];
            x.iter_mut().zip(added).for_each(|(x, added)| *x += added.to_f32());
        }
        Ok(match &self.norm {
            Some(norm) => norm.normalized(&x),
            None => x,
        })
    }
}
