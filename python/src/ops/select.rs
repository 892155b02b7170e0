//! The masks that a rule chooses, in tiles ([`crate::cpu::to_tiles`]).

use twofour::{Axis, MatrixRef, Pattern, layer::MaskRule, select};
use twofour_cuda::layer::borrowed::MasterSlice;

use super::*;
use crate::{cuda::select_together_into, torch::List};

/// `select_together` takes matrices of one type on one device. On a GPU few launches choose the masks of all, and no
/// NaN is found: that would wait for the device.
pub(super) const OPERATORS: &[Operator] = &[
    Operator::new("select(Tensor dense, int rule) -> Tensor", kernel!(cpu))
        .cuda(kernel!(cuda))
        .shapes(|arguments| Ok(vec![tiles_shape(&arguments.tensor(0)?)?])),
    Operator::new("select_together(Tensor[] dense, int rule) -> Tensor[]", kernel!(cpu_together))
        .cuda(kernel!(cuda_together))
        .shapes(|arguments| arguments.tensors(0)?.iter().map(tiles_shape).collect()),
];

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

fn cpu_together(dense: Vec<Tensor>, rule: MaskRule) -> Result<List> {
    List::of(dense.into_iter().map(|matrix| cpu(matrix, rule)).collect::<Result<_>>()?)
}

fn cuda_together(dense: Vec<Tensor>, rule: MaskRule) -> Result<List> {
    let Some(first) = dense.first() else { return List::of(vec![]) };
    let (device, context) = (first.device(), context::of(first)?);
    let dense = dense.iter().map(|matrix| matrix.contiguous("a matrix")).collect::<Result<Vec<_>>>()?;
    let shapes = dense.iter().map(|matrix| matrix.matrix("a matrix")).collect::<Result<Vec<_>>>()?;
    let masks = shapes.iter().map(|&(rows, cols)| new_mask(device, rows, cols));
    let mut masks = masks.collect::<Result<Vec<_>>>()?;
    let masters = dense
        .iter()
        .zip(&shapes)
        .map(|(matrix, &(rows, cols))| Ok(MasterSlice { data: slice(&context, matrix, "a matrix")?, rows, cols }));
    select_together_into(&context, masters.collect::<Result<_>>()?, rule, &mut masks)?;
    List::of(masks)
}
