//! The dense products of a layer, `c = aᵀ · b`, by the kernels of [`DenseRef`].

use rayon::prelude::*;

use crate::{
    Arithmetic, Element, MatrixRef, Result,
    kernel::{DenseRef, Engine},
    layer::Accumulate,
};

/// Rows of the result that are computed at a time: bounds the memory for the transposed part of `a`.
const ROWS: usize = 512;

/// `c = aᵀ · b` in f32: `a` is `[depth, rows]`, `b` is `[depth, cols]`, `c` is `[rows, cols]`. The lengths must fit.
/// `finish` sees each row of the product before it is stored.
///
/// # Errors
/// Those of [`Engine::best`].
pub(super) fn transposed_product<A: Element, B: Element, C: Arithmetic>(
    (a, b): (&[A], &[B]),
    (depth, rows, cols): (usize, usize, usize),
    accumulate: Accumulate,
    finish: impl Fn(usize, &mut [f32]) + Sync,
    c: &mut [C],
) -> Result<()> {
    if c.is_empty() {
        return Ok(());
    }
    let b = widen(b);
    let b = DenseRef::new(MatrixRef::new(depth, cols, &b)?, Engine::best()?)?;
    let mut part = vec![0f32; ROWS.min(rows) * depth];
    let mut product = vec![];
    for (i, c) in c.chunks_mut(ROWS * cols).enumerate() {
        let height = c.len() / cols;
        let part = &mut part[..height * depth];
        transpose(a, rows, i * ROWS, depth, part);
        // In place, where nothing is to be added to.
        if let (Some(c), Accumulate::Overwrite) = (as_floats(c), accumulate) {
            b.input_gradient(part, height, c)?;
            c.par_chunks_mut(cols).enumerate().for_each(|(row, c)| finish(i * ROWS + row, c));
            continue;
        }
        product.resize(ROWS.min(rows) * cols, 0.0);
        let product = &mut product[..c.len()];
        b.input_gradient(part, height, product)?;
        c.par_chunks_mut(cols).zip(product.par_chunks_mut(cols)).enumerate().for_each(|(row, (c, product))| {
            finish(i * ROWS + row, product);
            match accumulate {
                Accumulate::Overwrite => c.iter_mut().zip(product).for_each(|(c, p)| *c = C::from_f32(*p)),
                Accumulate::Add => c.iter_mut().zip(product).for_each(|(c, p)| *c = C::from_f32(c.to_f32() + *p)),
            }
        });
    }
    Ok(())
}

/// The buffer itself, where its elements are f32.
fn as_floats<C: Element>(c: &mut [C]) -> Option<&mut [f32]> {
    if C::DTYPE == crate::DType::F32 { bytemuck::try_cast_slice_mut(c).ok() } else { None }
}

/// The same numbers as f32.
pub(super) fn widen<T: Element>(values: &[T]) -> std::borrow::Cow<'_, [f32]> {
    match bytemuck::try_cast_slice(values) {
        Ok(floats) if T::DTYPE == crate::DType::F32 => std::borrow::Cow::Borrowed(floats),
        _ => std::borrow::Cow::Owned(values.par_iter().map(|v| v.to_f32()).collect()),
    }
}

/// Columns `first..` of `a`, `[depth, stride]`, as rows of `out`, `[columns, depth]`.
fn transpose<A: Element>(a: &[A], stride: usize, first: usize, depth: usize, out: &mut [f32]) {
    // Sixteen columns are a cache line of f32.
    const TILE: usize = 16;
    if depth == 0 {
        return;
    }
    out.par_chunks_mut(TILE * depth).enumerate().for_each(|(tile, out)| {
        let col = first + tile * TILE;
        let width = out.len() / depth;
        for row in 0..depth {
            for (i, v) in a[row * stride + col..][..width].iter().enumerate() {
                out[i * depth + row] = v.to_f32();
            }
        }
    });
}
