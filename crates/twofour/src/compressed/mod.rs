//! The canonical compressed form of a 2:4 weight.
//!
//! A weight `[rows, cols]` is cut along each row into groups of four. Of each group the two kept values are stored,
//! and a 4-bit [`code`] that says where they were: `first | second << 2`, `first < second`. Where `cols` is no multiple
//! of four the last group is completed with zeros; `cols` itself is remembered.
//!
//! | part | shape | order |
//! |---|---|---|
//! | values | `[rows, 2 * groups]` | row-major, the weight's dtype |
//! | metadata | `[rows, ceil(groups / 8)]` u32 | row-major, eight codes a word, the first in the lowest nibble; nibbles past the last group are zero |
//!
//! The form is unique: a group with fewer than two non-zeros keeps its lowest free positions too, with the value +0.0,
//! and -0.0 is stored as +0.0. Engines derive their own layouts from it by bijections (`layout`); only this
//! one is ever written to disk. It takes 9/16 of a 16-bit weight, 17/32 of f32, 5/8 of an 8-bit one.

mod append;
mod bitmask;
pub mod code;

use rayon::prelude::*;

use crate::{Axis, Element, Error, Mask, MatrixRef, Result, first_error::first_error, memory};

/// A 2:4 weight in canonical compressed form; see the [module](self).
///
/// ```
/// use twofour::{Compressed, MatrixRef};
/// let w = [0.0f32, 5.0, 0.0, 6.0, 7.0, 0.0, 0.0, 0.0];
/// let c = Compressed::from_dense(MatrixRef::new(1, 8, &w)?)?;
/// assert_eq!(c.values(), [5.0, 6.0, 7.0, 0.0]);
/// assert_eq!(c.meta(), [0x4D]); // group 0 keeps (1, 3), group 1 keeps (0, 1)
/// assert_eq!(c.to_dense(), w);
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug, Clone, PartialEq)]
pub struct Compressed<T> {
    rows: usize,
    cols: usize,
    values: Vec<T>,
    meta: Vec<u32>,
}

/// Groups of four in a row of `cols` elements; the last may be completed with zeros.
pub const fn groups_per_row(cols: usize) -> usize {
    cols.div_ceil(4)
}

/// Metadata words of a row of `cols` elements.
pub const fn meta_words_per_row(cols: usize) -> usize {
    groups_per_row(cols).div_ceil(8)
}

/// Lengths of the values and of the metadata of a `[rows, cols]` weight.
///
/// # Errors
/// [`Error::TooLarge`] where they overflow.
pub fn lengths(rows: usize, cols: usize) -> Result<(usize, usize)> {
    let too_large = || Error::TooLarge { shape: vec![rows, cols] };
    // cols rounded up must not overflow either.
    cols.checked_add(3).and_then(|padded| rows.checked_mul(padded)).ok_or_else(too_large)?;
    Ok((rows * groups_per_row(cols) * 2, rows * meta_words_per_row(cols)))
}

/// What is stored of a group of which the elements in `bits` are kept: its code and the two values, or `None` where
/// more than two are kept.
pub(crate) fn keep<T: Element>(four: [T; 4], bits: u8) -> Option<(u8, [T; 2])> {
    let code = code::of_kept(bits)?;
    let value = |i: usize| if bits >> i & 1 == 1 && !four[i].is_zero() { four[i] } else { T::ZERO };
    let (first, second) = code::positions(code);
    Some((code, [value(first), value(second)]))
}

/// The error for a group of a row of which too many are kept.
pub(crate) fn too_many_kept(row: usize, group: usize, bits: u8) -> Error {
    Error::TooManyKept { axis: Axis::Row, line: row, group, kept: bits.count_ones() as usize, n: 2, m: 4 }
}

/// Compresses one row into its values and metadata: of each group the elements whose bits `kept(group, values)` sets.
pub(crate) fn fill_row<T: Element>(
    row: usize,
    source: &[T],
    kept: impl Fn(usize, &[T; 4]) -> u8,
    values: &mut [T],
    meta: &mut [u32],
) -> Result<()> {
    meta.fill(0);
    for (group, (source, pair)) in source.chunks(4).zip(values.as_chunks_mut::<2>().0).enumerate() {
        let mut four = [T::ZERO; 4];
        four[..source.len()].copy_from_slice(source);
        let bits = kept(group, &four);
        let (code, kept) = keep(four, bits).ok_or_else(|| too_many_kept(row, group, bits))?;
        *pair = kept;
        meta[group / 8] |= u32::from(code) << (group % 8 * 4);
    }
    Ok(())
}

impl<T: Element> Compressed<T> {
    /// Compresses a matrix that is 2:4 along its rows already.
    ///
    /// # Errors
    /// [`Error::TooManyKept`] with the row and group of the first group with three or four non-zeros.
    pub fn from_dense(matrix: MatrixRef<'_, T>) -> Result<Self> {
        Self::build(matrix, |_, _, values| (0..4).fold(0, |bits, i| bits | u8::from(!values[i].is_zero()) << i))
    }

    /// Compresses the elements that the mask keeps; the others are dropped.
    ///
    /// # Errors
    /// [`Error::Shape`] where the shapes differ, [`Error::TooManyKept`] where the mask is not 2:4 along rows.
    pub fn from_masked(matrix: MatrixRef<'_, T>, mask: &Mask) -> Result<Self> {
        mask.expect_shape("mask and matrix", matrix.rows(), matrix.cols())?;
        Self::build(matrix, |row, group, _| mask.bits(row, group * 4, 4) as u8)
    }

    /// Compresses what `kept(row, group, values)` keeps of each group.
    fn build(matrix: MatrixRef<'_, T>, kept: impl Fn(usize, usize, &[T; 4]) -> u8 + Sync) -> Result<Self> {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let (values_len, meta_len) = lengths(rows, cols)?;
        let (mut values, mut meta) = (memory::zeroed(values_len)?, memory::zeroed(meta_len)?);
        if !values.is_empty() {
            let values = values.par_chunks_mut(groups_per_row(cols) * 2);
            let meta = meta.par_chunks_mut(meta_words_per_row(cols));
            first_error(values.zip(meta).enumerate(), |(row, (values, meta))| {
                fill_row(row, matrix.row(row), |group, four| kept(row, group, four), values, meta)
            })?;
        }
        Ok(Self { rows, cols, values, meta })
    }

    /// Takes over values and metadata made elsewhere, after checking every rule of the form.
    ///
    /// # Errors
    /// [`Error::Length`] where a buffer does not fit the shape; [`Error::IllegalCode`], [`Error::DirtyMetadataTail`] or
    /// [`Error::IllegalValue`] with the place of the first breach.
    pub fn from_parts(rows: usize, cols: usize, values: Vec<T>, meta: Vec<u32>) -> Result<Self> {
        let (values_len, meta_len) = lengths(rows, cols)?;
        if values.len() != values_len {
            return Err(Error::Length { what: "compressed values", expected: values_len, found: values.len() });
        }
        if meta.len() != meta_len {
            return Err(Error::Length { what: "compressed metadata", expected: meta_len, found: meta.len() });
        }
        let compressed = Self { rows, cols, values, meta };
        // A stranger's shape may have any number of empty rows.
        let rows = if cols == 0 { 0 } else { rows };
        first_error((0..rows).into_par_iter(), |row| compressed.verify_row(row))?;
        Ok(compressed)
    }

    /// Takes over values and metadata that this crate itself has made of a valid weight.
    pub(crate) fn from_trusted_parts(rows: usize, cols: usize, values: Vec<T>, meta: Vec<u32>) -> Self {
        debug_assert_eq!(lengths(rows, cols).ok(), Some((values.len(), meta.len())));
        Self { rows, cols, values, meta }
    }

    fn verify_row(&self, row: usize) -> Result<()> {
        let groups = groups_per_row(self.cols);
        for group in 0..groups {
            let code = self.code(row, group);
            if !code::is_legal(code) {
                return Err(Error::IllegalCode { row, group, code });
            }
            let (first, second) = code::positions(code);
            for (position, value) in [first, second].into_iter().zip(self.pair(row, group)) {
                let illegal = |reason| Err(Error::IllegalValue { row, group, reason });
                if value.is_negative_zero() {
                    return illegal("a stored value is -0.0, which the canonical form writes as +0.0");
                }
                if group * 4 + position >= self.cols && !value.is_zero() {
                    return illegal("a value past the last column is not zero");
                }
            }
        }
        match self.meta_row(row).last() {
            Some(last) if !groups.is_multiple_of(8) && last >> (groups % 8 * 4) != 0 => {
                Err(Error::DirtyMetadataTail { row })
            }
            _ => Ok(()),
        }
    }

    /// The dense matrix, `[rows, cols]` row-major.
    pub fn to_dense(&self) -> Vec<T> {
        let mut dense = vec![T::ZERO; self.rows * self.cols];
        dense.par_chunks_mut(self.cols.max(1)).enumerate().for_each(|(row, out)| {
            for (group, four) in out.chunks_mut(4).enumerate() {
                let (first, second) = code::positions(self.code(row, group));
                for (position, value) in [first, second].into_iter().zip(self.pair(row, group)) {
                    // Past the last column only zeros are stored.
                    if let Some(slot) = four.get_mut(position) {
                        *slot = value;
                    }
                }
            }
        });
        dense
    }

    /// The mask of the stored positions: exactly two a group, also where a stored value is zero.
    pub fn mask(&self) -> Mask {
        let mut mask = Mask::empty(self.rows, self.cols);
        let rows = if self.cols == 0 { 0 } else { self.rows };
        for row in 0..rows {
            for group in 0..groups_per_row(self.cols) {
                let (first, second) = code::positions(self.code(row, group));
                for col in [group * 4 + first, group * 4 + second] {
                    if col < self.cols {
                        mask.keep(row, col);
                    }
                }
            }
        }
        mask
    }

    /// Rows of the dense weight.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the dense weight, before any padding to a multiple of four.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Groups of four in a row, counting a last one that is completed with zeros.
    pub fn groups(&self) -> usize {
        groups_per_row(self.cols)
    }

    /// The kept values, `[rows, 2 * groups]`.
    pub fn values(&self) -> &[T] {
        &self.values
    }

    /// The metadata, `[rows, ceil(groups / 8)]`.
    pub fn meta(&self) -> &[u32] {
        &self.meta
    }

    /// The kept values of one row.
    ///
    /// # Panics
    /// Where `row` is out of range, as indexing does.
    pub fn values_row(&self, row: usize) -> &[T] {
        let len = self.groups() * 2;
        &self.values[row * len..][..len]
    }

    /// The metadata words of one row.
    ///
    /// # Panics
    /// Where `row` is out of range, as indexing does.
    pub fn meta_row(&self, row: usize) -> &[u32] {
        let len = meta_words_per_row(self.cols);
        &self.meta[row * len..][..len]
    }

    /// The code of one group.
    ///
    /// # Panics
    /// Where `row` or `group` is out of range, as indexing does.
    pub fn code(&self, row: usize, group: usize) -> u8 {
        (self.meta_row(row)[group / 8] >> (group % 8 * 4) & 0xF) as u8
    }

    pub(crate) fn pair(&self, row: usize, group: usize) -> [T; 2] {
        let values = self.values_row(row);
        [values[group * 2], values[group * 2 + 1]]
    }

    /// Bytes of values and metadata together.
    pub fn bytes(&self) -> usize {
        size_of_val(self.values()) + size_of_val(self.meta())
    }

    /// The values and metadata, given up.
    pub fn into_parts(self) -> (Vec<T>, Vec<u32>) {
        (self.values, self.meta)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{F8E4M3, F8E5M2, Pattern, select};
    use half::{bf16, f16};
    use proptest::prelude::*;

    /// Any bit pattern with NaNs taken out, pruned by whatever `from_pruned` keeps, must come back bit for bit.
    fn round_trip<T: Element>(rows: usize, cols: usize, bytes: &[u8]) {
        let mut data: Vec<T> = bytemuck::allocation::pod_collect_to_vec(&bytes[..rows * cols * size_of::<T>()]);
        for v in &mut data {
            if v.to_f32().is_nan() || bytes[0].is_multiple_of(3) && v.to_f32().abs() < 1.0 {
                *v = T::ZERO;
            }
        }
        let matrix = MatrixRef::new(rows, cols, &data).unwrap();
        let pruned = Compressed::from_pruned(matrix).unwrap();
        let dense = pruned.to_dense();
        let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
        let expected: Vec<T> =
            mask.apply(matrix).unwrap().iter().map(|v| if v.is_zero() { T::ZERO } else { *v }).collect();
        assert_eq!(bytemuck::cast_slice::<T, u8>(&dense), bytemuck::cast_slice::<T, u8>(&expected));
        // Compressing what is 2:4 already gives back the same matrix, and the parts survive their own inspection.
        let again = Compressed::from_dense(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
        assert_eq!(again.to_dense(), dense);
        assert!(again.mask().verify(Pattern::TWO_FOUR, Axis::Row).is_ok());
        let (values, meta) = again.clone().into_parts();
        assert_eq!(Compressed::from_parts(rows, cols, values, meta).unwrap(), again);
    }

    /// Rows and columns at most; Miri is slow.
    const SIZES: (usize, usize) = if cfg!(miri) { (3, 20) } else { (6, 80) };

    proptest! {
        #[test]
        fn every_dtype_round_trips((rows, cols, bytes) in (0..SIZES.0, 0..SIZES.1).prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec(any::<u8>(), r * c * 4 + 1)))) {
            round_trip::<f32>(rows, cols, &bytes);
            round_trip::<f16>(rows, cols, &bytes);
            round_trip::<bf16>(rows, cols, &bytes);
            round_trip::<i8>(rows, cols, &bytes);
            round_trip::<F8E4M3>(rows, cols, &bytes);
            round_trip::<F8E5M2>(rows, cols, &bytes);
        }

        #[test]
        fn strictness_is_the_masks_verdict((rows, cols, data) in (1..SIZES.0, 1..SIZES.1).prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec(prop_oneof![2 => Just(0f32), 1 => Just(-0.0), 2 => Just(1.5)], r * c)))) {
            let matrix = MatrixRef::new(rows, cols, &data).unwrap();
            let verdict = Mask::of_nonzeros(matrix).verify(Pattern::TWO_FOUR, Axis::Row).map_err(|e| e.to_string());
            prop_assert_eq!(Compressed::from_dense(matrix).map(|_| ()).map_err(|e| e.to_string()), verdict);
        }

        #[test]
        fn damage_to_the_metadata_is_found(byte in any::<u8>(), at in 0usize..16) {
            let data: Vec<f32> = (0..4 * 30).map(|i| if i % 30 % 4 < 2 { i as f32 + 1.0 } else { 0.0 }).collect();
            // 30 columns: 8 groups, the last with two columns of padding, whose pair may only keep positions 0 and 1.
            let c = Compressed::from_pruned(MatrixRef::new(4, 30, &data).unwrap()).unwrap();
            let (values, mut meta) = c.clone().into_parts();
            let bytes: &mut [u8] = bytemuck::cast_slice_mut(&mut meta);
            let before = bytes[at];
            bytes[at] = byte;
            let legal = code::is_legal(byte & 15) && code::is_legal(byte >> 4) && (at % 4 != 3 || byte >> 4 == before >> 4);
            prop_assert_eq!(Compressed::from_parts(4, 30, values, meta).is_ok(), legal);
        }
    }

    /// A hostile file may name any number of rows where there are no columns; nothing may walk over them.
    #[test]
    fn empty_rows_without_end_take_no_time() {
        let rows = 1 << 60;
        let matrix = MatrixRef::<f32>::new(rows, 0, &[]).unwrap();
        let parts = Compressed::from_parts(rows, 0, vec![], vec![]).unwrap();
        assert_eq!(Compressed::from_dense(matrix).unwrap(), parts);
        let c = Compressed::from_pruned(matrix).unwrap();
        assert!(c.to_dense().is_empty());
        assert!(c.mask().verify(Pattern::TWO_FOUR, Axis::Row).is_ok());
        assert!(c.mask().verify(Pattern::TWO_FOUR, Axis::Column).is_ok());
        assert_eq!(c.mask().kept_l1(matrix).unwrap(), 1.0);
    }

    #[test]
    fn breaches_of_the_form_are_named() {
        let part =
            |values: Vec<f32>, meta: Vec<u32>| Compressed::from_parts(1, 6, values, meta).unwrap_err().to_string();
        assert!(part(vec![1.0; 4], vec![0x44; 2]).contains("expected 1 elements, found 2"));
        assert!(part(vec![1.0; 3], vec![0x44]).contains("expected 4 elements, found 3"));
        assert!(part(vec![1.0; 4], vec![0x44_44]).contains("unused metadata nibbles"));
        assert!(part(vec![1.0; 4], vec![0x04]).contains("group 1: metadata code 0x0"));
        assert!(part(vec![1.0, 1.0, 1.0, -0.0], vec![0x44]).contains("group 1: a stored value is -0.0"));
        assert!(part(vec![1.0; 4], vec![0x84]).contains("past the last column"));
        assert!(matches!(Compressed::<f32>::from_parts(usize::MAX, 4, vec![], vec![]), Err(Error::TooLarge { .. })));
    }
}
