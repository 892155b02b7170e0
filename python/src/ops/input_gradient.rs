//! `dx = dy · W` of floats, `dy` of shape `[..., out_features]`.

use twofour::kernel::{SparseWeightRef, packed_bytes};
use twofour_cuda::layer::borrowed::{self, PackedSlice, packed_len};

use super::*;

pub(super) const OPERATORS: &[Operator] =
    &[Operator::new("input_gradient(Tensor dy, Tensor packed, int in_features) -> Tensor", kernel!(cpu))
        .cuda(kernel!(cuda))
        .shapes(|arguments| arguments.with_last(2))
        .by_rows()
        .product()];

fn cpu(dy: Tensor, packed: Tensor, cols: usize) -> Result<Tensor> {
    let dtype = dy.dtype()?;
    for_floats!(dtype, "the output gradient", on_cpu::<T>(&dy, &packed, cols))
}

fn on_cpu<T: Float>(dy: &Tensor, packed: &Tensor, cols: usize) -> Result<Tensor> {
    let (tokens, rows) = rows_and_last(dy, "the output gradient")?;
    expect_packed(packed, packed_bytes::<T>(rows, cols)? / size_of::<T>(), T::SCALAR, (rows, cols), dy)?;
    let memory = Memory::of(packed)?;
    let weight = SparseWeightRef::<T>::new(rows, cols, &memory)?;
    let values = dy.elements::<T>("the output gradient", T::SCALAR)?;
    let mut dx = with_last(dy, Device::HOST, cols, T::SCALAR)?;
    on_torch_threads(|| weight.input_gradient(&values, tokens, dx.elements_mut()?).map_err(Failure::from))?;
    Ok(dx)
}

fn cuda(dy: Tensor, packed: Tensor, cols: usize) -> Result<Tensor> {
    if wide::is_wide(&dy)? {
        return wide::input_gradient(&dy, &packed, cols);
    }
    let (dtype, context) = (half_type(&dy, "the output gradient")?, context::of(&dy)?);
    let (tokens, rows) = rows_and_last(&dy, "the output gradient")?;
    expect_packed(&packed, packed_len(dtype, rows, cols)?, dy.dtype()?, (rows, cols), &dy)?;
    multiply(&context, (&dy, &packed, None), (cols, dy.dtype()?), |p| {
        Ok(borrowed::input_gradient(&context, PackedSlice::new(p.packed, rows, cols), p.input, tokens, p.output)?)
    })
}
