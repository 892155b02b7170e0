//! Choosing the mask of a master weight and packing what it keeps.

use super::MaskRule;
use crate::{
    Element, Mask, MatrixRef, Result,
    kernel::{KernelElement, Selection, SparseWeightMut},
};

/// Chooses the mask of a master weight `[out_features, in_features]` by a rule, writes it to `mask`, packs what it
/// keeps into `packed` and its transpose into `transposed`, `[in_features, out_features]`, and returns how many mask
/// elements changed. [`MaskRule::Given`] packs by `mask` as it is. `scale` is that of [`MaskRule::SoftThreshold`]
/// ([`crate::estimate::soft_threshold_scale`]); other rules ignore it.
///
/// # Errors
/// [`crate::Error::Shape`] where a shape differs; [`crate::Error::NotANumber`] with the place of the first NaN, with
/// the soft threshold [`crate::Error::Infinite`] with that of the first infinity; [`crate::Error::TooManyKept`] where
/// the mask is not 2:4 along rows, or not along columns where the transpose is packed. After the last three, mask and
/// packed weights are unspecified.
pub fn remask<T: KernelElement, M: Element>(
    master: MatrixRef<'_, M>,
    rule: MaskRule,
    scale: f32,
    mask: &mut Mask,
    mut packed: SparseWeightMut<'_, T>,
    transposed: Option<SparseWeightMut<'_, T>>,
) -> Result<u64> {
    let selection = match rule {
        MaskRule::Magnitude => Selection::Magnitude,
        MaskRule::Transposable(rule) => Selection::Transposable(rule),
        MaskRule::SoftThreshold => Selection::SoftThreshold { scale },
        MaskRule::Given => Selection::Mask,
    };
    let flips = packed.remask(master, selection, mask)?;
    if let Some(mut transposed) = transposed {
        let data = master.transposed();
        let matrix = MatrixRef::new(master.cols(), master.rows(), &data)?;
        transposed.remask(matrix, Selection::Mask, &mut mask.transposed())?;
    }
    Ok(flips)
}
