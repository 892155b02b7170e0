//! A transformer's blocks, each as one operator with a hand-written backward pass.
//!
//! Operator by operator, candle's tape costs many times what PyTorch does: every edge of the graph pays a zero-filled
//! tensor and an addition, and every element-wise step a pass over memory. So the unit of differentiation is the block:
//!
//! | block | computes | reference |
//! |---|---|---|
//! | [`AttentionBlock`] | `x + out(attention(qkv(layer_norm(x))))` | [`AttentionBlock::reference`] |
//! | [`FeedForwardBlock`] | `x + down(activation(up(layer_norm(x))))` | [`FeedForwardBlock::reference`] |
//!
//! The reference is made of candle's elementary operators; tests hold values and gradients of both together. The blocks'
//! parameters are not inputs of the operator: their gradients go to a side store, [`Gradients`], and training calls
//! [`Gradients::backward`] where it would call `loss.backward()`.

mod attention;
mod feed_forward;
mod gradients;
mod norm;
mod operand;
#[cfg(test)]
mod tests;
mod workspace;

pub use attention::AttentionBlock;
pub use feed_forward::FeedForwardBlock;
pub use gradients::Gradients;
pub use norm::LayerNorm;
