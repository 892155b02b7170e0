//! `x · Wᵀ` of floats, of the blocks of `W` that are stored as torch's BSR has them: `crow` `[block rows + 1]` and `col`
//! `[blocks]` of int64, and the blocks, `[blocks, height, width]`.

use twofour::kernel::{BlockSparseRef, Engine, Epilogue};

use super::*;

pub(super) const OPERATORS: &[Operator] = &[Operator::new(
    "block_sparse_linear(Tensor x, Tensor crow, Tensor col, Tensor values, int out_features) -> Tensor",
    kernel!(cpu),
)
.shapes(|arguments| arguments.with_last(4))
.by_rows()
.product()];

fn cpu(x: Tensor, crow: Tensor, col: Tensor, values: Tensor, rows: usize) -> Result<Tensor> {
    let dtype = x.dtype()?;
    for_floats!(dtype, "the input", on_cpu::<T>(&x, &crow, &col, &values, rows))
}

fn on_cpu<T: Float>(x: &Tensor, crow: &Tensor, col: &Tensor, values: &Tensor, rows: usize) -> Result<Tensor> {
    let (tokens, cols) = rows_and_last(x, "the input")?;
    let &[_, height, width] = values.sizes() else {
        return Err(Failure::runtime(format!("the blocks must have 3 dimensions, not {:?}", values.sizes())));
    };
    let starts = numbers_of(crow, "crow_indices")?;
    let columns = numbers_of(col, "col_indices")?;
    let blocks = values.elements::<T>("the block-sparse weight", T::SCALAR)?;
    let block = [height as usize, width as usize];
    let weight = BlockSparseRef::new((rows, cols), block, starts, columns, &blocks, Engine::best()?)?;
    let input = x.elements::<T>("the input", T::SCALAR)?;
    let mut y = with_last(x, Device::HOST, rows, T::SCALAR)?;
    on_torch_threads(|| {
        weight.linear(&input, tokens, Epilogue::default(), y.elements_mut()?).map_err(Failure::from)
    })?;
    Ok(y)
}

/// Indices, which torch has in int64.
fn numbers_of<N: TryFrom<i64>>(indices: &Tensor, what: &str) -> Result<Vec<N>> {
    let number = |index: &i64| N::try_from(*index).map_err(|_| Failure::runtime(format!("{what} has {index}")));
    indices.elements::<i64>(what, ScalarType::I64)?.iter().map(number).collect()
}
