//! The scales of weights that are rounded to integers while they train, as a checkpoint has them.

use rayon::prelude::*;
use twofour::{
    Mask,
    file::{PlannedTensor, Reader, StoredDType},
    int4::Granularity,
    solve::Bits,
};

use crate::{Error, Result};

/// The integers that a weight is rounded to, and their scales.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct WeightScales {
    pub(crate) bits: Bits,
    pub(crate) granularity: Granularity,
    /// `[rows, scales of a row]`.
    pub(crate) values: Vec<f32>,
}

/// The integers, with what the name of their scales ends with.
const ENDS: [(Bits, &str); 2] = [(Bits::Int4, "int4_scales"), (Bits::Int8, "int8_scales")];

impl WeightScales {
    /// The scale of each element, 0 where the mask prunes.
    pub(crate) fn of_elements(&self, mask: &Mask) -> Vec<f32> {
        let (rows, cols) = (mask.rows(), mask.cols());
        let of_row = self.granularity.scales_per_row(cols);
        let scale = |i: usize| {
            let (row, col) = (i / cols, i % cols);
            let scale = self.values[row * of_row + self.granularity.scale_of(col)];
            if mask.is_kept(row, col) { scale } else { 0.0 }
        };
        (0..rows * cols).into_par_iter().map(scale).collect()
    }

    /// The tensor of a checkpoint that holds the scales.
    pub(crate) fn tensor(&self, weight: &str, (rows, cols): (usize, usize)) -> (PlannedTensor, Vec<u8>) {
        let shape = [rows, self.granularity.scales_per_row(cols)];
        let planned = PlannedTensor::new(name(weight, self.bits), StoredDType::F32, shape);
        (planned, self.values.iter().flat_map(|scale| scale.to_le_bytes()).collect())
    }

    /// Reads the scales that a checkpoint has for a weight of that shape; `None` for a weight that is not rounded.
    ///
    /// # Errors
    /// A tensor that does not fit, a scale that is not finite.
    pub(crate) fn read(reader: &Reader, weight: &str, (rows, cols): (usize, usize)) -> Result<Option<Self>> {
        let is_there = |(bits, _): &(Bits, &str)| reader.tensors().any(|tensor| tensor.name == name(weight, *bits));
        let Some((bits, _)) = ENDS.into_iter().find(is_there) else { return Ok(None) };
        let key = name(weight, bits);
        let view = reader.tensor(&key)?;
        let fault = |reason: String| Error::State { path: reader.path().to_owned(), reason };
        let shape = view.info.shape.clone();
        let granularity = Granularity::ALL.into_iter().find(|one| shape == [rows, one.scales_per_row(cols)]);
        let unfit = || fault(format!("`{key}` is {shape:?}, for a weight [{rows}, {cols}]"));
        let granularity = granularity.ok_or_else(unfit)?;
        let values = view.to_vec::<f32>()?;
        match values.iter().find(|scale| !scale.is_finite()) {
            Some(scale) => Err(fault(format!("`{key}` has the scale {scale}"))),
            None => Ok(Some(WeightScales { bits, granularity, values })),
        }
    }
}

fn name(weight: &str, bits: Bits) -> String {
    let end = ENDS.iter().find(|(own, _)| *own == bits).map_or("", |(_, end)| end);
    format!("{weight}.{end}")
}
