//! `int-quantized` and `float-quantized` of compressed-tensors: a dense matrix of 8-bit integers or floats, and scales.
//!
//! SmoothQuant of llm-compressor needs no tensors of its own: its scales are in the weights and in the norms before
//! them.

use half::bf16;

use super::{
    super::StoredDType,
    Decoded, PeerFormat, bytes,
    scales::{Scales, Values, expect_symmetric, of_eight_bits},
    tensors::Parts,
};
use crate::{Arithmetic, DataType, Element as _, F8E4M3, F8E5M2, MatrixRef, Result};

/// The end of the name of scales.
pub(super) const SCALES: &str = "weight_scale";

/// The largest number of E4M3.
const LARGEST: f32 = 448.0;

/// Codes and scales of a matrix of floats as llm-compressor rounds it to E4M3: each row by
/// the scale with which its largest magnitude is the largest of E4M3. Scales are in the type of the matrix, or in f32
/// in the place of f16, which has no room for small ones. Zeros stay zeros.
///
/// # Errors
/// [`Error::NotANumber`](crate::Error::NotANumber) and [`Error::Infinite`](crate::Error::Infinite), with row and
/// column.
pub(super) fn encode_float8<T: Arithmetic>(matrix: MatrixRef<'_, T>) -> Result<Vec<Vec<u8>>> {
    matrix.expect_finite()?;
    let is_bf16 = T::DTYPE == DataType::BF16;
    let (mut codes, mut scales) = (Vec::with_capacity(matrix.data().len()), Vec::with_capacity(matrix.rows()));
    for row in 0..matrix.rows() {
        let row = matrix.row(row);
        let largest = row.iter().fold(0f32, |most, value| most.max(value.to_f32().abs()));
        let exact = if largest > 0.0 { (largest / LARGEST).max(f32::MIN_POSITIVE) } else { 1.0 };
        let scale = if is_bf16 { bf16::from_f32(exact).to_f32() } else { exact };
        scales.push(scale);
        codes.extend(row.iter().map(|value| {
            let quotient = value.to_f32() / scale;
            let code = F8E4M3::from_f32(if is_bf16 { bf16::from_f32(quotient).to_f32() } else { quotient });
            if code.is_zero() { 0 } else { code.0 }
        }));
    }
    let scales = match is_bf16 {
        true => bytes(&scales.into_iter().map(bf16::from_f32).collect::<Vec<_>>()),
        false => bytes(&scales),
    };
    Ok(vec![codes, scales])
}

#[derive(Debug)]
pub(super) struct Naive;

impl PeerFormat for Naive {
    fn name(&self) -> &'static str {
        "8 bits, dense"
    }

    fn required(&self) -> &'static [&'static str] {
        &["weight", SCALES]
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
        let scales = Scales::read(parts, SCALES, shape)?;
        let name = parts.weight();
        match parts.expect("weight")?.dtype.element() {
            Some(DataType::I8) => of_eight_bits(&scales, name, Values::Dense(parts.elements::<i8>("weight")?)),
            Some(DataType::E4M3) => of_eight_bits(&scales, name, Values::Dense(parts.elements::<F8E4M3>("weight")?)),
            _ => of_eight_bits(&scales, name, Values::Dense(parts.elements::<F8E5M2>("weight")?)),
        }
    }
}
