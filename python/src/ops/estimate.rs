//! The 2:4 stand-in for a matrix along its rows, as a dense matrix with zeros.

use twofour::{
    MatrixRef,
    estimate::{self, Estimator},
};
use twofour_cuda::layer::borrowed::{self, MasterSlice};

use super::*;

/// A seed on a GPU is read when the kernel runs.
pub(super) const OPERATORS: &[Operator] =
    &[Operator::new("estimate(Tensor dense, int estimator, float scale, Tensor seed) -> Tensor", kernel!(cpu))
        .cuda(kernel!(cuda))
        .shapes(|arguments| arguments.like_first())];

fn cpu(dense: Tensor, kind: EstimatorKind, scale: f64, seed: Tensor) -> Result<Tensor> {
    let dtype = dense.dtype()?;
    let estimator = kind.with_seed(numbers::seed(&seed)?)?;
    for_floats!(dtype, "the matrix", on_cpu::<T>(&dense, estimator, scale as f32))
}

fn on_cpu<T: Float>(dense: &Tensor, estimator: Estimator, scale: f32) -> Result<Tensor> {
    let (rows, cols) = dense.matrix("the matrix")?;
    let values = dense.elements::<T>("the matrix", T::SCALAR)?;
    let matrix = MatrixRef::new(rows, cols, &values)?;
    let compressed = on_pool(|| estimate::estimate::<T, T>(matrix, estimator, scale))??;
    let mut out = Tensor::empty(&[rows as i64, cols as i64], T::SCALAR)?;
    out.elements_mut::<T>()?.copy_from_slice(&compressed.to_dense());
    Ok(out)
}

fn cuda(dense: Tensor, kind: EstimatorKind, scale: f64, seed: Tensor) -> Result<Tensor> {
    let context = context::of(&dense)?;
    let sampling = sampling(&context, kind, &seed)?;
    let (rows, cols) = dense.matrix("the matrix")?;
    let dense = dense.contiguous("the matrix")?;
    let mut out = Tensor::empty_on(dense.device(), dense.sizes(), dense.dtype()?)?;
    let scale = (scale != 1.0).then(|| number(dense.device(), scale as f32)).transpose()?;
    let master = MasterSlice { data: slice(&context, &dense, "the matrix")?, rows, cols };
    let factor = scale.as_ref().map(|scale| slice(&context, scale, "the scale")).transpose()?;
    borrowed::estimate(&context, master, sampling, factor, slice_mut(&context, &mut out, "the estimate")?)?;
    Ok(out)
}
