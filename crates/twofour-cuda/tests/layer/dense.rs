//! The dense layer in f64, and numbers for it.

use twofour::Arithmetic;

pub(crate) fn numbers<T: Arithmetic>(len: usize, seed: usize) -> Vec<T> {
    (0..len).map(|i| T::from_f32(((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0)).collect()
}

/// `a · b` for `[n, k]` and `[k, m]` in f64.
pub(crate) fn product(a: &[f64], b: &[f64], (n, k, m): (usize, usize, usize)) -> Vec<f64> {
    (0..n * m).map(|i| (0..k).map(|at| a[i / m * k + at] * b[at * m + i % m]).sum()).collect()
}

pub(crate) fn wide<T: twofour::Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|v| f64::from(v.to_f32())).collect()
}

pub(crate) fn flipped(data: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| data[r * cols + c])).collect()
}

pub(crate) fn close<T: twofour::Element>(what: &str, found: &[T], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let found = f64::from(found.to_f32());
        assert!(
            (found - expected).abs() <= tolerance * (1.0 + expected.abs()),
            "{what}: element {i}: {found}, expected {expected}"
        );
    }
}
