//! From dense weights to dense weights with zeros, by a function.

use std::fmt;

use rayon::prelude::*;

use super::{
    Item, Kept, Matrix, OnMatrix, Operation, Plan, Planned, Pruned, Reader, TensorInfo, Writer, pieces::Bands,
    prune::dense_matrix,
};
use crate::{
    Arithmetic, Axis, Error, Mask, MatrixRef, Result, first_error::first_error, memory, select::Sparsity, verify,
};

/// What a function made of a weight for [`PruneWith`].
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

/// As [`Prune`](super::Prune), with weights pruned by a function: by any criterion or solver, with statistics of the
/// caller's.
///
/// Memory holds the one weight that is pruned. What the function returns is verified before it is written: the shape,
/// that a pattern is obeyed, that what is not kept is zero, and that no element is infinite in the tensor's dtype.
///
/// # Errors
/// Those of [`Prune`](super::Prune) and of the function, with the tensor's name; [`Error::Shape`] or [`Error::Length`]
/// for a result of another shape, [`Error::TooManyKept`] or [`Error::Violation`] for a mask that breaks its pattern,
/// [`Error::NotPruned`] for an element that should be zero, [`Error::Infinite`] for one beyond the dtype.
///
/// ```
/// use std::collections::BTreeMap;
/// use twofour::{Axis, criterion::{self, Magnitude}, file::{Convert, Overwrite, PlannedTensor, PruneWith, PrunedWeight, Reader, StoredDType, Writer}, select::Sparsity};
/// let directory = tempfile::tempdir()?;
/// let at = |name: &str| directory.path().join(name);
/// let plan = vec![PlannedTensor::new("up.weight", StoredDType::F32, [1, 4])];
/// let mut writer = Writer::create(at("in.safetensors"), Overwrite::No, plan, BTreeMap::new())?;
/// writer.write_elements("up.weight", &[1.0f32, -3.0, 2.0, 0.5])?;
/// writer.finish()?;
///
/// let sparsity: Sparsity = "unstructured@0.75".parse()?;
/// let pruning = PruneWith::new(
///     |_tensor| Some((sparsity, Axis::Row)),
///     |_tensor, weight| Ok(PrunedWeight::Mask(criterion::mask(weight, &Magnitude::default(), sparsity)?)),
/// );
/// Convert::open(at("in.safetensors"))?.run(at("out.safetensors"), pruning)?;
/// assert_eq!(*Reader::open(at("out.safetensors"))?.tensor("up.weight")?.elements::<f32>()?, [0.0, -3.0, 0.0, 0.0]);
/// # Ok::<(), Box<dyn std::error::Error>>(())
/// ```
pub struct PruneWith<C, P> {
    choose: C,
    prune: P,
}

impl<C, P> PruneWith<C, P>
where
    C: FnMut(&TensorInfo) -> Option<(Sparsity, Axis)>,
    P: FnMut(&TensorInfo, MatrixRef<'_, f32>) -> Result<PrunedWeight>,
{
    /// `choose` is asked once for every two-dimensional tensor with elements of a dtype that twofour knows: the
    /// sparsity that it is to have and the axis along which a pattern is to hold, or `None` to keep it as it is. Then
    /// `prune` is called with each chosen tensor in f32, one at a time.
    pub fn new(choose: C, prune: P) -> Self {
        PruneWith { choose, prune }
    }
}

impl<C, P> fmt::Debug for PruneWith<C, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PruneWith").finish_non_exhaustive()
    }
}

/// What is to be done with a tensor that is pruned.
#[derive(Debug, Clone, Copy)]
pub struct PruneWithPlan {
    matrix: Matrix,
    sparsity: Sparsity,
    axis: Axis,
}

impl<C, P> Operation for PruneWith<C, P>
where
    C: FnMut(&TensorInfo) -> Option<(Sparsity, Axis)>,
    P: FnMut(&TensorInfo, MatrixRef<'_, f32>) -> Result<PrunedWeight>,
{
    type Plan = PruneWithPlan;
    type Change = Pruned;

    fn plan(&mut self, reader: &Reader, item: Item<'_>, plan: &mut Plan) -> Result<Planned<PruneWithPlan>> {
        let (tensor, matrix) = match dense_matrix(item) {
            Ok(found) => found,
            Err(kept) => return Ok(Planned::Copy(kept)),
        };
        let Some((sparsity, axis)) = (self.choose)(tensor) else { return Ok(Planned::Copy(Kept::NotChosen)) };
        Bands::of(reader, &tensor.name, matrix)?.expect_finite()?;
        item.plan_copy(plan);
        Ok(Planned::Change(PruneWithPlan { matrix, sparsity, axis }))
    }

    fn write(
        &mut self,
        reader: &Reader,
        item: Item<'_>,
        planned: PruneWithPlan,
        writer: &mut Writer,
    ) -> Result<Pruned> {
        let tensor = &reader.tensor(item.name())?.info;
        planned.matrix.run(reader, item.name(), ByFunction { writer, tensor, planned, prune: &mut self.prune })
    }
}

/// Prunes a matrix by a function and writes it.
struct ByFunction<'a, P> {
    writer: &'a mut Writer,
    tensor: &'a TensorInfo,
    planned: PruneWithPlan,
    prune: &'a mut P,
}

impl<P: FnMut(&TensorInfo, MatrixRef<'_, f32>) -> Result<PrunedWeight>> OnMatrix for ByFunction<'_, P> {
    type Output = Pruned;

    fn run<T: Arithmetic>(self, matrix: MatrixRef<'_, T>) -> Result<Pruned> {
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
        verify::expect_mask(&mask, self.planned.sparsity, self.planned.axis)?;
        self.writer.write_elements(&self.tensor.name, &values)?;
        Ok(Pruned::new(&retained, None, adjusted))
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
