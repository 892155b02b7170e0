//! `marlin-24` of compressed-tensors up to its version 0.14, and the checkpoints of GPTQ's `marlin_24`: integers,
//! scales and metadata in the order of [`crate::layout::marlin`].
//!
//! For a weight `[rows, cols]` of `bits` bits the tensors are I32 `[cols / 32, 16 * rows * bits / 32]`, I16 `[cols /
//! 32, 2 * rows]` and scales F16 `[groups, rows]`, of 128 columns each or one for a whole row.

use half::f16;

use super::{
    Decoded, PeerFormat,
    scales::{Scales, Values},
    tensors::Parts,
};
use crate::{
    Result,
    layout::marlin::{Bits, decode as decode_integers, scale_row},
    quantization::GROUP,
};

#[derive(Debug)]
pub(super) struct Marlin24;

#[derive(Debug)]
pub(super) struct GptqMarlin24;

impl PeerFormat for Marlin24 {
    fn name(&self) -> &'static str {
        "marlin-24"
    }

    fn required(&self) -> &'static [&'static str] {
        &["weight_packed", "scale_packed", "meta"]
    }

    fn decode(&self, parts: &Parts<'_>) -> Result<Decoded> {
        // The format's writer takes the kept columns for all of them where it decides on the order.
        decode(parts, ["weight_packed", "scale_packed", "meta"], |cols| cols / 2 > GROUP)
    }
}

impl PeerFormat for GptqMarlin24 {
    fn name(&self) -> &'static str {
        "gptq-marlin-24"
    }

    fn required(&self) -> &'static [&'static str] {
        &["B_24", "s", "B_meta"]
    }

    fn optional(&self) -> &'static [&'static str] {
        // Memory of the kernel.
        &["workspace"]
    }

    fn decode(&self, parts: &Parts<'_>) -> Result<Decoded> {
        decode(parts, ["B_24", "s", "B_meta"], |cols| cols > GROUP)
    }
}

fn decode(parts: &Parts<'_>, [words, scales, meta]: [&str; 3], is_ordered: impl Fn(usize) -> bool) -> Result<Decoded> {
    let [strips, packed] = parts.matrix(words)?;
    let ([meta_strips, twice], [groups, of_scales]) = (parts.matrix(meta)?, parts.matrix(scales)?);
    let (rows, cols) = (twice / 2, strips.saturating_mul(32));
    let fits = |bits: &Bits| Some(packed) == rows.checked_mul(16).map(|count| count / bits.per_word());
    let bits = [Bits::Four, Bits::Eight].into_iter().find(fits);
    let bits = bits.filter(|_| meta_strips == strips && of_scales == rows && rows > 0 && cols > 0);
    let Some(bits) = bits else {
        return Err(parts.fault(format!(
            "its integers {:?}, metadata {:?} and scales {:?} are not those of one weight in 4 or 8 bits",
            [strips, packed],
            [meta_strips, twice],
            [groups, of_scales]
        )));
    };
    let columns = match groups {
        1 => cols,
        _ if groups.checked_mul(GROUP) == Some(cols) => GROUP,
        _ => {
            return Err(parts.fault(format!("{groups} scales of a row of {cols} columns; one, or one for 128 columns")));
        }
    };
    let stored: Vec<f16> = parts.elements(scales)?;
    let (words, meta): (Vec<i32>, Vec<i16>) = (parts.elements(words)?, parts.elements(meta)?);
    let integers = decode_integers(rows, cols, bits, bytemuck::cast_slice(&words), bytemuck::cast_slice(&meta))?;
    let mut ordered = vec![f16::ZERO; stored.len()];
    for (i, scale) in stored.into_iter().enumerate() {
        let (group, place) = (i / rows, i % rows);
        let row = if groups > 1 && is_ordered(cols) { scale_row(place) } else { place };
        ordered[row * groups + group] = scale;
    }
    let scales = Scales::of_columns(&ordered, columns, [rows, cols]);
    scales.integers(parts.weight(), bits.count(), Values::Sparse(integers))
}
