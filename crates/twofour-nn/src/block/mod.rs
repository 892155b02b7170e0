//! Transformer blocks with hand-written forward and backward passes over an [`Engine`].
//!
//! A block takes its input by value, keeps it for the backward pass, and returns the output with what it saved. The backward pass turns the gradient of the
//! output into that of the input, and writes or adds the gradients of the block's parameters. Buffers come from a [`Workspace`] and go back to it.

mod attention;
mod feed_forward;
mod norm;
mod post_norm;
#[cfg(test)]
mod tests;
mod workspace;

pub use attention::{AttentionBlock, BlockHeads, SavedAttention};
pub use feed_forward::{FeedForwardBlock, FeedForwardFunction, SavedFeedForward};
pub use norm::{Norm, NormStatistics, Normalized};
pub use post_norm::{PostNormAttention, PostNormFeedForward, SavedPostNormAttention, SavedPostNormFeedForward};
pub use workspace::Workspace;

#[cfg(doc)]
use crate::engine::Engine;

/// Sequences and their length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BatchShape {
    /// Sequences.
    pub batch: usize,
    /// Tokens of a sequence.
    pub positions: usize,
}

impl BatchShape {
    /// Tokens of the batch.
    pub fn tokens(&self) -> usize {
        self.batch * self.positions
    }
}
