//! A sparse layer's weight, compressed, in a given dtype.

use twofour::{Arithmetic, Compressed};

use crate::{Result, linear::SparseLinear};

/// What the layer's present mask keeps of its master, in `T`.
pub(super) fn compressed<T: Arithmetic>(linear: &SparseLinear) -> Result<Compressed<T>> {
    linear.compressed_weight()
}
