//! From dense weights to dense weights with zeros.

use std::{collections::HashMap, ops::ControlFlow, path::Path};

use super::{
    Conversion, Item, Matrix, OnMatrix, Overwrite, Plan, Progress, Reader, TensorInfo, Writer, reject_not_finite, run,
};
use crate::{Element, MatrixRef, Result, file::StoredDType, select::Selector};

/// What [`prune()`] did.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct PruneReport {
    /// Every tensor of the input, in file order.
    pub tensors: Vec<PrunedTensor>,
}

/// What became of one tensor.
#[derive(Debug, Clone, PartialEq)]
pub struct PrunedTensor {
    /// Its name.
    pub name: String,
    /// The dtype of its elements.
    pub dtype: StoredDType,
    /// Its shape.
    pub shape: Vec<usize>,
    /// What was done.
    pub outcome: PruneOutcome,
}

/// What [`prune()`] did with a tensor.
#[derive(Debug, Clone, Copy, PartialEq)]
#[non_exhaustive]
pub enum PruneOutcome {
    /// It was pruned.
    Pruned {
        /// How the mask was chosen.
        selector: Selector,
        /// The share of elements that were not zero before.
        density_before: f64,
        /// The share of elements that the mask keeps.
        density: f64,
        /// The share of `Σ|w|` that was kept.
        kept_l1: f64,
        /// The share of `Σw²` that was kept.
        kept_l2: f64,
    },
    /// No selector was chosen for it, and it was copied.
    NotChosen,
    /// It is no matrix with elements of a dtype that twofour knows, and was copied.
    NotAMatrix,
    /// It is stored compressed already, and was copied.
    AlreadyCompressed,
}

/// Writes a model with the chosen weights pruned: dense, with +0.0 in the place of every element that is dropped. All else,
/// metadata included, is copied byte for byte.
///
/// `choose` is asked once for every two-dimensional tensor with elements of a dtype that twofour knows; `None` keeps it as it is.
///
/// A sharded input gives a directory with the same file names; see [`crate::file`](mod@crate::file) for what happens on the way.
///
/// # Errors
/// [`crate::Error::NotANumber`] or [`crate::Error::Infinite`], with tensor, row and column, where a chosen tensor is not
/// finite, before anything is written. Those of [`Reader::open`]; [`crate::Error::Exists`] where the output exists and may
/// not be replaced; [`crate::Error::Interrupted`] where `progress` breaks off; [`crate::Error::Io`] where the system
/// refuses. Nothing is left then.
pub fn prune(
    input: impl AsRef<Path>,
    output: impl AsRef<Path>,
    overwrite: Overwrite,
    choose: &mut dyn FnMut(&TensorInfo) -> Option<Selector>,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<PruneReport> {
    let reader = Reader::open(input)?;
    let mut conversion = Prune { choose, report: PruneReport::default(), choices: HashMap::new() };
    run(&mut conversion, &reader, output.as_ref(), overwrite, progress)?;
    Ok(conversion.report)
}

struct Prune<'a> {
    choose: &'a mut dyn FnMut(&TensorInfo) -> Option<Selector>,
    report: PruneReport,
    choices: HashMap<String, Option<Selector>>,
}

impl Conversion for Prune<'_> {
    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<()> {
        if let Item::Plain(tensor) = item
            && let Some(matrix) = Matrix::of(tensor)
        {
            let choice = (self.choose)(tensor);
            if choice.is_some() {
                matrix.run(reader, Finite)?;
            }
            self.choices.insert(tensor.name.clone(), choice);
        }
        item.plan_copy(plan);
        Ok(())
    }

    fn write(&mut self, reader: &Reader, item: Item<'_>, writer: &mut Writer) -> Result<()> {
        let (dtype, shape, outcome) = match item {
            Item::Compressed(w) => {
                item.write_copy(reader, writer)?;
                (w.format.stored(), vec![w.rows, w.cols], PruneOutcome::AlreadyCompressed)
            }
            Item::Plain(tensor) => {
                let outcome = match (Matrix::of(tensor), self.choices.get(&tensor.name)) {
                    (Some(matrix), Some(&selector)) => {
                        matrix.run(reader, Write { writer, name: &tensor.name, selector })?
                    }
                    _ => {
                        item.write_copy(reader, writer)?;
                        PruneOutcome::NotAMatrix
                    }
                };
                (tensor.dtype, tensor.shape.clone(), outcome)
            }
        };
        self.report.tensors.push(PrunedTensor { name: item.name().to_owned(), dtype, shape, outcome });
        Ok(())
    }
}

/// Checks that every element is finite.
struct Finite;

impl OnMatrix for Finite {
    type Output = ();

    fn run<T: Element>(self, matrix: MatrixRef<'_, T>) -> Result<()> {
        reject_not_finite(matrix)
    }
}

/// Prunes and writes a matrix.
struct Write<'a> {
    writer: &'a mut Writer,
    name: &'a str,
    selector: Option<Selector>,
}

impl OnMatrix for Write<'_> {
    type Output = PruneOutcome;

    fn run<T: Element>(self, matrix: MatrixRef<'_, T>) -> Result<PruneOutcome> {
        let Some(selector) = self.selector else {
            self.writer.write_elements(self.name, matrix.data())?;
            return Ok(PruneOutcome::NotChosen);
        };
        let (values, retained) = selector.pruned(matrix)?;
        self.writer.write_elements(self.name, &values)?;
        Ok(PruneOutcome::Pruned {
            selector,
            density_before: retained.density_before(),
            density: retained.density(),
            kept_l1: retained.l1(),
            kept_l2: retained.l2(),
        })
    }
}
