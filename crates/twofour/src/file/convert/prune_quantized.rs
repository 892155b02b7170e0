//! From dense weights to 2:4 weights of integers, by a function that prunes and quantizes in one pass.

use std::fmt;

use super::{
    Item, Kept, Matrix, OnMatrix, Operation, Plan, Planned, Pruned, Quantization, QuantizedWeight, Reader, TensorInfo,
    Writer, pieces::Bands, prune::dense_matrix,
};
use crate::{Arithmetic, Error, Mask, MatrixRef, Result};

/// As [`PruneWith`](super::PruneWith), with weights that the function returns as 2:4 weights of integers: what
/// [`sparsegpt`](mod@crate::solve::sparsegpt) with a [`Grid`](crate::solve::Grid) solves for.
///
/// What the function returns is verified before it is written: its shape, its integers and granularity, and that it can
/// be made again from the parts that a file holds. Places are along rows, as in every compressed weight.
///
/// # Errors
/// Those of [`PruneWith`](super::PruneWith) and of the function, with the tensor's name; [`Error::Shape`] for a result
/// of another shape, [`Error::NotPlanned`] for one of other integers.
pub struct PruneAndQuantize<C, S> {
    to: Quantization,
    choose: C,
    solve: S,
}

impl<C, S> PruneAndQuantize<C, S>
where
    C: FnMut(&TensorInfo) -> bool,
    S: FnMut(&TensorInfo) -> Result<QuantizedWeight>,
{
    /// `choose` is asked once for every two-dimensional tensor with elements of a dtype that twofour knows. `solve` is
    /// called with each chosen tensor, one at a time, and returns a weight of the integers `to`.
    pub fn new(to: Quantization, choose: C, solve: S) -> Self {
        PruneAndQuantize { to, choose, solve }
    }
}

impl<C, S> fmt::Debug for PruneAndQuantize<C, S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PruneAndQuantize").field("to", &self.to).finish_non_exhaustive()
    }
}

/// The matrix that is pruned.
#[derive(Debug, Clone, Copy)]
pub struct JointPlan(Matrix);

impl<C, S> Operation for PruneAndQuantize<C, S>
where
    C: FnMut(&TensorInfo) -> bool,
    S: FnMut(&TensorInfo) -> Result<QuantizedWeight>,
{
    type Plan = JointPlan;
    type Change = Pruned;

    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<Planned<JointPlan>> {
        let (tensor, matrix) = match dense_matrix(item) {
            Ok(found) => found,
            Err(kept) => return Ok(Planned::Copy(kept)),
        };
        if !(self.choose)(tensor) {
            return Ok(Planned::Copy(Kept::NotChosen));
        }
        Bands::of(reader, &tensor.name, matrix)?.expect_finite()?;
        plan.compressed(self.to.info(&tensor.name, matrix.rows, matrix.cols)?);
        Ok(Planned::Change(JointPlan(matrix)))
    }

    fn write(
        &mut self,
        reader: &Reader,
        item: Item<'_>,
        JointPlan(matrix): JointPlan,
        writer: &mut Writer,
    ) -> Result<Pruned> {
        let weight = (self.solve)(reader.tensor(item.name())?.info)?;
        if weight.quantization() != self.to {
            let (path, name) = (reader.path().to_owned(), item.name().to_owned());
            return Err(Error::NotPlanned { path, name, reason: "was quantized to other integers than planned" });
        }
        let weight = weight.verified()?;
        let mask = weight.mask();
        mask.expect_shape("quantized weight and tensor", matrix.rows, matrix.cols)?;
        let outcome = matrix.run(reader, item.name(), Retained(&mask))?;
        weight.write(item.name(), writer)?;
        Ok(outcome)
    }
}

/// What a mask keeps of the dense weight.
struct Retained<'a>(&'a Mask);

impl OnMatrix for Retained<'_> {
    type Output = Pruned;

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<Pruned> {
        Ok(Pruned::new(&self.0.retained(matrix)?, None, true))
    }
}
