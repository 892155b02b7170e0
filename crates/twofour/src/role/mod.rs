//! What each tensor of a model is for, from names and shapes: which weights are worth pruning, and along which axis.
//!
//! The places of tensors decide first, names break ties:
//!
//! 1. A **repeated layer** is a numbered module that holds named ones: `model.layers.3.mlp.up_proj`. In a model that
//!    has such layers, what lies outside of them is never a [`Role::Linear`]: embeddings, projectors between
//!    modalities, poolers and heads run once, hold few of the weights, and every token passes them. Numbered modules of
//!    a head, an embedding or a projector (`bbox_embed.0.layers.1`) are no repeated layers. What has the shape of the
//!    table of tokens is a head, whatever its name: it scores each of them.
//! 2. Inside, every two-dimensional `weight` is a linear layer's, but for those that [`Role`] lists: routers stand
//!    beside `experts`, what sets the decay of a recurrence stands beside `A_log`, a table has no bias and is named for
//!    what it is.
//! 3. In a model without repeated layers, names alone tell embeddings and heads.
//! 4. A `weight` of three to five dimensions is a convolution's, `[out_channels, in_channels, *kernel]`, and is pruned
//!    where its input channels are a multiple of 4. One that upsamples may be a transposed convolution,
//!    `[in_channels, out_channels, *kernel]`, and stays dense.
//!
//! A linear weight is `[out_features, in_features]`, or, as `Conv1D` of GPT-2 stores it, `[in_features, out_features]`.
//! The bias tells: it has as many elements as the layer has outputs. A square weight is stored as the others of its
//! name and layer are. Where no bias tells, `model_type` in `config.json` does.
//!
//! Experts may be stored in one tensor of three dimensions, a matrix for each of them, `[out_features, in_features]` or
//! the other way round: [`Roles::layout`] tells which.
//!
//! `tests/roles.rs` holds these rules against the modules of every model type of transformers.

mod kernel;
mod layout;
mod name;
mod roles;
mod stacked;

use std::fmt;

pub use kernel::Kernel;
pub use layout::Layout;
pub use roles::Roles;

/// What a tensor is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Role {
    /// The weight of a linear layer that is worth pruning.
    Linear,
    /// A table of which rows are looked up: tokens, positions, a codebook, a bias for each distance.
    Embedding,
    /// It scales or shifts what was normalized.
    Norm,
    /// It computes scores of tokens or classes, or lies between the last layer and those.
    Head,
    /// It chooses the experts of a token, or weighs them: a small change sends tokens to other experts.
    Router,
    /// It sets step size or decay of a recurrent state: its errors are exponentiated, and grow along the sequence.
    Recurrence,
    /// A low-rank matrix that is added to a weight, as LoRA's: pruned, it saves nothing.
    Adapter,
    /// A linear layer of one output: a gate or a score.
    SingleOutput,
    /// A matrix outside of the repeated layers that is none of the above: a projector, a pooler, what reads patches.
    Outside,
    /// The weight of a convolution that is worth pruning.
    Convolution,
    /// A convolution whose input channels are no multiple of 4, such as a depthwise one: its groups would run across
    /// positions of the kernel.
    FewChannels,
    /// A convolution that upsamples: if it is a transposed one, its weight is `[in_channels, out_channels, *kernel]`.
    Upsampling,
    /// Experts of a layer in one tensor of three dimensions: worth pruning, where it is known how they are stored.
    StackedExperts,
    /// A tensor of one dimension, or of more that is no convolution's.
    NotAMatrix,
    /// A tensor that is not the `weight` of a module.
    Parameter,
}

impl Role {
    /// Whether tensors of the role are pruned where no other choice is made.
    pub fn is_worth_pruning(self) -> bool {
        matches!(self, Role::Linear | Role::Convolution | Role::StackedExperts)
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Role::Linear => "linear layer",
            Role::Embedding => "embedding",
            Role::Norm => "norm",
            Role::Head => "output head",
            Role::Router => "router of experts",
            Role::Recurrence => "sets the decay of a recurrent state",
            Role::Adapter => "low-rank adapter; merge it into its model",
            Role::SingleOutput => "a single output: gate or score",
            Role::Outside => "outside the repeated layers",
            Role::Convolution => "convolution",
            Role::FewChannels => "a convolution whose input channels are no multiple of 4",
            Role::Upsampling => "a convolution that upsamples, perhaps a transposed one",
            Role::StackedExperts => "experts in one 3-D tensor",
            Role::NotAMatrix => "neither a matrix nor a convolution",
            Role::Parameter => "not named *.weight",
        })
    }
}
