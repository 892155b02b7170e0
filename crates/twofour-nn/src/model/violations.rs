//! The first element of a weight that breaks its pattern or its mask.

use twofour::{Axis, Mask, MatrixRef, Pattern, file::Reader, verify::conformance};

use super::file;
use crate::Result;

/// The first nonzero of a weight in a file of [`TrainedModel::save`](super::TrainedModel::save) that a mask of its
/// shape prunes; none where all of these are zero.
///
/// # Errors
/// No such tensor, or one of another shape.
pub fn mask_violation(reader: &Reader, weight: &str, mask: &Mask) -> Result<Option<String>> {
    Ok(beyond_mask(&file::values(reader, weight, &[mask.rows(), mask.cols()])?, mask))
}

/// The first nonzero of a weight, row by row, that a mask of its shape prunes.
pub(super) fn beyond_mask(values: &[f32], mask: &Mask) -> Option<String> {
    let cols = mask.cols().max(1);
    let is_beyond = |(index, value): &(usize, &f32)| **value != 0.0 && !mask.is_kept(index / cols, index % cols);
    let (index, value) = values.iter().enumerate().find(is_beyond)?;
    Some(format!("row {}, column {} is {value}, which its mask prunes", index / cols, index % cols))
}

/// The first group with more than two nonzeros of a linear layer that is stored as these weights, of `(outputs,
/// inputs)` together.
pub(super) fn violation(
    reader: &Reader,
    stored: &[String],
    (outputs, inputs): (usize, usize),
    values: impl FnOnce() -> Result<Vec<f32>>,
) -> Result<Option<String>> {
    if stored.iter().all(|name| file::is_compressed(reader, name)) {
        return Ok(None);
    }
    let values = values()?;
    let found = conformance(MatrixRef::new(outputs, inputs, &values)?, Pattern::TWO_FOUR, Axis::Row, 1)?;
    Ok(found.violations.first().map(|violation| {
        format!(
            "{}: {violation}, and {} of {} groups have more than two",
            stored.join(", "),
            found.violation_count,
            found.parts
        )
    }))
}
