//! Pruning methods by name.

use std::{fmt::Debug, ops::Range};

use super::{
    Backend, Compensation, Grid, Refit, Solved, Swaps, alps::ByAlps, compensated_on, refit_on, round,
    sparsegpt::BySparseGpt, swaps,
};
use crate::{
    Error, Mask, MatrixRef, Result,
    calibration::{CrossProducts, Hessian, Statistic, StatisticKind},
    criterion::{self, Criterion, Magnitude, Ria, Wanda, WandaVariant},
    select::Sparsity,
};

/// A named way to prune a layer's weight. The command finds it in [`METHODS`] by its name.
pub trait Method: Debug + Sync {
    /// The name, in lower case.
    fn name(&self) -> &'static str;

    /// What it keeps and what it changes: one line, without a full stop.
    fn about(&self) -> &'static str;

    /// What it requires of the layer's inputs.
    fn requires(&self) -> StatisticKind;

    /// Whether weights that read one input may be pruned as one, one above the other: what is kept of a row does not
    /// depend on what the weight's other rows are.
    fn joins_rows(&self) -> bool {
        true
    }

    /// The patterns that it prunes to, in words.
    fn patterns(&self) -> &'static str {
        "every pattern"
    }

    /// Whether it prunes to a pattern.
    fn prunes_to(&self, _sparsity: Sparsity) -> bool {
        true
    }

    /// Prunes a weight `[rows, cols]` to a pattern along its rows. A method whose work is not large computes on the CPU
    /// whatever the backend.
    ///
    /// # Errors
    /// A weight that is not finite, with the place; a statistic of another number of features or of too little;
    /// [`Error::MethodPattern`] for a pattern that it does not [prune to](Method::prunes_to).
    fn prune(
        &self,
        backend: &dyn Backend,
        weight: MatrixRef<'_, f32>,
        sparsity: Sparsity,
        inputs: Option<&Statistic>,
    ) -> Result<Pruned>;
}

/// All methods.
pub static METHODS: &[&dyn Method] = &[&MAGNITUDE, &WANDA, &RIA, &BySparseGpt, &ByAlps];

/// Returns the method of a name.
pub fn method(name: &str) -> Option<&'static dyn Method> {
    METHODS.iter().copied().find(|method| method.name() == name)
}

/// What a method found.
#[derive(Debug, Clone, PartialEq)]
pub enum Pruned {
    /// Kept weights stay what they are.
    Mask(Mask),
    /// Kept weights have changed.
    Solved(Solved),
}

impl Pruned {
    /// What is kept.
    pub fn mask(&self) -> &Mask {
        match self {
            Pruned::Mask(mask) => mask,
            Pruned::Solved(solved) => &solved.mask,
        }
    }
}

/// A method, and what follows it.
#[derive(Debug, Clone, Copy)]
pub struct Pruning {
    /// The method.
    pub method: &'static dyn Method,
    /// The pattern along rows.
    pub sparsity: Sparsity,
    /// The most exchanges in a row of a kept for a pruned element of its group, after the method ([`swaps`](swaps()));
    /// 0 for none.
    pub swaps: usize,
    /// Steps of refitting kept weights at the end ([`refit`](super::refit())); 0 for none.
    pub refit: usize,
    /// The share of the errors of earlier layers that the weight makes up for ([`compensated`](super::compensated()));
    /// 0 for none.
    pub compensation: f64,
    /// What kept weights are rounded to at the end ([`round`](round())), if they are.
    pub grid: Option<Grid>,
}

impl Pruning {
    /// A method with ten steps of refitting.
    pub fn new(method: &'static dyn Method, sparsity: impl Into<Sparsity>) -> Self {
        let sparsity = sparsity.into();
        Pruning { method, sparsity, swaps: 0, refit: Refit::default().steps, compensation: 0.0, grid: None }
    }

    /// An error where the method, or what follows it, does not have the pattern: before any work.
    ///
    /// # Errors
    /// [`Error::MethodPattern`]; those of [`Sparsity::level`].
    pub fn expect_pattern(&self) -> Result<()> {
        self.sparsity.level()?;
        if !self.method.prunes_to(self.sparsity) {
            return Err(pattern_error(self.method, self.sparsity));
        }
        if self.swaps > 0 && !matches!(self.sparsity, Sparsity::Groups(_)) {
            let pattern = self.sparsity.to_string();
            return Err(Error::MethodPattern {
                method: "swaps",
                pattern,
                supported: "N:M, whose groups it exchanges in",
            });
        }
        Ok(())
    }

    /// What all of it requires of the layer's inputs.
    pub fn requires(&self) -> StatisticKind {
        let follows = self.swaps > 0 || self.refit > 0 || self.grid.is_some() || self.compensation > 0.0;
        self.method.requires().max(if follows { StatisticKind::Hessian } else { StatisticKind::Nothing })
    }

    /// Prunes a weight `[rows, cols]`, by what is known of its inputs, and of the dense model beside them, on a
    /// backend.
    ///
    /// # Errors
    /// Those of [`Method::prune`], [`compensated`](super::compensated()), [`swaps`](swaps()) and
    /// [`refit`](super::refit()).
    pub fn prune(
        &self,
        backend: &dyn Backend,
        weight: MatrixRef<'_, f32>,
        inputs: Option<&Statistic>,
        beside: Option<&CrossProducts>,
    ) -> Result<Pruned> {
        let target = self.target(backend, weight, inputs, beside)?;
        self.prune_for(backend, weight, target.as_deref(), inputs)
    }

    /// Prunes weights that read one input: together, where the method [allows](Method::joins_rows) it, which saves
    /// what depends on the input alone.
    ///
    /// # Errors
    /// Those of [`Pruning::prune`]; [`Error::Length`] for weights of two widths.
    pub fn prune_all(
        &self,
        backend: &dyn Backend,
        weights: &[MatrixRef<'_, f32>],
        inputs: Option<&Statistic>,
        beside: Option<&CrossProducts>,
    ) -> Result<Vec<Pruned>> {
        let [first, _, ..] = weights else {
            return weights.iter().map(|weight| self.prune(backend, *weight, inputs, beside)).collect();
        };
        let cols = first.cols();
        if let Some(other) = weights.iter().find(|weight| weight.cols() != cols) {
            let what = "columns of weights of one input";
            return Err(Error::Length { what, expected: cols, found: other.cols() });
        }
        if !self.method.joins_rows() || !self.sparsity.is_by_row() {
            return weights.iter().map(|weight| self.prune(backend, *weight, inputs, beside)).collect();
        }
        let rows: Vec<usize> = weights.iter().map(MatrixRef::rows).collect();
        let joined: Vec<f32> = weights.iter().flat_map(|weight| weight.data()).copied().collect();
        let joined = MatrixRef::new(rows.iter().sum(), cols, &joined)?;
        let target = self.target(backend, joined, inputs, beside)?;
        let found = self.prune_for(backend, joined, target.as_deref(), inputs)?;
        split(backend, found, target.as_deref().unwrap_or(joined.data()), &rows, inputs)
    }

    /// Returns the weight that is to be come near to, where it is another than the dense one: what makes up for the
    /// errors of earlier layers.
    ///
    /// # Errors
    /// Those of [`compensated`](super::compensated()).
    pub fn target(
        &self,
        backend: &dyn Backend,
        weight: MatrixRef<'_, f32>,
        inputs: Option<&Statistic>,
        beside: Option<&CrossProducts>,
    ) -> Result<Option<Vec<f32>>> {
        let Some(beside) = beside.filter(|_| self.compensation > 0.0) else { return Ok(None) };
        let settings = Compensation { share: self.compensation, ..Compensation::default() };
        compensated_on(backend, weight, hessian_of(inputs)?, beside, &settings).map(Some)
    }

    fn prune_for(
        &self,
        backend: &dyn Backend,
        weight: MatrixRef<'_, f32>,
        target: Option<&[f32]>,
        inputs: Option<&Statistic>,
    ) -> Result<Pruned> {
        let Some(target) = target else { return self.prune_to(backend, weight, inputs) };
        let target = MatrixRef::new(weight.rows(), weight.cols(), target)?;
        Ok(match self.prune_to(backend, target, inputs)? {
            // The dense weight is another.
            Pruned::Mask(mask) => {
                Pruned::Solved(solved(backend, target, mask.apply(target)?, mask, hessian_of(inputs)?)?)
            }
            found => found,
        })
    }

    /// Prunes the weight that is to be come near to.
    fn prune_to(
        &self,
        backend: &dyn Backend,
        weight: MatrixRef<'_, f32>,
        inputs: Option<&Statistic>,
    ) -> Result<Pruned> {
        let found = self.method.prune(backend, weight, self.sparsity, inputs)?;
        if self.swaps == 0 && self.refit == 0 && self.grid.is_none() {
            return Ok(found);
        }
        let hessian = hessian_of(inputs)?;
        let mut start = None;
        let mut mask = match found {
            Pruned::Mask(mask) => mask,
            Pruned::Solved(solved) => {
                start = Some(solved.weight);
                solved.mask
            }
        };
        if self.swaps > 0 {
            self.expect_pattern()?;
        }
        if let Sparsity::Groups(pattern) = self.sparsity
            && self.swaps > 0
        {
            let settings = Swaps { rounds: self.swaps, ..Swaps::new(pattern) };
            let swapped = swaps(weight, &mask, hessian, &settings)?;
            if swapped != mask {
                (mask, start) = (swapped, None);
            }
        }
        if self.refit > 0 {
            let settings = Refit { steps: self.refit, ..Refit::default() };
            start = Some(refit_on(backend, weight, &mask, start.as_deref(), hessian, &settings)?);
        }
        match (self.grid, start) {
            (Some(grid), start) => {
                let adjusted = start.as_deref().unwrap_or(weight.data());
                round(weight, &mask, adjusted, hessian, grid).map(Pruned::Solved)
            }
            (None, Some(adjusted)) => Ok(Pruned::Solved(solved(backend, weight, adjusted, mask, hessian)?)),
            (None, None) => Ok(Pruned::Mask(mask)),
        }
    }
}

/// What was found for weights one above the other, for each.
fn split(
    backend: &dyn Backend,
    pruned: Pruned,
    target: &[f32],
    rows: &[usize],
    inputs: Option<&Statistic>,
) -> Result<Vec<Pruned>> {
    let all = pruned.mask().rows().max(1);
    let mut first = 0;
    let part = |count: &usize| {
        let range = first..first + count;
        first = range.end;
        // Of a matrix with as many rows as all weights.
        fn of<T: Clone>(values: &[T], all: usize, rows: &Range<usize>) -> Vec<T> {
            let width = values.len() / all;
            values[rows.start * width..rows.end * width].to_vec()
        }
        let mask = pruned.mask().of_rows(range.clone());
        let Pruned::Solved(found) = &pruned else { return Ok(Pruned::Mask(mask)) };
        let of_part = of(target, all, &range);
        let of_part = MatrixRef::new(mask.rows(), mask.cols(), &of_part)?;
        let own = solved(backend, of_part, of(&found.weight, all, &range), mask, hessian_of(inputs)?)?;
        Ok(Pruned::Solved(Solved {
            integers: found.integers.as_ref().map(|integers| of(integers, all, &range)),
            scales: found.scales.as_ref().map(|scales| of(scales, all, &range)),
            ..own
        }))
    };
    rows.iter().map(part).collect()
}

/// An adjusted weight, with its error for the weight that it comes near to.
pub(super) fn solved(
    backend: &dyn Backend,
    weight: MatrixRef<'_, f32>,
    adjusted: Vec<f32>,
    mask: Mask,
    hessian: &Hessian,
) -> Result<Solved> {
    let difference: Vec<f32> = weight.data().iter().zip(&adjusted).map(|(w, own)| w - own).collect();
    let difference = MatrixRef::new(weight.rows(), weight.cols(), &difference)?;
    let squared_error = backend.squared_outputs(hessian, difference)?;
    Ok(Solved { weight: adjusted, mask, integers: None, scales: None, squared_error })
}

/// The error of a pattern that a method does not have.
pub(super) fn pattern_error(method: &dyn Method, sparsity: Sparsity) -> Error {
    let (method, supported) = (method.name(), method.patterns());
    Error::MethodPattern { method, pattern: sparsity.to_string(), supported }
}

fn inputs_of(inputs: Option<&Statistic>) -> Result<&Statistic> {
    inputs.ok_or(Error::NoTokens { what: "statistic of a layer's inputs" })
}

pub(super) fn hessian_of(inputs: Option<&Statistic>) -> Result<&Hessian> {
    inputs.and_then(Statistic::hessian).ok_or(Error::NoTokens { what: "Hessian" })
}

/// A criterion under its name.
#[derive(Debug)]
struct ByCriterion {
    name: &'static str,
    about: &'static str,
    requires: StatisticKind,
    joins_rows: bool,
    mask: fn(MatrixRef<'_, f32>, Sparsity, Option<&Statistic>) -> Result<Mask>,
}

fn mask_by(weight: MatrixRef<'_, f32>, sparsity: Sparsity, criterion: &dyn Criterion) -> Result<Mask> {
    criterion::mask(weight, criterion, sparsity)
}

static MAGNITUDE: ByCriterion = ByCriterion {
    name: "magnitude",
    about: "Keep the largest absolute values",
    requires: StatisticKind::Nothing,
    joins_rows: true,
    mask: |weight, sparsity, _| mask_by(weight, sparsity, &Magnitude::default()),
};

static WANDA: ByCriterion = ByCriterion {
    name: "wanda",
    about: "Keep the largest |w| times the norm of the input feature",
    requires: StatisticKind::Norms,
    joins_rows: true,
    mask: |weight, sparsity, inputs| {
        let norms = inputs_of(inputs)?.norms();
        mask_by(weight, sparsity, &Wanda { norms: &norms, variant: WandaVariant::Paper })
    },
};

static RIA: ByCriterion = ByCriterion {
    name: "ria",
    about: "Keep the largest shares of row and column, times the root of the norm",
    requires: StatisticKind::Norms,
    // Scores are shares of a weight's columns.
    joins_rows: false,
    mask: |weight, sparsity, inputs| {
        let norms = inputs_of(inputs)?.norms();
        mask_by(weight, sparsity, &Ria { norms: &norms, exponent: Ria::EXPONENT })
    },
};

impl Method for ByCriterion {
    fn name(&self) -> &'static str {
        self.name
    }

    fn about(&self) -> &'static str {
        self.about
    }

    fn requires(&self) -> StatisticKind {
        self.requires
    }

    fn joins_rows(&self) -> bool {
        self.joins_rows
    }

    fn prune(
        &self,
        _: &dyn Backend,
        weight: MatrixRef<'_, f32>,
        sparsity: Sparsity,
        inputs: Option<&Statistic>,
    ) -> Result<Pruned> {
        Ok(Pruned::Mask((self.mask)(weight, sparsity, inputs)?))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{
        Axis, Pattern,
        calibration::DenseSide,
        solve::{
            Bits, Cpu, ScaleScope,
            testing::{correlated, error_of, random},
        },
        verify::expect_mask,
    };

    fn inputs(cols: usize) -> (Statistic, Hessian) {
        let hessian = correlated(cols, 300);
        (Statistic::Hessian(hessian.clone()), hessian)
    }

    #[test]
    fn every_method_is_found_by_its_name_and_obeys_every_pattern() {
        let (rows, cols) = (6, 32);
        let (statistic, _) = inputs(cols);
        let w = random(rows * cols, 8);
        let matrix = MatrixRef::new(rows, cols, &w).unwrap();
        for found in METHODS.iter().copied() {
            let name = found.name();
            assert_eq!(method(name).map(Method::name), Some(name));
            assert!(!found.about().ends_with('.') && name == name.to_lowercase());
            for text in [
                "2:4",
                "1:4",
                "4:8",
                "8:16",
                "7:32",
                "3:2:8",
                "block:4x8@0.5",
                "rows@0.5",
                "columns@0.25",
                "unstructured@0.5",
                "unstructured-rows@0.3",
            ] {
                let sparsity: Sparsity = text.parse().unwrap();
                let pruned = found.prune(&Cpu, matrix, sparsity, Some(&statistic));
                let pruning = Pruning { swaps: 0, ..Pruning::new(found, sparsity) };
                assert_eq!(pruning.expect_pattern().is_ok(), found.prunes_to(sparsity), "{name} {text}");
                if found.prunes_to(sparsity) {
                    let pruned = pruned.unwrap();
                    expect_mask(pruned.mask(), sparsity, Axis::Row).unwrap();
                    // Rows that read one input are pruned as they are alone.
                    let apart = pruning.prune_all(&Cpu, &[matrix, matrix], Some(&statistic), None).unwrap();
                    assert!(apart.iter().all(|part| part.mask() == pruned.mask()) || name == "alps", "{name} {text}");
                } else {
                    let error = pruned.unwrap_err().to_string();
                    assert!(
                        error.contains(name) && error.contains(text) && error.contains(found.patterns()),
                        "{error}"
                    );
                }
                let swaps = Pruning { swaps: 1, ..pruning }.expect_pattern();
                assert_eq!(swaps.is_ok(), matches!(sparsity, Sparsity::Groups(_)), "{name} {text}");
            }
            if found.requires() > StatisticKind::Nothing {
                let two_four = Sparsity::Groups(Pattern::TWO_FOUR);
                assert!(matches!(found.prune(&Cpu, matrix, two_four, None), Err(Error::NoTokens { .. })));
            }
        }
        assert!(method("random").is_none());
    }

    /// Among more elements there is more to choose from: of a wider group no method leaves more of the error.
    #[test]
    fn the_wider_the_groups_the_smaller_is_every_method_s_error() {
        let (rows, cols) = (32, 64);
        let (statistic, hessian) = inputs(cols);
        let w = random(rows * cols, 14);
        let matrix = MatrixRef::new(rows, cols, &w).unwrap();
        for found in METHODS.iter().copied() {
            for (swaps, refit) in [(0, 0), (20, 10)] {
                let error = |text: &str| {
                    let pruning = Pruning { swaps, refit, ..Pruning::new(found, text.parse::<Sparsity>().unwrap()) };
                    let weight = match pruning.prune(&Cpu, matrix, Some(&statistic), None).unwrap() {
                        Pruned::Mask(mask) => mask.apply(matrix).unwrap(),
                        Pruned::Solved(solved) => solved.weight,
                    };
                    error_of(&hessian, &w, &weight)
                };
                let errors = ["2:4", "4:8", "8:16", "16:32"].map(error);
                assert!(errors.is_sorted_by(|a, b| a > b), "{} {swaps} {refit}: {errors:?}", found.name());
            }
        }
    }

    #[test]
    fn what_follows_a_method_makes_its_error_smaller() {
        for pattern in ["2:4", "4:8", "8:16"] {
            follows(pattern.parse().unwrap());
        }
    }

    fn follows(pattern: Pattern) {
        let (rows, cols) = (24, 48);
        let (statistic, hessian) = inputs(cols);
        let w = random(rows * cols, 9);
        let matrix = MatrixRef::new(rows, cols, &w).unwrap();
        for found in METHODS.iter().copied() {
            let error = |swaps, refit| {
                let pruning = Pruning { swaps, refit, ..Pruning::new(found, pattern) };
                assert!(pruning.requires() >= if refit > 0 { StatisticKind::Hessian } else { found.requires() });
                match pruning.prune(&Cpu, matrix, Some(&statistic), None).unwrap() {
                    Pruned::Mask(mask) => error_of(&hessian, &w, &mask.apply(matrix).unwrap()),
                    Pruned::Solved(solved) => {
                        let error = error_of(&hessian, &w, &solved.weight);
                        assert!((error - solved.squared_error).abs() <= 0.1 * error, "{pattern} {}", found.name());
                        error
                    }
                }
            };
            let (alone, refitted) = (error(0, 0), error(0, 10));
            assert!(refitted < alone, "{}: {refitted} {alone}", found.name());
            if found.requires() < StatisticKind::Hessian {
                let (swapped, both) = (error(100, 0), error(100, 10));
                assert!(swapped < alone && both < refitted, "{}: {swapped} {both}", found.name());
            }
        }
    }

    /// What is compensated comes nearer to the dense outputs, whatever prunes.
    #[test]
    fn errors_of_earlier_layers_are_made_up_for_by_every_method() {
        let (rows, cols, tokens) = (16, 16, 300);
        let dense = random(tokens * cols, 31);
        let pruned: Vec<f32> = (0..dense.len()).map(|i| 0.8 * dense[i] + 0.3 * dense[i ^ 1]).collect();
        let mut statistic = Statistic::new(StatisticKind::Hessian, cols).unwrap().unwrap();
        statistic.add(&pruned).unwrap();
        let mut cross = CrossProducts::new(DenseSide::Inputs, cols).unwrap();
        cross.add(&dense, &pruned).unwrap();
        let w = random(rows * cols, 32);
        let matrix = MatrixRef::new(rows, cols, &w).unwrap();
        let outputs = |weight: &[f32], x: &[f32]| -> Vec<f32> {
            let of =
                |token: &[f32]| weight.chunks(cols).map(|w| w.iter().zip(token).map(|(w, x)| w * x).sum()).collect();
            x.chunks(cols).flat_map(|token| -> Vec<f32> { of(token) }).collect()
        };
        let expected = outputs(&w, &dense);
        for found in METHODS.iter().copied() {
            for refit in [0, 10] {
                let error = |compensation| {
                    let pruning = Pruning { compensation, refit, ..Pruning::new(found, Pattern::TWO_FOUR) };
                    let weight = match pruning.prune(&Cpu, matrix, Some(&statistic), Some(&cross)).unwrap() {
                        Pruned::Mask(mask) => mask.apply(matrix).unwrap(),
                        Pruned::Solved(solved) => solved.weight,
                    };
                    outputs(&weight, &pruned).iter().zip(&expected).map(|(a, b)| (a - b) * (a - b)).sum::<f32>()
                };
                let [alone, compensated] = [0.0, 1.0].map(error);
                assert!(compensated < alone, "{} {refit}: {compensated} {alone}", found.name());
            }
        }
    }

    #[test]
    fn weights_of_one_input_are_pruned_together_as_they_are_alone() {
        let cols = 32;
        let (statistic, _) = inputs(cols);
        let w = random(17 * cols, 12);
        let [a, b] = [(0, 12), (12, 17)].map(|(i, j)| MatrixRef::new(j - i, cols, &w[i * cols..j * cols]).unwrap());
        for found in METHODS.iter().copied() {
            // What ALPS keeps depends on all rows: its penalty follows them.
            if found.name() == "alps" {
                continue;
            }
            for grid in [None, Some(Grid { bits: Bits::Int8, scope: ScaleScope::Row })] {
                let pruning = Pruning { grid, ..Pruning::new(found, Pattern::TWO_FOUR) };
                let together = pruning.prune_all(&Cpu, &[a, b], Some(&statistic), None).unwrap();
                for (weight, together) in [a, b].into_iter().zip(&together) {
                    let alone = pruning.prune(&Cpu, weight, Some(&statistic), None).unwrap();
                    assert_eq!(alone.mask(), together.mask(), "{}", found.name());
                    let (Pruned::Solved(alone), Pruned::Solved(together)) = (&alone, together) else { panic!() };
                    assert!(alone.weight.iter().zip(&together.weight).all(|(a, b)| (a - b).abs() < 1e-4));
                    assert!(alone.integers == together.integers && alone.scales == together.scales);
                    let near = (alone.squared_error - together.squared_error).abs() <= 0.05 * alone.squared_error;
                    assert!(near || grid.is_some(), "{}", found.name());
                }
            }
        }
        let narrow = MatrixRef::new(1, 4, &w[..4]).unwrap();
        let pruning = Pruning::new(METHODS[0], Pattern::TWO_FOUR);
        assert!(matches!(pruning.prune_all(&Cpu, &[a, narrow], Some(&statistic), None), Err(Error::Length { .. })));
        assert!(pruning.prune_all(&Cpu, &[], None, None).unwrap().is_empty());
    }

    #[test]
    fn a_mask_alone_requires_no_hessian() {
        let pruning = Pruning { refit: 0, ..Pruning::new(&WANDA, Pattern::TWO_FOUR) };
        assert_eq!(pruning.requires(), StatisticKind::Norms);
        let mut statistic = Statistic::new(pruning.requires(), 4).unwrap();
        statistic.as_mut().unwrap().add(&[1.0, 2.0, 3.0, 4.0]).unwrap();
        let w = MatrixRef::new(1, 4, &[4.0f32, 3.0, 2.0, 1.0]).unwrap();
        let found = pruning.prune(&Cpu, w, statistic.as_ref(), None).unwrap();
        assert!(matches!(found, Pruned::Mask(mask) if mask.row_words(0) == [0b0110]));
        let refitted = Pruning::new(&WANDA, Pattern::TWO_FOUR);
        assert!(matches!(refitted.prune(&Cpu, w, statistic.as_ref(), None), Err(Error::NoTokens { what: "Hessian" })));
    }
}
