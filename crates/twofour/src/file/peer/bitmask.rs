//! `sparse-24-bitmask` of compressed-tensors up to its version 0.14, with scales of 8-bit values or without; the layout
//! is that of [`Compressed::from_bitmask`].

use super::{
    ACTIVATIONS, Decoded, PeerFormat, bytes,
    scales::{Scales, Values, expect_symmetric, of_eight_bits},
    tensors::Parts,
};
use crate::{Compressed, DataType, Element, Result, match_element};

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

/// The bytes of `compressed`, `bitmask` and `shape`.
pub(super) fn encode<T: Element>(weight: &Compressed<T>) -> [Vec<u8>; 3] {
    let shape = [weight.rows() as i64, weight.cols() as i64];
    [bytes(weight.values()), weight.bitmask(), bytes(&shape)]
}
