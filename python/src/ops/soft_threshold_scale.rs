//! The scale of the soft threshold for a weight, one number of float32.

use twofour::{MatrixRef, estimate};
use twofour_cuda::layer::borrowed::{self, MasterSlice};

use super::*;

pub(super) const OPERATORS: &[Operator] =
    &[Operator::new("soft_threshold_scale(Tensor dense) -> Tensor", kernel!(cpu))
        .cuda(kernel!(cuda))
        .shapes(|_| Ok(vec![Shape::new([]).of(ScalarType::F32)]))];

fn cpu(dense: Tensor) -> Result<Tensor> {
    let dtype = dense.dtype()?;
    for_floats!(dtype, "the weight", on_cpu::<T>(&dense))
}

fn on_cpu<T: Float>(dense: &Tensor) -> Result<Tensor> {
    let (rows, cols) = dense.matrix("the weight")?;
    let values = dense.elements::<T>("the weight", T::SCALAR)?;
    let matrix = MatrixRef::new(rows, cols, &values)?;
    let mut scale = Tensor::empty(&[], ScalarType::F32)?;
    scale.elements_mut::<f32>()?[0] = on_pool(|| estimate::soft_threshold_scale(matrix))??;
    Ok(scale)
}

fn cuda(dense: Tensor) -> Result<Tensor> {
    let context = context::of(&dense)?;
    let (rows, cols) = dense.matrix("the weight")?;
    let dense = dense.contiguous("the weight")?;
    let mut scale = Tensor::empty_on(dense.device(), &[], ScalarType::F32)?;
    let master = MasterSlice { data: slice(&context, &dense, "the weight")?, rows, cols };
    borrowed::soft_threshold_scale(&context, master, slice_mut(&context, &mut scale, "the scale")?)?;
    Ok(scale)
}
