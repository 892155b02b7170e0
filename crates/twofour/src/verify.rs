//! Is a dense tensor already 2:4, along which axis, and where not?

use rayon::prelude::*;

use crate::{Axis, Element, Mask, MatrixRef, Pattern, mask::Violation};

/// What a dense matrix's zeros say about a pattern, along one axis.
#[derive(Debug, Clone, PartialEq)]
pub struct Conformance {
    /// The pattern checked.
    pub pattern: Pattern,
    /// The axis checked.
    pub axis: Axis,
    /// Groups in the matrix.
    pub groups: usize,
    /// Groups with more non-zeros than the pattern allows.
    pub violation_count: usize,
    /// The first of them, as many as were asked for.
    pub violations: Vec<Violation>,
}

impl Conformance {
    /// Whether every group obeys the pattern.
    pub fn obeys(&self) -> bool {
        self.violation_count == 0
    }
}

/// Checks a dense matrix against a pattern; an element is non-zero unless it is +0.0 or -0.0 (NaN is non-zero).
/// At most `places` violations are listed, all are counted.
pub fn conformance<T: Element>(matrix: MatrixRef<'_, T>, pattern: Pattern, axis: Axis, places: usize) -> Conformance {
    let mask = Mask::of_nonzeros(matrix);
    let groups = match axis {
        Axis::Row => matrix.rows() * matrix.cols().div_ceil(pattern.m()),
        Axis::Column => matrix.rows().div_ceil(pattern.m()) * matrix.cols(),
    };
    let mut violations = Vec::new();
    let mut violation_count = 0;
    for violation in mask.violations(pattern, axis) {
        violation_count += 1;
        if violations.len() < places {
            violations.push(violation);
        }
    }
    Conformance { pattern, axis, groups, violation_count, violations }
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

    #[test]
    fn the_axis_matters() {
        // Two of four along rows, four of four along columns.
        let data: Vec<f32> = (0..32).map(|i| if i % 4 < 2 { 1.0 } else { -0.0 }).collect();
        let matrix = MatrixRef::new(4, 8, &data).unwrap();
        assert!(conformance(matrix, Pattern::TWO_FOUR, Axis::Row, 8).obeys());
        let columns = conformance(matrix, Pattern::TWO_FOUR, Axis::Column, 3);
        assert_eq!((columns.violation_count, columns.violations.len(), columns.groups), (4, 3, 8));
        assert_eq!(columns.violations[2], Violation { line: 4, group: 0, kept: 4 });
        assert_eq!(census(&data), Census { elements: 32, nonzeros: 16, negative_zeros: 16, ..Census::default() });
    }

    #[test]
    fn the_census_sees_what_is_not_finite() {
        let c = census(&[f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 0.0, 1.0]);
        assert_eq!(c, Census { elements: 5, nonzeros: 4, negative_zeros: 0, nans: 1, infinities: 2 });
    }
}
