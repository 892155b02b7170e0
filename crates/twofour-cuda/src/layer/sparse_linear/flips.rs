//! The flips of several layers, read together.

use super::SparseLinear;
use crate::{
    DataType, Error, Result,
    arguments::expect_pointers,
    layer::{DeviceSliceMut, LayerContext},
};

/// Launches the reading of each layer's flips since its last mask, as [`SparseLinear::flips`] has them, to u64s in
/// device memory: `to` holds two elements of [`DataType::I32`] for each layer, the lower half first, and is aligned to
/// 8 bytes.
///
/// # Errors
/// [`Error::Length`], [`Error::SliceType`], [`Error::OtherDevice`] and [`Error::Pointer`] for memory that does not fit,
/// or a layer of another device; [`Error::Driver`].
pub fn flip_counts(context: &LayerContext, layers: &[&SparseLinear], to: DeviceSliceMut<'_>) -> Result<()> {
    let out = to.expect("the flips of layers", context, DataType::I32, 2 * layers.len())?;
    if layers.is_empty() {
        return Ok(());
    }
    expect_pointers(&[("flips of layers", out, 8)])?;
    if let Some(other) = layers.iter().find(|layer| layer.context.ordinal() != context.ordinal()) {
        let (expected, found) = (context.ordinal(), other.context.ordinal());
        return Err(Error::OtherDevice { what: "a layer whose flips are counted", expected, found });
    }
    let counters: Vec<_> = layers.iter().map(|layer| layer.flips_at()).collect();
    // SAFETY: the counters are valid as long as the layers are borrowed, the result has been found to have room for
    // them, and the stream is of their device.
    unsafe { context.mask_change_counters()?.gather(context.raw(), &counters, out) }
}
