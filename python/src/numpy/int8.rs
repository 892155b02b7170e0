//! Weights of 8-bit integers with scales: F32 for each row, or F16 for groups of columns.

use twofour::{Result, int4::Granularity, int8::Int8};

use super::{
    compression::parts,
    dtype::{elements, store},
};

/// The weight of the bytes of its parts, after checking every rule of the form.
pub(super) fn weight(
    rows: usize,
    cols: usize,
    granularity: Granularity,
    values: &[u8],
    meta: &[u8],
    scales: &[u8],
) -> Result<Int8> {
    let scales: Vec<f32> = match granularity {
        Granularity::Row => elements::<f32>(scales).into_owned(),
        _ => elements::<half::f16>(scales).iter().map(|scale| scale.to_f32()).collect(),
    };
    Int8::from_parts(parts::<i8>(values, meta, rows, cols)?, scales, granularity)
}

/// Stores the bytes of a weight's parts.
pub(super) fn store_parts(weight: &Int8, values: &mut [u8], meta: &mut [u8], scales: &mut [u8]) -> Result<()> {
    store("array of values", weight.weight().values(), values)?;
    store("array of metadata", weight.weight().meta(), meta)?;
    match weight.granularity() {
        Granularity::Row => store("array of scales", weight.scales(), scales),
        _ => {
            // They were F16 in the file.
            let halves: Vec<half::f16> = weight.scales().iter().map(|scale| half::f16::from_f32(*scale)).collect();
            store("array of scales", &halves, scales)
        }
    }
}
