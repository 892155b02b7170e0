//! Choosing a mask and packing what it keeps, in one pass over the dense weight: what sparse training does once per
//! optimizer step.
//!
//! A group of sixteen rows is loaded as four columns of sixteen elements, so that the comparisons, the choice of values
//! and their positions are the same operations on every lane. The compiler turns the loops over lanes into vector
//! instructions.

use std::{
    ops::DerefMut,
    sync::atomic::{AtomicBool, AtomicU64, Ordering::Relaxed},
};

use rayon::prelude::*;

use super::{
    format::KernelElement,
    strips::{ROWS, Strips},
};
use crate::{
    Element, Error, Mask, MatrixRef, Result,
    compressed::{self, code},
    select::{Transposable, nm, tile},
    widest::widest,
};

/// Which elements of a matrix are kept, and with which values: a [`MaskRule`](crate::layer::MaskRule) at one step, with
/// the scale that it needs, or the mask of an earlier step.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) enum Selection {
    /// The two largest magnitudes of each group.
    Magnitude,
    /// The same, less the third largest, times a scale.
    SoftThreshold {
        /// The scale.
        scale: f32,
    },
    /// By tiles.
    Transposable(Transposable),
    /// Those of the mask as it is, which must be 2:4 along rows.
    Mask,
}

/// Sixteen rows of one column.
type Lanes<T> = [T; ROWS];

/// What a line of a strip stores.
struct Line {
    kept: Lanes<u32>,
    positions: [Lanes<u32>; 2],
    values: [Lanes<f32>; 2],
}

impl<T: KernelElement, B: DerefMut<Target = [u8]>> Strips<T, B> {
    /// Chooses the mask of `matrix`, writes it to `mask`, packs what it keeps, and returns how many mask elements
    /// changed.
    ///
    /// # Errors
    /// [`Error::Shape`] where a shape differs; [`Error::NotANumber`] with the place of the first NaN,
    /// [`Error::Infinite`] with that of the first infinity where the selection is the soft threshold,
    /// [`Error::TooManyKept`] where a mask that is to be kept is not 2:4 along rows. After these three, mask and values
    /// are unspecified.
    pub(super) fn remask<M: Element>(
        &mut self,
        matrix: MatrixRef<'_, M>,
        selection: Selection,
        mask: &mut Mask,
    ) -> Result<u64> {
        let expected = (self.shape.rows, self.shape.cols);
        if (matrix.rows(), matrix.cols()) != expected {
            return Err(Error::Shape { what: "repacked matrix", expected, found: (matrix.rows(), matrix.cols()) });
        }
        mask.expect_shape("mask and matrix", matrix.rows(), matrix.cols())?;
        let (flips, failed) = (AtomicU64::new(0), AtomicBool::new(false));
        let words = mask.words_per_row();
        self.par_strips_mut().zip(mask.par_bands_mut(ROWS)).enumerate().for_each(|(strip, (bytes, bits))| {
            let pass = Pass { matrix, selection, first_row: strip * ROWS, words };
            let done = widest(|| pass.strip::<T>(bytes, bits));
            flips.fetch_add(done.flips, Relaxed);
            failed.fetch_or(done.failed, Relaxed);
        });
        if failed.into_inner() {
            first_fault(matrix, selection, mask)?;
        }
        Ok(flips.into_inner())
    }
}

/// The error of a pass that met something that it cannot take.
fn first_fault<M: Element>(matrix: MatrixRef<'_, M>, selection: Selection, mask: &Mask) -> Result<()> {
    if selection == Selection::Mask {
        return mask.verify(crate::Pattern::TWO_FOUR, crate::Axis::Row);
    }
    nm::reject_nan(matrix)?;
    for row in 0..matrix.rows() {
        if let Some(col) = matrix.row(row).iter().position(|v| v.to_f32().is_infinite()) {
            return Err(Error::Infinite { row, col });
        }
    }
    Ok(())
}

/// What a strip's pass found.
#[derive(Default)]
struct Done {
    flips: u64,
    failed: bool,
}

/// A pass over sixteen rows.
struct Pass<'a, M> {
    matrix: MatrixRef<'a, M>,
    selection: Selection,
    first_row: usize,
    /// Words of a row of the mask.
    words: usize,
}

impl<M: Element> Pass<'_, M> {
    /// Fills the memory of a strip and its rows of the mask.
    #[inline(always)]
    fn strip<T: KernelElement>(&self, bytes: &mut [u8], bits: &mut [u64]) -> Done {
        let height = ROWS.min(self.matrix.rows() - self.first_row);
        let groups = compressed::groups_per_row(self.matrix.cols());
        let block_groups = T::BLOCK_LINES;
        let mut done = Done::default();
        for (block, first) in bytes.chunks_mut(T::BLOCK_BYTES).zip((0..groups).step_by(block_groups)) {
            let (codes, values) = block.split_at_mut(super::aligned::CACHE_LINE);
            let (codes, values): (&mut [u32], &mut [T]) =
                (bytemuck::cast_slice_mut(codes), bytemuck::cast_slice_mut(values));
            codes.fill(0);
            let before: Lanes<u32> = std::array::from_fn(|row| {
                if row < height { (bits[self.word(row, first)] >> shift(first)) as u32 } else { 0 }
            });
            let mut after = [0u32; ROWS];
            let lines = values.chunks_exact_mut(2 * ROWS).zip(codes.as_chunks_mut::<2>().0);
            for (i, (values, codes)) in lines.enumerate() {
                let line = self.line(first + i, height, before.map(|bits| bits >> (4 * i) & 15), &mut done.failed);
                for (which, (lanes, positions)) in line.values.iter().zip(&line.positions).enumerate() {
                    for (row, value) in lanes.iter().enumerate() {
                        let value = T::from_f32(*value);
                        values[T::value(row, 0, which)] = if value.is_zero() { T::ZERO } else { value };
                    }
                    codes[which] = (0..ROWS).fold(0, |word, row| word | positions[row] << (2 * row));
                }
                for (after, kept) in after.iter_mut().zip(&line.kept) {
                    *after |= kept << (4 * i);
                }
            }
            for row in 0..height {
                done.flips += u64::from((before[row] ^ after[row]).count_ones());
                let word = &mut bits[self.word(row, first)];
                *word = *word & !(u64::from(u32::MAX) << shift(first)) | u64::from(after[row]) << shift(first);
            }
        }
        done
    }

    /// The word of the mask that a row's block of groups is in.
    #[inline(always)]
    fn word(&self, row: usize, group: usize) -> usize {
        row * self.words + group / 16
    }

    /// What is stored of a group of sixteen rows, of which the mask kept `before`.
    #[inline(always)]
    fn line(&self, group: usize, height: usize, before: Lanes<u32>, failed: &mut bool) -> Line {
        let cols = self.matrix.cols();
        let width = 4.min(cols - 4 * group);
        let mut columns = [[0f32; ROWS]; 4];
        let data = &self.matrix.data()[self.first_row * cols + 4 * group..];
        if (height, width) == (ROWS, 4) {
            for row in 0..ROWS {
                let four = &data[row * cols..][..4];
                for col in 0..4 {
                    columns[col][row] = four[col].to_f32();
                }
            }
        } else {
            for row in 0..height {
                for (column, value) in columns.iter_mut().zip(&data[row * cols..][..width]) {
                    column[row] = value.to_f32();
                }
            }
        }
        let mut line = match self.selection {
            Selection::Magnitude => by_magnitude(&columns, None, failed),
            Selection::SoftThreshold { scale } => by_magnitude(&columns, Some(scale), failed),
            Selection::Transposable(rule) => {
                *failed |= columns.iter().flatten().any(|v| v.is_nan());
                by_bits(&columns, tiles(&columns, height, width, rule))
            }
            Selection::Mask => {
                *failed |= before.iter().any(|bits| bits.count_ones() > 2);
                by_bits(&columns, before)
            }
        };
        if width < 4 {
            line.kept.iter_mut().for_each(|kept| *kept &= (1 << width) - 1);
        }
        if height < ROWS {
            // Rows that complete the strip hold zeros.
            line.positions.iter_mut().for_each(|positions| positions[height..].fill(0));
        }
        line
    }
}

/// The place of a block's bits in its word of the mask: eight groups are half of it.
#[inline(always)]
fn shift(first_group: usize) -> u32 {
    (4 * (first_group % 16)) as u32
}

/// The two largest magnitudes of each row, ties to the lower index; with a scale, by the soft threshold.
#[inline(always)]
fn by_magnitude(columns: &[Lanes<f32>; 4], scale: Option<f32>, failed: &mut bool) -> Line {
    const INFINITY: u32 = 0x7F80_0000;
    let mut line = Line { kept: [0; ROWS], positions: [[0; ROWS]; 2], values: [[0.0; ROWS]; 2] };
    let mut largest = 0;
    for row in 0..ROWS {
        let v = columns.each_ref().map(|column| column[row]);
        // Magnitudes are ordered as their bits are.
        let k = v.map(|v| v.to_bits() & 0x7FFF_FFFF);
        // Which of two comes first: 1 for the one of lower index.
        let first = |i: usize, j: usize| u32::from(k[i] >= k[j]);
        let (a, b, c, d, e, f) = (first(0, 1), first(0, 2), first(0, 3), first(1, 2), first(1, 3), first(2, 3));
        // Those that come before at least two of the three others are the first two.
        let kept = [a + b + c >= 2, 1 - a + d + e >= 2, 2 - b - d + f >= 2, 3 - c - e - f >= 2];
        let pick = |x: [u32; 4]| {
            let first = if kept[0] {
                x[0]
            } else if kept[1] {
                x[1]
            } else {
                x[2]
            };
            let second = if kept[3] {
                x[3]
            } else if kept[2] {
                x[2]
            } else {
                x[1]
            };
            [first, second]
        };
        let positions = pick([0, 1, 2, 3]);
        let bits = pick(v.map(f32::to_bits));
        let third = (0..4).fold(0, |third, i| third.max(if kept[i] { 0 } else { k[i] }));
        for which in 0..2 {
            line.positions[which][row] = positions[which];
            let value = f32::from_bits(bits[which]);
            line.values[which][row] = match scale {
                None => value,
                Some(scale) => (value.abs() - f32::from_bits(third)).copysign(value) * scale,
            };
        }
        line.kept[row] = (0..4).fold(0, |bits, i| bits | u32::from(kept[i]) << i);
        largest = k.iter().fold(largest, |largest: u32, k| largest.max(*k));
    }
    *failed |= if scale.is_some() { largest >= INFINITY } else { largest > INFINITY };
    line
}

/// What each row keeps by its bits.
#[inline(always)]
fn by_bits(columns: &[Lanes<f32>; 4], kept: Lanes<u32>) -> Line {
    let mut line = Line { kept, positions: [[0; ROWS]; 2], values: [[0.0; ROWS]; 2] };
    for row in 0..ROWS {
        // More than two are an error that the caller has noted.
        let code = code::of_kept(kept[row] as u8).unwrap_or(code::LEGAL[0]);
        let (first, second) = code::positions(code);
        for (which, position) in [first, second].into_iter().enumerate() {
            line.positions[which][row] = position as u32;
            line.values[which][row] = if kept[row] >> position & 1 == 1 { columns[position][row] } else { 0.0 };
        }
    }
    line
}

/// The masks of the four tiles below each other.
fn tiles(columns: &[Lanes<f32>; 4], height: usize, width: usize, rule: Transposable) -> Lanes<u32> {
    let mut kept = [0; ROWS];
    for first in (0..height).step_by(4) {
        let values = std::array::from_fn(|i| columns[i % 4][first + i / 4]);
        let inside = (0..16).filter(|i| first + i / 4 < height && i % 4 < width).fold(0u16, |bits, i| bits | 1 << i);
        let tile = tile::select(values, inside, rule);
        for row in 0..4 {
            kept[first + row] = u32::from(tile >> (4 * row) & 15);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use half::{bf16, f16};
    use proptest::prelude::*;

    use super::*;
    use crate::{
        Arithmetic, Axis, Compressed, Pattern,
        estimate::{Estimator, estimate},
        select,
    };

    fn check<M: Arithmetic, T: KernelElement>(rows: usize, cols: usize, data: &[f32]) {
        let data: Vec<M> = data.iter().map(|v| M::from_f32(*v)).collect();
        let converted: Vec<T> = data.iter().map(|v| T::from_f32(v.to_f32())).collect();
        let matrix = MatrixRef::new(rows, cols, &data).unwrap();
        let of_values = MatrixRef::new(rows, cols, &converted).unwrap();
        let empty = Mask::empty(rows, cols);
        let blank = Compressed::from_masked(of_values, &empty).unwrap();
        let mut cases = vec![(Selection::Magnitude, select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap())];
        for rule in Transposable::ALL {
            cases.push((Selection::Transposable(rule), select::transposable(matrix, rule).unwrap()));
        }
        for (selection, expected) in cases {
            let (mut strips, mut mask) =
                (Strips::<T>::pack(&blank, ()).unwrap(), Mask::from_fn(rows, cols, |r, c| (r + c) % 4 < 2));
            let flips = (mask.flip_rate(&expected).unwrap() * (rows * cols) as f64).round() as u64;
            assert_eq!(strips.remask(matrix, selection, &mut mask).unwrap(), flips);
            assert_eq!(mask, expected, "{selection:?}");
            let packed = Compressed::from_masked(of_values, &expected).unwrap();
            assert_eq!(strips.to_compressed(), packed, "{selection:?}");
            // Repacking with the mask as it is changes nothing.
            let mut again = Strips::<T>::pack(&blank, ()).unwrap();
            assert_eq!(again.remask(matrix, Selection::Mask, &mut mask).unwrap(), 0);
            assert_eq!((again.to_compressed(), &mask), (packed, &expected));
        }
        if data.iter().all(|v| v.to_f32().is_finite()) {
            let (mut strips, mut mask) = (Strips::<T>::pack(&blank, ()).unwrap(), empty);
            strips.remask(matrix, Selection::SoftThreshold { scale: 1.25 }, &mut mask).unwrap();
            let expected = estimate::<M, T>(matrix, Estimator::SoftThreshold, 1.25).unwrap();
            assert_eq!(strips.to_compressed(), expected);
            assert_eq!(mask, select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap());
        }
    }

    fn numbers() -> impl Strategy<Value = f32> {
        let special = [0.0, -0.0, 1.0, -1.0, 1e-45, -1e-41, 1e30, f32::INFINITY];
        prop_oneof![4 => -4f32..4.0, 1 => proptest::sample::select(special.to_vec()), 2 => (-2i8..=2).prop_map(f32::from)]
    }

    /// Rows and columns at most; Miri is slow.
    const SIZES: (usize, usize) = if cfg!(miri) { (18, 13) } else { (40, 80) };

    proptest! {
        #[test]
        fn masks_values_and_flips_are_those_of_separate_passes(
            (rows, cols, data) in (0..SIZES.0, 0..SIZES.1)
                .prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec(numbers(), r * c)))
        ) {
            check::<f32, f32>(rows, cols, &data);
            check::<bf16, bf16>(rows, cols, &data);
            check::<f16, f16>(rows, cols, &data);
            check::<f32, bf16>(rows, cols, &data);
        }
    }

    #[test]
    fn faults_are_named_by_their_first_place() {
        let (rows, cols) = (40, 36);
        let mut data = vec![1f32; rows * cols];
        let blank =
            Compressed::from_masked(MatrixRef::new(rows, cols, &data).unwrap(), &Mask::empty(rows, cols)).unwrap();
        let run = |data: &[f32], selection, mut mask: Mask| {
            Strips::<f32>::pack(&blank, ())
                .unwrap()
                .remask(MatrixRef::new(rows, cols, data).unwrap(), selection, &mut mask)
                .unwrap_err()
        };
        let empty = || Mask::empty(rows, cols);
        data[20 * cols + 7] = f32::INFINITY;
        let error = run(&data, Selection::SoftThreshold { scale: 1.0 }, empty());
        assert!(matches!(error, Error::Infinite { row: 20, col: 7 }), "{error}");
        data[30 * cols + 1] = f32::NAN;
        for selection in [Selection::Magnitude, Selection::Transposable(Transposable::Optimal)] {
            let error = run(&data, selection, empty());
            assert!(matches!(error, Error::NotANumber { row: 30, col: 1 }), "{error}");
        }
        let error = run(&data, Selection::Mask, Mask::from_fn(rows, cols, |r, c| r == 17 && c > 4));
        assert!(matches!(error, Error::TooManyKept { line: 17, group: 1, kept: 3, .. }), "{error}");
    }
}
