//! `int-quantized` and `float-quantized` of compressed-tensors: a dense matrix of 8-bit integers or floats, and scales.
//!
//! SmoothQuant of llm-compressor needs no tensors of its own: its scales are in the weights and in the norms before
//! them.

use super::{
    super::StoredDType,
    Decoded, PeerFormat,
    scales::{Scales, Values, expect_symmetric, of_eight_bits},
    tensors::Parts,
};
use crate::{DataType, F8E4M3, F8E5M2, Result};

#[derive(Debug)]
pub(super) struct Naive;

impl PeerFormat for Naive {
    fn name(&self) -> &'static str {
        "8 bits, dense"
    }

    fn required(&self) -> &'static [&'static str] {
        &["weight", "weight_scale"]
    }

    fn optional(&self) -> &'static [&'static str] {
        &["weight_zero_point", "input_scale", "input_zero_point"]
    }

    fn is_format_of(&self, parts: &Parts<'_>) -> bool {
        const DTYPES: [StoredDType; 3] = [StoredDType::I8, StoredDType::F8E4M3, StoredDType::F8E5M2];
        parts.get("weight").is_some_and(|weight| DTYPES.contains(&weight.dtype) && weight.shape.len() == 2)
    }

    fn decode(&self, parts: &Parts<'_>) -> Result<Decoded> {
        let shape = parts.matrix("weight")?;
        expect_symmetric(parts)?;
        let scales = Scales::read(parts, "weight_scale", shape)?;
        let name = parts.weight();
        match parts.expect("weight")?.dtype.element() {
            Some(DataType::I8) => of_eight_bits(&scales, name, Values::Dense(parts.elements::<i8>("weight")?)),
            Some(DataType::E4M3) => of_eight_bits(&scales, name, Values::Dense(parts.elements::<F8E4M3>("weight")?)),
            _ => of_eight_bits(&scales, name, Values::Dense(parts.elements::<F8E5M2>("weight")?)),
        }
    }
}
