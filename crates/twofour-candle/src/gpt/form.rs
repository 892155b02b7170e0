//! A sparse layer's weight, compressed, in a given dtype.

use twofour::{Arithmetic, Compressed, MatrixRef};

use crate::{Result, linear::SparseLinear, ops::rows};

/// What the layer's present mask keeps of its master, in `T`.
pub(super) fn compressed<T: Arithmetic>(linear: &SparseLinear) -> Result<Compressed<T>> {
    let (outputs, inputs) = linear.weight().dims2()?;
    let values =
        rows::with_slice(linear.weight(), "weight", |w| Ok(w.iter().map(|&v| T::from_f32(v)).collect::<Vec<T>>()))?;
    Ok(Compressed::from_masked(MatrixRef::new(outputs, inputs, &values)?, &linear.mask())?)
}
