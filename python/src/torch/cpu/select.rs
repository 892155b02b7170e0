//! Choosing masks.

use twofour::{Axis, Mask, MatrixRef, Pattern, layer::MaskRule, select};

use super::{Failure, Float, Result, ScalarType, Tensor, for_floats, on_pool};

/// The rule of that number.
pub(super) fn rule(number: i64) -> Result<MaskRule> {
    use select::Transposable;
    Ok(match number {
        0 => MaskRule::Magnitude,
        1 => MaskRule::Transposable(Transposable::GreedyAbs),
        2 => MaskRule::Transposable(Transposable::GreedySigned),
        3 => MaskRule::Transposable(Transposable::Causal1122),
        4 => MaskRule::Transposable(Transposable::Optimal),
        5 => MaskRule::SoftThreshold,
        other => return Err(Failure::runtime(format!("there is no mask rule number {other}"))),
    })
}

/// The mask that a rule chooses, `[rows, cols]` of bool.
pub(super) fn select(dense: Tensor, number: i64) -> Result<Tensor> {
    let dtype = dense.dtype()?;
    for_floats!(dtype, "the matrix", mask_of::<T>(&dense, number))
}

fn mask_of<T: Float>(dense: &Tensor, number: i64) -> Result<Tensor> {
    let rule = rule(number)?;
    let (rows, cols) = dense.matrix("the matrix")?;
    let values = dense.elements::<T>("the matrix", T::SCALAR)?;
    let matrix = MatrixRef::new(rows, cols, &values)?;
    let mask = on_pool(|| match rule {
        MaskRule::Transposable(rule) => select::transposable(matrix, rule),
        _ => select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row),
    })??;
    to_bool(&mask)
}

/// A mask as a tensor.
pub(super) fn to_bool(mask: &Mask) -> Result<Tensor> {
    let (rows, cols) = (mask.rows(), mask.cols());
    let mut out = Tensor::empty(&[rows as i64, cols as i64], ScalarType::Bool)?;
    let bytes = out.bytes_mut()?;
    if !bytes.is_empty() {
        for (row, bytes) in bytes.chunks_mut(cols).enumerate() {
            for (word, bytes) in mask.row_words(row).iter().zip(bytes.chunks_mut(64)) {
                for (bit, byte) in bytes.iter_mut().enumerate() {
                    *byte = (word >> bit & 1) as u8;
                }
            }
        }
    }
    Ok(out)
}

/// A mask from a tensor of bool.
pub(super) fn from_bool(mask: &Tensor) -> Result<Mask> {
    let (rows, cols) = mask.matrix("the mask")?;
    let kept = mask.elements::<u8>("the mask", ScalarType::Bool)?;
    Ok(Mask::from_fn(rows, cols, |row, col| kept[row * cols + col] != 0))
}
