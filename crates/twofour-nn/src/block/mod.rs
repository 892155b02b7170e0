//! Transformer blocks with hand-written forward and backward passes over an [`Engine`].
//!
//! A [`Block`] adds a [`Branch`] to its input: [`Attention`] or a [`FeedForward`] network. It takes its input by value,
//! keeps it for the backward pass, and returns the output with what it saved. The backward pass turns the gradient of
//! the output into that of the input, and writes or adds the gradients of the block's parameters. Buffers come from a
//! [`Workspace`] and go back to it.

mod attention;
mod feed_forward;
mod head_norms;
mod norm;
mod residual;
#[cfg(test)]
mod tests;
mod workspace;

pub use attention::{Attention, AttentionOptions, BlockHeads, SavedAttention};
pub use feed_forward::{FeedForward, SavedFeedForward};
pub use head_norms::{HeadNorms, SavedHeadNorms};
pub use norm::{Norm, NormStatistics, Normalized};
pub use residual::{Block, BlockNorms, Branch, SavedBlock, Stream};
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
