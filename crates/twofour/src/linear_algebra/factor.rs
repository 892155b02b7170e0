//! The Cholesky factor that solvers require.
//!
//! A damped Hessian `H` is factored as `H = R·Rᵀ` with `R` upper triangular. Then `U = R⁻¹` is the upper Cholesky
//! factor of the inverse, `H⁻¹ = Uᵀ·U`, that SparseGPT is written with. `R` serves without an inversion
//! ([`sparsegpt`](crate::solve::sparsegpt)): one factorization instead of two and an inverse.
//!
//! `R` comes from the usual factorization: with rows and columns in reverse order `H` becomes `L·Lᵀ`, and `L` in
//! reverse order is `R`. The recursion halves the matrix, so that nearly all the work is large GEMMs.

use rayon::prelude::*;

use super::gemm::{Block, Float, Operand, Threads, multiply, subtract_within};

/// Matrices of this order are factored, and triangles of it solved, without GEMM.
const BASE: usize = 32;

/// Columns of an inverse that one GEMM computes.
const STRIP: usize = 256;

/// Squares of this order on the diagonal of a symmetric product are computed whole.
const SQUARE: usize = 256;

/// Returns `R`, `[n, n]`, zero below the diagonal, with `H + damping · mean(diagonal) · I = R·Rᵀ`, of the lower half of
/// `H`. Zeros on the diagonal (rows and columns of zeros) are replaced by the mean of the others. The error is a row
/// whose pivot is not positive.
pub(crate) fn upper<T: Float>(lower: &[f32], n: usize, damping: f64) -> Result<Vec<T>, usize> {
    let diagonal: Vec<f32> = (0..n).map(|i| lower[i * n + i]).collect();
    let live = diagonal.iter().filter(|d| **d > 0.0).count();
    let mean = diagonal.iter().map(|d| f64::from(*d)).sum::<f64>() / live.max(1) as f64;
    // A layer whose inputs were all zero: any positive diagonal will do.
    let mean = if mean > 0.0 { mean } else { 1.0 };

    let mut matrix = vec![T::default(); n * n];
    // Element (i, j) of the reversed matrix is that at (n-1-i, n-1-j), by symmetry (n-1-j, n-1-i): below the diagonal
    // for j <= i.
    matrix.par_chunks_mut(n.max(1)).enumerate().for_each(|(i, row)| {
        for (j, out) in row[..=i].iter_mut().enumerate() {
            *out = T::of(lower[(n - 1 - j) * n + n - 1 - i]);
        }
        let d = f64::from(diagonal[n - 1 - i]);
        let d = if d > 0.0 { d } else { mean };
        row[i] = T::of_f64(d + damping * mean);
    });
    cholesky(&mut matrix, n, 0, n).map_err(|at| n - 1 - at)?;
    matrix.par_chunks_mut(n.max(1)).enumerate().for_each(|(i, row)| row[i + 1..].fill(T::default()));
    matrix.reverse();
    Ok(matrix)
}

/// Factors the square of order `n` at `(at, at)` in place, its lower half; the error is the row whose pivot is not
/// positive.
fn cholesky<T: Float>(a: &mut [T], stride: usize, at: usize, n: usize) -> Result<(), usize> {
    if n <= BASE {
        return factor_small(a, stride, at, n);
    }
    let half = half(n);
    let below = Block { row: at + half, col: at, rows: n - half, cols: half };
    cholesky(a, stride, at, half)?;
    solve_right(a, stride, at, below);
    subtract_square(a, stride, below);
    cholesky(a, stride, at + half, n - half)
}

/// The inverse of a symmetric positive definite matrix `[n, n]`, computed in f64 where f32 does not suffice; the error
/// is a row whose pivot is not positive.
pub(crate) fn inverse(matrix: &[f32], n: usize) -> Result<Vec<f32>, usize> {
    let mut narrow = matrix.to_vec();
    if invert(&mut narrow, n).is_ok() {
        return Ok(narrow);
    }
    let mut wide: Vec<f64> = matrix.par_iter().map(|value| f64::from(*value)).collect();
    invert(&mut wide, n)?;
    Ok(wide.par_iter().map(|value| *value as f32).collect())
}

/// Replaces a symmetric positive definite matrix `[n, n]`, whose lower half is read, by its inverse; the error is a row
/// whose pivot is not positive.
fn invert<T: Float>(matrix: &mut [T], n: usize) -> Result<(), usize> {
    cholesky(matrix, n, 0, n)?;
    matrix.par_chunks_mut(n.max(1)).enumerate().for_each(|(i, row)| row[i + 1..].fill(T::default()));
    invert_triangle(matrix, n, 0, n);
    // L⁻ᵀ · L⁻¹, a strip of columns at a time: the rows of L⁻¹ above a strip's first are zero in it.
    let triangle = matrix.to_vec();
    for col in (0..n).step_by(STRIP) {
        let cols = STRIP.min(n - col);
        let below = Block { row: col, col, rows: n - col, cols: n - col };
        multiply(
            (&mut *matrix, n, Block { row: col, col, rows: n - col, cols }),
            T::default(),
            T::ONE,
            Operand::new(&triangle, n, below).transposed(),
            Operand::new(&triangle, n, Block { cols, ..below }),
            Threads::All,
        );
    }
    for i in 0..n {
        let (above, row) = matrix.split_at_mut(i * n);
        above.iter_mut().skip(i).step_by(n).zip(&row[..i]).for_each(|(above, value)| *above = *value);
    }
    Ok(())
}

/// Replaces the lower triangle `L` of order `n` at `(at, at)` by its inverse.
fn invert_triangle<T: Float>(a: &mut [T], stride: usize, at: usize, n: usize) {
    if n <= BASE {
        for i in at..at + n {
            let (above, row) = a.split_at_mut(i * stride);
            let pivot = row[i];
            // Row i of the inverse: minus that of L times the rows above, which are inverted.
            let own: Vec<T> = row[at..i].to_vec();
            for j in at..i {
                let sum = (j..i).fold(T::default(), |sum, k| sum + own[k - at] * above[k * stride + j]);
                row[j] = -sum / pivot;
            }
            row[i] = T::ONE / pivot;
        }
        return;
    }
    let half = half(n);
    invert_triangle(a, stride, at, half);
    invert_triangle(a, stride, at + half, n - half);
    let below = Block { row: at + half, col: at, rows: n - half, cols: half };
    let square = Block { row: at, col: at, rows: half, cols: half };
    let all = Block { row: 0, col: 0, ..below };
    let (mut left, mut product) = (vec![T::default(); below.rows * half], vec![T::default(); below.rows * half]);
    for (i, row) in left.chunks_mut(half).enumerate() {
        row.copy_from_slice(&a[(below.row + i) * stride + at..][..half]);
    }
    let (zero, one) = (T::default(), T::ONE);
    let upper = Operand::new(a, stride, square);
    multiply((&mut product, half, all), zero, one, Operand::new(&left, half, all), upper, Threads::All);
    let lower = Block { row: below.row, col: below.row, rows: below.rows, cols: below.rows };
    let own = Operand::new(a, stride, lower);
    multiply((&mut left, half, all), zero, -one, own, Operand::new(&product, half, all), Threads::All);
    for (i, row) in left.chunks(half).enumerate() {
        a[(below.row + i) * stride + at..][..half].copy_from_slice(row);
    }
}

/// Where to cut: a multiple of the base, so that small blocks are whole ones.
fn half(n: usize) -> usize {
    (n / 2).next_multiple_of(BASE).min(n - 1)
}

fn factor_small<T: Float>(a: &mut [T], stride: usize, at: usize, n: usize) -> Result<(), usize> {
    for j in at..at + n {
        let (above, row) = a.split_at_mut(j * stride);
        let row = &mut row[at..=j];
        // The row against those above it: a forward substitution.
        for k in at..j {
            let other = &above[k * stride + at..=k * stride + k];
            let sum = dot(&row[..k - at], &other[..k - at]);
            row[k - at] = (row[k - at] - sum) / other[k - at];
        }
        let (pivot, row) = (row[j - at], &mut row[..j - at + 1]);
        let pivot = pivot - dot(&row[..j - at], &row[..j - at]);
        if !pivot.is_finite() || pivot <= T::default() {
            return Err(j);
        }
        row[j - at] = pivot.root();
    }
    Ok(())
}

/// A dot product in eight partial sums, so that it becomes vector instructions.
fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    let mut sums = [T::default(); 8];
    let ((a8, a_rest), (b8, b_rest)) = (a.as_chunks::<8>(), b.as_chunks::<8>());
    for (a, b) in a8.iter().zip(b8) {
        for i in 0..8 {
            sums[i] += a[i] * b[i];
        }
    }
    for (i, (a, b)) in a_rest.iter().zip(b_rest).enumerate() {
        sums[i] += *a * *b;
    }
    sums.into_iter().fold(T::default(), |a, b| a + b)
}

/// Replaces the block `B`, whose columns are those of the triangle `L` at `(at, at)`, by `B · L⁻ᵀ`.
fn solve_right<T: Float>(a: &mut [T], stride: usize, at: usize, block: Block) {
    let n = block.cols;
    if n <= BASE {
        let triangle: Vec<T> = (0..n).flat_map(|i| a[(at + i) * stride + at..][..n].to_vec()).collect();
        let rows = &mut a[block.row * stride..(block.row + block.rows) * stride];
        rows.par_chunks_mut(stride).with_min_len(64).for_each(|row| {
            let row = &mut row[block.col..block.col + n];
            for k in 0..n {
                let of_triangle = &triangle[k * n..][..=k];
                let sum = dot(&row[..k], &of_triangle[..k]);
                row[k] = (row[k] - sum) / of_triangle[k];
            }
        });
        return;
    }
    let half = half(n);
    let left = Block { cols: half, ..block };
    let right = Block { col: block.col + half, cols: n - half, ..block };
    solve_right(a, stride, at, left);
    let of_triangle = Block { row: at + half, col: at, rows: n - half, cols: half };
    subtract_within(a, stride, right, left, of_triangle);
    solve_right(a, stride, at + half, right);
}

/// Subtracts `B·Bᵀ` from the square to the right of the block `B`, of the same rows: from its lower half at least.
fn subtract_square<T: Float>(a: &mut [T], stride: usize, b: Block) {
    let right = |rows: Block, cols: Block| Block {
        row: rows.row,
        col: cols.row - b.row + b.col + b.cols,
        rows: rows.rows,
        cols: cols.rows,
    };
    fn split<T: Float>(a: &mut [T], stride: usize, b: Block, right: &impl Fn(Block, Block) -> Block) {
        if b.rows <= SQUARE {
            return subtract_within(a, stride, right(b, b), b, b);
        }
        let half = half(b.rows);
        let (upper, lower) = (Block { rows: half, ..b }, Block { row: b.row + half, rows: b.rows - half, ..b });
        split(a, stride, upper, right);
        subtract_within(a, stride, right(lower, upper), lower, upper);
        split(a, stride, lower, right);
    }
    split(a, stride, b, &right);
}

/// The diagonal of `(R·Rᵀ)⁻¹`: the squared norms of the columns of `R⁻¹`. Takes `n³/3` multiplications.
pub(crate) fn inverse_diagonal(upper: &[f64], n: usize) -> Vec<f32> {
    // Column j of the inverse solves R·x = e_j, from row j upwards; in the order of rows of the transpose all reads are
    // consecutive.
    let mut transposed = vec![0f64; n * n];
    transposed.par_chunks_mut(n.max(1)).enumerate().for_each(|(j, out)| {
        for (i, out) in out[..=j].iter_mut().enumerate() {
            *out = upper[i * n + j];
        }
    });
    let column = |j: usize| {
        let mut x = vec![0f64; j + 1];
        x[j] = 1.0;
        let mut norm = 0.0;
        for i in (0..=j).rev() {
            let column = &transposed[i * n..][..=i];
            x[i] /= column[i];
            let value = x[i];
            norm += value * value;
            x[..i].iter_mut().zip(column).for_each(|(x, r)| *x -= value * r);
        }
        norm as f32
    };
    (0..n).into_par_iter().map(column).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, calibration::Hessian};

    /// A Hessian of random activations, more tokens than features.
    fn hessian(n: usize) -> Hessian {
        let mut state = 9u64;
        let mut random = || {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        };
        let batch: Vec<f32> = (0..(n + 20) * n).map(|_| random()).collect();
        let mut hessian = Hessian::new(n).unwrap();
        hessian.add(&batch).unwrap();
        hessian
    }

    fn residual<T: Float>(n: usize) -> f64 {
        let hessian = hessian(n);
        let damping = 0.01;
        let r = hessian.upper_factor::<T>(damping).unwrap();
        let mean = hessian.diagonal().iter().map(|d| f64::from(*d)).sum::<f64>() / n as f64;
        let mut worst = 0f64;
        for i in 0..n {
            for j in 0..=i {
                let at = |i: usize, j: usize| f64::from(r[i * n + j].to_f32());
                let product: f64 = (i..n).map(|k| at(i, k) * at(j, k)).sum();
                let expected = f64::from(hessian.lower()[i * n + j]) + if i == j { damping * mean } else { 0.0 };
                worst = worst.max((product - expected).abs() / mean);
                assert!(j == i || r[i * n + j] == T::default(), "{i} {j}");
            }
        }
        worst
    }

    #[test]
    fn the_factor_times_its_transpose_is_the_hessian() {
        for n in [1, 2, 31, 32, 33, 63, 64, 65, 100, 300] {
            let (single, double) = (residual::<f32>(n), residual::<f64>(n));
            assert!(single < 2e-6, "{n}: {single}");
            // What is read here is rounded to f32.
            assert!(double < 2e-7, "{n}: {double}");
        }
    }

    #[test]
    fn an_inverse_times_its_matrix_is_one() {
        for n in [0usize, 1, 2, 31, 33, 64, 100, 300] {
            let hessian = hessian(n.max(1));
            let lower: Vec<f64> = hessian.lower()[..n * n].iter().map(|value| f64::from(*value)).collect();
            let mut inverse = lower.clone();
            invert(&mut inverse, n).unwrap();
            for (i, j) in (0..n).flat_map(|i| (0..n).map(move |j| (i, j))) {
                let at = |i: usize, k: usize| lower[i.max(k) * n + i.min(k)];
                let sum: f64 = (0..n).map(|k| at(i, k) * inverse[k * n + j]).sum();
                let expected = if i == j { 1.0 } else { 0.0 };
                assert!((sum - expected).abs() < 1e-6, "{n}: {i} {j}: {sum}");
            }
        }
        assert_eq!(invert(&mut [1.0f32, 0.0, 2.0, 1.0], 2), Err(1));
    }

    #[test]
    fn a_hessian_without_full_rank_is_named_and_dead_features_are_not() {
        let mut flat = Hessian::new(3).unwrap();
        flat.add(&[1.0, 2.0, 0.0]).unwrap();
        let error = flat.upper_factor::<f64>(0.0).unwrap_err();
        assert!(matches!(error, Error::NotPositiveDefinite { feature: 0, .. }), "{error}");
        let r = flat.upper_factor::<f64>(0.01).unwrap();
        assert!((r[8] * r[8] - 2.5 * 1.01).abs() < 1e-12, "{r:?}");
        assert!(flat.upper_factor::<f32>(f64::NAN).is_err() && flat.upper_factor::<f32>(-1.0).is_err());
        assert!(matches!(Hessian::new(3).unwrap().upper_factor::<f32>(0.1), Err(Error::NoTokens { .. })));
    }
}
