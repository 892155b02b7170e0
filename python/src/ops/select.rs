//! The mask that a rule chooses, in tiles ([`crate::cpu::to_tiles`]).

use twofour::{
    Axis, MatrixRef, Pattern,
    layer::MaskRule,
    select,
};
use twofour_cuda::layer::borrowed::MasterSlice;

use super::*;

pub(super) const OPERATORS: &[Operator] = &[Operator::new("select(Tensor dense, int rule) -> Tensor", kernel!(cpu))
    .cuda(kernel!(cuda))
    .shapes(|arguments| Ok(vec![tiles_shape(&arguments.tensor(0)?)?]))];

fn cpu(dense: Tensor, rule: MaskRule) -> Result<Tensor> {
    let dtype = dense.dtype()?;
    for_floats!(dtype, "the matrix", on_cpu::<T>(&dense, rule))
}

fn on_cpu<T: Float>(dense: &Tensor, rule: MaskRule) -> Result<Tensor> {
    let (rows, cols) = dense.matrix("the matrix")?;
    let values = dense.elements::<T>("the matrix", T::SCALAR)?;
    let matrix = MatrixRef::new(rows, cols, &values)?;
    let mask = on_pool(|| match rule {
        MaskRule::Transposable(rule) => select::transposable(matrix, rule),
        _ => select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row),
    })??;
    to_tiles(&mask)
}

fn cuda(dense: Tensor, rule: MaskRule) -> Result<Tensor> {
    let context = context::of(&dense)?;
    let (rows, cols) = dense.matrix("the matrix")?;
    let dense = dense.contiguous("the matrix")?;
    let mut mask = new_mask(dense.device(), rows, cols)?;
    let master = MasterSlice { data: slice(&context, &dense, "the matrix")?, rows, cols };
    select_into(&context, master, rule, &mut mask, true)?;
    Ok(mask)
}
