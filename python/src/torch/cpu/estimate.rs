//! Sparse stand-ins for a dense tensor.

use twofour::{
    MatrixRef,
    estimate::{self, Estimator},
};

use crate::torch::{numbers, scalar_type::ScalarType};

use super::{Float, Result, Tensor, for_floats, on_pool};

/// The scale of the soft threshold for a weight, one number of float32.
pub(super) fn soft_threshold_scale(dense: Tensor) -> Result<Tensor> {
    let dtype = dense.dtype()?;
    for_floats!(dtype, "the weight", scale_of::<T>(&dense))
}

fn scale_of<T: Float>(dense: &Tensor) -> Result<Tensor> {
    let (rows, cols) = dense.matrix("the weight")?;
    let values = dense.elements::<T>("the weight", T::SCALAR)?;
    let matrix = MatrixRef::new(rows, cols, &values)?;
    let mut scale = Tensor::empty(&[], ScalarType::F32)?;
    scale.elements_mut::<f32>()?[0] = on_pool(|| estimate::soft_threshold_scale(matrix))??;
    Ok(scale)
}

/// The 2:4 stand-in for a matrix along its rows, as a dense matrix with zeros.
pub(super) fn estimate(dense: Tensor, estimator: i64, scale: f64, seed: Tensor) -> Result<Tensor> {
    let dtype = dense.dtype()?;
    let estimator = numbers::estimator(estimator, numbers::seed(&seed)?)?;
    for_floats!(dtype, "the matrix", estimated::<T>(&dense, estimator, scale as f32))
}

fn estimated<T: Float>(dense: &Tensor, estimator: Estimator, scale: f32) -> Result<Tensor> {
    let (rows, cols) = dense.matrix("the matrix")?;
    let values = dense.elements::<T>("the matrix", T::SCALAR)?;
    let matrix = MatrixRef::new(rows, cols, &values)?;
    let compressed = on_pool(|| estimate::estimate::<T, T>(matrix, estimator, scale))??;
    let mut out = Tensor::empty(&[rows as i64, cols as i64], T::SCALAR)?;
    out.elements_mut::<T>()?.copy_from_slice(&compressed.to_dense());
    Ok(out)
}
