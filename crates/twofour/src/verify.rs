//! Has a dense tensor a pattern already, along which axis, and where not?

use std::{fmt, ops::Range};

use rayon::prelude::*;

use crate::{
    Axis, Element, Error, Mask, MatrixRef, Result,
    select::{Sparsity, structured::Cut, unstructured::pruned_count},
};

/// What a dense matrix's zeros say about a pattern, along one axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Conformance {
    /// The pattern checked.
    pub sparsity: Sparsity,
    /// The axis checked.
    pub axis: Axis,
    /// The parts that the pattern counts: groups of N:M, blocks, rows or columns; 1 where it is the whole matrix.
    pub parts: usize,
    /// Parts with more nonzeros than the pattern allows. Where a share of blocks, rows or columns must be zero: how
    /// many more of them must be.
    pub violation_count: usize,
    /// The first of them, as many as were asked for. Where a share of parts must be zero, those of the fewest nonzeros.
    pub violations: Vec<Violation>,
}

impl Conformance {
    /// Whether no part violates the pattern.
    pub fn obeys(&self) -> bool {
        self.violation_count == 0
    }
}

/// A part of a matrix with more nonzeros than its pattern allows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Violation {
    /// Which part.
    pub place: Place,
    /// Its nonzeros; of [`Place::Vector`] its columns with nonzeros.
    pub nonzeros: usize,
    /// How many it may have; 0 where it is one of those that must be zero.
    pub allowed: usize,
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Violation { place, nonzeros, allowed } = self;
        match place {
            Place::Vector { .. } => write!(f, "{place}: non-zeros in {nonzeros} columns, of which {allowed} may be"),
            Place::Group { .. } => write!(f, "{place}: {nonzeros} non-zeros"),
            _ => write!(f, "{place}: {nonzeros} non-zeros, of which {allowed} may be"),
        }
    }
}

/// A part of a matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Place {
    /// A group of N:M.
    Group {
        /// The axis along which groups run.
        axis: Axis,
        /// The row ([`Axis::Row`]) or column ([`Axis::Column`]) that holds the group.
        line: usize,
        /// The group's index along that line.
        group: usize,
    },
    /// V rows by M columns ([`Axis::Row`]), or M rows by V columns ([`Axis::Column`]).
    Vector {
        /// The axis along which groups run.
        axis: Axis,
        /// Its first row.
        row: usize,
        /// Its first column.
        col: usize,
    },
    /// A block.
    Block {
        /// Its first row.
        row: usize,
        /// Its first column.
        col: usize,
    },
    /// A row ([`Axis::Row`]) or column ([`Axis::Column`]).
    Line {
        /// Which of the two.
        axis: Axis,
        /// Its index.
        line: usize,
    },
    /// All of it.
    Matrix,
}

impl Place {
    /// The place in the transpose.
    fn transposed(self) -> Self {
        let other = |axis| if axis == Axis::Row { Axis::Column } else { Axis::Row };
        match self {
            Place::Group { axis, line, group } => Place::Group { axis: other(axis), line, group },
            Place::Vector { axis, row, col } => Place::Vector { axis: other(axis), row: col, col: row },
            Place::Block { row, col } => Place::Block { row: col, col: row },
            Place::Line { axis, line } => Place::Line { axis: other(axis), line },
            Place::Matrix => Place::Matrix,
        }
    }
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Place::Group { axis, line, group } => write!(f, "{axis} {line}, group {group}"),
            Place::Vector { row, col, .. } => write!(f, "the rows and columns from row {row}, column {col}"),
            Place::Block { row, col } => write!(f, "the block from row {row}, column {col}"),
            Place::Line { axis, line } => write!(f, "{axis} {line}"),
            Place::Matrix => f.write_str("all elements"),
        }
    }
}

/// Checks a dense matrix against a pattern; an element is non-zero unless it is +0.0 or -0.0 (NaN is non-zero). Along
/// [`Axis::Column`] it is the transpose that must obey. At most `places` violations are listed, all are counted.
///
/// # Errors
/// Those of [`Sparsity::level`].
///
/// ```
/// use twofour::{Axis, MatrixRef, select::Sparsity, verify::conformance};
/// let w = [0.0f32, 0.0, 0.0, 2.0, 0.0, 0.0, 3.0, 4.0];
/// let found = conformance(MatrixRef::new(2, 4, &w)?, "block:2x2@0.5".parse::<Sparsity>()?, Axis::Row, 1)?;
/// assert!(found.obeys());
/// let found = conformance(MatrixRef::new(2, 4, &w)?, "rows@0.5".parse::<Sparsity>()?, Axis::Row, 1)?;
/// assert_eq!(found.violations[0].to_string(), "row 0: 1 non-zeros, of which 0 may be");
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn conformance<T: Element>(
    matrix: MatrixRef<'_, T>,
    sparsity: impl Into<Sparsity>,
    axis: Axis,
    places: usize,
) -> Result<Conformance> {
    conformance_of_mask(&Mask::of_nonzeros(matrix), sparsity, axis, places)
}

/// [`conformance`] of a matrix whose nonzeros are what a mask keeps.
///
/// # Errors
/// Those of [`Sparsity::level`].
pub fn conformance_of_mask(
    mask: &Mask,
    sparsity: impl Into<Sparsity>,
    axis: Axis,
    places: usize,
) -> Result<Conformance> {
    let sparsity = sparsity.into();
    let level = sparsity.level()?;
    let (stored, transposed) = match (axis, sparsity) {
        (Axis::Row, _) | (_, Sparsity::Groups(_) | Sparsity::Tensor(_)) => (sparsity, None),
        (_, Sparsity::Blocks { rows, cols, level }) => (Sparsity::Blocks { rows: cols, cols: rows, level }, None),
        (_, Sparsity::WholeRows(level)) => (Sparsity::WholeColumns(level), None),
        (_, Sparsity::WholeColumns(level)) => (Sparsity::WholeRows(level), None),
        (_, Sparsity::Vectors { .. } | Sparsity::EachRow(_)) => (sparsity, Some(mask.transposed())),
    };
    let mut found = Found { places, parts: 0, count: 0, violations: Vec::new() };
    found.look(transposed.as_ref().unwrap_or(mask), stored, axis, level);
    if transposed.is_some() {
        found.violations.iter_mut().for_each(|violation| violation.place = violation.place.transposed());
    }
    let Found { parts, count: violation_count, violations, .. } = found;
    Ok(Conformance { sparsity, axis, parts, violation_count, violations })
}

/// An error unless a mask obeys a pattern.
///
/// # Errors
/// [`Error::TooManyKept`] or [`Error::Violation`] with the first place; those of [`Sparsity::level`].
pub(crate) fn expect_mask(mask: &Mask, sparsity: Sparsity, axis: Axis) -> Result<()> {
    if let Sparsity::Groups(pattern) = sparsity {
        return mask.verify(pattern, axis);
    }
    match conformance_of_mask(mask, sparsity, axis, 1)?.violations.first() {
        None => Ok(()),
        Some(violation) => Err(Error::Violation { pattern: sparsity.to_string(), violation: *violation }),
    }
}

/// What was found so far.
struct Found {
    places: usize,
    parts: usize,
    count: usize,
    violations: Vec<Violation>,
}

impl Found {
    fn add(&mut self, place: Place, nonzeros: usize, allowed: usize) {
        self.count += 1;
        if self.violations.len() < self.places {
            self.violations.push(Violation { place, nonzeros, allowed });
        }
    }

    fn look(&mut self, mask: &Mask, sparsity: Sparsity, axis: Axis, level: f64) {
        let (rows, cols) = (mask.rows(), mask.cols());
        let keeps = |elements: usize| elements - pruned_count(elements, level);
        match sparsity {
            Sparsity::Groups(pattern) => {
                self.parts = match axis {
                    Axis::Row => rows * cols.div_ceil(pattern.m()),
                    Axis::Column => rows.div_ceil(pattern.m()) * cols,
                };
                for group in mask.violations(pattern, axis) {
                    let place = Place::Group { axis, line: group.line, group: group.group };
                    self.add(place, group.kept, pattern.n());
                }
            }
            Sparsity::Vectors { v, pattern } => {
                let cut = Cut::new((rows, cols), [v, pattern.m()]);
                self.parts = cut.count();
                for (block_row, block_col) in blocks(cut) {
                    let (row, col) = (cut.rows_of(block_row).start, cut.cols_of(block_col).start);
                    let of_rows = cut.rows_of(block_row).map(|row| (row, mask.bits(row, col, pattern.m())));
                    let columns = of_rows.clone().fold(0, |all, (_, bits)| all | bits).count_ones() as usize;
                    let full = of_rows.map(|(row, bits)| (row, bits.count_ones() as usize));
                    if columns > Sparsity::VECTOR_COLUMNS {
                        let place = Place::Vector { axis: Axis::Row, row, col };
                        self.add(place, columns, Sparsity::VECTOR_COLUMNS);
                    } else if let Some((line, kept)) = full.clone().find(|(_, kept)| *kept > pattern.n()) {
                        self.add(Place::Group { axis: Axis::Row, line, group: block_col }, kept, pattern.n());
                    }
                }
            }
            Sparsity::EachRow(_) => {
                self.parts = rows;
                for line in 0..rows {
                    let (nonzeros, allowed) = (count(mask, line, 0..cols), keeps(cols));
                    if nonzeros > allowed {
                        self.add(Place::Line { axis: Axis::Row, line }, nonzeros, allowed);
                    }
                }
            }
            Sparsity::Tensor(_) => {
                self.parts = 1;
                let (nonzeros, allowed) = (mask.count(), keeps(rows * cols));
                if nonzeros > allowed {
                    self.add(Place::Matrix, nonzeros, allowed);
                }
            }
            Sparsity::Blocks { .. } | Sparsity::WholeRows(_) | Sparsity::WholeColumns(_) => {
                let Some(unit) = sparsity.unit(rows, cols) else { return };
                let cut = Cut::new((rows, cols), unit);
                self.parts = cut.count();
                let nonzeros = |(block_row, block_col)| {
                    let cols = cut.cols_of(block_col);
                    let count = cut.rows_of(block_row).map(|row| count(mask, row, cols.clone())).sum::<usize>();
                    (count, (block_row, block_col))
                };
                let mut nonzero: Vec<(usize, (usize, usize))> =
                    blocks(cut).map(nonzeros).filter(|(count, _)| *count > 0).collect();
                let excess = nonzero.len().saturating_sub(keeps(cut.count()));
                nonzero.sort_unstable();
                for (count, (block_row, block_col)) in nonzero.into_iter().take(excess) {
                    let (row, col) = (cut.rows_of(block_row).start, cut.cols_of(block_col).start);
                    let place = match sparsity {
                        Sparsity::WholeRows(_) => Place::Line { axis: Axis::Row, line: row },
                        Sparsity::WholeColumns(_) => Place::Line { axis: Axis::Column, line: col },
                        _ => Place::Block { row, col },
                    };
                    self.add(place, count, 0);
                }
            }
        }
    }
}

/// Row and column of all blocks, row by row.
fn blocks(cut: Cut) -> impl Iterator<Item = (usize, usize)> {
    (0..cut.down()).flat_map(move |row| (0..cut.across()).map(move |col| (row, col)))
}

/// Kept elements among consecutive columns of a row.
fn count(mask: &Mask, row: usize, cols: Range<usize>) -> usize {
    let end = cols.end;
    cols.step_by(64).map(|col| mask.bits(row, col, (end - col).min(64)).count_ones() as usize).sum()
}

/// Elements of special kinds in a dense matrix.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Census {
    /// All elements.
    pub elements: usize,
    /// Elements that are neither +0.0 nor -0.0.
    pub nonzeros: usize,
    /// Elements that are -0.0: pruned, but some peers' compressors take them for non-zeros.
    pub negative_zeros: usize,
    /// NaNs.
    pub nans: usize,
    /// Infinities of either sign.
    pub infinities: usize,
}

/// Counts a slice's zeros, negative zeros, NaNs and infinities.
pub fn census<T: Element>(values: &[T]) -> Census {
    let count = |chunk: &[T]| {
        chunk.iter().fold(Census { elements: chunk.len(), ..Census::default() }, |mut c, v| {
            let f = v.to_f32();
            c.nonzeros += usize::from(f != 0.0);
            c.negative_zeros += usize::from(v.is_negative_zero());
            c.nans += usize::from(f.is_nan());
            c.infinities += usize::from(f.is_infinite());
            c
        })
    };
    values.par_chunks(1 << 16).map(count).reduce(Census::default, |a, b| Census {
        elements: a.elements + b.elements,
        nonzeros: a.nonzeros + b.nonzeros,
        negative_zeros: a.negative_zeros + b.negative_zeros,
        nans: a.nans + b.nans,
        infinities: a.infinities + b.infinities,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Pattern,
        criterion::{Magnitude, mask_along},
    };
    use proptest::prelude::*;

    const PATTERNS: [&str; 9] = [
        "2:4",
        "7:32",
        "3:2:8",
        "5:4:16",
        "block:3x5@0.6",
        "rows@0.4",
        "columns@0.7",
        "unstructured-rows@0.55",
        "unstructured@0.3",
    ];

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(48))]
        /// And one more nonzero than a pattern has room for is a violation, in its place.
        #[test]
        fn what_is_pruned_to_a_pattern_obeys_it(
            (rows, cols, data) in (1usize..20, 1usize..90)
                .prop_flat_map(|(r, c)| (Just(r), Just(c), proptest::collection::vec(1i8..=100, r * c))),
            is_along_rows in any::<bool>(),
            choice in any::<proptest::sample::Index>(),
        ) {
            let data: Vec<f32> = data.into_iter().map(f32::from).collect();
            let matrix = MatrixRef::new(rows, cols, &data).unwrap();
            let axis = if is_along_rows { Axis::Row } else { Axis::Column };
            for text in PATTERNS {
                let sparsity: Sparsity = text.parse().unwrap();
                let mask = mask_along(matrix, &Magnitude::default(), sparsity, axis).unwrap();
                expect_mask(&mask, sparsity, axis).unwrap();
                let transposed = matrix.transposed();
                let of_transpose = MatrixRef::new(cols, rows, &transposed).unwrap();
                let other = if is_along_rows { Axis::Column } else { Axis::Row };
                let other = mask_along(of_transpose, &Magnitude::default(), sparsity, other).unwrap();
                prop_assert_eq!(&other.transposed(), &mask);
                let pruned: Vec<(usize, usize)> =
                    (0..rows * cols).map(|i| (i / cols, i % cols)).filter(|(r, c)| !mask.is_kept(*r, *c)).collect();
                if pruned.is_empty() {
                    continue;
                }
                // Weights are not zero, so that what a rule keeps it keeps full.
                let (row, col) = pruned[choice.index(pruned.len())];
                let mut more = mask.clone();
                more.keep(row, col);
                let found = conformance_of_mask(&more, sparsity, axis, 9).unwrap();
                prop_assert_eq!((found.violation_count, found.violations.len()), (1, 1), "{}: {:?}", text, found);
                let contains = match found.violations[0].place {
                    // Another part may have a single nonzero, too.
                    _ if sparsity.unit(rows, cols).is_some() => found.violations[0].nonzeros == 1,
                    Place::Group { axis: Axis::Row, line, .. } | Place::Line { axis: Axis::Row, line } => line == row,
                    Place::Group { line, .. } | Place::Line { line, .. } => line == col,
                    Place::Vector { row: r, col: c, .. } | Place::Block { row: r, col: c } => r <= row && c <= col,
                    Place::Matrix => true,
                };
                prop_assert!(contains, "{}: {} has not {}, {}", text, found.violations[0], row, col);
            }
        }
    }

    #[test]
    fn an_empty_matrix_obeys_every_pattern() {
        for (rows, cols) in [(0, 0), (0, 7), (7, 0)] {
            for text in PATTERNS {
                for axis in [Axis::Row, Axis::Column] {
                    let found =
                        conformance_of_mask(&Mask::empty(rows, cols), text.parse::<Sparsity>().unwrap(), axis, 1);
                    assert!(found.unwrap().obeys(), "{text}");
                    let matrix = MatrixRef::<f32>::new(rows, cols, &[]).unwrap();
                    let mask = mask_along(matrix, &Magnitude::default(), text.parse().unwrap(), axis).unwrap();
                    assert_eq!((mask.rows(), mask.cols()), (rows, cols));
                }
            }
        }
    }

    #[test]
    fn the_parts_of_the_fewest_nonzeros_are_told_first() {
        // Three of four blocks have nonzeros, where two may: the one with a single nonzero is one too many.
        let mut data = [1.0f32; 16];
        [2, 3, 6, 7, 8, 9, 12].iter().for_each(|zero| data[*zero] = 0.0);
        let matrix = MatrixRef::new(4, 4, &data).unwrap();
        let found = conformance(matrix, "block:2x2@0.5".parse::<Sparsity>().unwrap(), Axis::Row, 5).unwrap();
        assert_eq!((found.parts, found.violation_count), (4, 1));
        assert_eq!(found.violations, [Violation { place: Place::Block { row: 2, col: 0 }, nonzeros: 1, allowed: 0 }]);
        let error = expect_mask(&Mask::of_nonzeros(matrix), "columns@0.5".parse().unwrap(), Axis::Row).unwrap_err();
        let text = error.to_string();
        assert!(text.contains("columns@0.5") && text.contains("column 0"), "{text}");
        let none = conformance(matrix, Sparsity::EachRow(2.0), Axis::Row, 1);
        assert!(matches!(none, Err(Error::SparsityLevel { .. })));
    }

    #[test]
    fn the_axis_matters() {
        // Two of four along rows, four of four along columns.
        let data: Vec<f32> = (0..32).map(|i| if i % 4 < 2 { 1.0 } else { -0.0 }).collect();
        let matrix = MatrixRef::new(4, 8, &data).unwrap();
        assert!(conformance(matrix, Pattern::TWO_FOUR, Axis::Row, 8).unwrap().obeys());
        let columns = conformance(matrix, Pattern::TWO_FOUR, Axis::Column, 3).unwrap();
        assert_eq!((columns.violation_count, columns.violations.len(), columns.parts), (4, 3, 8));
        let place = Place::Group { axis: Axis::Column, line: 4, group: 0 };
        assert_eq!(columns.violations[2], Violation { place, nonzeros: 4, allowed: 2 });
        assert_eq!(census(&data), Census { elements: 32, nonzeros: 16, negative_zeros: 16, ..Census::default() });
    }

    #[test]
    fn the_census_sees_what_is_not_finite() {
        let c = census(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, 1.0]);
        assert_eq!(c, Census { elements: 5, nonzeros: 4, negative_zeros: 0, nans: 1, infinities: 2 });
    }
}
