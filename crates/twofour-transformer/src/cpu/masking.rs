//! Weights under masks of any pattern.

use rayon::prelude::*;
use twofour::Mask;

/// u32 words of a mask's row: those of whole 64-bit words.
pub const fn mask_words_of_row(cols: usize) -> usize {
    2 * cols.div_ceil(64)
}

/// The words of a mask, row by row, [`mask_words_of_row`] of each: bit `b` of word `j` stands for column `32 j + b`, 1
/// where the element is kept.
pub fn words(mask: &Mask) -> Vec<u32> {
    let of_word = |word: &u64| [*word as u32, (*word >> 32) as u32];
    (0..mask.rows()).flat_map(|row| mask.row_words(row).iter().flat_map(of_word)).collect()
}

/// Whether the words of a row keep a column.
fn is_kept(words: &[u32], col: usize) -> bool {
    words[col / 32] >> (col % 32) & 1 == 1
}

/// Writes a weight with rows of `cols` elements to `masked`, with +0.0 in place of every element that the mask of these
/// words prunes.
///
/// The slices must have one length, a multiple of `cols`, and the mask the words of their rows.
pub fn apply(mask: &[u32], cols: usize, weight: &[f32], masked: &mut [f32]) {
    let cols = cols.max(1);
    let words = mask.par_chunks(mask_words_of_row(cols));
    masked.par_chunks_mut(cols).zip(weight.par_chunks(cols)).zip(words).for_each(|((masked, weight), words)| {
        for (col, (masked, weight)) in masked.iter_mut().zip(weight).enumerate() {
            *masked = if is_kept(words, col) { *weight } else { 0.0 };
        }
    });
}

/// Writes +0.0 in place of every element that the mask of these words prunes of values with rows of `cols` elements.
///
/// The values must be whole rows, and the mask must have the words of these rows.
pub fn apply_in_place(mask: &[u32], cols: usize, values: &mut [f32]) {
    let cols = cols.max(1);
    values.par_chunks_mut(cols).zip(mask.par_chunks(mask_words_of_row(cols))).for_each(|(values, words)| {
        for (col, value) in values.iter_mut().enumerate() {
            if !is_kept(words, col) {
                *value = 0.0;
            }
        }
    });
}

#[cfg(test)]
mod tests {
    use twofour::MatrixRef;

    use super::*;

    #[test]
    fn masks_are_applied_as_the_core_applies_them() {
        for (rows, cols) in [(0, 5), (1, 1), (3, 31), (2, 32), (3, 33), (2, 64), (2, 65), (5, 130)] {
            let mask = Mask::from_fn(rows, cols, |row, col| (row * 7 + col * col) % 3 != 0);
            let special = [f32::NAN, f32::INFINITY, -0.0, -1.5];
            let weight: Vec<f32> = (0..rows * cols).map(|i| special.get(i % 9).copied().unwrap_or(i as f32)).collect();
            let expected = mask.apply(MatrixRef::new(rows, cols, &weight).unwrap()).unwrap();
            let bits = |values: &[f32]| values.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
            let words = words(&mask);
            assert_eq!(words.len(), rows * mask_words_of_row(cols));
            let (mut apart, mut in_place) = (vec![9.0; weight.len()], weight.clone());
            apply(&words, cols, &weight, &mut apart);
            apply_in_place(&words, cols, &mut in_place);
            assert_eq!(bits(&apart), bits(&expected), "[{rows}, {cols}]");
            assert_eq!(bits(&in_place), bits(&expected), "[{rows}, {cols}]");
        }
    }
}
