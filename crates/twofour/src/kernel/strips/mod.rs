//! The layout that kernels multiply with: a 2:4 weight in strips of sixteen rows.
//!
//! A strip stores the kept values of one group (one position along the columns) of all its rows side by side, so that one
//! register of activations, the same four for every row, serves all of them: a shuffle inside 128-bit blocks picks for each row
//! what its metadata says, the products need no sum across lanes, and the strip is read as one stream. The layout is
//! a bijection of the canonical form, made in memory only; rows and groups that complete the last strip and line hold zeros.
//!
//! A strip is a run of blocks. A block is a cache line of positions, then the lines that these positions are of: eight, four of i8, fewer in
//! a strip's last block. So values and positions are one stream of memory, too.
//!
//! | element | a line | values | positions, 2 bits each |
//! |---|---|---|---|
//! | f32, f16 | 1 group | the sixteen first values, then the sixteen second | first: word 0, second: word 1; row `r` at bit `2r` |
//! | bf16 | 1 group | (first, second) of row 0, of row 1, … | as above |
//! | i8 | 2 groups | (first, second, first, second) of row 0, of row 1, … | value `8 (2q + h) + b` at bit `8b + 2q` of the 64-bit half `h` |

mod order;

use std::{
    any::TypeId,
    marker::PhantomData,
    ops::{Deref, DerefMut, Range},
};

use rayon::prelude::*;

use super::aligned::{Aligned, CACHE_LINE};
use crate::{
    Compressed, Error, Mask, MatrixRef, Result,
    compressed::{self, code},
    first_error::first_error,
};

pub(super) use order::{Order, ROWS};

/// A 2:4 weight in strips; see the [module](self). `B` owns or borrows its memory, which starts at a cache line.
#[derive(Debug)]
pub(super) struct Strips<T, B = Aligned<u8>> {
    rows: usize,
    cols: usize,
    bytes: B,
    element: PhantomData<T>,
}

impl<T, B: Clone> Clone for Strips<T, B> {
    fn clone(&self) -> Self {
        Strips { rows: self.rows, cols: self.cols, bytes: self.bytes.clone(), element: PhantomData }
    }
}
impl<T, B: Copy> Copy for Strips<T, B> {}

/// A weight in borrowed memory: what kernels multiply.
pub(super) type StripsRef<'a, T> = Strips<T, &'a [u8]>;

/// A weight in memory that is borrowed to be filled.
pub(super) type StripsMut<'a, T> = Strips<T, &'a mut [u8]>;

/// Lines of a strip.
#[inline(always)]
fn lines_of<T: Order>(cols: usize) -> usize {
    compressed::groups_per_row(cols).div_ceil(T::GROUPS)
}

/// Bytes of a strip, or `None` where they are too many to count.
fn strip_bytes_of<T: Order>(cols: usize) -> Option<usize> {
    let lines = lines_of::<T>(cols);
    lines.div_ceil(T::BLOCK_LINES).checked_mul(CACHE_LINE)?.checked_add(lines.checked_mul(T::LINE_BYTES)?)
}

/// Bytes of a weight's strips.
///
/// # Errors
/// [`Error::TooLarge`].
pub(super) fn bytes_of<T: Order>(rows: usize, cols: usize) -> Result<usize> {
    strip_bytes_of::<T>(cols)
        .and_then(|strip| strip.checked_mul(rows.div_ceil(ROWS)))
        .ok_or(Error::TooLarge { shape: vec![rows, cols] })
}

/// Sixteen rows of a weight.
#[derive(Debug)]
pub(super) struct Strip<'a, T> {
    /// Block after block.
    bytes: &'a [u8],
    lines: usize,
    element: PhantomData<T>,
}

impl<T> Clone for Strip<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<T> Copy for Strip<'_, T> {}

impl<'a, T: Order> Strip<'a, T> {
    /// Lines of the strip.
    #[inline(always)]
    pub(super) fn lines(&self) -> usize {
        self.lines
    }

    /// Where its first block starts: a cache line.
    #[inline(always)]
    pub(super) fn as_ptr(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    /// A line's values and its words of positions.
    #[inline(always)]
    pub(super) fn line(&self, line: usize) -> (&'a [T], &'a [u32]) {
        let block = &self.bytes[line / T::BLOCK_LINES * T::BLOCK_BYTES..];
        let line = line % T::BLOCK_LINES;
        let (codes, values) = block.split_at(CACHE_LINE);
        (
            bytemuck::cast_slice(&values[line * T::LINE_BYTES..][..T::LINE_BYTES]),
            &bytemuck::cast_slice(codes)[line * T::CODE_WORDS..][..T::CODE_WORDS],
        )
    }

    /// The memory of some lines and of those that share a block's positions with them.
    pub(super) fn bytes_of(&self, lines: Range<usize>) -> &'a [u8] {
        let start = lines.start / T::BLOCK_LINES * T::BLOCK_BYTES;
        let end = lines.end.div_ceil(T::BLOCK_LINES) * T::BLOCK_BYTES;
        &self.bytes[start..end.min(self.bytes.len())]
    }

    /// What a row keeps of a group: positions and values, first and second.
    #[inline(always)]
    pub(super) fn kept(&self, row: usize, group: usize) -> [(usize, T); 2] {
        let (values, codes) = self.line(group / T::GROUPS);
        let group = group % T::GROUPS;
        [0, 1].map(|which| {
            let (word, bit) = T::code(row, group, which);
            let position = codes[word] >> bit & 3;
            (position as usize, values[T::value(row, group, which)])
        })
    }
}

impl<'a, T: Order> StripsRef<'a, T> {
    /// One strip, borrowed from the weight's memory and not from this view of it.
    #[inline(always)]
    pub(super) fn strip_of(&self, i: usize) -> Strip<'a, T> {
        let (bytes, memory): (usize, &'a [u8]) = (self.strip_bytes(), self.bytes);
        Strip { bytes: &memory[i * bytes..][..bytes], lines: self.lines(), element: PhantomData }
    }
}

impl<T: Order> Strips<T> {
    fn empty(rows: usize, cols: usize) -> Result<Self> {
        let mut strips = Self { rows, cols, bytes: Aligned::zeroed(0), element: PhantomData };
        strips.bytes = Aligned::try_zeroed(strips.strip_bytes() * rows.div_ceil(ROWS))?;
        Ok(strips)
    }

    /// The strips of a weight.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn pack(weight: &Compressed<T>) -> Result<Self> {
        let mut strips = Self::empty(weight.rows(), weight.cols())?;
        strips.pack_again(weight)?;
        Ok(strips)
    }
}

impl<T: Order, B: Deref<Target = [u8]>> Strips<T, B> {
    /// The weight that lies in `bytes`, which may have any contents.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; [`Error::Length`] for memory of another length than [`bytes_of`], [`Error::Unaligned`] for memory that does
    /// not start at a cache line.
    pub(super) fn over(rows: usize, cols: usize, bytes: B) -> Result<Self> {
        let expected = bytes_of::<T>(rows, cols)?;
        if bytes.len() != expected {
            return Err(Error::Length { what: "the packed weight's memory", expected, found: bytes.len() });
        }
        if !bytes.is_empty() && !bytes.as_ptr().addr().is_multiple_of(CACHE_LINE) {
            return Err(Error::Unaligned { what: "the packed weight's memory", alignment: CACHE_LINE });
        }
        Ok(Self { rows, cols, bytes, element: PhantomData })
    }

    /// The weight, to be multiplied.
    #[inline(always)]
    pub(super) fn view(&self) -> StripsRef<'_, T> {
        Strips { rows: self.rows, cols: self.cols, bytes: &self.bytes, element: PhantomData }
    }

    /// The same memory as strips of `U`, where that is `T`.
    pub(super) fn as_type<U: Order>(&self) -> Option<StripsRef<'_, U>> {
        let same = TypeId::of::<T>() == TypeId::of::<U>();
        same.then(|| Strips { rows: self.rows, cols: self.cols, bytes: &*self.bytes, element: PhantomData })
    }

    /// Lines of a strip.
    #[inline(always)]
    fn lines(&self) -> usize {
        lines_of::<T>(self.cols)
    }

    /// Bytes of a strip, which are in memory already.
    #[inline(always)]
    fn strip_bytes(&self) -> usize {
        self.lines().div_ceil(T::BLOCK_LINES) * CACHE_LINE + self.lines() * T::LINE_BYTES
    }

    /// The canonical form.
    pub(super) fn to_compressed(&self) -> Compressed<T> {
        let groups = compressed::groups_per_row(self.cols);
        let words = compressed::meta_words_per_row(self.cols);
        let mut values = Vec::with_capacity(self.rows * groups * 2);
        let mut meta = vec![0; self.rows * words];
        for row in 0..self.rows {
            let strip = self.strip(row / ROWS);
            for group in 0..groups {
                let [(first, a), (second, b)] = strip.kept(row % ROWS, group);
                values.extend([a, b]);
                meta[row * words + group / 8] |= ((first | second << 2) as u32) << (group % 8 * 4);
            }
        }
        Compressed::from_trusted_parts(self.rows, self.cols, values, meta)
    }

    /// Rows of the weight.
    pub(super) fn rows(&self) -> usize {
        self.rows
    }

    /// Columns of the weight.
    pub(super) fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of values and positions.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Columns to which activations must be completed.
    pub(super) fn padded_cols(&self) -> usize {
        self.cols.next_multiple_of(4 * T::GROUPS)
    }

    /// One strip.
    #[inline(always)]
    pub(super) fn strip(&self, i: usize) -> Strip<'_, T> {
        let bytes = self.strip_bytes();
        Strip { bytes: &self.bytes[i * bytes..][..bytes], lines: self.lines(), element: PhantomData }
    }
}

impl<T: Order, B: DerefMut<Target = [u8]>> Strips<T, B> {
    /// The weight, to be filled.
    pub(super) fn view_mut(&mut self) -> StripsMut<'_, T> {
        Strips { rows: self.rows, cols: self.cols, bytes: &mut self.bytes, element: PhantomData }
    }

    /// Fills with a weight.
    ///
    /// # Errors
    /// [`Error::Shape`] where the shape is another.
    pub(super) fn pack_again(&mut self, weight: &Compressed<T>) -> Result<()> {
        let (expected, found) = ((self.rows, self.cols), (weight.rows(), weight.cols()));
        if found != expected {
            return Err(Error::Shape { what: "packed weight", expected, found });
        }
        self.fill(|row, group| Ok((weight.code(row, group), weight.pair(row, group))))
    }

    /// Fills with what `mask` keeps of `matrix`.
    ///
    /// # Errors
    /// [`Error::Shape`] where a shape differs, [`Error::TooManyKept`] where the mask is not 2:4 along rows; the contents are
    /// then unspecified.
    pub(super) fn repack(&mut self, matrix: MatrixRef<'_, T>, mask: &Mask) -> Result<()> {
        if (matrix.rows(), matrix.cols()) != (self.rows, self.cols) {
            let expected = (self.rows, self.cols);
            return Err(Error::Shape { what: "recompressed matrix", expected, found: (matrix.rows(), matrix.cols()) });
        }
        mask.expect_shape("mask and matrix", matrix.rows(), matrix.cols())?;
        self.fill(|row, group| {
            let source = &matrix.row(row)[group * 4..];
            let source = &source[..source.len().min(4)];
            let mut four = [T::ZERO; 4];
            four[..source.len()].copy_from_slice(source);
            let bits = mask.bits(row, group * 4, 4) as u8;
            compressed::keep(four, bits).ok_or_else(|| compressed::too_many_kept(row, group, bits))
        })
    }

    /// The memory of each strip, block after block, for filling in parallel.
    pub(super) fn par_strips_mut(&mut self) -> impl IndexedParallelIterator<Item = &mut [u8]> {
        // A weight without columns would make empty chunks; there is then nothing to fill.
        let bytes = self.strip_bytes().max(1);
        self.bytes.par_chunks_mut(bytes)
    }

    /// Stores for each group of each row the code and values that `kept` gives.
    fn fill(&mut self, kept: impl Fn(usize, usize) -> Result<(u8, [T; 2])> + Sync) -> Result<()> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        let (rows, groups, bytes) = (self.rows, compressed::groups_per_row(self.cols), self.strip_bytes());
        first_error(self.bytes.par_chunks_mut(bytes).enumerate(), |(strip, bytes)| {
            let rows = strip * ROWS..(strip * ROWS + ROWS).min(rows);
            let block_groups = T::BLOCK_LINES * T::GROUPS;
            for (block, first) in bytes.chunks_mut(T::BLOCK_BYTES).zip((0..groups).step_by(block_groups)) {
                let in_block = first..(first + block_groups).min(groups);
                if Self::fill_block(block, rows.clone(), in_block, &kept).is_err() {
                    // Blocks go by columns; the first fault is told by rows.
                    let all = rows.clone().flat_map(|row| (0..groups).map(move |group| (row, group)));
                    return all.map(|(row, group)| kept(row, group)).try_for_each(|kept| kept.map(drop));
                }
            }
            Ok(())
        })
    }

    /// The same for a block.
    fn fill_block(
        block: &mut [u8],
        rows: Range<usize>,
        groups: Range<usize>,
        kept: &impl Fn(usize, usize) -> Result<(u8, [T; 2])>,
    ) -> Result<()> {
        let (codes, values) = block.split_at_mut(CACHE_LINE);
        let (codes, values): (&mut [u32], &mut [T]) =
            (bytemuck::cast_slice_mut(codes), bytemuck::cast_slice_mut(values));
        codes.fill(0);
        for row in rows {
            for (i, group) in groups.clone().enumerate() {
                let (line, in_line) = (i / T::GROUPS, i % T::GROUPS);
                let (code, pair) = kept(row, group)?;
                let (first, second) = code::positions(code);
                for (which, (position, value)) in [first, second].into_iter().zip(pair).enumerate() {
                    values[line * T::LINE + T::value(row % ROWS, in_line, which)] = value;
                    let (word, bit) = T::code(row % ROWS, in_line, which);
                    codes[line * T::CODE_WORDS + word] |= (position as u32) << bit;
                }
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};

    use super::*;
    use proptest::prelude::*;

    fn check<T: Order>(rows: usize, cols: usize, bytes: &[u8], convert: impl Fn(u8) -> T) {
        let dense: Vec<T> = bytes[..rows * cols].iter().map(|b| convert(*b)).collect();
        let matrix = MatrixRef::new(rows, cols, &dense).unwrap();
        let compressed = Compressed::from_pruned(matrix).unwrap();
        let mut strips = Strips::pack(&compressed).unwrap();
        assert_eq!(strips.to_compressed(), compressed);
        assert!(strips.bytes() >= compressed.bytes() - 4 * rows * usize::from(!cols.is_multiple_of(32)));
        // Repacking what is there already changes nothing, also over other contents.
        let other = Compressed::from_pruned(MatrixRef::new(rows, cols, &vec![T::ZERO; rows * cols]).unwrap()).unwrap();
        let mask = compressed.mask();
        strips.repack(matrix, &mask).unwrap();
        assert_eq!(strips.to_compressed(), compressed);
        let mut from_other = Strips::pack(&other).unwrap();
        from_other.repack(matrix, &mask).unwrap();
        assert_eq!(from_other.to_compressed(), compressed);
    }

    /// Rows and columns at most; Miri is slow.
    const SIZES: (usize, usize) = if cfg!(miri) { (18, 36) } else { (40, 70) };

    proptest! {
        #[test]
        fn strips_are_a_bijection_of_the_canonical_form(
            (rows, cols, bytes) in (0..SIZES.0, 0..SIZES.1).prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec(any::<u8>(), r * c)))
        ) {
            check(rows, cols, &bytes, |b| f32::from(b as i8));
            check(rows, cols, &bytes, |b| bf16::from_f32(f32::from(b as i8)));
            check(rows, cols, &bytes, |b| f16::from_f32(f32::from(b as i8)));
            check(rows, cols, &bytes, |b| b as i8);
        }
    }

    #[test]
    fn the_first_fault_by_rows_is_told_though_blocks_go_by_columns() {
        let (rows, cols) = (20, 80);
        let dense = vec![1.0f32; rows * cols];
        let matrix = MatrixRef::new(rows, cols, &dense).unwrap();
        let mut strips = Strips::<f32>::empty(rows, cols).unwrap();
        // Row 3 has too many in the last block's columns, row 5 in the first's, row 17 in another strip.
        let faults = [(3, 19), (5, 0), (17, 0)];
        let mask = Mask::from_fn(rows, cols, |row, col| col % 4 < 2 || faults.contains(&(row, col / 4)));
        let error = strips.repack(matrix, &mask).unwrap_err();
        assert!(matches!(error, Error::TooManyKept { line: 3, group: 19, kept: 4, .. }), "{error}");
    }

    #[test]
    fn every_value_and_position_has_a_place_of_its_own() {
        fn check<T: Order>() {
            let places = (0..ROWS).flat_map(|r| (0..T::GROUPS).flat_map(move |g| [(r, g, 0), (r, g, 1)]));
            let mut values: Vec<usize> = places.clone().map(|(r, g, w)| T::value(r, g, w)).collect();
            values.sort_unstable();
            assert!(values.into_iter().eq(0..T::LINE));
            let mut codes: Vec<(usize, u32)> = places.map(|(r, g, w)| T::code(r, g, w)).collect();
            codes.sort_unstable();
            let all = (0..T::CODE_WORDS).flat_map(|word| (0..32).step_by(2).map(move |bit| (word, bit)));
            assert!(codes.into_iter().eq(all));
        }
        check::<f32>();
        check::<bf16>();
        check::<f16>();
        check::<i8>();
    }
}
