//! Masks chosen band by band.
//!
//! Every selection rule works on bands of a few rows that do not depend on each other: one row for groups along rows,
//! `m` rows for groups along columns, four for tiles. So a matrix can be selected in parallel, and a caller that needs
//! the mask only to apply it can do both, and take its statistics, while a band is in the cache.

use rayon::prelude::*;

use super::nm::reject_nan;
use crate::{
    Compressed, Element, Mask, MatrixRef, Result,
    compressed::{fill_row, groups_per_row, lengths, meta_words_per_row},
    mask::{Retained, apply_row, stride},
    memory,
};

/// A rule that chooses the mask of one band.
pub(crate) trait BandRule<T>: Sync {
    /// Rows of a band; the last band of a matrix may have fewer.
    fn height(&self) -> usize;

    /// Sets the bits of the kept elements. `words` holds the bands' mask rows one after the other, all zero. Returns
    /// whether an element is NaN; the mask is of no use then.
    fn choose(&self, band: MatrixRef<'_, T>, words: &mut [u64]) -> bool;
}

/// The mask of a matrix.
///
/// # Errors
/// [`crate::Error::NotANumber`] with the place of the first NaN.
pub(crate) fn mask<T: Element>(matrix: MatrixRef<'_, T>, rule: &impl BandRule<T>) -> Result<Mask> {
    let mut mask = Mask::empty(matrix.rows(), matrix.cols());
    let stride = stride(matrix.cols()).max(1);
    let height = rule.height();
    let nan = mask
        .par_bands_mut(height)
        .enumerate()
        .map(|(band, words)| rule.choose(matrix.band(band * height, words.len() / stride), words))
        .reduce(|| false, |a, b| a | b);
    if nan {
        reject_nan(matrix)?;
    }
    Ok(mask)
}

/// What the passes over a matrix's bands need beside it; used again from one call to the next.
#[derive(Debug, Default)]
pub(crate) struct BandScratch {
    words: Vec<u64>,
}

/// Writes the matrix to `values` with +0.0 in the place of every element that the rule does not keep, and what it keeps
/// of each row to `retained`; on this thread, band by band. A NaN makes what is retained of its row not finite.
pub(crate) fn prune<T: Element>(
    matrix: MatrixRef<'_, T>,
    rule: &impl BandRule<T>,
    scratch: &mut BandScratch,
    values: &mut [T],
    retained: &mut [Retained],
) {
    let (cols, height) = (matrix.cols(), rule.height());
    let bands = values.chunks_mut((height * cols).max(1)).zip(retained.chunks_mut(height));
    for (band, (values, retained)) in bands.enumerate() {
        let band = matrix.band(band * height, retained.len());
        let words = &mut scratch.words;
        words.clear();
        words.resize(retained.len() * stride(cols), 0);
        // A NaN shows in the sums.
        let _ = rule.choose(band, words);
        let rows = values.chunks_mut(cols).zip(words.chunks(stride(cols))).zip(retained);
        for (row, ((values, words), retained)) in rows.enumerate() {
            apply_row(band.row(row), words, values);
            *retained = Retained::of_pruned(band.row(row), values, words);
        }
    }
}

/// The compressed form of the elements that the rule keeps, and what it keeps, in one pass. Bands of the rule must be
/// single rows.
///
/// # Errors
/// [`crate::Error::NotANumber`] with the place of the first NaN, [`Error::TooManyKept`] where the rule does not choose
/// 2:4 masks.
pub(crate) fn compressed<T: Element>(
    matrix: MatrixRef<'_, T>,
    rule: &impl BandRule<T>,
) -> Result<(Compressed<T>, Retained)> {
    debug_assert_eq!(rule.height(), 1);
    let (rows, cols) = (matrix.rows(), matrix.cols());
    let (values_len, meta_len) = lengths(rows, cols)?;
    let (mut values, mut meta) = (memory::zeroed::<T>(values_len)?, memory::zeroed::<u32>(meta_len)?);
    let mut retained = vec![Retained::default(); rows];
    if values_len > 0 {
        let parts = values
            .par_chunks_mut(groups_per_row(cols) * 2)
            .zip(meta.par_chunks_mut(meta_words_per_row(cols)))
            .zip(&mut retained);
        let broken = parts
            .enumerate()
            .map_init(Vec::new, |words: &mut Vec<u64>, (row, ((values, meta), retained))| {
                words.clear();
                words.resize(stride(cols), 0);
                // A NaN shows in the sums.
                let nan = rule.choose(matrix.band(row, 1), words);
                *retained = Retained::of_row(matrix.row(row), words);
                let bits = |group: usize, _: &[T; 4]| (words[group / 16] >> (group % 16 * 4) & 0xF) as u8;
                if nan { Ok(()) } else { fill_row(row, matrix.row(row), bits, values, meta) }
            })
            .find_map_first(Result::err);
        if let Some(error) = broken {
            return Err(error);
        }
    }
    let retained = Retained::total(&retained);
    if !retained.is_finite() {
        reject_nan(matrix)?;
    }
    Ok((Compressed::from_trusted_parts(rows, cols, values, meta), retained))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;
    use crate::{Error, Pattern};

    fn pruned<T: Element>(matrix: MatrixRef<'_, T>, rule: &impl BandRule<T>) -> (Vec<T>, Retained) {
        let mut values = vec![T::ZERO; matrix.data().len()];
        let mut retained = vec![Retained::default(); if matrix.cols() == 0 { 0 } else { matrix.rows() }];
        prune(matrix, rule, &mut BandScratch::default(), &mut values, &mut retained);
        (values, Retained::total(&retained))
    }

    /// One pass gives what selecting, applying, compressing and summing give one after the other.
    pub(in crate::select) fn one_pass_agrees<T: Element>(matrix: MatrixRef<'_, T>, rule: &impl BandRule<T>) {
        let mask = mask(matrix, rule).unwrap();
        let (values, retained) = pruned(matrix, rule);
        assert_eq!(bytemuck::cast_slice::<T, u8>(&values), bytemuck::cast_slice::<T, u8>(&mask.apply(matrix).unwrap()));
        let check = |retained: Retained| {
            assert_eq!((retained.elements, retained.kept), (matrix.data().len(), mask.count()));
            assert_eq!(retained.density(), mask.density());
            if retained.is_finite() {
                assert_eq!(retained.l1(), mask.kept_l1(matrix).unwrap());
                assert_eq!(retained.l2(), mask.kept_l2(matrix).unwrap());
            }
        };
        check(retained);
        if rule.height() == 1 && mask.verify(Pattern::TWO_FOUR, crate::Axis::Row).is_ok() {
            let (weight, retained) = compressed(matrix, rule).unwrap();
            assert_eq!(weight, Compressed::from_masked(matrix, &mask).unwrap());
            check(retained);
        }
    }

    #[test]
    fn the_first_nan_is_named_by_every_pass() {
        use crate::select::{Transposable, nm::magnitude_rule};
        fn expect(rule: &impl BandRule<f32>) {
            let mut data = vec![1f32; 12 * 70];
            data[5 * 70 + 66] = f32::NAN;
            data[5 * 70 + 69] = f32::NAN;
            data[8 * 70] = f32::NAN;
            let matrix = MatrixRef::new(12, 70, &data).unwrap();
            let errors = [
                mask(matrix, rule).map(|_| ()),
                if rule.height() == 1 { compressed(matrix, rule).map(|_| ()) } else { mask(matrix, rule).map(|_| ()) },
            ];
            assert!(!pruned(matrix, rule).1.is_finite());
            for outcome in errors {
                assert!(matches!(outcome, Err(Error::NotANumber { row: 5, col: 66 })), "{outcome:?}");
            }
        }
        expect(&magnitude_rule(Pattern::TWO_FOUR, crate::Axis::Row));
        expect(&magnitude_rule(Pattern::TWO_FOUR, crate::Axis::Column));
        expect(&magnitude_rule(Pattern::new(1, 3).unwrap(), crate::Axis::Row));
        Transposable::ALL.iter().for_each(expect);
    }
}
