//! From dense weights to 2:4 weights of integers, by a function that prunes and quantizes in one pass.

use std::{
    collections::{BTreeSet, HashMap},
    ops::ControlFlow,
    path::Path,
};

use super::{
    Conversion, Item, Matrix, OnMatrix, Overwrite, Plan, Progress, PruneOutcome, PruneReport, PrunedTensor,
    Quantization, QuantizedWeight, Reader, TensorInfo, Writer, pieces, run,
};
use crate::{Arithmetic, Error, Mask, MatrixRef, Result};

/// As [`prune_with`](super::prune_with), with weights that the function returns as 2:4 weights of integers: what
/// [`sparsegpt`](mod@crate::solve::sparsegpt) with a [`Grid`](crate::solve::Grid) solves for.
///
/// `choose` is asked once for every two-dimensional tensor with elements of a dtype that twofour knows. `solve` is called with each chosen tensor, one at a time. What it
/// returns is verified before it is written: its shape, its integers and granularity against `to`, and that it can be made again from the parts that a file holds. Everything
/// else is copied byte for byte. Places are along rows, as in every compressed weight.
///
/// # Errors
/// Those of [`prune_with`](super::prune_with) and of the function, with the tensor's name; [`Error::Shape`] for a result of another shape, [`Error::NotPlanned`] for one of other
/// integers. Nothing is left then.
pub fn prune_and_quantize_with(
    input: impl AsRef<Path>,
    output: impl AsRef<Path>,
    overwrite: Overwrite,
    to: Quantization,
    choose: &mut dyn FnMut(&TensorInfo) -> bool,
    solve: &mut dyn FnMut(&TensorInfo) -> Result<QuantizedWeight>,
    progress: &mut dyn FnMut(Progress<'_>) -> ControlFlow<()>,
) -> Result<PruneReport> {
    let reader = Reader::open(input)?;
    let report = PruneReport::default();
    let mut conversion = PruneQuantized { to, choose, solve, report, chosen: BTreeSet::new(), kept: HashMap::new() };
    run(&mut conversion, &reader, output.as_ref(), overwrite, progress)?;
    Ok(conversion.report)
}

struct PruneQuantized<'a> {
    to: Quantization,
    choose: &'a mut dyn FnMut(&TensorInfo) -> bool,
    solve: &'a mut dyn FnMut(&TensorInfo) -> Result<QuantizedWeight>,
    report: PruneReport,
    chosen: BTreeSet<String>,
    /// What became of the tensors that are copied.
    kept: HashMap<String, PruneOutcome>,
}

impl Conversion for PruneQuantized<'_> {
    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<()> {
        let outcome = match item {
            Item::Compressed(_) => PruneOutcome::AlreadyCompressed,
            Item::Plain(tensor) => match Matrix::of(tensor) {
                None => PruneOutcome::NotAMatrix,
                Some(matrix) if (self.choose)(tensor) => {
                    pieces::expect_finite(reader, matrix)?;
                    plan.compressed(self.to.info(&tensor.name, matrix.rows, matrix.cols)?);
                    self.chosen.insert(tensor.name.clone());
                    return Ok(());
                }
                Some(_) => PruneOutcome::NotChosen,
            },
        };
        self.kept.insert(item.name().to_owned(), outcome);
        item.plan_copy(plan);
        Ok(())
    }

    fn write(&mut self, reader: &Reader, item: Item<'_>, writer: &mut Writer) -> Result<()> {
        let name = item.name().to_owned();
        let (dtype, shape) = match item {
            Item::Plain(tensor) => (tensor.dtype, tensor.shape.clone()),
            Item::Compressed(weight) => (weight.format.stored(), vec![weight.rows, weight.cols]),
        };
        let outcome = match item {
            Item::Plain(tensor) if self.chosen.contains(&name) => self.solved(reader, tensor, writer)?,
            _ => {
                item.write_copy(reader, writer)?;
                self.kept.get(&name).copied().unwrap_or(PruneOutcome::NotAMatrix)
            }
        };
        self.report.tensors.push(PrunedTensor { name, dtype, shape, outcome });
        Ok(())
    }
}

impl PruneQuantized<'_> {
    fn solved(&mut self, reader: &Reader, tensor: &TensorInfo, writer: &mut Writer) -> Result<PruneOutcome> {
        let changed = |reason| {
            let (path, name) = (reader.path().to_owned(), tensor.name.clone());
            Error::NotPlanned { path, name, reason }
        };
        let matrix = Matrix::of(tensor).ok_or_else(|| changed("is no matrix; it changed while it was read"))?;
        let weight = (self.solve)(tensor)?;
        if weight.quantization() != self.to {
            return Err(changed("was quantized to other integers than planned"));
        }
        let weight = weight.verified()?;
        let mask = weight.mask();
        mask.expect_shape("quantized weight and tensor", matrix.rows, matrix.cols)?;
        let outcome = matrix.run(reader, Retained(&mask))?;
        weight.write(&tensor.name, writer)?;
        Ok(outcome)
    }
}

/// What a mask keeps of the dense weight.
struct Retained<'a>(&'a Mask);

impl OnMatrix for Retained<'_> {
    type Output = PruneOutcome;

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<PruneOutcome> {
        let retained = self.0.retained(matrix)?;
        Ok(PruneOutcome::PrunedBy {
            density_before: retained.density_before(),
            density: retained.density(),
            kept_l1: retained.l1(),
            kept_l2: retained.l2(),
            adjusted: true,
        })
    }
}
