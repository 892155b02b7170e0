//! What linear layers compute with.

use twofour::{
    layer::{Accumulate, SparseLinearSettings},
    select::Transposable,
};

use super::{Kept, LinearShape, Memory, SparseActivation, SparseLayer, SparsePrecision};
use crate::Result;

/// GEMMs of linear layers, dense and 2:4, and the masks of weights.
pub trait LinearOperations: Memory {
    /// A 2:4 activation, packed along features and along tokens.
    type PackedActivation: SparseActivation<Self::Buffer>;

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

    /// A 2:4 layer over a master weight `[out_features, in_features]` of [`Kind::Wide`](super::Kind::Wide), with GEMMs
    /// of a precision: selects its mask and packs it.
    ///
    /// # Errors
    /// A NaN in the master weight, settings that exclude each other, a shape that no kernel of the engine supports; a
    /// device that is too old for the precision.
    fn sparse_linear(
        &self,
        master: &Self::Buffer,
        shape: (usize, usize),
        settings: SparseLinearSettings,
        precision: SparsePrecision,
    ) -> Result<Self::SparseLinear>;

    /// Rounds to `kept` the elements of a weight of [`Kind::Wide`](super::Kind::Wide) with rows of `cols` elements that
    /// stay, with zeros in place of the others.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn prune(
        &self,
        which: Kept<'_, Self::Buffer>,
        weight: &Self::Buffer,
        cols: usize,
        kept: &mut Self::Buffer,
    ) -> Result<()>;

    /// Writes +0.0 in place of every element that a mask, as [`Kept::Mask`] has it, prunes of values of
    /// [`Kind::Wide`](super::Kind::Wide).
    ///
    /// # Errors
    /// Operands that do not fit.
    fn mask_in_place(&self, mask: &Self::Buffer, cols: usize, values: &mut Self::Buffer) -> Result<()>;

    /// Writes the nearest multiples of scales to `rounded`: `clamp(round(w / s), -largest, largest) · s` for each
    /// element of a weight and its scale, both of [`Kind::Wide`](super::Kind::Wide), ties to even. A scale of zero
    /// makes +0.0.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn round_to_grid(
        &self,
        largest: f32,
        scales: &Self::Buffer,
        weight: &Self::Buffer,
        rounded: &mut Self::Buffer,
    ) -> Result<()>;

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
}
