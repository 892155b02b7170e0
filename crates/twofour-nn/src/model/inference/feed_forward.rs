//! Feed-forward blocks for inference.

use twofour::kernel::KernelElement;

use super::{experts::Experts, hidden_layer::HiddenLayer, parts::Parts};
use crate::{Result, model::config::TransformerConfig};

/// The linear layers of a feed-forward block.
#[derive(Debug)]
pub(crate) enum FeedForward<T: KernelElement> {
    /// One pair of layers.
    Dense(HiddenLayer<T>),
    /// A router and experts.
    Experts(Box<Experts<T>>),
}

impl<T: KernelElement> FeedForward<T> {
    /// The block of a layer.
    pub(super) fn build(config: &TransformerConfig, parts: &impl Parts<T>, layer: usize) -> Result<Self> {
        let at = format!("blocks.{layer}.mlp");
        Ok(match config.experts(layer) {
            Some(experts) => FeedForward::Experts(Box::new(Experts::build(config, experts, parts, &at)?)),
            None => FeedForward::Dense(HiddenLayer::build(config, parts, &at, config.feed_forward.hidden)?),
        })
    }

    /// Bytes of the linear layers' weights.
    pub(super) fn bytes(&self) -> usize {
        match self {
            FeedForward::Dense(layer) => layer.bytes(),
            FeedForward::Experts(experts) => experts.bytes(),
        }
    }
}
