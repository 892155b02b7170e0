//! A choice of mask by name, for any pattern and axis.

use crate::{
    Axis, Element, Error, Mask, MatrixRef, Pattern, Result,
    criterion::{Magnitude, mask_along},
    mask::{Retained, apply_row},
    select::{
        Sparsity, Transposable,
        band::{self, BandRule, BandScratch},
        magnitude, nm, transposable,
    },
};

/// How the mask of a dense matrix is chosen when it is pruned once, for any pattern.
///
/// A layer in training has a [`MaskRule`](crate::layer::MaskRule): always 2:4 along rows, and chosen anew from the
/// dense master weight.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum Selector {
    /// The largest magnitudes of each group ([`magnitude`]).
    Magnitude {
        /// The pattern that the mask obeys.
        pattern: Pattern,
        /// The axis along which it does.
        axis: Axis,
    },
    /// The largest magnitudes that any other pattern keeps ([`mask_along`]).
    Pattern {
        /// The pattern that the mask obeys.
        sparsity: Sparsity,
        /// The axis along which the layer sums.
        axis: Axis,
    },
    /// 2:4 along rows and along columns, tile by tile ([`transposable`]).
    Transposable(Transposable),
}

impl Selector {
    /// The two largest magnitudes of each group of four along a row.
    pub const TWO_FOUR: Self = Selector::Magnitude { pattern: Pattern::TWO_FOUR, axis: Axis::Row };

    /// The selector of that name: `magnitude`, with a pattern and an axis, or that of a [`Transposable`] rule, which is
    /// 2:4 along both axes.
    ///
    /// # Errors
    /// [`Error::UnknownSelector`] for other names, [`Error::SelectorPattern`] for a transposable rule with another
    /// pattern than 2:4.
    ///
    /// ```
    /// use twofour::{Axis, Pattern, Selector};
    /// assert_eq!(Selector::named("magnitude", Pattern::TWO_FOUR, Axis::Row)?, Selector::TWO_FOUR);
    /// assert!(Selector::named("optimal", "1:4".parse::<Pattern>()?, Axis::Row).is_err());
    /// # Ok::<(), twofour::Error>(())
    /// ```
    pub fn named(name: &str, sparsity: impl Into<Sparsity>, axis: Axis) -> Result<Self> {
        let sparsity = sparsity.into();
        if name == "magnitude" {
            return Ok(Self::by_magnitude(sparsity, axis));
        }
        let known = "magnitude, greedy, greedy-signed, causal1122, optimal";
        let rule: Transposable = name.parse().map_err(|_| Error::UnknownSelector { name: name.to_owned(), known })?;
        if sparsity != Pattern::TWO_FOUR.into() {
            return Err(Error::SelectorPattern { name: rule.name(), pattern: sparsity.to_string() });
        }
        Ok(Selector::Transposable(rule))
    }

    /// The selector of the largest magnitudes.
    pub fn by_magnitude(sparsity: Sparsity, axis: Axis) -> Self {
        match sparsity {
            Sparsity::Groups(pattern) => Selector::Magnitude { pattern, axis },
            sparsity => Selector::Pattern { sparsity, axis },
        }
    }

    /// The mask of a matrix.
    ///
    /// # Errors
    /// [`Error::NotANumber`] with the place of the first NaN; of [`Selector::Pattern`] also [`Error::Infinite`], and
    /// those of [`Sparsity::level`].
    pub fn mask<T: Element>(self, matrix: MatrixRef<'_, T>) -> Result<Mask> {
        match self {
            Selector::Magnitude { pattern, axis } => magnitude(matrix, pattern, axis),
            Selector::Pattern { sparsity, axis } => mask_along(matrix, &Magnitude::default(), sparsity, axis),
            Selector::Transposable(rule) => transposable(matrix, rule),
        }
    }

    /// Rows that belong together: a part of a matrix that begins at a multiple of so many rows is pruned as the whole
    /// is.
    pub(crate) fn height(self) -> usize {
        match self {
            Selector::Magnitude { pattern, axis } => BandRule::<f32>::height(&nm::magnitude_rule(pattern, axis)),
            Selector::Pattern { sparsity: Sparsity::EachRow(_), axis: Axis::Row } => 1,
            Selector::Pattern { sparsity: Sparsity::Vectors { v, .. }, axis: Axis::Row } => v,
            // All rows.
            Selector::Pattern { .. } => usize::MAX,
            Selector::Transposable(rule) => BandRule::<f32>::height(&rule),
        }
    }

    /// [`band::prune`] with this selector's rule.
    pub(crate) fn prune<T: Element>(
        self,
        matrix: MatrixRef<'_, T>,
        scratch: &mut BandScratch,
        values: &mut [T],
        retained: &mut [Retained],
    ) {
        match self {
            Selector::Magnitude { pattern, axis } => {
                band::prune(matrix, &nm::magnitude_rule(pattern, axis), scratch, values, retained);
            }
            Selector::Pattern { .. } => {
                // What is not finite shows in the sums.
                let mask = self.mask(matrix).unwrap_or_else(|_| Mask::full(matrix.rows(), matrix.cols()));
                let rows = values.chunks_mut(matrix.cols().max(1)).zip(retained).enumerate();
                for (row, (values, retained)) in rows {
                    apply_row(matrix.row(row), mask.row_words(row), values);
                    *retained = Retained::of_row(matrix.row(row), mask.row_words(row));
                }
            }
            Selector::Transposable(rule) => band::prune(matrix, &rule, scratch, values, retained),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_known_name_is_a_selector() {
        let named = |name, pattern| Selector::named(name, pattern, Axis::Column);
        let Err(Error::UnknownSelector { known, .. }) = named("largest", Pattern::TWO_FOUR) else { panic!() };
        for name in known.split(", ") {
            assert!(named(name, Pattern::TWO_FOUR).is_ok(), "{name}");
        }
        let rules = Transposable::ALL.map(|rule| named(rule.name(), Pattern::TWO_FOUR).unwrap());
        assert_eq!(rules, Transposable::ALL.map(Selector::Transposable));
        let error = named("greedy", "1:4".parse().unwrap()).unwrap_err().to_string();
        assert!(error.contains("greedy") && error.contains("1:4"), "{error}");
        let rows: Sparsity = "rows@0.5".parse().unwrap();
        let found = Selector::named("magnitude", rows, Axis::Row).unwrap();
        assert_eq!(found, Selector::Pattern { sparsity: rows, axis: Axis::Row });
        assert!(Selector::named("greedy", rows, Axis::Row).unwrap_err().to_string().contains("rows@0.5"));
    }
}
