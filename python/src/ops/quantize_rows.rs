//! Quantizes a matrix in the host's memory to 8-bit integers, symmetrically, with a scale for each row.

use twofour::{MatrixRef, kernel::quantize};

use super::*;

pub(super) const OPERATORS: &[Operator] =
    &[Operator::new("quantize_rows(Tensor dense) -> (Tensor values, Tensor scales)", kernel!(cpu)).shapes(
        |arguments| {
            let dense = arguments.tensor(0)?;
            let [rows, cols] = dense.matrix()?;
            let values = Shape::new([rows.clone(), cols.clone()]).of(ScalarType::I8);
            Ok(vec![values, Shape::new([rows.clone()]).of(ScalarType::F32)])
        },
    )];

fn cpu(dense: Tensor) -> Result<(Tensor, Tensor)> {
    let dtype = dense.dtype()?;
    let (rows, cols) = dense.matrix("the matrix")?;
    let wide = for_floats!(dtype, "the matrix", widened::<T>(&dense, "the matrix"))?;
    let matrix = MatrixRef::new(rows, cols, &wide)?;
    let (found, row_scales) = on_torch_threads(|| quantize(matrix))?;
    let mut values = Tensor::empty(&[rows as i64, cols as i64], ScalarType::I8)?;
    values.elements_mut::<i8>()?.copy_from_slice(&found);
    let mut scales = Tensor::empty(&[rows as i64], ScalarType::F32)?;
    scales.elements_mut::<f32>()?.copy_from_slice(&row_scales);
    Ok((values, scales))
}
