//! Compressed weights of the format `sparse-24-bitmask` of compressed-tensors up to its version 0.14.
//!
//! A weight `[rows, cols]` is stored as its kept values, row by row in ascending column, and a bit for each element,
//! `ceil(cols / 8)` bytes a row: bit `b` of byte `j` stands for column `8 * j + b`. Its writer keeps exactly two of
//! four, zeros among them where there were fewer.

use super::{Compressed, code, groups_per_row, too_many_kept};
use crate::{Element, Error, MatrixRef, Result};

impl<T: Element> Compressed<T> {
    /// The weight of kept values and a bitmask.
    ///
    /// ```
    /// use twofour::Compressed;
    /// let c = Compressed::from_bitmask(1, 8, &[5.0f32, 6.0, 7.0, 0.0], &[0b0011_1010])?;
    /// assert_eq!(c.to_dense(), [0.0, 5.0, 0.0, 6.0, 7.0, 0.0, 0.0, 0.0]);
    /// # Ok::<(), twofour::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`Error::Length`] where the bitmask does not fit the shape, or the values do not fit the bitmask;
    /// [`Error::TooManyKept`] with row and group where more than two bits of a group are set; [`Error::IllegalValue`]
    /// where a bit past the last column is set.
    pub fn from_bitmask(rows: usize, cols: usize, kept: &[T], bitmask: &[u8]) -> Result<Self> {
        super::lengths(rows, cols)?;
        let stride = cols.div_ceil(8);
        if bitmask.len() != rows * stride {
            return Err(Error::Length { what: "bitmask bytes", expected: rows * stride, found: bitmask.len() });
        }
        let count = bitmask.iter().map(|byte| byte.count_ones() as usize).sum();
        if kept.len() != count {
            return Err(Error::Length { what: "kept values of the bitmask", expected: count, found: kept.len() });
        }
        let bits = |row: usize, group: usize| bitmask[row * stride + group / 2] >> (group % 2 * 4) & 0xF;
        let mut values = kept.iter();
        let mut dense = bytemuck::allocation::zeroed_vec::<T>(rows * cols);
        for (row, dense) in dense.chunks_mut(cols.max(1)).enumerate() {
            if !cols.is_multiple_of(8) && bitmask[row * stride + stride - 1] >> (cols % 8) != 0 {
                let reason = "a bit past the last column is set";
                return Err(Error::IllegalValue { row, group: groups_per_row(cols) - 1, reason });
            }
            for (group, four) in dense.chunks_mut(4).enumerate() {
                let bits = bits(row, group);
                if bits.count_ones() > 2 {
                    return Err(too_many_kept(row, group, bits));
                }
                let kept = four.iter_mut().enumerate().filter(|(position, _)| bits >> position & 1 == 1);
                // There are as many values as bits.
                kept.zip(values.by_ref()).for_each(|((_, slot), value)| *slot = *value);
            }
        }
        Compressed::build(MatrixRef::new(rows, cols, &dense)?, |row, group, _| bits(row, group))
    }

    /// The bits of the stored positions, `[rows, ceil(cols / 8)]`: with [`Compressed::values`] what
    /// [`Compressed::from_bitmask`] reads, for columns that are a multiple of four. Exactly two of four are set.
    pub fn bitmask(&self) -> Vec<u8> {
        let stride = self.cols().div_ceil(8);
        let mut bitmask = vec![0; self.rows() * stride];
        for (row, bytes) in bitmask.chunks_mut(stride.max(1)).enumerate() {
            for group in 0..groups_per_row(self.cols()) {
                let (first, second) = code::positions(self.code(row, group));
                bytes[group / 2] |= (1 << first | 1 << second) << (group % 2 * 4);
            }
        }
        bitmask
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::select;
    use crate::{Axis, Pattern};
    use proptest::prelude::*;

    proptest! {
        /// The format's writer: the two largest magnitudes of each group, their bits and their values.
        #[test]
        fn what_the_format_s_writer_stores_is_read(rows in 0usize..5, groups in 0usize..9, seed in any::<u32>()) {
            let cols = 4 * groups;
            let dense: Vec<f32> =
                (0..rows * cols).map(|i| ((i as u32).wrapping_mul(2654435761) ^ seed) as i32 as f32).collect();
            let matrix = MatrixRef::new(rows, cols, &dense).unwrap();
            let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
            let (mut kept, mut bitmask) = (Vec::new(), vec![0u8; rows * cols.div_ceil(8)]);
            for (row, col) in (0..rows).flat_map(|row| (0..cols).map(move |col| (row, col))) {
                if mask.is_kept(row, col) {
                    kept.push(dense[row * cols + col]);
                    bitmask[row * cols.div_ceil(8) + col / 8] |= 1 << (col % 8);
                }
            }
            let read = Compressed::from_bitmask(rows, cols, &kept, &bitmask).unwrap();
            prop_assert_eq!((read.values(), read.bitmask()), (kept.as_slice(), bitmask));
            prop_assert_eq!(read, Compressed::from_masked(matrix, &mask).unwrap());
        }
    }

    #[test]
    fn breaches_are_named() {
        let refusal = |cols, kept: &[f32], bits: &[u8]| Compressed::from_bitmask(2, cols, kept, bits).unwrap_err();
        assert!(matches!(refusal(8, &[], &[0]), Error::Length { expected: 2, found: 1, .. }));
        assert!(matches!(refusal(8, &[1.0], &[1, 1]), Error::Length { expected: 2, found: 1, .. }));
        let many = refusal(8, &[1.0; 3], &[0, 0x70]).to_string();
        assert!(many.contains("row 1, group 1: 3 non-zeros"), "{many}");
        assert!(matches!(refusal(4, &[1.0], &[0, 0x10]), Error::IllegalValue { row: 1, group: 0, .. }));
        assert!(matches!(Compressed::<f32>::from_bitmask(usize::MAX, 8, &[], &[]), Err(Error::TooLarge { .. })));
    }
}
