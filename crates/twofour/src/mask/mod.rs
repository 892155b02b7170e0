//! Which elements of a matrix are kept.

mod retained;

use std::ops::Range;

use rayon::prelude::*;

use crate::{
    Axis, Element, Error, MatrixRef, Pattern, Result, memory,
    widest::{Inlined, widest},
};

pub(crate) use retained::Retained;

/// Which elements of a `[rows, cols]` matrix are kept, one bit each.
///
/// Bit `col % 64` of word `col / 64` of a row is set where the element is kept; each row starts a new word, and the
/// bits past the last column are zero.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mask {
    rows: usize,
    cols: usize,
    words: Vec<u64>,
}

/// Words that a row of `cols` bits takes.
pub(crate) fn stride(cols: usize) -> usize {
    cols.div_ceil(64)
}

impl Mask {
    /// A mask that keeps nothing.
    pub fn empty(rows: usize, cols: usize) -> Self {
        Mask { rows, cols, words: vec![0; rows * stride(cols)] }
    }

    /// A mask that keeps everything.
    pub fn full(rows: usize, cols: usize) -> Self {
        let mut mask = Mask::empty(rows, cols);
        if cols > 0 {
            let (words, last) = (stride(cols), cols - 64 * (stride(cols) - 1));
            for row in mask.words.chunks_mut(words) {
                row.fill(u64::MAX);
                row[words - 1] >>= 64 - last;
            }
        }
        mask
    }

    /// A mask that keeps what `keep(row, col)` says.
    pub fn from_fn(rows: usize, cols: usize, mut keep: impl FnMut(usize, usize) -> bool) -> Self {
        let mut mask = Mask::empty(rows, cols);
        for row in 0..rows {
            for col in 0..cols {
                if keep(row, col) {
                    mask.keep(row, col);
                }
            }
        }
        mask
    }

    /// The mask of a matrix's non-zeros (neither +0.0 nor -0.0).
    pub fn of_nonzeros<T: Element>(matrix: MatrixRef<'_, T>) -> Self {
        let mut mask = Mask::empty(matrix.rows(), matrix.cols());
        mask.par_rows_mut().enumerate().for_each(|(row, words)| {
            for (word, values) in words.iter_mut().zip(matrix.row(row).chunks(64)) {
                *word = values.iter().rev().fold(0, |w, v| w << 1 | u64::from(!v.is_zero()));
            }
        });
        mask
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Number of columns.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Whether the element is kept.
    ///
    /// # Panics
    /// Where `row` or `col` is out of range, as indexing does.
    pub fn is_kept(&self, row: usize, col: usize) -> bool {
        assert!(col < self.cols, "column {col} of a mask with {} columns", self.cols);
        self.words[row * stride(self.cols) + col / 64] >> (col % 64) & 1 == 1
    }

    /// Keeps the element.
    ///
    /// # Panics
    /// Where `row` or `col` is out of range, as indexing does.
    pub fn keep(&mut self, row: usize, col: usize) {
        assert!(col < self.cols, "column {col} of a mask with {} columns", self.cols);
        self.words[row * stride(self.cols) + col / 64] |= 1 << (col % 64);
    }

    /// Keeps the element no longer.
    ///
    /// # Panics
    /// Where `row` or `col` is out of range, as indexing does.
    pub fn prune(&mut self, row: usize, col: usize) {
        assert!(col < self.cols, "column {col} of a mask with {} columns", self.cols);
        self.words[row * stride(self.cols) + col / 64] &= !(1 << (col % 64));
    }

    /// The kept bits of up to 64 columns from `col` on, the first in bit 0; columns past the end read as not kept.
    pub(crate) fn bits(&self, row: usize, col: usize, len: usize) -> u64 {
        let words = self.row_words(row);
        let (word, shift) = (col / 64, col % 64);
        let mut bits = words.get(word).map_or(0, |w| w >> shift);
        if shift + len > 64 {
            bits |= words.get(word + 1).map_or(0, |w| w << (64 - shift));
        }
        if len < 64 { bits & ((1 << len) - 1) } else { bits }
    }

    /// Words of a row.
    pub(crate) fn words_per_row(&self) -> usize {
        stride(self.cols)
    }

    /// The mask of some of the rows.
    pub(crate) fn of_rows(&self, rows: Range<usize>) -> Mask {
        let stride = stride(self.cols);
        let words = self.words[rows.start * stride..rows.end * stride].to_vec();
        Mask { rows: rows.len(), cols: self.cols, words }
    }

    /// The words of one row.
    pub fn row_words(&self, row: usize) -> &[u64] {
        let s = stride(self.cols);
        &self.words[row * s..][..s]
    }

    /// The rows' words, for filling in parallel.
    pub(crate) fn par_rows_mut(&mut self) -> impl IndexedParallelIterator<Item = &mut [u64]> {
        self.par_bands_mut(1)
    }

    /// The words of bands of `height` rows (the last may be lower), for filling in parallel.
    pub(crate) fn par_bands_mut(&mut self, height: usize) -> impl IndexedParallelIterator<Item = &mut [u64]> {
        // An empty row would make empty chunks; there is then nothing to fill.
        self.words.par_chunks_mut((height * stride(self.cols)).max(1))
    }

    /// All words, row by row.
    pub(crate) fn words_mut(&mut self) -> &mut [u64] {
        &mut self.words
    }

    /// How many elements are kept.
    pub fn count(&self) -> usize {
        self.words.iter().map(|w| w.count_ones() as usize).sum()
    }

    /// The share of elements that are kept; 0 for a matrix without elements.
    pub fn density(&self) -> f64 {
        retained::ratio(self.count() as f64, (self.rows * self.cols) as f64)
    }

    /// The share of `Σ|w|` that the kept elements hold; 1 where the matrix is all zero.
    ///
    /// # Errors
    /// [`Error::Shape`] where the shapes differ.
    pub fn kept_l1<T: Element>(&self, matrix: MatrixRef<'_, T>) -> Result<f64> {
        Ok(self.retained(matrix)?.l1())
    }

    /// The share of `Σw²` that the kept elements hold; 1 where the matrix is all zero.
    ///
    /// # Errors
    /// [`Error::Shape`] where the shapes differ.
    pub fn kept_l2<T: Element>(&self, matrix: MatrixRef<'_, T>) -> Result<f64> {
        Ok(self.retained(matrix)?.l2())
    }

    /// Counts and sums of what is kept.
    ///
    /// # Errors
    /// [`Error::Shape`] where the shapes differ.
    pub(crate) fn retained<T: Element>(&self, matrix: MatrixRef<'_, T>) -> Result<Retained> {
        self.expect_shape("mask and matrix", matrix.rows(), matrix.cols())?;
        let rows = if self.cols == 0 { 0 } else { self.rows };
        let of_row = |row| Retained::of_row(matrix.row(row), self.row_words(row));
        let rows: Vec<Retained> = (0..rows).into_par_iter().map(of_row).collect();
        Ok(Retained::total(&rows))
    }

    /// How many elements differ between the two masks.
    ///
    /// # Errors
    /// [`Error::Shape`] where the shapes differ.
    pub fn flips(&self, other: &Mask) -> Result<u64> {
        self.expect_shape("the other mask", other.rows, other.cols)?;
        Ok(self.words.iter().zip(&other.words).map(|(a, b)| u64::from((a ^ b).count_ones())).sum())
    }

    /// The flip rate: the share of elements whose fate differs between the two masks (FST, Hu et al., ICML 2024).
    ///
    /// # Errors
    /// [`Error::Shape`] where the shapes differ.
    pub fn flip_rate(&self, other: &Mask) -> Result<f64> {
        Ok(retained::ratio(self.flips(other)? as f64, (self.rows * self.cols) as f64))
    }

    /// The first group that keeps more than the pattern allows, as an error; the groups of a last, shorter one count
    /// with the elements they have. Keeping fewer is allowed.
    ///
    /// # Errors
    /// [`Error::TooManyKept`] with the first place that breaks the pattern.
    pub fn verify(&self, pattern: Pattern, axis: Axis) -> Result<()> {
        match self.violations(pattern, axis).next() {
            None => Ok(()),
            Some(v) => Err(Error::TooManyKept {
                axis,
                line: v.line,
                group: v.group,
                kept: v.kept,
                n: pattern.n(),
                m: pattern.m(),
            }),
        }
    }

    /// Every group that keeps more than the pattern allows, in order of line, then of group (for [`Axis::Row`]), or
    /// of group, then of line (for [`Axis::Column`]).
    pub fn violations(&self, pattern: Pattern, axis: Axis) -> impl Iterator<Item = Violation> + '_ {
        let (n, m) = (pattern.n(), pattern.m());
        let (outer, inner) = match axis {
            Axis::Row => (self.rows, self.cols.div_ceil(m)),
            Axis::Column => (self.rows.div_ceil(m), self.cols),
        };
        let outer = if inner == 0 { 0 } else { outer };
        (0..outer).flat_map(move |o| {
            (0..inner).filter_map(move |i| {
                let (line, group, kept) = match axis {
                    Axis::Row => (o, i, self.bits(o, i * m, m).count_ones() as usize),
                    Axis::Column => {
                        let rows = o * m..(o * m + m).min(self.rows);
                        (i, o, rows.filter(|&row| self.is_kept(row, i)).count())
                    }
                };
                (kept > n).then_some(Violation { line, group, kept })
            })
        })
    }

    /// The dense matrix with every element that is not kept replaced by +0.0 (or 0).
    ///
    /// # Errors
    /// [`Error::Shape`] where the shapes differ.
    pub fn apply<T: Element>(&self, matrix: MatrixRef<'_, T>) -> Result<Vec<T>> {
        self.expect_shape("mask and matrix", matrix.rows(), matrix.cols())?;
        let mut out = memory::zeroed::<T>(matrix.data().len())?;
        let rows = out.par_chunks_mut(self.cols.max(1)).enumerate();
        rows.for_each(|(row, out)| apply_row(matrix.row(row), self.row_words(row), out));
        Ok(out)
    }

    /// Writes +0.0 (or 0) in the place of every element of a row-major matrix that is not kept.
    ///
    /// # Errors
    /// [`Error::Length`] for another number of elements than the mask's.
    pub fn apply_in_place<T: Element>(&self, values: &mut [T]) -> Result<()> {
        let expected = self.rows * self.cols;
        if values.len() != expected {
            return Err(Error::Length { what: "elements to mask", expected, found: values.len() });
        }
        let rows = values.par_chunks_mut(self.cols.max(1)).enumerate();
        rows.for_each(|(row, values)| zero_pruned(values, self.row_words(row)));
        Ok(())
    }

    /// The mask of the transposed matrix.
    #[must_use]
    pub fn transposed(&self) -> Mask {
        Mask::from_fn(self.cols, self.rows, |row, col| self.is_kept(col, row))
    }

    /// An error unless the mask is `[rows, cols]`.
    pub(crate) fn expect_shape(&self, what: &'static str, rows: usize, cols: usize) -> Result<()> {
        if (self.rows, self.cols) == (rows, cols) {
            Ok(())
        } else {
            Err(Error::Shape { what, expected: (self.rows, self.cols), found: (rows, cols) })
        }
    }
}

/// One group that keeps more than its pattern allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Violation {
    /// The row ([`Axis::Row`]) or column ([`Axis::Column`]) that holds the group.
    pub line: usize,
    /// The group's index along that line.
    pub group: usize,
    /// How many of its elements are kept.
    pub kept: usize,
}

/// Copies the kept elements of a row to `out`, and +0.0 in the place of the others.
pub(crate) fn apply_row<T: Element>(values: &[T], words: &[u64], out: &mut [T]) {
    out.copy_from_slice(values);
    zero_pruned(out, words);
}

/// Writes +0.0 in the place of the elements of a row that are not kept.
pub(crate) fn zero_pruned<T: Element>(row: &mut [T], words: &[u64]) {
    widest(ZeroPruned { row, words });
}

struct ZeroPruned<'a, T> {
    row: &'a mut [T],
    words: &'a [u64],
}

impl<T: Element> Inlined for ZeroPruned<'_, T> {
    type Output = ();

    #[inline(always)]
    fn run(self) {
        let (whole, rest) = self.row.as_chunks_mut::<64>();
        for (values, word) in whole.iter_mut().zip(self.words) {
            kept_or_zero(values, *word);
        }
        if let Some(word) = self.words.get(whole.len()) {
            let mut values = [T::ZERO; 64];
            values[..rest.len()].copy_from_slice(rest);
            kept_or_zero(&mut values, *word);
            rest.copy_from_slice(&values[..rest.len()]);
        }
    }
}

/// The bit of each of 16 lanes: comparisons with it become vector instructions, which a shift by the lane's number does
/// not.
const BITS: [u16; 16] = {
    let mut bits = [0; 16];
    let mut lane = 0;
    while lane < 16 {
        bits[lane] = 1 << lane;
        lane += 1;
    }
    bits
};

/// Writes +0.0 in the place of the elements whose bits are not set.
#[inline(always)]
fn kept_or_zero<T: Element>(values: &mut [T; 64], word: u64) {
    for (part, values) in values.as_chunks_mut::<16>().0.iter_mut().enumerate() {
        let bits = (word >> (16 * part)) as u16;
        // In two loops: one loop of both has a branch for each element.
        let mut masks = [0; 16];
        for lane in 0..16 {
            masks[lane] = if bits & BITS[lane] == BITS[lane] { u16::MAX } else { 0 };
        }
        for lane in 0..16 {
            values[lane] = masked(values[lane], masks[lane]);
        }
    }
}

/// The element where the mask is all ones, +0.0 where it is all zeros.
#[inline(always)]
fn masked<T: Element>(value: T, mask: u16) -> T {
    match size_of::<T>() {
        1 => bytemuck::cast(bytemuck::cast::<T, u8>(value) & mask as u8),
        2 => bytemuck::cast(bytemuck::cast::<T, u16>(value) & mask),
        4 => bytemuck::cast(bytemuck::cast::<T, u32>(value) & mask.cast_signed() as u32),
        _ => {
            if mask == 0 {
                T::ZERO
            } else {
                value
            }
        }
    }
}

/// Sets up to 64 bits of a mask's row from column `col` on, the first from bit 0.
pub(crate) fn set_bits(words: &mut [u64], col: usize, bits: u64) {
    let (word, shift) = (col / 64, col % 64);
    words[word] |= bits << shift;
    if shift > 0 && bits >> (64 - shift) > 0 {
        words[word + 1] |= bits >> (64 - shift);
    }
}

/// Sets the bits of consecutive columns of a mask's row.
pub(crate) fn set_range(words: &mut [u64], columns: Range<usize>) {
    let mut col = columns.start;
    while col < columns.end {
        let len = (64 - col % 64).min(columns.end - col);
        words[col / 64] |= u64::MAX >> (64 - len) << (col % 64);
        col += len;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn any_mask() -> impl Strategy<Value = Mask> {
        (0usize..9, 0usize..150).prop_flat_map(|(rows, cols)| {
            proptest::collection::vec(any::<bool>(), rows * cols)
                .prop_map(move |bits| Mask::from_fn(rows, cols, |r, c| bits[r * cols + c]))
        })
    }

    proptest! {
        #[test]
        fn bits_agree_with_single_reads(mask in any_mask(), col in 0usize..200, len in 1usize..=64) {
            for row in 0..mask.rows() {
                let expected = (0..len).filter(|i| col + i < mask.cols() && mask.is_kept(row, col + i)).fold(0u64, |b, i| b | 1 << i);
                prop_assert_eq!(mask.bits(row, col, len), expected);
            }
        }

        #[test]
        fn violations_along_columns_are_those_of_the_transpose(mask in any_mask(), n in 1usize..4, extra in 0usize..4) {
            let pattern = Pattern::new(n, n + extra).unwrap();
            let mut columns: Vec<_> = mask.violations(pattern, Axis::Column).collect();
            columns.sort_by_key(|v| (v.line, v.group));
            let rows: Vec<_> = mask.transposed().violations(pattern, Axis::Row).collect();
            prop_assert_eq!(columns, rows);
        }

        #[test]
        fn the_mask_of_an_applied_mask_is_the_mask(mask in any_mask()) {
            let ones = vec![1f32; mask.rows() * mask.cols()];
            let matrix = MatrixRef::new(mask.rows(), mask.cols(), &ones).unwrap();
            let kept = mask.apply(matrix).unwrap();
            let kept = MatrixRef::new(mask.rows(), mask.cols(), &kept).unwrap();
            prop_assert_eq!(&Mask::of_nonzeros(kept), &mask);
            let mut in_place = ones.clone();
            mask.apply_in_place(&mut in_place).unwrap();
            prop_assert_eq!(in_place.as_slice(), kept.data());
            let mut full = Mask::full(mask.rows(), mask.cols());
            prop_assert_eq!(&full, &Mask::from_fn(mask.rows(), mask.cols(), |_, _| true));
            for (row, col) in (0..mask.rows()).flat_map(|r| (0..mask.cols()).map(move |c| (r, c))) {
                if !mask.is_kept(row, col) {
                    full.prune(row, col);
                }
            }
            prop_assert_eq!(&full, &mask);
            let n = ones.len().max(1) as f64;
            prop_assert_eq!(mask.density(), mask.count() as f64 / n);
            prop_assert_eq!(mask.flip_rate(&Mask::empty(mask.rows(), mask.cols())).unwrap(), mask.density());
        }
    }

    /// Of every type and around the ends of words: NaN, infinities, -0.0 and all other bits stay or become +0.0.
    #[test]
    fn an_applied_mask_keeps_the_bits_of_elements() {
        fn check<T: Element>() -> Result<()> {
            let bytes = size_of::<T>();
            for cols in [1, 15, 16, 17, 63, 64, 65, 130] {
                let mask = Mask::from_fn(3, cols, |row, col| (row * 5 + col * 7) % 3 == 0);
                let bits: Vec<u8> =
                    (0..3 * cols * bytes).map(|i| (i * 89 % 257) as u8 | (i % 5 / 4 * 0xFF) as u8).collect();
                let elements: Vec<T> = bytemuck::pod_collect_to_vec(&bits);
                let applied = mask.apply(MatrixRef::new(3, cols, &elements)?)?;
                let mut in_place = elements;
                mask.apply_in_place(&mut in_place)?;
                let mut expected = bits;
                for (at, element) in expected.chunks_mut(bytes).enumerate() {
                    if !mask.is_kept(at / cols, at % cols) {
                        element.fill(0);
                    }
                }
                assert_eq!(bytemuck::cast_slice::<T, u8>(&applied), expected, "{} of {cols} columns", T::DTYPE);
                assert_eq!(bytemuck::cast_slice::<T, u8>(&in_place), expected, "{} of {cols} columns", T::DTYPE);
            }
            Ok(())
        }
        for data_type in crate::DataType::ALL.into_iter().filter(|data_type| data_type.is_of_weights()) {
            crate::match_element!(data_type, |T| check::<T>()).unwrap();
        }
    }

    #[test]
    fn masses_are_shares() {
        let w = [3.0f32, -4.0, 0.0, 1.0];
        let matrix = MatrixRef::new(1, 4, &w).unwrap();
        let mask = Mask::from_fn(1, 4, |_, c| c < 2);
        assert_eq!(mask.kept_l1(matrix).unwrap(), 7.0 / 8.0);
        assert_eq!(mask.kept_l2(matrix).unwrap(), 25.0 / 26.0);
        assert!(mask.kept_l1(MatrixRef::new(2, 2, &w).unwrap()).is_err());
    }

    #[test]
    fn a_violation_names_its_place() {
        let mask = Mask::from_fn(3, 8, |r, c| r == 1 && (4..7).contains(&c));
        let error = mask.verify(Pattern::TWO_FOUR, Axis::Row).unwrap_err().to_string();
        assert!(error.starts_with("row 1, group 1: 3 non-zeros where 2:4 allows 2"), "{error}");
        assert!(mask.verify(Pattern::TWO_FOUR, Axis::Column).is_ok());
    }
}
