//! The life of masks.

use std::{collections::BTreeMap, fmt};

use super::{ParameterRule, Schedule};
use crate::{Error, Mask, MatrixRef, Result};

/// What a new mask is chosen from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Regrowth {
    /// The dense weight: pruned elements come back when they matter.
    #[default]
    FromDense,
    /// The weight with the present mask applied: what was pruned once counts as zero.
    Never,
}

/// Masks of named parameters; see the [module](super).
#[derive(Debug)]
pub struct Sparsifier {
    pub(super) parameters: BTreeMap<String, Parameter>,
    regrowth: Regrowth,
}

/// A parameter under a sparsifier.
pub(super) struct Parameter {
    rule: Box<dyn ParameterRule>,
    pub(super) base_level: f64,
    pub(super) level: f64,
    pub(super) mask: Mask,
}

impl fmt::Debug for Parameter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shape = (self.mask.rows(), self.mask.cols());
        f.debug_struct("Parameter").field("shape", &shape).field("level", &self.level).finish_non_exhaustive()
    }
}

/// What became of a parameter when its mask was written into it.
#[derive(Debug, Clone, PartialEq)]
pub struct SquashedParameter {
    /// Its name.
    pub name: String,
    /// The level at the end.
    pub level: f64,
    /// Its mask.
    pub mask: Mask,
}

impl Sparsifier {
    /// A sparsifier without parameters.
    pub fn new(regrowth: Regrowth) -> Self {
        Self { parameters: BTreeMap::new(), regrowth }
    }

    /// Takes a parameter `[rows, cols]` under a rule, at a level that schedules count from. Its mask keeps everything
    /// until [`Sparsifier::step`].
    ///
    /// # Errors
    /// [`Error::DuplicateParameter`] for a name that is taken; [`Error::SparsityLevel`] for a level that is NaN or
    /// infinite.
    pub fn prepare(
        &mut self,
        name: impl Into<String>,
        rows: usize,
        cols: usize,
        rule: impl ParameterRule + 'static,
        level: f64,
    ) -> Result<()> {
        let name = name.into();
        if !level.is_finite() {
            return Err(Error::SparsityLevel { value: level }.in_tensor(name));
        }
        if self.parameters.contains_key(&name) {
            return Err(Error::DuplicateParameter { name });
        }
        let parameter = Parameter { rule: Box::new(rule), base_level: level, level, mask: Mask::full(rows, cols) };
        self.parameters.insert(name, parameter);
        Ok(())
    }

    /// The names of all parameters, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.parameters.keys().map(String::as_str)
    }

    /// The mask of a parameter.
    pub fn mask(&self, name: &str) -> Option<&Mask> {
        self.parameters.get(name).map(|p| &p.mask)
    }

    /// The present level of a parameter.
    pub fn level(&self, name: &str) -> Option<f64> {
        self.parameters.get(name).map(|p| p.level)
    }

    /// Sets every parameter's level to what a schedule makes of the level that it was prepared with.
    pub fn set_epoch(&mut self, schedule: &dyn Schedule, epoch: u64) {
        for parameter in self.parameters.values_mut() {
            parameter.level = schedule.level(parameter.base_level, epoch);
        }
    }

    /// Sets the level of one parameter: where parameters follow schedules of their own.
    ///
    /// # Errors
    /// [`Error::NoParameter`] for an unknown name, [`Error::SparsityLevel`] for a level that is NaN or infinite.
    pub fn set_level(&mut self, name: &str, level: f64) -> Result<()> {
        if !level.is_finite() {
            return Err(Error::SparsityLevel { value: level }.in_tensor(name));
        }
        let parameter = self.parameters.get_mut(name);
        parameter.ok_or_else(|| Error::NoParameter { name: name.to_owned() })?.level = level;
        Ok(())
    }

    /// Chooses the mask of one parameter anew, from its dense weight; returns the number of its elements that changed.
    /// Where it fails, the mask is as it was.
    ///
    /// # Errors
    /// [`Error::NoParameter`] for an unknown name; [`Error::Shape`] for a weight of another shape than prepared; the
    /// rule's own.
    pub fn step_one(&mut self, name: &str, weight: MatrixRef<'_, f32>) -> Result<u64> {
        let parameter = self.parameters.get(name).ok_or_else(|| Error::NoParameter { name: name.to_owned() })?;
        let mask = self.chosen(parameter, weight).map_err(|error| error.in_tensor(name))?;
        let flips = mask.flips(&parameter.mask)?;
        if let Some(parameter) = self.parameters.get_mut(name) {
            parameter.mask = mask;
        }
        Ok(flips)
    }

    /// Chooses all masks anew, from the dense weights that `weight_of` returns by name. Where it fails, no mask is
    /// changed.
    ///
    /// # Errors
    /// [`Error::NoParameter`] where `weight_of` returns `None`; [`Error::Shape`] for a weight of another shape than
    /// prepared; the rules' own. All but the first with the name.
    pub fn step<'w>(&mut self, mut weight_of: impl FnMut(&str) -> Option<MatrixRef<'w, f32>>) -> Result<()> {
        let mut masks = Vec::with_capacity(self.parameters.len());
        for (name, parameter) in &self.parameters {
            let weight = weight_of(name).ok_or_else(|| Error::NoParameter { name: name.clone() })?;
            masks.push(self.chosen(parameter, weight).map_err(|error| error.in_tensor(name))?);
        }
        self.parameters.values_mut().zip(masks).for_each(|(parameter, mask)| parameter.mask = mask);
        Ok(())
    }

    fn chosen(&self, parameter: &Parameter, weight: MatrixRef<'_, f32>) -> Result<Mask> {
        let (rows, cols) = (weight.rows(), weight.cols());
        parameter.mask.expect_shape("weight", rows, cols)?;
        let mask = match self.regrowth {
            Regrowth::FromDense => parameter.rule.mask(weight, parameter.level)?,
            Regrowth::Never => {
                let masked = parameter.mask.apply(weight)?;
                parameter.rule.mask(MatrixRef::new(rows, cols, &masked)?, parameter.level)?
            }
        };
        mask.expect_shape("a rule's mask and its weight", rows, cols)?;
        Ok(mask)
    }

    /// Returns `W ∘ M`, with the dense weight left as it is.
    ///
    /// # Errors
    /// [`Error::NoParameter`] for an unknown name, [`Error::Shape`] for a weight of another shape.
    pub fn masked(&self, name: &str, weight: MatrixRef<'_, f32>) -> Result<Vec<f32>> {
        let mask = self.mask(name).ok_or_else(|| Error::NoParameter { name: name.to_owned() })?;
        mask.apply(weight).map_err(|error| error.in_tensor(name))
    }

    /// Writes +0.0 in the place of every pruned element of a weight, or of its gradient. What is pruned is lost there.
    ///
    /// # Errors
    /// [`Error::NoParameter`] for an unknown name, [`Error::Length`] for another number of elements.
    pub fn apply(&self, name: &str, values: &mut [f32]) -> Result<()> {
        let mask = self.mask(name).ok_or_else(|| Error::NoParameter { name: name.to_owned() })?;
        mask.apply_in_place(values).map_err(|error| error.in_tensor(name))
    }

    /// Writes the masks into the weights that `weight_of` returns by name, and ends the masks' life.
    ///
    /// # Errors
    /// [`Error::NoParameter`] where `weight_of` returns `None`, [`Error::Length`] for a weight of another size. Weights
    /// before it in the order of names are masked then.
    pub fn squash_mask<'w>(
        self,
        mut weight_of: impl FnMut(&str) -> Option<&'w mut [f32]>,
    ) -> Result<Vec<SquashedParameter>> {
        let squash = |(name, parameter): (String, Parameter)| {
            let weight = weight_of(&name).ok_or_else(|| Error::NoParameter { name: name.clone() })?;
            parameter.mask.apply_in_place(weight).map_err(|error| error.in_tensor(&name))?;
            Ok(SquashedParameter { name, level: parameter.level, mask: parameter.mask })
        };
        self.parameters.into_iter().map(squash).collect()
    }
}
