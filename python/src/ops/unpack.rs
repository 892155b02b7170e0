//! The dense weight of a packed one.

use twofour_cuda::layer::borrowed::{self, PackedSlice};

use super::*;

pub(super) const OPERATORS: &[Operator] =
    &[Operator::new("unpack(Tensor packed, int rows, int cols) -> Tensor", kernel!(cpu))
        .cuda(kernel!(cuda))
        .shapes(|arguments| Ok(vec![Shape::new([arguments.size(1)?, arguments.size(2)?])]))];

fn cpu(packed: Tensor, rows: usize, cols: usize) -> Result<Tensor> {
    let dtype = packed.dtype()?;
    for_stored!(dtype, "the packed weight", on_cpu::<T>(&packed, rows, cols))
}

fn on_cpu<T: Stored>(packed: &Tensor, rows: usize, cols: usize) -> Result<Tensor> {
    let compressed = T::unpack(packed, rows, cols)?;
    let mut out = Tensor::empty(&[rows as i64, cols as i64], T::STORED)?;
    out.elements_mut::<T>()?.copy_from_slice(&compressed.to_dense());
    Ok(out)
}

fn cuda(packed: Tensor, rows: usize, cols: usize) -> Result<Tensor> {
    match packed.dtype()? {
        ScalarType::F32 => return wide::unpack(&packed, rows, cols),
        ScalarType::I8 => {}
        other => drop(packable(other)?),
    }
    let context = context::of(&packed)?;
    let packed = packed.contiguous("the packed weight")?;
    let mut out = Tensor::empty_on(packed.device(), &[rows as i64, cols as i64], packed.dtype()?)?;
    let weight = PackedSlice::new(slice(&context, &packed, "the packed weight")?, rows, cols);
    borrowed::unpack(&context, weight, slice_mut(&context, &mut out, "the dense weight")?)?;
    Ok(out)
}
