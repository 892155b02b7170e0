//! From dense weights to dense weights with zeros.

use std::{collections::HashMap, ops::ControlFlow, path::Path};

use rayon::prelude::*;

use super::{Conversion, Item, Matrix, OnMatrix, Overwrite, Plan, Progress, Reader, TensorInfo, Writer, pieces, run};
use crate::{
    Arithmetic, Axis, Error, Mask, MatrixRef, Result,
    file::StoredDType,
    first_error::first_error,
    memory,
    select::{Selector, Sparsity},
};

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
    /// It was pruned by the function given to [`prune_with`].
    PrunedBy {
        /// The share of elements that were not zero before.
        density_before: f64,
        /// The share of elements that the mask keeps.
        density: f64,
        /// The share of `Σ|w|` of the input in the places that are kept.
        kept_l1: f64,
        /// The share of `Σw²` of the input in the places that are kept.
        kept_l2: f64,
        /// Whether kept weights were adjusted.
        adjusted: bool,
    },
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
    let mut choose = |tensor: &TensorInfo| choose(tensor).map(Rule::Selector);
    let mut none =
        |_: &TensorInfo, matrix: MatrixRef<'_, f32>| Ok(PrunedWeight::Mask(Mask::full(matrix.rows(), matrix.cols())));
    convert((input.as_ref(), output.as_ref()), overwrite, &mut choose, &mut none, progress)
}

/// What a function made of a weight for [`prune_with`].
#[derive(Debug, Clone, PartialEq)]
pub enum PrunedWeight {
    /// The mask: kept elements stay as they are, bit for bit.
    Mask(Mask),
    /// The pruned weight, row-major, with kept elements adjusted; they are rounded to the tensor's dtype, to nearest.
    Adjusted {
        /// The elements; what the mask does not keep must be zero.
        weight: Vec<f32>,
        /// What is kept.
        mask: Mask,
    },
}

/// As [`prune()`], with weights pruned by a function: by any criterion or solver, with statistics of the caller's.
///
/// `choose` is asked once for every two-dimensional tensor with elements of a dtype that twofour knows: the sparsity that it is to have and the axis along which a
/// pattern is to hold, or `None` to keep it as it is. Then `prune` is called with
/// each chosen tensor in f32, one at a time. What it returns is verified before it is written: the shape, that a pattern is obeyed, that what is not kept is zero, and that no element is
/// infinite in the tensor's dtype.
///
/// # Errors
/// Those of [`prune()`] and of the function, with the tensor's name; [`Error::Shape`] or [`Error::Length`] for a result of another shape, [`Error::TooManyKept`] for a mask that breaks its
/// pattern, [`Error::NotPruned`] for an element that should be zero, [`Error::Infinite`] for one beyond the dtype. Nothing is left then.
///
/// ```
/// use std::{collections::BTreeMap, ops::ControlFlow};
/// use twofour::{Axis, criterion::{self, Magnitude}, file::{self, Overwrite, PlannedTensor, PrunedWeight, Reader, StoredDType, Writer}, select::Sparsity};
/// let directory = tempfile::tempdir()?;
/// let at = |name: &str| directory.path().join(name);
/// let plan = vec![PlannedTensor::new("up.weight", StoredDType::F32, [1, 4])];
/// let mut writer = Writer::create(at("in.safetensors"), Overwrite::No, plan, BTreeMap::new())?;
/// writer.write_elements("up.weight", &[1.0f32, -3.0, 2.0, 0.5])?;
/// writer.finish()?;
///
/// let sparsity: Sparsity = "unstructured@0.75".parse()?;
/// file::prune_with(
///     at("in.safetensors"),
///     at("out.safetensors"),
///     Overwrite::No,
///     &mut |_tensor| Some((sparsity, Axis::Row)),
///     &mut |_tensor, weight| Ok(PrunedWeight::Mask(criterion::mask(weight, &Magnitude::default(), sparsity)?)),
///     &mut |_| ControlFlow::Continue(()),
/// )?;
/// assert_eq!(*Reader::open(at("out.safetensors"))?.tensor("up.weight")?.elements::<f32>()?, [0.0, -3.0, 0.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub fn prune_with(
    input: impl AsRef<Path>,
    output: impl AsRef<Path>,
    overwrite: Overwrite,
    choose: &mut dyn FnMut(&TensorInfo) -> Option<(Sparsity, Axis)>,
    prune: &mut dyn FnMut(&TensorInfo, MatrixRef<'_, f32>) -> Result<PrunedWeight>,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<PruneReport> {
    let mut choose = |tensor: &TensorInfo| choose(tensor).map(|(sparsity, axis)| Rule::Function(sparsity, axis));
    convert((input.as_ref(), output.as_ref()), overwrite, &mut choose, prune, progress)
}

fn convert(
    (input, output): (&Path, &Path),
    overwrite: Overwrite,
    choose: &mut dyn FnMut(&TensorInfo) -> Option<Rule>,
    prune: &mut dyn FnMut(&TensorInfo, MatrixRef<'_, f32>) -> Result<PrunedWeight>,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<PruneReport> {
    let reader = Reader::open(input)?;
    let mut conversion = Prune { choose, prune, report: PruneReport::default(), choices: HashMap::new() };
    run(&mut conversion, &reader, output, overwrite, progress)?;
    Ok(conversion.report)
}

/// How a tensor is pruned.
#[derive(Debug, Clone, Copy)]
enum Rule {
    Selector(Selector),
    Function(Sparsity, Axis),
}

struct Prune<'a> {
    choose: &'a mut dyn FnMut(&TensorInfo) -> Option<Rule>,
    prune: &'a mut dyn FnMut(&TensorInfo, MatrixRef<'_, f32>) -> Result<PrunedWeight>,
    report: PruneReport,
    choices: HashMap<String, Option<Rule>>,
}

impl Conversion for Prune<'_> {
    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<()> {
        if let Item::Plain(tensor) = item
            && let Some(matrix) = Matrix::of(tensor)
        {
            let choice = (self.choose)(tensor);
            if choice.is_some() {
                pieces::expect_finite(reader, matrix)?;
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
                    (Some(matrix), Some(Some(Rule::Selector(selector)))) => {
                        let retained = pieces::prune(reader, writer, matrix, *selector)?;
                        PruneOutcome::Pruned {
                            selector: *selector,
                            density_before: retained.density_before(),
                            density: retained.density(),
                            kept_l1: retained.l1(),
                            kept_l2: retained.l2(),
                        }
                    }
                    (Some(matrix), Some(&Some(Rule::Function(sparsity, axis)))) => {
                        matrix.run(reader, ByFunction { writer, tensor, sparsity, axis, prune: &mut *self.prune })?
                    }
                    (Some(_), Some(None)) => {
                        item.write_copy(reader, writer)?;
                        PruneOutcome::NotChosen
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

/// Prunes a matrix by a function and writes it.
struct ByFunction<'a> {
    writer: &'a mut Writer,
    tensor: &'a TensorInfo,
    sparsity: Sparsity,
    axis: Axis,
    prune: &'a mut dyn FnMut(&TensorInfo, MatrixRef<'_, f32>) -> Result<PrunedWeight>,
}

impl OnMatrix for ByFunction<'_> {
    type Output = PruneOutcome;

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<PruneOutcome> {
        let (rows, cols) = (matrix.rows(), matrix.cols());
        let mut dense = memory::zeroed::<f32>(rows * cols)?;
        dense.par_iter_mut().zip(matrix.data()).for_each(|(dense, value)| *dense = value.to_f32());
        let pruned = (self.prune)(self.tensor, MatrixRef::new(rows, cols, &dense)?)?;
        drop(dense);
        let (PrunedWeight::Mask(mask) | PrunedWeight::Adjusted { mask, .. }) = &pruned;
        mask.expect_shape("mask and weight", rows, cols)?;
        let (values, mask, adjusted) = match pruned {
            PrunedWeight::Mask(mask) => (mask.apply(matrix)?, mask, false),
            PrunedWeight::Adjusted { weight, mask } => (rounded::<T>(&weight, &mask)?, mask, true),
        };
        let retained = mask.retained(matrix)?;
        if let Sparsity::Groups(pattern) = self.sparsity {
            mask.verify(pattern, self.axis)?;
        }
        self.writer.write_elements(&self.tensor.name, &values)?;
        Ok(PruneOutcome::PrunedBy {
            density_before: retained.density_before(),
            density: retained.density(),
            kept_l1: retained.l1(),
            kept_l2: retained.l2(),
            adjusted,
        })
    }
}

/// An adjusted weight in the tensor's dtype, after its elements were verified.
fn rounded<T: Arithmetic>(weight: &[f32], mask: &Mask) -> Result<Vec<T>> {
    let (rows, cols) = (mask.rows(), mask.cols());
    let weight = MatrixRef::new(rows, cols, weight)?;
    let mut out = memory::zeroed::<T>(rows * cols)?;
    first_error(out.par_chunks_mut(cols.max(1)).enumerate(), |(row, out)| {
        for (col, (out, value)) in out.iter_mut().zip(weight.row(row)).enumerate() {
            if !mask.is_kept(row, col) {
                if *value != 0.0 {
                    return Err(Error::NotPruned { row, col, value: *value });
                }
                continue;
            }
            *out = T::from_f32(*value);
            if value.is_nan() {
                return Err(Error::NotANumber { row, col });
            }
            if !value.is_finite() || !out.to_f32().is_finite() {
                return Err(Error::Infinite { row, col });
            }
        }
        Ok(())
    })?;
    Ok(out)
}
