//! The orders in which GPUs want the metadata of a compressed weight.
//!
//! Each is a bijection of the canonical metadata ([`crate::compressed`]): the codes are the same, only their places
//! differ. They are made in memory, for one kind of kernel; only other tools' formats have some of them on disk.
//!
//! | module | whose |
//! |---|---|
//! | [`sm80`] | CUTLASS 2.x and torch's CUTLASS form, for `mma.sp` |
//! | [`lanes`] | ours, for four-bit weights and `mma.sp`: values and scales too |
//! | [`marlin`] | Sparse-Marlin's, for integers and `mma.sp`: values, too |
//! | [`sm90`] | CUTLASS 3.x, for `wgmma.sp`; depends on the kernel's tile |
//! | [`bitmask`] | torch's mask of 4x4 tiles that goes with weights compressed both ways |

pub mod bitmask;
pub mod lanes;
pub mod marlin;
pub mod sm80;
pub mod sm90;

use crate::{Compressed, Element, Error, Result};

/// The 16-bit metadata words of a weight, row by row: four codes each, the first in the lowest nibble.
///
/// # Errors
/// [`Error::Multiple`] where the columns are no multiple of 16.
fn halves<T: Element>(weight: &Compressed<T>) -> Result<Vec<u16>> {
    expect_multiple("columns of the weight", weight.cols(), 16)?;
    // A shape may have any number of empty rows.
    let rows = if weight.cols() == 0 { 0 } else { weight.rows() };
    let words = (0..rows).flat_map(|row| {
        let halves = weight.meta_row(row).iter().flat_map(|word| [*word as u16, (*word >> 16) as u16]);
        halves.take(weight.cols() / 16)
    });
    Ok(words.collect())
}

/// An error unless `found` is a multiple.
fn expect_multiple(what: &'static str, found: usize, multiple: usize) -> Result<()> {
    if found.is_multiple_of(multiple) { Ok(()) } else { Err(Error::Multiple { what, multiple, found }) }
}

/// `out[place(i)] = words[i]`.
fn scatter<W: Copy + Default>(words: &[W], place: impl Fn(usize) -> usize) -> Vec<W> {
    let mut out = vec![W::default(); words.len()];
    for (i, word) in words.iter().enumerate() {
        out[place(i)] = *word;
    }
    out
}

/// `out[i] = words[place(i)]`: undoes [`scatter`].
fn gather<W: Copy>(words: &[W], place: impl Fn(usize) -> usize) -> Vec<W> {
    (0..words.len()).map(|i| words[place(i)]).collect()
}

/// The number of elements of a shape, or an error where it overflows.
fn elements(rows: usize, cols: usize) -> Result<usize> {
    rows.checked_mul(cols).ok_or_else(|| Error::TooLarge { shape: vec![rows, cols] })
}

/// An error unless there are as many words as the shape requires.
fn expect_words<W>(words: &[W], expected: usize) -> Result<()> {
    if words.len() == expected {
        Ok(())
    } else {
        Err(Error::Length { what: "metadata in a GPU's order", expected, found: words.len() })
    }
}

/// Packs 16-bit words in row order, `cols / 16` a row, to canonical metadata.
fn canonical_from_halves(words: &[u16], cols: usize) -> Vec<u32> {
    let row = |row: &[u16]| -> Vec<u32> {
        row.chunks(2).map(|pair| u32::from(pair[0]) | pair.get(1).map_or(0, |high| u32::from(*high) << 16)).collect()
    };
    if cols == 0 { Vec::new() } else { words.chunks(cols / 16).flat_map(row).collect() }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::MatrixRef;
    use half::bf16;

    /// A weight whose codes are random, in a shape that every layout takes.
    fn weights() -> impl Strategy<Value = Compressed<bf16>> {
        (1usize..5, 1usize..4).prop_flat_map(|(r, c)| {
            let (rows, cols) = (64 * r, 128 * c);
            proptest::collection::vec(-4i8..=4, rows * cols).prop_map(move |data| {
                let data: Vec<bf16> = data.into_iter().map(|v| bf16::from_f32(f32::from(v))).collect();
                Compressed::from_pruned(MatrixRef::new(rows, cols, &data).unwrap()).unwrap()
            })
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(12))]
        #[test]
        fn every_layout_is_undone(weight in weights()) {
            let (rows, cols) = (weight.rows(), weight.cols());
            prop_assert_eq!(sm80::decode_16(rows, cols, &sm80::encode_16(&weight).unwrap()).unwrap(), weight.meta());
            prop_assert_eq!(sm80::decode_8(rows, cols, &sm80::encode_8(&weight).unwrap()).unwrap(), weight.meta());
            for tile_k in sm90::TileK::ALL {
                let encoded = sm90::encode_16(&weight, tile_k).unwrap();
                prop_assert_eq!(sm90::decode_16(rows, cols, tile_k, &encoded).unwrap(), weight.meta());
                let encoded = sm90::encode_8(&weight, tile_k).unwrap();
                prop_assert_eq!(sm90::decode_8(rows, cols, tile_k, &encoded).unwrap(), weight.meta());
            }
        }
    }

    #[test]
    fn shapes_that_a_layout_cannot_hold_are_errors() {
        let weight = |rows: usize, cols: usize| {
            let data = vec![0f32; rows * cols];
            Compressed::from_dense(MatrixRef::new(rows, cols, &data).unwrap()).unwrap()
        };
        assert!(sm80::encode_16(&weight(16, 64)).unwrap_err().to_string().contains("16 is not a multiple of 32"));
        assert!(sm80::encode_16(&weight(32, 48)).is_err() && sm80::encode_8(&weight(16, 32)).is_err());
        assert!(sm90::encode_16(&weight(64, 64), sm90::TileK::K128).is_err());
        assert!(sm80::decode_16(32, 32, &[0; 63]).is_err());
        assert!(bitmask::encode(&crate::Mask::empty(4, 8)).is_err());
    }

    #[test]
    fn shapes_that_overflow_are_refused() {
        let huge = 1usize << (usize::BITS - 4);
        let none = lanes::Lanes { values: vec![], meta: vec![], scales: vec![] };
        for error in [
            sm80::decode_16(huge, 64, &[]).unwrap_err(),
            sm80::decode_8(huge, 64, &[]).unwrap_err(),
            sm90::decode_16(huge, 64, sm90::TileK::K64, &[]).unwrap_err(),
            sm90::decode_8(huge, 64, sm90::TileK::K64, &[]).unwrap_err(),
            bitmask::decode(huge, 64, &[]).unwrap_err(),
            lanes::decode(huge, 128, crate::int4::Granularity::Row, &none).unwrap_err(),
        ] {
            assert!(matches!(error, Error::TooLarge { .. }), "{error}");
        }
        // Rows without elements take no time.
        assert!(bitmask::encode(&bitmask::decode(huge, 0, &[]).unwrap()).unwrap().is_empty());
        let weight = Compressed::<bf16>::from_parts(huge, 0, vec![], vec![]).unwrap();
        assert!(sm80::encode_16(&weight).unwrap().is_empty() && sm80::encode_8(&weight).unwrap().is_empty());
        for tile_k in sm90::TileK::ALL {
            assert!(sm90::encode_16(&weight, tile_k).unwrap().is_empty());
            assert!(sm90::encode_8(&weight, tile_k).unwrap().is_empty());
        }
        let weight = lanes::decode(huge, 0, crate::int4::Granularity::Group, &none).unwrap();
        assert_eq!(lanes::encode(&weight).unwrap(), none);
    }
}
