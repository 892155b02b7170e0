//! What linear layers compute with.

use std::fmt::Debug;

use twofour::{
    layer::{Accumulate, SparseLinearSettings},
    select::Transposable,
};

use super::{LinearShape, Memory, SparseLayer};
use crate::Result;

/// GEMMs of linear layers, dense and 2:4, and the masks of weights.
pub trait LinearOperations: Memory {
    /// A 2:4 activation, packed along features and along tokens.
    type PackedActivation: Debug + Send;

    /// A trainable 2:4 weight.
    type SparseLinear: SparseLayer<Self::Buffer>;

    /// `y = x · Wᵀ + bias` for a dense weight; weight and bias are [`Kind::Compute`](super::Kind::Compute).
    ///
    /// # Errors
    /// Operands that do not fit.
    fn linear(
        &self,
        shape: LinearShape,
        x: &Self::Buffer,
        weight: &Self::Buffer,
        bias: Option<&Self::Buffer>,
        y: &mut Self::Buffer,
    ) -> Result<()>;

    /// `dx = dy · W` for a dense weight.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn input_gradient(
        &self,
        shape: LinearShape,
        dy: &Self::Buffer,
        weight: &Self::Buffer,
        dx: &mut Self::Buffer,
    ) -> Result<()>;

    /// `dw = dyᵀ · x`, or added to it; `dw` is [`Kind::Wide`](super::Kind::Wide).
    ///
    /// # Errors
    /// Operands that do not fit.
    fn weight_gradient(
        &self,
        shape: LinearShape,
        dy: &Self::Buffer,
        x: &Self::Buffer,
        accumulate: Accumulate,
        dw: &mut Self::Buffer,
    ) -> Result<()>;

    /// `db` = column sums of `dy`, or added to it; `db` is [`Kind::Wide`](super::Kind::Wide).
    ///
    /// # Errors
    /// Operands that do not fit.
    fn bias_gradient(&self, dy: &Self::Buffer, accumulate: Accumulate, db: &mut Self::Buffer) -> Result<()>;

    /// A 2:4 layer over a master weight `[out_features, in_features]` of [`Kind::Wide`](super::Kind::Wide): selects its
    /// mask and packs it.
    ///
    /// # Errors
    /// A NaN in the master weight, settings that exclude each other, a shape that no kernel of the engine supports.
    fn sparse_linear(
        &self,
        master: &Self::Buffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
    ) -> Result<Self::SparseLinear>;

    /// [`LinearOperations::sparse_linear`] with GEMMs in 8-bit floats: weights and inputs in e4m3, and, where masks are
    /// transposable, output gradients in e5m2. Each tensor has one scale, from its largest magnitude when it is
    /// rounded; that of zeros is 1. Input gradients under other masks and weight gradients are computed in the compute
    /// type. An engine without such GEMMs rounds operands and computes in the compute type.
    ///
    /// # Errors
    /// Those of [`LinearOperations::sparse_linear`]; a device that is too old.
    fn float8_sparse_linear(
        &self,
        master: &Self::Buffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
    ) -> Result<Self::SparseLinear>;

    /// Rounds to `kept` a weight of [`Kind::Wide`](super::Kind::Wide) with rows of `cols` elements, and sets all but
    /// the `count` largest magnitudes of every group of four in a row to zero. Of equal magnitudes the lower index is
    /// kept; a NaN counts as the largest.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn keep_of_four(&self, count: u32, weight: &Self::Buffer, cols: usize, kept: &mut Self::Buffer) -> Result<()>;

    /// Rounds to `masked` a weight of [`Kind::Wide`](super::Kind::Wide) with rows of `cols` elements, with +0.0 in
    /// place of every element that a mask prunes. The mask is of [`Kind::Index`](super::Kind::Index), `[rows,
    /// mask_words_of_row(cols)]` ([`mask_words_of_row`](super::mask_words_of_row)): bit `b` of word `j` of a row stands
    /// for column `32 j + b`, 1 where the element is kept.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn apply_mask(
        &self,
        mask: &Self::Buffer,
        cols: usize,
        weight: &Self::Buffer,
        masked: &mut Self::Buffer,
    ) -> Result<()>;

    /// Writes +0.0 in place of every element that a mask, as [`LinearOperations::apply_mask`] has it, prunes of values
    /// of [`Kind::Wide`](super::Kind::Wide).
    ///
    /// # Errors
    /// Operands that do not fit.
    fn apply_mask_in_place(&self, mask: &Self::Buffer, cols: usize, values: &mut Self::Buffer) -> Result<()>;

    /// `max(x, 0)²` of `x`, `[tokens, width]`, pruned by the rule to 2:4 along tokens and along features at once, and
    /// packed along both: the input of a linear layer with a 2:4 activation (Haziza et al., 2025). `old` is a packed
    /// activation that is not needed any more: of the same shape, its memory is used again, which a step that is
    /// repeated requires.
    ///
    /// # Errors
    /// Operands that do not fit; a NaN, where the engine looks for one; a shape or a type that no kernel of the engine
    /// supports.
    fn pack_squared_relu(
        &self,
        rule: Transposable,
        x: &Self::Buffer,
        width: usize,
        old: Option<Self::PackedActivation>,
    ) -> Result<Self::PackedActivation>;

    /// [`LinearOperations::linear`] of a packed activation.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn packed_linear(
        &self,
        shape: LinearShape,
        x: &Self::PackedActivation,
        weight: &Self::Buffer,
        bias: Option<&Self::Buffer>,
        y: &mut Self::Buffer,
    ) -> Result<()>;

    /// [`LinearOperations::weight_gradient`] of a packed activation.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn packed_weight_gradient(
        &self,
        shape: LinearShape,
        dy: &Self::Buffer,
        x: &Self::PackedActivation,
        accumulate: Accumulate,
        dw: &mut Self::Buffer,
    ) -> Result<()>;
}
