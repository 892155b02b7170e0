//! Numbers and comparisons.

use twofour::{Arithmetic, Element};

use crate::support::numbers::Random;

/// Numbers between -2 and 2, more of them near 0.
pub(crate) fn numbers<T: Arithmetic>(len: usize, seed: u64) -> Vec<T> {
    let mut random = Random(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1);
    (0..len).map(|_| T::from_f32(random.number())).collect()
}

/// The numbers in f64.
pub(crate) fn wide<T: Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|value| f64::from(value.to_f32())).collect()
}

/// Expects results within a tolerance, relative to the result and to `size`.
pub(crate) fn expect_close_to<T: Element>(what: &str, found: &[T], expected: &[f64], tolerance: f64, size: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let found = f64::from(found.to_f32());
        let error = (found - expected).abs();
        assert!(error <= tolerance * (size + expected.abs()), "{what}: element {i}: {found}, expected {expected}");
    }
}

/// Expects results within a tolerance, relative to the result and to 1.
pub(crate) fn expect_close<T: Element>(what: &str, found: &[T], expected: &[f64], tolerance: f64) {
    expect_close_to(what, found, expected, tolerance, 1.0);
}

/// Returns `a · bᵀ` for `[n, k]` and `[m, k]`.
pub(crate) fn product(a: &[f64], b: &[f64], (n, m, k): (usize, usize, usize)) -> Vec<f64> {
    (0..n * m).map(|i| (0..k).map(|at| a[i / m * k + at] * b[i % m * k + at]).sum()).collect()
}

/// Returns the transpose of a `[rows, cols]` matrix.
pub(crate) fn transposed(data: &[f64], (rows, cols): (usize, usize)) -> Vec<f64> {
    (0..cols).flat_map(|col| (0..rows).map(move |row| data[row * cols + col])).collect()
}
