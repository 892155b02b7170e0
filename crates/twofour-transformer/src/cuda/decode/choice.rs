//! The most likely token.

use twofour_cuda::{
    DataType, Result,
    arguments::{Memory, positive, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::decode::choice::{ChoiceParameters, Choices};

/// Where the chosen tokens of `batch` sequences go.
#[derive(Debug)]
pub struct ChosenTokens<'a> {
    /// The tokens, u32 `[batch]`.
    pub ids: DeviceSliceMut<'a>,
    /// The number of tokens of each sequence, u32 `[batch]`, raised by one.
    pub positions: DeviceSliceMut<'a>,
    /// The token at each position of each sequence, u32 `[batch, capacity]`; written at the raised position, where it
    /// is below the capacity.
    pub history: DeviceSliceMut<'a>,
}

/// Chooses the token with the largest of the `[batch, vocabulary]` logits of each sequence, the lower of equals, and
/// counts it. A NaN is never chosen, but for a first one.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for logits of another type than f32, f16 and bf16; those of
/// [`Memory::at`] for a tensor that does not fit; [`Error::Dimension`](twofour_cuda::Error::Dimension) for no
/// vocabulary or no capacity; [`Error::Driver`](twofour_cuda::Error::Driver).
pub fn choose_tokens(
    context: &LayerContext,
    (batch, vocabulary, capacity): (usize, usize, usize),
    logits: DeviceSlice<'_>,
    to: ChosenTokens<'_>,
) -> Result<()> {
    let dtype = logits.dtype();
    let kernel = Choices::of(context, dtype)?;
    let parameters = ChoiceParameters {
        logits: logits.at("the logits", context, dtype, product(batch, vocabulary)?)?,
        ids: to.ids.at("the tokens", context, DataType::I32, batch)?,
        positions: to.positions.at("the positions", context, DataType::I32, batch)?,
        history: to.history.at("the history", context, DataType::I32, product(batch, capacity)?)?,
        vocabulary: positive("the vocabulary", vocabulary)?,
        capacity: positive("the capacity", capacity)?,
    };
    if batch == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernel.run(context.raw(), side("sequences", batch)?, &parameters) }
}
