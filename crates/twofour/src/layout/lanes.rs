//! The order in which the lanes of a warp want a four-bit weight for `mma.sp.m16n8k32`, on sm_80 and everything after.
//!
//! A unit is 16 rows by 128 columns: four products, of 32 columns each. Units follow each other along the columns, then
//! along the rows. In a unit every lane has, next to each other, what it gives to the four products, so that a warp
//! reads a unit in one piece:
//!
//! | part | u32s of a unit | lane `l` (`g = l / 4`, `t = l % 4`) |
//! |---|---|---|
//! | values | `[32 lanes][4 products]` | kept values `2t, 2t + 1, 2t + 8, 2t + 9` of the product's sixteen, of rows `g` and `g + 8`, plus 8 |
//! | metadata | `[32 lanes][2 pairs of products]` | sixteen columns (`t % 2`) of product `t / 2` of the pair: row `g` in the lower half, row `g + 8` in the upper |
//! | scales | `[8]` | `g`: row `g`'s in the lower half, row `g + 8`'s in the upper; one such line for all units of sixteen rows where rows have one scale each |
//!
//! In a word of values nibble `i` and nibble `i + 4` are neighbours along a row, `i = row / 8 + 2 · (kept / 8)`: a mask
//! picks such a pair of registers' worth at once. [Derived from the fragments of the PTX manual, `mma.sp` with 16-bit
//! elements.]

use half::f16;

use super::{elements, expect_multiple, expect_words};
use crate::{
    Compressed, Result,
    int4::{GROUP, Granularity, Int4},
};

/// Rows of a unit.
const ROWS: usize = 16;

/// Columns of a product.
const STEP: usize = 32;

/// u32s of a unit's values and of its metadata.
const VALUES: usize = ROWS * GROUP / 2 / 8;
const META: usize = ROWS * GROUP / 4 / 8;

/// A four-bit weight in this order.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Lanes {
    /// `[units, 32, 4]`.
    pub values: Vec<u32>,
    /// `[units, 32, 2]`.
    pub meta: Vec<u32>,
    /// `[units, 8]`, or `[rows / 16, 8]`.
    pub scales: Vec<u32>,
}

/// Word and shift of a kept value.
fn place_of_value(cols: usize, row: usize, kept: usize) -> (usize, usize) {
    let unit = row / ROWS * (cols / GROUP) + kept / (GROUP / 2);
    let (product, kept) = (kept % (GROUP / 2) / (STEP / 2), kept % (STEP / 2));
    let lane = row % 8 * 4 + kept % 8 / 2;
    let nibble = row % ROWS / 8 + 2 * (kept / 8) + 4 * (kept % 2);
    (unit * VALUES + lane * 4 + product, 4 * nibble)
}

/// Word and shift of a group's code.
fn place_of_code(cols: usize, row: usize, group: usize) -> (usize, usize) {
    let col = group * 4;
    let unit = row / ROWS * (cols / GROUP) + col / GROUP;
    let (product, col) = (col % GROUP / STEP, col % STEP);
    let lane = row % 8 * 4 + product % 2 * 2 + col / 16;
    (unit * META + lane * 2 + product / 2, 16 * (row % ROWS / 8) + col % 16)
}

/// Word and shift of a scale: the row's `i`th.
fn place_of_scale(per_row: usize, row: usize, i: usize) -> (usize, usize) {
    ((row / ROWS * per_row + i) * 8 + row % 8, 16 * (row % ROWS / 8))
}

/// Brings a weight into this order.
///
/// # Errors
/// [`crate::Error::Multiple`] unless rows are a multiple of 16 and columns of 128, [`crate::Error::GroupOnCpuOnly`] for
/// groups of 64 columns.
pub fn encode(weight: &Int4) -> Result<Lanes> {
    let q = weight.weight();
    let (rows, cols) = (q.rows(), q.cols());
    let per_row = expect(rows, cols, weight.granularity())?;
    let units = rows / ROWS * (cols / GROUP);
    let mut lanes = Lanes {
        values: vec![0; units * VALUES],
        meta: vec![0; units * META],
        scales: vec![0; rows / ROWS * per_row * 8],
    };
    // A shape may have any number of rows without values and scales.
    let rows = if cols == 0 && per_row == 0 { 0 } else { rows };
    for row in 0..rows {
        for (kept, value) in q.values_row(row).iter().enumerate() {
            let (word, shift) = place_of_value(cols, row, kept);
            lanes.values[word] |= ((value + 8) as u32) << shift;
        }
        for group in 0..q.groups() {
            let (word, shift) = place_of_code(cols, row, group);
            lanes.meta[word] |= u32::from(q.code(row, group)) << shift;
        }
        for i in 0..per_row {
            let (word, shift) = place_of_scale(per_row, row, i);
            lanes.scales[word] |= u32::from(weight.scales()[row * per_row + i].to_bits()) << shift;
        }
    }
    Ok(lanes)
}

/// The `[rows, cols]` weight that is in this order.
///
/// # Errors
/// As [`encode`]; [`crate::Error::Length`] where the words do not fit the shape; those of [`Compressed::from_parts`]
/// and [`Int4::from_parts`] for damaged contents.
pub fn decode(rows: usize, cols: usize, granularity: Granularity, lanes: &Lanes) -> Result<Int4> {
    let per_row = expect(rows, cols, granularity)?;
    let units = rows / ROWS * (cols / GROUP);
    expect_words(&lanes.values, units * VALUES)?;
    expect_words(&lanes.meta, units * META)?;
    expect_words(&lanes.scales, rows / ROWS * per_row * 8)?;
    let nibble = |words: &[u32], (word, shift): (usize, usize)| words[word] >> shift & 15;
    let values =
        (0..rows * cols / 2).map(|i| nibble(&lanes.values, place_of_value(cols, i / (cols / 2), i % (cols / 2))));
    let values = values.map(|q| q as i8 - 8).collect();
    let words_per_row = cols / STEP;
    let meta = (0..rows * words_per_row).map(|i| {
        let (row, first) = (i / words_per_row, i % words_per_row * 8);
        (0..8).fold(0, |word, g| word | nibble(&lanes.meta, place_of_code(cols, row, first + g)) << (4 * g))
    });
    let q = Compressed::from_parts(rows, cols, values, meta.collect())?;
    let scales = (0..rows * per_row).map(|i| {
        let (word, shift) = place_of_scale(per_row, i / per_row, i % per_row);
        f16::from_bits((lanes.scales[word] >> shift) as u16)
    });
    Int4::from_parts(q, scales.collect(), granularity)
}

/// The scales of a row, or an error for a shape.
fn expect(rows: usize, cols: usize, granularity: Granularity) -> Result<usize> {
    expect_multiple("rows of the weight", rows, ROWS)?;
    expect_multiple("columns of the weight", cols, GROUP)?;
    elements(rows, cols)?;
    if granularity == Granularity::Group64 {
        return Err(crate::Error::GroupOnCpuOnly { columns: 64 });
    }
    Ok(granularity.scales_per_row(cols))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::MatrixRef;

    fn weights() -> impl Strategy<Value = Int4> {
        (1usize..4, 1usize..4, any::<bool>()).prop_flat_map(|(r, c, by_row)| {
            let granularity = if by_row { Granularity::Row } else { Granularity::Group };
            proptest::collection::vec(-1.0f32..1.0, 16 * r * 128 * c).prop_map(move |data| {
                let weight = Compressed::from_pruned(MatrixRef::new(16 * r, 128 * c, &data).unwrap()).unwrap();
                Int4::quantize(&weight, granularity).unwrap()
            })
        })
    }

    /// What a warp's `mma.sp` makes of the words of a unit, by the fragments of the PTX manual: for each of its 16 rows
    /// the 128 dense integers.
    fn unit_by_lanes(lanes: &Lanes, unit: usize) -> [[i32; GROUP]; ROWS] {
        let mut dense = [[0; GROUP]; ROWS];
        for product in 0..4 {
            // Registers a0 to a3 of each lane, two elements each, as the kernel masks them out.
            let mut compressed = [[0; 16]; ROWS];
            for lane in 0..32 {
                let word = lanes.values[unit * VALUES + lane * 4 + product];
                for register in 0..4 {
                    for half in 0..2 {
                        let q = (word >> (4 * register + 16 * half) & 15) as i32 - 8;
                        compressed[lane / 4 + register % 2 * 8][lane % 4 * 2 + register / 2 * 8 + half] = q;
                    }
                }
            }
            // The selector names lanes 0 and 1 of each quad, or 2 and 3.
            for (row, compressed) in compressed.iter().enumerate() {
                for half in 0..2 {
                    let lane = row % 8 * 4 + product % 2 * 2 + half;
                    let codes = lanes.meta[unit * META + lane * 2 + product / 2] >> (16 * (row / 8)) & 0xFFFF;
                    for group in 0..4 {
                        for which in 0..2 {
                            let position = codes >> (4 * group + 2 * which) & 3;
                            let col = product * STEP + half * 16 + group * 4 + position as usize;
                            dense[row][col] = compressed[half * 8 + group * 2 + which];
                        }
                    }
                }
            }
        }
        dense
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(24))]
        #[test]
        fn the_order_is_undone_and_lanes_find_what_is_theirs(weight in weights()) {
            let q = weight.weight();
            let (rows, cols) = (q.rows(), q.cols());
            let lanes = encode(&weight).unwrap();
            prop_assert_eq!(&decode(rows, cols, weight.granularity(), &lanes).unwrap(), &weight);
            let dense = q.to_dense();
            for unit in 0..rows / ROWS * (cols / GROUP) {
                let (first_row, first_col) = (unit / (cols / GROUP) * ROWS, unit % (cols / GROUP) * GROUP);
                for (r, row) in unit_by_lanes(&lanes, unit).iter().enumerate() {
                    let expected = dense[(first_row + r) * cols + first_col..][..GROUP].iter().map(|q| i32::from(*q));
                    prop_assert!(row.iter().copied().eq(expected));
                }
            }
        }
    }

    #[test]
    fn shapes_and_contents_that_cannot_be_are_errors() {
        let weight = |rows: usize, cols: usize| {
            let data = vec![0f32; rows * cols];
            let weight = Compressed::from_dense(MatrixRef::new(rows, cols, &data).unwrap()).unwrap();
            Int4::quantize(&weight, Granularity::Group).unwrap()
        };
        assert!(encode(&weight(8, 128)).unwrap_err().to_string().contains("8 is not a multiple of 16"));
        assert!(encode(&weight(16, 64)).unwrap_err().to_string().contains("64 is not a multiple of 128"));
        let mut lanes = encode(&weight(16, 128)).unwrap();
        assert!(decode(16, 256, Granularity::Group, &lanes).is_err());
        lanes.meta[3] = 0;
        assert!(decode(16, 128, Granularity::Group, &lanes).is_err());
    }
}
