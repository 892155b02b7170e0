//! `pack-quantized` of compressed-tensors: integers of four or eight bits, several in 32, each row by itself.
//!
//! Column `c` of a row is in word `c / n`, from bit `bits * (c % n)` on, where `n = 32 / bits`; what is stored is the
//! integer plus `2^(bits - 1)`. Zeros are stored like any other integer.

use super::{
    super::unique::quoted,
    Decoded, PeerFormat,
    scales::{Scales, Values},
    tensors::Parts,
};
use crate::{Compressed, Result, memory};

#[derive(Debug)]
pub(super) struct PackQuantized;

impl PeerFormat for PackQuantized {
    fn name(&self) -> &'static str {
        "pack-quantized"
    }

    fn required(&self) -> &'static [&'static str] {
        &["weight_packed", "weight_scale", "weight_shape"]
    }

    fn optional(&self) -> &'static [&'static str] {
        &["weight_g_idx", "weight_zero_point", "input_scale", "input_zero_point"]
    }

    fn decode(&self, parts: &Parts<'_>) -> Result<Decoded> {
        let [rows, cols] = parts.shape("weight_shape")?;
        let packed = parts.matrix("weight_packed")?;
        let bits = [4u32, 8].into_iter().find(|bits| packed == [rows, words_per_row(cols, *bits)]);
        let Some(bits) = bits.filter(|_| rows > 0 && cols > 0) else {
            return Err(parts.fault(format!(
                "its packed integers have shape {packed:?}, which is not that of [{rows}, {cols}] in 4 or 8 bits"
            )));
        };
        if parts.get("weight_zero_point").is_some() {
            return Err(parts.fault(format!(
                "it has zero points ({}), and weights here have symmetric scales: a pruned weight would be no zero; \
                 start from the model that was quantized",
                quoted(&parts.key("weight_zero_point"))
            )));
        }
        let scales = Scales::read(parts, "weight_scale", [rows, cols])?;
        if parts.get("weight_g_idx").is_some() {
            expect_ordered(parts, cols)?;
        }
        let words: Vec<i32> = parts.elements("weight_packed")?;
        let mut integers: Vec<i8> = memory::zeroed(rows * cols)?;
        for (row, words) in integers.chunks_mut(cols).zip(words.chunks(packed[1])) {
            unpack(words, bits, row);
        }
        scales.integers(parts.weight(), bits, Values::Dense(integers))
    }
}

/// An error unless the columns of a scale lie one after another.
fn expect_ordered(parts: &Parts<'_>, cols: usize) -> Result<()> {
    const END: &str = "weight_g_idx";
    let groups: Vec<i32> = parts.elements(END)?;
    let per_row = parts.matrix("weight_scale")?[1];
    let width = cols / per_row.max(1);
    let is_ordered =
        groups.len() == cols && groups.iter().enumerate().all(|(c, g)| i64::from(*g) == (c / width) as i64);
    // -1 is what the format's writer stores where there is no order.
    if is_ordered || groups.iter().all(|group| *group == -1) {
        return Ok(());
    }
    Err(parts.fault(format!(
        "its columns are grouped in another order ({}), by their activations (act-order, desc_act); groups here are \
         columns one after another",
        quoted(&parts.key(END))
    )))
}

/// Words of a row.
pub(super) fn words_per_row(cols: usize, bits: u32) -> usize {
    cols.div_ceil((32 / bits) as usize)
}

fn unpack(words: &[i32], bits: u32, row: &mut [i8]) {
    let (per_word, offset, mask) = ((32 / bits) as usize, 1i32 << (bits - 1), (1u32 << bits) - 1);
    for (integers, word) in row.chunks_mut(per_word).zip(words) {
        for (i, integer) in integers.iter_mut().enumerate() {
            let stored = *word as u32 >> (bits * i as u32) & mask;
            *integer = (stored as i32 - offset) as i8;
        }
    }
}

/// The words of a weight of integers of so many bits.
pub(super) fn pack(weight: &Compressed<i8>, bits: u32) -> Vec<u32> {
    let (per_word, offset, mask) = ((32 / bits) as usize, 1i32 << (bits - 1), (1u32 << bits) - 1);
    let word = |integers: &[i8]| {
        let stored = integers.iter().map(|integer| (i32::from(*integer) + offset) as u32 & mask);
        stored.enumerate().fold(0, |word, (i, stored)| word | stored << (bits * i as u32))
    };
    let dense = weight.to_dense();
    dense.chunks(weight.cols().max(1)).flat_map(|row| row.chunks(per_word).map(word)).collect()
}
