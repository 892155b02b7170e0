//! A trainable 2:4 weight of an engine, and a 2:4 activation.

use std::fmt::Debug;

use twofour::{
    Mask,
    layer::{Accumulate, SparseLinearSettings},
};

use super::LinearShape;
use crate::Result;

/// A trainable 2:4 weight: the mask of a dense master weight, the packed weight, and the GEMMs with it. The master
/// weight belongs to the caller.
///
/// [`SparseLayer::remask`] or [`SparseLayer::repack`] is called once after each optimizer step; passes between two of
/// these calls use the same packed weight.
pub trait SparseLayer<B>: Debug + Send {
    /// The settings that it was created with.
    fn settings(&self) -> SparseLinearSettings;

    /// Selects the mask of the master weight as it is now, and packs what it keeps.
    ///
    /// # Errors
    /// A NaN in the master weight, or a master weight of another shape.
    fn remask(&mut self, master: &B) -> Result<()>;

    /// Packs the master weight's present values under the mask as it is. With the soft threshold, whose mask and values
    /// are one, this is [`SparseLayer::remask`].
    ///
    /// # Errors
    /// Those of [`SparseLayer::remask`].
    fn repack(&mut self, master: &B) -> Result<()>;

    /// `y = x · (mask ⊙ W)ᵀ + bias`; the bias is [`Kind::Compute`](super::Kind::Compute).
    ///
    /// # Errors
    /// Operands that do not fit.
    fn forward(&self, x: &B, tokens: usize, bias: Option<&B>, y: &mut B) -> Result<()>;

    /// `dx = dy · (mask ⊙ W)`.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn input_gradient(&self, dy: &B, tokens: usize, dx: &mut B) -> Result<()>;

    /// The weight gradient of the settings, written or added to `dw`, [`Kind::Wide`](super::Kind::Wide). An MVUE takes
    /// a seed at each call.
    ///
    /// # Errors
    /// Operands that do not fit; with an MVUE a gradient that is not finite.
    fn weight_gradient(&self, dy: &B, x: &B, tokens: usize, accumulate: Accumulate, dw: &mut B) -> Result<()>;

    /// Mask elements that the last [`SparseLayer::remask`] changed. Waits.
    ///
    /// # Errors
    /// Those of the device.
    fn flips(&self) -> Result<u64>;

    /// The mask. Waits.
    ///
    /// # Errors
    /// Those of the device.
    fn mask(&self) -> Result<Mask>;

    /// A hash of the mask, the same for the same mask on all devices of this engine. Waits.
    ///
    /// # Errors
    /// Those of the device.
    fn mask_hash(&self) -> Result<u64>;

    /// Sets the mask and packs what it keeps: when training is resumed.
    ///
    /// # Errors
    /// A mask of another shape, or one that the layer's settings do not allow.
    fn set_mask(&mut self, master: &B, mask: Mask) -> Result<()>;

    /// The frozen scale of the soft threshold; other rules have none. Waits.
    ///
    /// # Errors
    /// Those of the device.
    fn scale(&self) -> Result<Option<f32>>;

    /// Replaces the scale of the soft threshold; it takes effect when the weight is packed next. Other rules ignore it.
    ///
    /// # Errors
    /// Those of the device.
    fn set_scale(&mut self, scale: f32) -> Result<()>;

    /// The seed of the next MVUE weight gradient; each leaves the next higher. Waits.
    ///
    /// # Errors
    /// Those of the device.
    fn seed(&self) -> Result<u64>;

    /// Sets the seed of the next MVUE weight gradient. Layers must have seeds that are far apart.
    ///
    /// # Errors
    /// Those of the device.
    fn set_seed(&mut self, seed: u64) -> Result<()>;

    /// Bytes of the packed weight, its transpose where there is one, and the mask.
    fn bytes(&self) -> usize;
}

/// A 2:4 activation, packed along features and along tokens: the input of a dense linear layer.
pub trait SparseActivation<B>: Debug + Send {
    /// [`LinearOperations::linear`](super::LinearOperations::linear) of the activation.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn linear(&self, shape: LinearShape, weight: &B, bias: Option<&B>, y: &mut B) -> Result<()>;

    /// [`LinearOperations::weight_gradient`](super::LinearOperations::weight_gradient) of the activation.
    ///
    /// # Errors
    /// Operands that do not fit.
    fn weight_gradient(&self, shape: LinearShape, dy: &B, accumulate: Accumulate, dw: &mut B) -> Result<()>;
}
