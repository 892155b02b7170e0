//! The layout that kernels multiply with: a 2:4 weight in strips of sixteen rows; see [the drawing](super).
//!
//! The layout is a bijection of the canonical form, made in memory only; rows and groups that complete the last strip
//! and line hold zeros.

use std::ops::{Deref, DerefMut, Range};

use rayon::prelude::*;

use super::{
    aligned::{Aligned, CACHE_LINE},
    format::Format,
};
use crate::{
    Compressed, Element, Error, Mask, MatrixRef, Result,
    compressed::{self, code},
    first_error::first_error,
};

/// Rows of a strip.
pub(in crate::kernel) const ROWS: usize = 16;

/// A weight's shape, and what shares a scale where scales lie in the strips.
#[derive(Debug)]
pub(in crate::kernel) struct Shape<F: Format> {
    pub(super) rows: usize,
    pub(super) cols: usize,
    pub(super) grouping: F::Grouping,
}

impl<F: Format> Clone for Shape<F> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<F: Format> Copy for Shape<F> {}

impl<F: Format> Shape<F> {
    /// Lines of a strip.
    #[inline(always)]
    pub(super) fn lines(&self) -> usize {
        compressed::groups_per_row(self.cols).div_ceil(F::GROUPS)
    }

    /// Columns to which activations must be completed.
    pub(super) fn padded_cols(&self) -> usize {
        self.cols.next_multiple_of(4 * F::GROUPS)
    }

    /// How many strips the rows are.
    pub(super) fn strips(&self) -> usize {
        self.rows.div_ceil(ROWS)
    }

    /// Bytes of a strip, which are in memory already.
    #[inline(always)]
    pub(super) fn strip_bytes(&self) -> usize {
        let blocks = self.lines().div_ceil(F::BLOCK_LINES);
        (blocks + F::headers(self.cols, self.grouping)) * CACHE_LINE + self.lines() * F::LINE_BYTES
    }

    /// Bytes of all strips.
    ///
    /// # Errors
    /// [`Error::TooLarge`].
    pub(super) fn bytes(&self) -> Result<usize> {
        let too_large = || Error::TooLarge { shape: vec![self.rows, self.cols] };
        // A strip has less than this for each column, beside a block's positions and a header.
        let most = self.cols.checked_next_multiple_of(4 * F::GROUPS).and_then(|cols| cols.checked_mul(4 * CACHE_LINE));
        most.and_then(|most| most.checked_add(2 * CACHE_LINE)).ok_or_else(too_large)?;
        self.strip_bytes().checked_mul(self.strips()).ok_or_else(too_large)
    }
}

/// A 2:4 weight in strips; see the [module](self). `B` owns or borrows its memory, which starts at a cache line.
#[derive(Debug)]
pub struct Strips<F: Format, B = Aligned<u8>> {
    pub(super) shape: Shape<F>,
    /// Of each strip.
    strip_bytes: usize,
    bytes: B,
}

impl<F: Format, B: Clone> Clone for Strips<F, B> {
    fn clone(&self) -> Self {
        Strips { shape: self.shape, strip_bytes: self.strip_bytes, bytes: self.bytes.clone() }
    }
}
impl<F: Format, B: Copy> Copy for Strips<F, B> {}

/// A weight in borrowed memory: what kernels multiply.
pub(in crate::kernel) type StripsRef<'a, F> = Strips<F, &'a [u8]>;

/// A weight in memory that is borrowed to be filled.
pub(in crate::kernel) type StripsMut<'a, F> = Strips<F, &'a mut [u8]>;

/// Sixteen rows of a weight.
#[derive(Debug)]
pub struct Strip<'a, F: Format> {
    /// Block after block.
    bytes: &'a [u8],
    shape: Shape<F>,
}

impl<F: Format> Clone for Strip<'_, F> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<F: Format> Copy for Strip<'_, F> {}

impl<'a, F: Format> Strip<'a, F> {
    /// Lines of the strip.
    #[inline(always)]
    pub(super) fn lines(&self) -> usize {
        self.shape.lines()
    }

    /// What shares a scale.
    #[inline(always)]
    pub(super) fn shape(&self) -> Shape<F> {
        self.shape
    }

    /// Where it starts: a cache line.
    #[inline(always)]
    pub(super) fn as_ptr(&self) -> *const u8 {
        self.bytes.as_ptr()
    }

    /// A line's values and its words of positions.
    #[inline(always)]
    pub(super) fn line(&self, line: usize) -> (&'a [F::Stored], &'a [u32]) {
        let block = &self.bytes[F::block_start(line / F::BLOCK_LINES, self.shape.grouping)..];
        let line = line % F::BLOCK_LINES;
        let (codes, values) = block.split_at(CACHE_LINE);
        (
            bytemuck::cast_slice(&values[line * F::LINE_BYTES..][..F::LINE_BYTES]),
            &bytemuck::cast_slice(codes)[line * F::CODE_WORDS..][..F::CODE_WORDS],
        )
    }

    /// All of it.
    #[inline(always)]
    pub(super) fn bytes(&self) -> &'a [u8] {
        self.bytes
    }

    /// The memory of some lines and of those that share a block's positions with them.
    pub(super) fn bytes_of(&self, lines: Range<usize>) -> &'a [u8] {
        let block = |block| F::block_start(block, self.shape.grouping);
        let (start, end) = (block(lines.start / F::BLOCK_LINES), block(lines.end.div_ceil(F::BLOCK_LINES)));
        &self.bytes[start..end.min(self.bytes.len())]
    }

    /// What a row keeps of a group: positions and values, first and second.
    #[inline(always)]
    pub(super) fn kept(&self, row: usize, group: usize) -> [(usize, F::Value); 2] {
        let (values, codes) = self.line(group / F::GROUPS);
        let group = group % F::GROUPS;
        [0, 1].map(|which| {
            let (word, bit) = F::code(row, group, which);
            let position = codes[word] >> bit & 3;
            (position as usize, F::get(values, F::value(row, group, which)))
        })
    }
}

impl<'a, F: Format> StripsRef<'a, F> {
    /// One strip, borrowed from the weight's memory and not from this view of it.
    #[inline(always)]
    pub(super) fn strip_of(&self, i: usize) -> Strip<'a, F> {
        let (bytes, memory): (usize, &'a [u8]) = (self.strip_bytes, self.bytes);
        Strip { bytes: &memory[i * bytes..][..bytes], shape: self.shape }
    }

    /// The same memory in a format of the same layout.
    #[allow(dead_code, reason = "only instruction sets with products of pairs need it")]
    pub(super) fn cast<G: Format<Grouping = F::Grouping>>(&self) -> StripsRef<'a, G> {
        const { assert!(F::GROUPS == G::GROUPS && F::LINE_BYTES == G::LINE_BYTES) };
        let Shape { rows, cols, grouping } = self.shape;
        Strips { shape: Shape { rows, cols, grouping }, strip_bytes: self.strip_bytes, bytes: self.bytes }
    }
}

impl<F: Format> Strips<F> {
    /// Zeros.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::OutOfMemory`].
    pub(super) fn empty(shape: Shape<F>) -> Result<Self> {
        let bytes = Aligned::try_zeroed(shape.bytes()?)?;
        Ok(Self { shape, strip_bytes: shape.strip_bytes(), bytes })
    }

    /// The strips of a weight.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`].
    pub(super) fn pack(weight: &Compressed<F::Value>, grouping: F::Grouping) -> Result<Self> {
        let mut strips = Self::empty(Shape { rows: weight.rows(), cols: weight.cols(), grouping })?;
        strips.pack_again(weight)?;
        Ok(strips)
    }
}

impl<F: Format, B: Deref<Target = [u8]>> Strips<F, B> {
    /// The weight that lies in `bytes`, which may have any contents.
    ///
    /// # Errors
    /// [`Error::TooLarge`]; [`Error::Length`] for memory of another length than [`Shape::bytes`], [`Error::Unaligned`]
    /// for memory that does not start at a cache line.
    pub(super) fn over(shape: Shape<F>, bytes: B) -> Result<Self> {
        let expected = shape.bytes()?;
        if bytes.len() != expected {
            return Err(Error::Length { what: "the packed weight's memory", expected, found: bytes.len() });
        }
        if !bytes.is_empty() && !bytes.as_ptr().addr().is_multiple_of(CACHE_LINE) {
            return Err(Error::Unaligned { what: "the packed weight's memory", alignment: CACHE_LINE });
        }
        Ok(Self { shape, strip_bytes: shape.strip_bytes(), bytes })
    }

    /// The weight, to be multiplied.
    #[inline(always)]
    pub(super) fn view(&self) -> StripsRef<'_, F> {
        Strips { shape: self.shape, strip_bytes: self.strip_bytes, bytes: &self.bytes }
    }

    /// Values and metadata of the canonical form.
    pub(super) fn canonical(&self) -> (Vec<F::Value>, Vec<u32>) {
        let Shape { rows, cols, .. } = self.shape;
        let groups = compressed::groups_per_row(cols);
        let words = compressed::meta_words_per_row(cols);
        // A shape may have any number of rows without columns.
        let filled = if groups == 0 { 0 } else { rows };
        let (mut values, mut meta) = (Vec::with_capacity(filled * groups * 2), vec![0; rows * words]);
        for row in 0..filled {
            let strip = self.strip(row / ROWS);
            for group in 0..groups {
                let [(first, a), (second, b)] = strip.kept(row % ROWS, group);
                values.extend([a, b]);
                meta[row * words + group / 8] |= ((first | second << 2) as u32) << (group % 8 * 4);
            }
        }
        (values, meta)
    }

    /// The canonical form.
    pub(super) fn to_compressed(&self) -> Compressed<F::Value> {
        let (values, meta) = self.canonical();
        Compressed::from_trusted_parts(self.shape.rows, self.shape.cols, values, meta)
    }

    /// Bytes of values and positions.
    pub(super) fn bytes(&self) -> usize {
        self.bytes.len()
    }

    /// One strip.
    #[inline(always)]
    pub(super) fn strip(&self, i: usize) -> Strip<'_, F> {
        let bytes = self.strip_bytes;
        Strip { bytes: &self.bytes[i * bytes..][..bytes], shape: self.shape }
    }
}

impl<F: Format, B: DerefMut<Target = [u8]>> Strips<F, B> {
    /// The weight, to be filled.
    pub(super) fn view_mut(&mut self) -> StripsMut<'_, F> {
        Strips { shape: self.shape, strip_bytes: self.strip_bytes, bytes: &mut self.bytes }
    }

    /// Fills with a weight.
    ///
    /// # Errors
    /// [`Error::Shape`] where the shape is another.
    pub(super) fn pack_again(&mut self, weight: &Compressed<F::Value>) -> Result<()> {
        let (expected, found) = ((self.shape.rows, self.shape.cols), (weight.rows(), weight.cols()));
        if found != expected {
            return Err(Error::Shape { what: "packed weight", expected, found });
        }
        self.fill(|row, group| Ok((weight.code(row, group), weight.pair(row, group))))
    }

    /// Fills with what `mask` keeps of `matrix`.
    ///
    /// # Errors
    /// [`Error::Shape`] where a shape differs, [`Error::TooManyKept`] where the mask is not 2:4 along rows; the
    /// contents are then unspecified.
    pub(super) fn repack(&mut self, matrix: MatrixRef<'_, F::Value>, mask: &Mask) -> Result<()> {
        let expected = (self.shape.rows, self.shape.cols);
        if (matrix.rows(), matrix.cols()) != expected {
            return Err(Error::Shape { what: "recompressed matrix", expected, found: (matrix.rows(), matrix.cols()) });
        }
        mask.expect_shape("mask and matrix", matrix.rows(), matrix.cols())?;
        self.fill(|row, group| {
            let source = &matrix.row(row)[group * 4..];
            let source = &source[..source.len().min(4)];
            let mut four = [F::Value::ZERO; 4];
            four[..source.len()].copy_from_slice(source);
            let bits = mask.bits(row, group * 4, 4) as u8;
            compressed::keep(four, bits).ok_or_else(|| compressed::too_many_kept(row, group, bits))
        })
    }

    /// The memory of each strip, block after block, for filling in parallel.
    pub(super) fn par_strips_mut(&mut self) -> impl IndexedParallelIterator<Item = &mut [u8]> {
        // A weight without columns would make empty chunks; there is then nothing to fill.
        let bytes = self.strip_bytes.max(1);
        self.bytes.par_chunks_mut(bytes)
    }

    /// Stores for each group of each row the code and values that `kept` gives.
    fn fill(&mut self, kept: impl Fn(usize, usize) -> Result<(u8, [F::Value; 2])> + Sync) -> Result<()> {
        if self.bytes.is_empty() {
            return Ok(());
        }
        let (Shape { rows, cols, grouping }, bytes) = (self.shape, self.strip_bytes);
        let groups = compressed::groups_per_row(cols);
        first_error(self.bytes.par_chunks_mut(bytes).enumerate(), |(strip, bytes)| {
            let rows = strip * ROWS..(strip * ROWS + ROWS).min(rows);
            let block_groups = F::BLOCK_LINES * F::GROUPS;
            for (block, first) in (0..groups).step_by(block_groups).enumerate() {
                let start = F::block_start(block, grouping);
                let end = bytes.len().min(start + F::BLOCK_BYTES);
                let in_block = first..(first + block_groups).min(groups);
                if Self::fill_block(&mut bytes[start..end], rows.clone(), in_block, &kept).is_err() {
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
        kept: &impl Fn(usize, usize) -> Result<(u8, [F::Value; 2])>,
    ) -> Result<()> {
        let (codes, values) = block.split_at_mut(CACHE_LINE);
        let (codes, values): (&mut [u32], &mut [F::Stored]) =
            (bytemuck::cast_slice_mut(codes), bytemuck::cast_slice_mut(values));
        codes.fill(0);
        let line_len = F::LINE_BYTES / size_of::<F::Stored>();
        for row in rows {
            for (i, group) in groups.clone().enumerate() {
                let (line, in_line) = (i / F::GROUPS, i % F::GROUPS);
                let (code, pair) = kept(row, group)?;
                let (first, second) = code::positions(code);
                let values = &mut values[line * line_len..][..line_len];
                for (which, (position, value)) in [first, second].into_iter().zip(pair).enumerate() {
                    F::put(values, F::value(row % ROWS, in_line, which), value);
                    let (word, bit) = F::code(row % ROWS, in_line, which);
                    codes[line * F::CODE_WORDS + word] |= (position as u32) << bit;
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
    use crate::int4::Int4;
    use proptest::prelude::*;

    fn check<T: Element + Format<Value = T, Grouping = ()>>(
        rows: usize,
        cols: usize,
        bytes: &[u8],
        convert: impl Fn(u8) -> T,
    ) {
        let dense: Vec<T> = bytes[..rows * cols].iter().map(|b| convert(*b)).collect();
        let matrix = MatrixRef::new(rows, cols, &dense).unwrap();
        let compressed = Compressed::from_pruned(matrix).unwrap();
        let mut strips = Strips::<T>::pack(&compressed, ()).unwrap();
        assert_eq!(strips.to_compressed(), compressed);
        assert!(strips.bytes() >= compressed.bytes() - 4 * rows * usize::from(!cols.is_multiple_of(32)));
        // Repacking what is there already changes nothing, also over other contents.
        let other = Compressed::from_pruned(MatrixRef::new(rows, cols, &vec![T::ZERO; rows * cols]).unwrap()).unwrap();
        let mask = compressed.mask();
        strips.repack(matrix, &mask).unwrap();
        assert_eq!(strips.to_compressed(), compressed);
        let mut from_other = Strips::<T>::pack(&other, ()).unwrap();
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
        let mut strips = Strips::<f32>::empty(Shape { rows, cols, grouping: () }).unwrap();
        // Row 3 has too many in the last block's columns, row 5 in the first's, row 17 in another strip.
        let faults = [(3, 19), (5, 0), (17, 0)];
        let mask = Mask::from_fn(rows, cols, |row, col| col % 4 < 2 || faults.contains(&(row, col / 4)));
        let error = strips.repack(matrix, &mask).unwrap_err();
        assert!(matches!(error, Error::TooManyKept { line: 3, group: 19, kept: 4, .. }), "{error}");
    }

    #[test]
    fn every_value_and_position_has_a_place_of_its_own() {
        fn check<T: Format>() {
            let places = (0..ROWS).flat_map(|r| (0..T::GROUPS).flat_map(move |g| [(r, g, 0), (r, g, 1)]));
            let mut values: Vec<usize> = places.clone().map(|(r, g, w)| T::value(r, g, w)).collect();
            values.sort_unstable();
            assert!(values.into_iter().eq(0..T::GROUPS * 2 * ROWS));
            let mut codes: Vec<(usize, u32)> = places.map(|(r, g, w)| T::code(r, g, w)).collect();
            codes.sort_unstable();
            let all = (0..T::CODE_WORDS).flat_map(|word| (0..32).step_by(2).map(move |bit| (word, bit)));
            assert!(codes.into_iter().eq(all));
        }
        check::<f32>();
        check::<bf16>();
        check::<f16>();
        check::<i8>();
        check::<Int4>();
    }
}
