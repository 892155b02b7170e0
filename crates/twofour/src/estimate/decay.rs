//! Decay of what a mask drops.

use crate::{Mask, MatrixRef, Result};

/// Masked decay: adds to the gradient of a `[rows, cols]` weight `strength` times every element that the mask drops, `g
/// ← g + λ (1 - m) ⊙ w`, before an optimizer reads it. Dropped elements that do not matter shrink, so that the mask
/// settles. (Hu et al., "Accelerating Transformer Pre-training with 2:4 Sparsity", ICML 2024; under plain SGD it is
/// SR-STE, Zhou et al., ICLR 2021.)
///
/// # Errors
/// [`crate::Error::Shape`] and [`crate::Error::Length`] where the three do not fit.
///
/// ```
/// use twofour::{Mask, MatrixRef, estimate::masked_decay};
/// let (w, mut g) = ([1.0f32, 2.0, 3.0, 4.0], [10.0; 4]);
/// let mask = Mask::from_fn(1, 4, |_, col| col >= 2);
/// masked_decay(&mut g, MatrixRef::new(1, 4, &w)?, &mask, 0.5)?;
/// assert_eq!(g, [10.5, 11.0, 10.0, 10.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn masked_decay(gradient: &mut [f32], weight: MatrixRef<'_, f32>, mask: &Mask, strength: f32) -> Result<()> {
    mask.expect_shape("mask and weight", weight.rows(), weight.cols())?;
    if gradient.len() != weight.data().len() {
        let (expected, found) = (weight.data().len(), gradient.len());
        return Err(crate::Error::Length { what: "gradient", expected, found });
    }
    for (row, gradient) in gradient.chunks_mut(weight.cols().max(1)).enumerate() {
        for (col, (g, w)) in gradient.iter_mut().zip(weight.row(row)).enumerate() {
            if !mask.is_kept(row, col) {
                *g += strength * w;
            }
        }
    }
    Ok(())
}
