//! `x · Wᵀ` of floats, of the blocks of `W` that are stored as torch's BSR has them: `crow` `[block rows + 1]` and
//! `col` `[blocks]` of int64, and the blocks, `[blocks, height, width]`.

use twofour::kernel::{BlockSparseRef, Engine, Epilogue};
use twofour_cuda::layer::borrowed::block_sparse::{self, BlockSparseSlice};

use super::*;

pub(super) const OPERATORS: &[Operator] = &[Operator::new(
    "block_sparse_linear(Tensor x, Tensor crow, Tensor col, Tensor values, int out_features) -> Tensor",
    kernel!(cpu),
)
.cuda(kernel!(cuda))
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
    on_torch_threads(|| weight.linear(&input, tokens, Epilogue::default(), y.elements_mut()?).map_err(Failure::from))?;
    Ok(y)
}

fn cuda(x: Tensor, crow: Tensor, col: Tensor, values: Tensor, rows: usize) -> Result<Tensor> {
    let ((tokens, cols), context) = (rows_and_last(&x, "the input")?, context::of(&x)?);
    half_type(&x, "the input")?;
    let &[blocks, height, width] = values.sizes() else {
        return Err(Failure::runtime(format!("the blocks must have 3 dimensions, not {:?}", values.sizes())));
    };
    let block = height as usize;
    if height != width || !block_sparse::is_supported(block, cols) {
        return Err(Failure::not_implemented(format!(
            "blocks of {height} x {width} of a weight with {cols} columns: on a GPU a block has 16, 32 or a multiple \
             of 64 rows and as many columns, and a weight a multiple of 8 columns"
        )));
    }
    if col.numel() != blocks as usize || crow.numel() != rows.div_ceil(block) + 1 {
        return Err(Failure::runtime(format!(
            "{blocks} blocks of a weight with {rows} rows need {blocks} column indices and {} row starts, not {} and \
             {}",
            rows.div_ceil(block) + 1,
            col.numel(),
            crow.numel()
        )));
    }
    let x = x.contiguous_and_aligned("the input")?;
    let [crow, col] = [crow.contiguous("crow_indices")?, col.contiguous("col_indices")?];
    let values = values.contiguous_and_aligned("the block-sparse weight")?;
    let mut y = with_last(&x, x.device(), rows, x.dtype()?)?;
    let weight = BlockSparseSlice {
        crow: indices(&context, &crow, "crow_indices")?,
        col: indices(&context, &col, "col_indices")?,
        values: slice(&context, &values, "the block-sparse weight")?,
        block,
        rows,
        cols,
    };
    let input = slice(&context, &x, "the input")?;
    block_sparse::linear(&context, weight, input, tokens, slice_mut(&context, &mut y, "the output")?)?;
    Ok(y)
}

/// Indices, which torch has in int64.
fn numbers_of<N: TryFrom<i64>>(indices: &Tensor, what: &str) -> Result<Vec<N>> {
    let number = |index: &i64| N::try_from(*index).map_err(|_| Failure::runtime(format!("{what} has {index}")));
    indices.elements::<i64>(what, ScalarType::I64)?.iter().map(number).collect()
}
