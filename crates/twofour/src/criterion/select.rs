//! From a criterion to scores and masks.

use rayon::prelude::*;

use super::{Criterion, Scorer, Weight};
use crate::{
    Axis, Element, Error, Mask, MatrixRef, Result,
    select::{
        Sparsity, nm, structured,
        unstructured::{self, ScoreRows},
        vectors,
    },
};

/// Returns the scores of all elements, row-major.
///
/// # Errors
/// [`Error::NotANumber`] and [`Error::Infinite`] with the place of the first element that is not finite,
/// [`Error::NanScore`] with that of the first NaN score, and those of [`Criterion::scorer`].
pub fn scores<T: Element>(matrix: MatrixRef<'_, T>, criterion: &dyn Criterion) -> Result<Vec<f32>> {
    let weight = Weight::new(matrix);
    let scored = Scored::new(&weight, criterion, None)?;
    let mut out = vec![0f32; matrix.data().len()];
    let rows = out.par_chunks_mut(matrix.cols().max(1)).enumerate();
    match rows.find_map_first(|(row, scores)| scored.row(row, scores).err()) {
        None => Ok(out),
        Some(error) => Err(error),
    }
}

/// Returns the mask that keeps the elements of highest score; ties go to the lower index.
///
/// # Errors
/// Those of [`scores`]; [`Error::SparsityLevel`] for a sparsity that is not from 0 to 1.
///
/// ```
/// use twofour::{MatrixRef, calibration::InputNorms, criterion::{self, Wanda, WandaVariant}, select::Sparsity};
/// let mut norms = InputNorms::new(4);
/// norms.add(&[100.0, 10.0, 1.0, 0.1])?;
/// let wanda = Wanda { norms: &norms, variant: WandaVariant::Paper };
/// let w = [1.0f32, 2.0, 3.0, 4.0];
/// let mask = criterion::mask(MatrixRef::new(1, 4, &w)?, &wanda, "2:4".parse()?)?;
/// assert_eq!(mask.row_words(0), [0b0011]);
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn mask<T: Element>(matrix: MatrixRef<'_, T>, criterion: &dyn Criterion, sparsity: Sparsity) -> Result<Mask> {
    let level = sparsity.level()?;
    let weight = Weight::new(matrix);
    let scored = Scored::new(&weight, criterion, None)?;
    let pattern = match sparsity {
        Sparsity::Groups(pattern) => Some(pattern),
        Sparsity::EachRow(_) => None,
        Sparsity::Vectors { v, pattern } => return vectors::mask(&scored, v, pattern),
        Sparsity::Tensor(_) | Sparsity::Blocks { .. } | Sparsity::WholeRows(_) | Sparsity::WholeColumns(_) => {
            return match sparsity.unit(matrix.rows(), matrix.cols()) {
                Some(unit) => structured::mask(&scored, unit, level),
                None => {
                    let pruned = unstructured::pruned_count(matrix.data().len(), level);
                    Ok(unstructured::masks(&[&scored], pruned)?.remove(0))
                }
            };
        }
    };
    let cols = matrix.cols();
    let pruned = unstructured::pruned_count(cols, level);
    let mut mask = Mask::empty(matrix.rows(), cols);
    let scratch = || (vec![0f32; cols], Vec::new());
    let errors = mask.par_rows_mut().enumerate().map_init(scratch, |(scores, keys), (row, words)| {
        scored.row(row, scores)?;
        match pattern {
            Some(pattern) => {
                nm::best_of_row(pattern, scores, words);
            }
            None => unstructured::keep_best(scores, pruned, words, keys),
        }
        Ok(())
    });
    match errors.find_map_first(Result::err) {
        None => Ok(mask),
        Some(error) => Err(error),
    }
}

/// Returns the mask along the axis that the layer sums: rows of a weight stored as `[out, in]` ([`Axis::Row`]), columns
/// of one stored as `[in, out]` ([`Axis::Column`]).
///
/// # Errors
/// Those of [`mask`], with places in the stored matrix.
pub fn mask_along<T: Element>(
    matrix: MatrixRef<'_, T>,
    criterion: &dyn Criterion,
    sparsity: Sparsity,
    axis: Axis,
) -> Result<Mask> {
    match axis {
        Axis::Row => mask(matrix, criterion, sparsity),
        Axis::Column => {
            let transposed = matrix.transposed();
            let of_layer = mask(MatrixRef::new(matrix.cols(), matrix.rows(), &transposed)?, criterion, sparsity);
            Ok(of_layer.map_err(Error::transposed)?.transposed())
        }
    }
}

/// How scores of several weights become comparable.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Normalization {
    /// Scores as they are.
    #[default]
    None,
    /// Scores over their weight's mean score.
    Mean,
    /// Scores over the root of their weight's mean squared score: of magnitudes, over the weight's RMS.
    RootMeanSquare,
}

/// One of several weights with a common threshold.
pub struct GlobalWeight<'a> {
    /// Its name, for errors.
    pub name: &'a str,
    /// The weight.
    pub weight: Weight<'a>,
    /// Its criterion: the same rule for all, with each layer's own statistics.
    pub criterion: &'a dyn Criterion,
}

impl std::fmt::Debug for GlobalWeight<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("GlobalWeight").field("name", &self.name).field("weight", &self.weight).finish_non_exhaustive()
    }
}

/// Returns the masks, in order, that together prune the share `level` of all elements (rounded down): those of lowest
/// normalized score, wherever they are. Among equal scores those of a later weight, then of a higher row and column, go
/// first.
///
/// # Errors
/// Those of [`mask`], with the weight's name.
pub fn global_masks(weights: &[GlobalWeight<'_>], level: f64, normalization: Normalization) -> Result<Vec<Mask>> {
    Sparsity::Tensor(level).level()?;
    let mut all = Vec::with_capacity(weights.len());
    for w in weights {
        let mut scored = Scored::new(&w.weight, w.criterion, Some(w.name))?;
        scored.divisor = divisor(&scored, normalization)?;
        all.push(scored);
    }
    let rows: Vec<&dyn ScoreRows> = all.iter().map(|s| s as &dyn ScoreRows).collect();
    let elements: usize = rows.iter().map(|w| w.rows() * w.cols()).sum();
    unstructured::masks(&rows, unstructured::pruned_count(elements, level))
}

/// What a weight's scores are divided by; 1 where all are zero.
fn divisor(scored: &Scored<'_>, normalization: Normalization) -> Result<f32> {
    let power = match normalization {
        Normalization::None => return Ok(1.0),
        Normalization::Mean => 1,
        Normalization::RootMeanSquare => 2,
    };
    let sums = (0..scored.rows()).into_par_iter().map_init(
        || vec![0f32; scored.cols()],
        |scores, row| -> Result<f64> {
            scored.row(row, scores)?;
            Ok(scores.iter().map(|s| f64::from(*s).powi(power)).sum())
        },
    );
    // Collected, so that neither the sum nor the error depends on the threads.
    let sums: Vec<Result<f64>> = sums.collect();
    let mut sum = 0.0;
    for of_row in sums {
        sum += of_row?;
    }
    let mean = sum / (scored.rows() * scored.cols()).max(1) as f64;
    let divisor = if power == 2 { mean.sqrt() } else { mean };
    Ok(if divisor > 0.0 && divisor.is_finite() { divisor as f32 } else { 1.0 })
}

/// A weight with what scores its rows.
struct Scored<'a> {
    weight: &'a Weight<'a>,
    scorer: Scorer<'a>,
    name: Option<&'a str>,
    divisor: f32,
}

impl<'a> Scored<'a> {
    fn new(weight: &'a Weight<'a>, criterion: &'a dyn Criterion, name: Option<&'a str>) -> Result<Self> {
        let scorer = criterion.scorer(weight).map_err(|error| in_weight(error, name))?;
        Ok(Self { weight, scorer, name, divisor: 1.0 })
    }
}

/// Says in which of several weights an error happened.
fn in_weight(error: Error, name: Option<&str>) -> Error {
    match name {
        Some(name) => error.in_tensor(name),
        None => error,
    }
}

impl ScoreRows for Scored<'_> {
    fn rows(&self) -> usize {
        self.weight.rows()
    }

    fn cols(&self) -> usize {
        self.weight.cols()
    }

    fn row(&self, row: usize, scores: &mut [f32]) -> Result<()> {
        let mut weights = vec![0f32; scores.len()];
        self.weight.read_row(row, &mut weights);
        if let Some(col) = weights.iter().position(|w| !w.is_finite()) {
            let error =
                if weights[col].is_nan() { Error::NotANumber { row, col } } else { Error::Infinite { row, col } };
            return Err(in_weight(error, self.name));
        }
        (self.scorer)(row, &weights, scores);
        if self.divisor != 1.0 {
            scores.iter_mut().for_each(|score| *score /= self.divisor);
        }
        match scores.iter().position(|score| score.is_nan()) {
            None => Ok(()),
            Some(col) => Err(in_weight(Error::NanScore { row, col }, self.name)),
        }
    }
}
