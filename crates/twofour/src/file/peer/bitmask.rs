//! `sparse-24-bitmask` of compressed-tensors up to its version 0.14, with scales of 8-bit values or without; the layout
//! is that of [`Compressed::from_bitmask`].

use super::{
    ACTIVATIONS, Decoded, PeerFormat, bytes,
    scales::{Scales, Values, expect_symmetric, of_eight_bits},
    tensors::Parts,
};
use crate::{Compressed, DataType, Element, Error, MatrixRef, Result, match_element, memory};

#[derive(Debug)]
pub(super) struct Bitmask;

impl PeerFormat for Bitmask {
    fn name(&self) -> &'static str {
        "sparse-24-bitmask"
    }

    fn required(&self) -> &'static [&'static str] {
        &["compressed", "bitmask", "shape"]
    }

    fn optional(&self) -> &'static [&'static str] {
        &["weight_scale", "weight_zero_point", ACTIVATIONS[0], ACTIVATIONS[1]]
    }

    fn decode(&self, parts: &Parts<'_>) -> Result<Decoded> {
        let info = parts.expect("compressed")?;
        match info.dtype.element() {
            Some(dtype) => match_element!(dtype, |T| decode::<T>(parts)),
            None => Err(parts.fault(format!("its kept values are {}, which no weight has", info.dtype))),
        }
    }
}

fn decode<T: Element>(parts: &Parts<'_>) -> Result<Decoded> {
    let [rows, cols] = parts.shape("shape")?;
    let (kept, bitmask) = (parts.elements::<T>("compressed")?, parts.elements("bitmask")?);
    let weight = Compressed::from_bitmask(rows, cols, &kept, &bitmask)?;
    if parts.get("weight_scale").is_none() {
        return Decoded::compressed(parts.weight(), &weight);
    }
    if !matches!(T::DTYPE, DataType::I8 | DataType::E4M3 | DataType::E5M2) {
        return Err(parts.fault(format!("it has scales, and its values are {}, no type of eight bits", T::DTYPE)));
    }
    expect_symmetric(parts)?;
    let scales = Scales::read(parts, "weight_scale", [rows, cols])?;
    of_eight_bits(&scales, parts.weight(), Values::Sparse(weight))
}

/// `sparse-bitmask`, of any pattern: kept values in one dimension, and where those of each row begin.
#[derive(Debug)]
pub(super) struct SparseBitmask;

impl PeerFormat for SparseBitmask {
    fn name(&self) -> &'static str {
        "sparse-bitmask"
    }

    fn required(&self) -> &'static [&'static str] {
        &["compressed", "bitmask", "shape", "row_offsets"]
    }

    fn decode(&self, parts: &Parts<'_>) -> Result<Decoded> {
        let info = parts.expect("compressed")?;
        match info.dtype.element() {
            Some(_) if parts.get("weight_scale").is_some() => {
                Err(parts.fault("it has scales, and sparse-bitmask of weights with scales is not read"))
            }
            Some(dtype) => match_element!(dtype, |T| scattered::<T>(parts)),
            None => Err(parts.fault(format!("its kept values are {}, which no weight has", info.dtype))),
        }
    }
}

/// The weight of any pattern; compressed where it is 2:4.
fn scattered<T: Element>(parts: &Parts<'_>) -> Result<Decoded> {
    let [rows, cols] = parts.shape("shape")?;
    let (kept, bitmask): (Vec<T>, Vec<u8>) = (parts.elements("compressed")?, parts.elements("bitmask")?);
    let stride = cols.div_ceil(8);
    let expected = rows.checked_mul(cols.checked_add(7).ok_or(Error::TooLarge { shape: vec![rows, cols] })?);
    if expected.is_none() || bitmask.len() != rows * stride || cols == 0 {
        let found = bitmask.len();
        return Err(parts.fault(format!("its bitmask of {found} bytes is not that of [{rows}, {cols}]")));
    }
    let offsets: Vec<i64> = parts.elements("row_offsets")?;
    let mut dense: Vec<T> = memory::zeroed(rows * cols)?;
    let mut next = 0;
    for (row, (dense, bits)) in dense.chunks_mut(cols).zip(bitmask.chunks(stride)).enumerate() {
        if offsets.get(row) != Some(&(next as i64)) {
            return Err(parts.fault(format!("row {row}: its row offset is not {next}, the number of values before it")));
        }
        for (col, element) in dense.iter_mut().enumerate().filter(|(col, _)| bits[col / 8] >> (col % 8) & 1 == 1) {
            let value =
                kept.get(next).ok_or_else(|| parts.fault(format!("row {row}, column {col}: it has no value")))?;
            *element = if value.is_zero() { T::ZERO } else { *value };
            next += 1;
        }
    }
    if next != kept.len() {
        return Err(parts.fault(format!("it has {} values, and {next} bits", kept.len())));
    }
    match Compressed::from_dense(MatrixRef::new(rows, cols, &dense)?) {
        Ok(weight) => Decoded::compressed(parts.weight(), &weight),
        Err(Error::TooManyKept { .. }) => Ok(Decoded::dense(parts.weight(), [rows, cols], &dense)),
        Err(error) => Err(error),
    }
}

/// The bytes of `compressed`, `bitmask` and `shape`.
pub(super) fn encode<T: Element>(weight: &Compressed<T>) -> [Vec<u8>; 3] {
    let shape = [weight.rows() as i64, weight.cols() as i64];
    [bytes(weight.values()), weight.bitmask(), bytes(&shape)]
}
