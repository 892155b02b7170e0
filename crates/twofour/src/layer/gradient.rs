//! Gradients of a layer's parameters.

use rayon::prelude::*;

use super::{
    Accumulate,
    activation::{elements, expect_length},
    dense::{transposed_product, widen},
};
use crate::{
    Arithmetic, Compressed, Element, Mask, MatrixRef, Result,
    estimate::{Estimator, estimate},
    kernel::{Epilogue, KernelElement, SparseWeight},
};

/// The dense weight gradient `dw = dyᵀ · x`. Products accumulate in f32.
///
/// # Errors
/// [`crate::Error::Length`] where a slice does not fit the `(tokens, out_features, in_features)`.
pub fn weight_gradient<T: Element, G: Arithmetic>(
    (dy, x): (&[T], &[T]),
    (tokens, out_features, in_features): (usize, usize, usize),
    accumulate: Accumulate,
    dw: &mut [G],
) -> Result<()> {
    expect_operands(dy, x, (tokens, out_features, in_features), dw)?;
    transposed_product((dy, x), (tokens, out_features, in_features), accumulate, |_, _, _| (), dw)
}

/// The weight gradient, zero (or, accumulated, nothing added) where the mask keeps nothing.
///
/// # Errors
/// Those of [`weight_gradient`], and [`crate::Error::Shape`] for the mask.
pub fn masked_weight_gradient<T: Element, G: Arithmetic>(
    (dy, x): (&[T], &[T]),
    tokens: usize,
    mask: &Mask,
    accumulate: Accumulate,
    dw: &mut [G],
) -> Result<()> {
    let dims = (tokens, mask.rows(), mask.cols());
    expect_operands(dy, x, dims, dw)?;
    let finish = |row: usize, first_col: usize, products: &mut [f32]| {
        let words = mask.row_words(row);
        for (col, product) in (first_col..).zip(products) {
            if words[col / 64] >> (col % 64) & 1 == 0 {
                *product = 0.0;
            }
        }
    };
    transposed_product((dy, x), dims, accumulate, finish, dw)
}

/// The 2:4 estimate of the transposed output gradient, `[out_features, tokens]` compressed along tokens: what stands
/// for `dyᵀ` in [`super::WeightGradient::Mvue`].
///
/// # Errors
/// Those of [`estimate`], and [`crate::Error::Length`].
pub fn gradient_estimate<T: Arithmetic>(
    dy: &[T],
    tokens: usize,
    out_features: usize,
    estimator: Estimator,
) -> Result<Compressed<T>> {
    let transposed = MatrixRef::new(tokens, out_features, dy)?.transposed();
    estimate(MatrixRef::new(out_features, tokens, &transposed)?, estimator, 1.0)
}

/// `dw = estimate · x` for the estimate of the transposed output gradient ([`gradient_estimate`]), `x` `[tokens,
/// in_features]` and `dw` `[out_features, in_features]`: the weight gradient of [`super::WeightGradient::Mvue`].
/// Products are added in f32.
///
/// # Errors
/// [`crate::Error::Shape`] and [`crate::Error::Length`] where `x` does not fit the estimate's tokens and the length of
/// `dw`.
pub fn estimated_weight_gradient<T: KernelElement, G: Arithmetic>(
    estimate: Compressed<T>,
    x: &[T],
    accumulate: Accumulate,
    dw: &mut [G],
) -> Result<()> {
    let (out_features, tokens) = (estimate.rows(), estimate.cols());
    if dw.is_empty() {
        return Ok(());
    }
    let in_features = dw.len() / out_features;
    // The kernels take activations token by token: here, input by input. Products are stored in f32.
    let estimate = estimate.to_dense();
    let estimate = widen(&estimate);
    let estimate = Compressed::from_dense(MatrixRef::new(out_features, tokens, &estimate)?)?;
    let x = widen(x);
    let x = MatrixRef::new(tokens, in_features, &x)?.transposed();
    let mut product = vec![0f32; dw.len()];
    SparseWeight::pack(estimate)?.linear(&x, in_features, Epilogue::default(), &mut product)?;
    dw.par_chunks_mut(in_features).enumerate().for_each(|(row, dw)| {
        for (col, dw) in dw.iter_mut().enumerate() {
            let added = product[col * out_features + row];
            *dw = match accumulate {
                Accumulate::Overwrite => G::from_f32(added),
                Accumulate::Add => G::from_f32(dw.to_f32() + added),
            };
        }
    });
    Ok(())
}

/// The bias gradient: the sums of the columns of `dy`, `[tokens, out_features]`, in f32 and in order of token.
///
/// # Errors
/// [`crate::Error::Length`] where `dy` does not fit `tokens` and the length of `db`.
pub fn bias_gradient<T: Element, G: Arithmetic>(
    dy: &[T],
    tokens: usize,
    accumulate: Accumulate,
    db: &mut [G],
) -> Result<()> {
    // Columns that one task sums: a few cache lines of each row.
    const BLOCK: usize = 256;
    let out_features = db.len();
    expect_length("the output gradient", elements(tokens, out_features)?, dy.len())?;
    db.par_chunks_mut(BLOCK).enumerate().for_each(|(block, db)| {
        let mut sums = [0f32; BLOCK];
        for row in dy.chunks_exact(out_features) {
            for (sum, value) in sums.iter_mut().zip(&row[block * BLOCK..][..db.len()]) {
                *sum += value.to_f32();
            }
        }
        for (db, sum) in db.iter_mut().zip(sums) {
            *db = match accumulate {
                Accumulate::Overwrite => G::from_f32(sum),
                Accumulate::Add => G::from_f32(db.to_f32() + sum),
            };
        }
    });
    Ok(())
}

pub(super) fn expect_operands<T, G>(
    dy: &[T],
    x: &[T],
    (tokens, out_features, in_features): (usize, usize, usize),
    dw: &[G],
) -> Result<()> {
    expect_length("the output gradient", elements(tokens, out_features)?, dy.len())?;
    expect_length("the input", elements(tokens, in_features)?, x.len())?;
    expect_length("the weight gradient", elements(out_features, in_features)?, dw.len())
}
