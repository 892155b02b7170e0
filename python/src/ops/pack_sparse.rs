//! Packs a weight in the host's memory that is 2:4 along its rows already.

use twofour::{Compressed, MatrixRef};

use super::*;

pub(super) const OPERATORS: &[Operator] = &[Operator::new("pack_sparse(Tensor weight) -> Tensor", kernel!(cpu))
    .shapes(|arguments| {
        let weight = arguments.tensor(0)?;
        let [rows, cols] = weight.matrix()?;
        Ok(vec![shape(weight.dtype, weight.on_gpu, rows, cols)?])
    })];

fn cpu(weight: Tensor) -> Result<Tensor> {
    let dtype = weight.dtype()?;
    for_stored!(dtype, "the weight", verified::<T>(&weight))
}

fn verified<T: Stored>(weight: &Tensor) -> Result<Tensor> {
    let (rows, cols) = weight.matrix("the weight")?;
    let values = weight.elements::<T>("the weight", T::STORED)?;
    let matrix = MatrixRef::new(rows, cols, &values)?;
    T::pack(&on_pool(|| Compressed::from_dense(matrix))??)
}
