//! Eigenvalues of small symmetric matrices, by Jacobi's rotations.

/// The most sweeps over all elements; convergence is quadratic, and ten are enough.
const SWEEPS: usize = 60;

/// Eigenvalues of a symmetric matrix `[n, n]`, from the largest to the smallest, and their eigenvectors as rows.
pub(crate) fn symmetric(mut a: Vec<f64>, n: usize) -> (Vec<f64>, Vec<f64>) {
    let mut vectors = vec![0.0; n * n];
    vectors.iter_mut().step_by(n + 1).for_each(|v| *v = 1.0);
    for _ in 0..SWEEPS {
        let norm: f64 = a.iter().map(|v| v * v).sum();
        let beside: f64 = (0..n).flat_map(|i| (0..i).map(move |j| (i, j))).map(|(i, j)| a[i * n + j].powi(2)).sum();
        if beside <= norm * 1e-30 {
            break;
        }
        for p in 0..n {
            for q in p + 1..n {
                rotate(&mut a, &mut vectors, n, (p, q));
            }
        }
    }
    let mut order: Vec<usize> = (0..n).collect();
    order.sort_by(|i, j| a[j * n + j].total_cmp(&a[i * n + i]));
    let values = order.iter().map(|i| a[i * n + i]).collect();
    (values, order.iter().flat_map(|i| vectors[i * n..(i + 1) * n].to_vec()).collect())
}

/// Makes one element beside the diagonal zero.
fn rotate(a: &mut [f64], vectors: &mut [f64], n: usize, (p, q): (usize, usize)) {
    let apq = a[p * n + q];
    if apq == 0.0 {
        return;
    }
    let theta = (a[q * n + q] - a[p * n + p]) / (2.0 * apq);
    let t = theta.signum() / (theta.abs() + theta.hypot(1.0));
    let t = if theta == 0.0 { 1.0 } else { t };
    let c = 1.0 / t.hypot(1.0);
    let s = t * c;
    for k in 0..n {
        let (x, y) = (a[k * n + p], a[k * n + q]);
        (a[k * n + p], a[k * n + q]) = (c * x - s * y, s * x + c * y);
    }
    for values in [a, vectors] {
        for k in 0..n {
            let (x, y) = (values[p * n + k], values[q * n + k]);
            (values[p * n + k], values[q * n + k]) = (c * x - s * y, s * x + c * y);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::solve::testing::random;

    #[test]
    fn eigenvectors_are_orthonormal_and_make_the_matrix_again() {
        for n in [0, 1, 2, 7, 30] {
            let factors: Vec<f64> = random(n * n, 3).into_iter().map(f64::from).collect();
            let at = |i: usize, j: usize| (0..n).map(|k| factors[i * n + k] * factors[j * n + k]).sum::<f64>();
            let matrix: Vec<f64> = (0..n * n).map(|place| at(place / n, place % n)).collect();
            let (values, vectors) = symmetric(matrix.clone(), n);
            assert!(values.is_sorted_by(|a, b| a >= b));
            for i in 0..n {
                for j in 0..n {
                    let dot: f64 = (0..n).map(|k| vectors[i * n + k] * vectors[j * n + k]).sum();
                    assert!((dot - f64::from(i == j)).abs() < 1e-12);
                    let again: f64 = (0..n).map(|k| values[k] * vectors[k * n + i] * vectors[k * n + j]).sum();
                    assert!((again - matrix[i * n + j]).abs() < 1e-11);
                }
            }
        }
        let (values, _) = symmetric(vec![2.0, 0.0, 0.0, 5.0], 2);
        assert_eq!(values, [5.0, 2.0]);
    }
}
