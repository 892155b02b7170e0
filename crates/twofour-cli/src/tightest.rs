//! The tightest N:M pattern that a matrix has.

use rayon::prelude::*;
use twofour::{Axis, Element, MatrixRef};

/// Group lengths that are tried, each twice the one before.
const LENGTHS: [usize; 5] = [2, 4, 8, 16, 32];

/// The most non-zeros in any group, for each of [`LENGTHS`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tightest([u8; LENGTHS.len()]);

impl Tightest {
    /// N and M: of the patterns obeyed, the one of lowest density, then of shortest groups; `None` where every length
    /// has a full group. A matrix without non-zeros obeys `(0, 2)`.
    pub(crate) fn pattern(self) -> Option<(usize, usize)> {
        let all = self.0.iter().zip(LENGTHS).map(|(&n, m)| (usize::from(n), m));
        // min_by_key keeps the first of equals; densities in 32nds are whole.
        all.min_by_key(|&(n, m)| n * (32 / m)).filter(|(n, m)| n < m)
    }

    /// As text: `2:4`, or `zero` for a matrix without non-zeros.
    pub(crate) fn text(self) -> Option<String> {
        self.pattern().map(|(n, m)| if n == 0 { "zero".to_owned() } else { format!("{n}:{m}") })
    }

    /// Excludes groups longer than a line, which no line fills: a row of 24 would obey 12:32 by its length alone.
    fn within(mut self, line: usize) -> Tightest {
        for (n, m) in self.0.iter_mut().zip(LENGTHS).skip(1).filter(|(_, m)| *m > line) {
            *n = m as u8;
        }
        self
    }

    /// That of both matrices.
    pub(crate) fn join(self, other: Tightest) -> Tightest {
        let mut joined = self;
        joined.0.iter_mut().zip(other.0).for_each(|(a, b)| *a = (*a).max(b));
        joined
    }
}

/// Counts the most non-zeros in any group along the axis, for all lengths in one pass. A last, shorter group counts
/// with the elements it has.
pub(crate) fn tightest<T: Element>(matrix: MatrixRef<'_, T>, axis: Axis) -> Tightest {
    let none = Tightest([0; LENGTHS.len()]);
    if matrix.rows() == 0 || matrix.cols() == 0 {
        return none;
    }
    let found = match axis {
        Axis::Row => (0..matrix.rows())
            .into_par_iter()
            .map(|row| matrix.row(row).chunks(32).map(of_chunk).fold(none, Tightest::join))
            .reduce(|| none, Tightest::join),
        Axis::Column => (0..matrix.rows().div_ceil(32))
            .into_par_iter()
            .map(|band| {
                let mut counter = Counter::new(matrix.cols());
                (band * 32..(band * 32 + 32).min(matrix.rows())).for_each(|row| counter.add(matrix.row(row)));
                counter.finish()
            })
            .reduce(|| none, Tightest::join),
    };
    found.within(if axis == Axis::Row { matrix.cols() } else { matrix.rows() })
}

/// The most non-zeros in any group of up to 32 consecutive elements.
fn of_chunk<T: Element>(chunk: &[T]) -> Tightest {
    // Each level holds the counts of all its groups as fields of one word, and adds neighbours to get the next.
    const FIELDS: [u32; LENGTHS.len()] = [0x5555_5555, 0x3333_3333, 0x0F0F_0F0F, 0x00FF_00FF, 0x0000_FFFF];
    let mut counts = chunk.iter().rev().fold(0u32, |bits, v| bits << 1 | u32::from(!v.is_zero()));
    let mut most = [0; LENGTHS.len()];
    for ((most, length), fields) in most.iter_mut().zip(LENGTHS).zip(FIELDS) {
        counts = (counts & fields) + (counts >> (length / 2) & fields);
        let field = (1u64 << length) - 1;
        *most = (0..32 / length).map(|i| (u64::from(counts) >> (i * length) & field) as u8).max().unwrap_or(0);
    }
    Tightest(most)
}

/// Counts of up to 32 lines of `width` elements side by side: a full group's counts are added to the group of twice its
/// length that it is part of, as digits carry.
struct Counter {
    lines: usize,
    counts: [Vec<u8>; LENGTHS.len()],
    most: Tightest,
}

impl Counter {
    fn new(width: usize) -> Self {
        Counter { lines: 0, counts: std::array::from_fn(|_| vec![0; width]), most: Tightest([0; LENGTHS.len()]) }
    }

    fn add<T: Element>(&mut self, line: &[T]) {
        self.counts[0].iter_mut().zip(line).for_each(|(count, v)| *count += u8::from(!v.is_zero()));
        self.lines += 1;
        for (level, length) in LENGTHS.into_iter().enumerate() {
            if self.lines.is_multiple_of(length) {
                self.carry(level);
            }
        }
    }

    fn carry(&mut self, level: usize) {
        let (lower, upper) = self.counts.split_at_mut(level + 1);
        let counts = &mut lower[level];
        self.most.0[level] = counts.iter().copied().fold(self.most.0[level], u8::max);
        if let Some(next) = upper.first_mut() {
            next.iter_mut().zip(counts.iter()).for_each(|(next, count)| *next += count);
        }
        counts.fill(0);
    }

    fn finish(mut self) -> Tightest {
        (0..LENGTHS.len()).for_each(|level| self.carry(level));
        self.most
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use twofour::{Mask, Pattern};

    /// Returns the rule as a sentence: N:M is obeyed where no group of M breaks it.
    fn reference(matrix: MatrixRef<'_, f32>, axis: Axis) -> Tightest {
        let mask = Mask::of_nonzeros(matrix);
        Tightest(LENGTHS.map(|m| {
            let obeyed = |n: &usize| *n == m || mask.verify(Pattern::new(*n, m).unwrap(), axis).is_ok();
            let line = if axis == Axis::Row { matrix.cols() } else { matrix.rows() };
            match mask.count() {
                _ if m > line.max(2) => m as u8,
                0 => 0,
                _ => (1..=m).find(obeyed).unwrap() as u8,
            }
        }))
    }

    #[test]
    fn both_axes_agree_with_the_reference_whatever_the_shape() {
        for (case, (rows, cols)) in
            [(1, 1), (3, 5), (4, 4), (7, 64), (33, 31), (64, 70), (100, 3)].into_iter().enumerate()
        {
            for percent in [0, 10, 40, 90, 100] {
                let random = |i: usize| (i + case).wrapping_mul(0x9E37_79B9_7F4A_7C15).rotate_left(23) % 100;
                let data: Vec<f32> = (0..rows * cols).map(|i| if random(i) < percent { 1.0 } else { -0.0 }).collect();
                let matrix = MatrixRef::new(rows, cols, &data).unwrap();
                for axis in [Axis::Row, Axis::Column] {
                    assert_eq!(tightest(matrix, axis), reference(matrix, axis), "{rows}x{cols} {percent}% {axis}");
                }
            }
        }
    }

    #[test]
    fn the_shortest_of_equally_dense_patterns_is_told() {
        assert_eq!(Tightest([2, 2, 4, 8, 16]).text().as_deref(), Some("2:4"));
        assert_eq!(Tightest([1, 2, 4, 8, 16]).text().as_deref(), Some("1:2"));
        assert_eq!(Tightest([2, 4, 4, 8, 16]).text().as_deref(), Some("4:8"));
        assert_eq!(Tightest([2, 4, 8, 16, 32]).text(), None);
        assert_eq!(Tightest([0; 5]).text().as_deref(), Some("zero"));
    }
}
