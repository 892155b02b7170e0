//! The dense GEMMs of a layer, `c = aᵀ · b`.

use rayon::prelude::*;

use crate::{
    Arithmetic, Element, MatrixRef, Result,
    kernel::{self, Engine},
    layer::Accumulate,
};

/// `c = aᵀ · b` in f32: `a` is `[depth, rows]`, `b` is `[depth, cols]`, `c` is `[rows, cols]`. The lengths must fit.
/// `finish(row, first_col, products)` changes products, some of a row from `first_col` on, before they are stored.
///
/// # Errors
/// Those of [`Engine::best`].
pub(super) fn transposed_product<A: Element, B: Element, C: Arithmetic>(
    (a, b): (&[A], &[B]),
    (depth, rows, cols): (usize, usize, usize),
    accumulate: Accumulate,
    finish: impl Fn(usize, usize, &mut [f32]) + Sync,
    c: &mut [C],
) -> Result<()> {
    let (a, b) = (widen(a), widen(b));
    let factors = (MatrixRef::new(depth, rows, &a)?, MatrixRef::new(depth, cols, &b)?);
    let store = |row: usize, first_col: usize, products: &mut [f32], c: &mut [C]| {
        finish(row, first_col, products);
        match accumulate {
            Accumulate::Overwrite => c.iter_mut().zip(products).for_each(|(c, p)| *c = C::from_f32(*p)),
            Accumulate::Add => c.iter_mut().zip(products).for_each(|(c, p)| *c = C::from_f32(c.to_f32() + *p)),
        }
    };
    kernel::transposed_product(Engine::best()?, factors, store, c)
}

/// The same numbers as f32.
pub(super) fn widen<T: Element>(values: &[T]) -> std::borrow::Cow<'_, [f32]> {
    match bytemuck::try_cast_slice(values) {
        Ok(floats) if T::DTYPE == crate::DataType::F32 => std::borrow::Cow::Borrowed(floats),
        _ => std::borrow::Cow::Owned(values.par_iter().map(|v| v.to_f32()).collect()),
    }
}
