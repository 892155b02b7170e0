//! Dense GEMM in f32 and f64 over parts of matrices, for solvers: the `gemm` crate behind checked bounds.

use std::{
    fmt::Debug,
    ops::{Add, AddAssign, Div, Mul, Neg, Sub, SubAssign},
};

/// f32 or f64.
pub(crate) trait Float:
    Copy
    + Send
    + Sync
    + Debug
    + PartialOrd
    + Default
    + Add<Output = Self>
    + Sub<Output = Self>
    + Mul<Output = Self>
    + Div<Output = Self>
    + Neg<Output = Self>
    + AddAssign
    + SubAssign
    + 'static
{
    /// 1.
    const ONE: Self;
    /// The value of an f32.
    fn of(value: f32) -> Self;
    /// The nearest value to an f64.
    fn of_f64(value: f64) -> Self;
    /// Whether it is neither NaN nor infinite.
    fn is_finite(self) -> bool;
    /// The nearest f32.
    #[cfg(test)]
    fn to_f32(self) -> f32;
    /// The square root.
    fn root(self) -> Self;
}

impl Float for f32 {
    const ONE: Self = 1.0;
    fn of(value: f32) -> Self {
        value
    }
    fn of_f64(value: f64) -> Self {
        value as f32
    }
    fn is_finite(self) -> bool {
        f32::is_finite(self)
    }
    #[cfg(test)]
    fn to_f32(self) -> f32 {
        self
    }
    fn root(self) -> Self {
        self.sqrt()
    }
}

impl Float for f64 {
    const ONE: Self = 1.0;
    fn of(value: f32) -> Self {
        f64::from(value)
    }
    fn of_f64(value: f64) -> Self {
        value
    }
    fn is_finite(self) -> bool {
        f64::is_finite(self)
    }
    #[cfg(test)]
    fn to_f32(self) -> f32 {
        self as f32
    }
    fn root(self) -> Self {
        self.sqrt()
    }
}

/// A rectangle of a matrix.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Block {
    pub(crate) row: usize,
    pub(crate) col: usize,
    pub(crate) rows: usize,
    pub(crate) cols: usize,
}

impl Block {
    /// An assertion that a slice with this distance of rows holds the rectangle.
    fn check(self, len: usize, stride: usize) {
        assert!(self.cols == 0 || self.col + self.cols <= stride, "{self:?} is wider than rows of {stride}");
        let end = self.row.checked_add(self.rows).and_then(|end| end.checked_mul(stride));
        assert!(end.is_some_and(|end| end <= len), "{self:?} ends past {len} elements");
    }

    fn is_disjoint_from(self, other: Block) -> bool {
        let apart = |a: usize, a_len: usize, b: usize, b_len: usize| a + a_len <= b || b + b_len <= a;
        apart(self.row, self.rows, other.row, other.rows) || apart(self.col, self.cols, other.col, other.cols)
    }
}

/// A matrix of a product: a rectangle of a row-major matrix with rows of `stride` elements, transposed or not.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Operand<'a, T> {
    data: &'a [T],
    stride: usize,
    block: Block,
    transposed: bool,
}

impl<'a, T> Operand<'a, T> {
    /// A rectangle of a matrix with rows of `stride` elements.
    pub(crate) fn new(data: &'a [T], stride: usize, block: Block) -> Self {
        block.check(data.len(), stride);
        Self { data, stride, block, transposed: false }
    }

    /// The transpose.
    pub(crate) fn transposed(self) -> Self {
        Self { transposed: !self.transposed, ..self }
    }

    fn shape(&self) -> (usize, usize) {
        if self.transposed { (self.block.cols, self.block.rows) } else { (self.block.rows, self.block.cols) }
    }
}

/// Who computes a product.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Threads {
    /// The calling thread.
    One,
    /// All of rayon's.
    All,
}

impl Threads {
    fn parallelism(self) -> gemm::Parallelism {
        match self {
            Threads::One => gemm::Parallelism::None,
            Threads::All => gemm::Parallelism::Rayon(0),
        }
    }
}

/// `dst = old · dst + scale · a · b` for a rectangle of `dst`.
pub(crate) fn multiply<T: Float>(
    (dst, stride, block): (&mut [T], usize, Block),
    old: T,
    scale: T,
    a: Operand<'_, T>,
    b: Operand<'_, T>,
    threads: Threads,
) {
    block.check(dst.len(), stride);
    let ((m, k), (inner, n)) = (a.shape(), b.shape());
    assert_eq!((m, k, n), (block.rows, inner, block.cols), "shapes of a product");
    let strides = |o: &Operand<'_, T>| if o.transposed { (o.stride, 1) } else { (1, o.stride) };
    let ((a_cs, a_rs), (b_cs, b_rs)) = (strides(&a), strides(&b));
    let start = |o: &Operand<'_, T>| o.data[o.block.row * o.stride + o.block.col..].as_ptr();
    if m == 0 || n == 0 || k == 0 {
        return;
    }
    // SAFETY: `Block::check` ran for all three rectangles, so every element addressed by these sizes and strides lies
    // inside its slice. `dst` is borrowed mutably and so overlaps neither operand. Strides fit isize because slices do.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            dst[block.row * stride + block.col..].as_mut_ptr(),
            1,
            stride as isize,
            old != T::default(),
            start(&a),
            a_cs as isize,
            a_rs as isize,
            start(&b),
            b_cs as isize,
            b_rs as isize,
            old,
            scale,
            false,
            false,
            false,
            threads.parallelism(),
        );
    }
}

/// `dst -= a · bᵀ` for three rectangles of one matrix with rows of `stride` elements, where `dst` overlaps neither
/// other.
pub(crate) fn subtract_within<T: Float>(data: &mut [T], stride: usize, dst: Block, a: Block, b: Block) {
    for block in [dst, a, b] {
        block.check(data.len(), stride);
    }
    assert!(dst.is_disjoint_from(a) && dst.is_disjoint_from(b), "a product's destination overlaps an operand");
    assert_eq!((dst.rows, dst.cols, a.cols), (a.rows, b.rows, b.cols), "shapes of a product");
    if dst.rows == 0 || dst.cols == 0 || a.cols == 0 {
        return;
    }
    let start = data.as_mut_ptr();
    let at = |block: Block| block.row * stride + block.col;
    // SAFETY: `Block::check` ran for all three rectangles, so every element addressed lies inside `data`, whose only
    // pointer is `start`. The destination's elements are no operand's: the rectangles are disjoint.
    unsafe {
        gemm::gemm(
            dst.rows,
            dst.cols,
            a.cols,
            start.add(at(dst)),
            1,
            stride as isize,
            true,
            start.add(at(a)).cast_const(),
            1,
            stride as isize,
            start.add(at(b)).cast_const(),
            stride as isize,
            1,
            T::ONE,
            -T::ONE,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(0),
        );
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    fn block(row: usize, col: usize, rows: usize, cols: usize) -> Block {
        Block { row, col, rows, cols }
    }

    proptest! {
        /// Small integers have exact products, so the order of sums does not matter.
        #[test]
        fn products_of_rectangles(
            (m, n, k) in (0usize..20, 0usize..20, 0usize..20),
            transposed in any::<(bool, bool)>(),
            values in proptest::collection::vec(-8i8..8, 4 * 32 * 32),
            within in any::<bool>(),
        ) {
            let values: Vec<f64> = values.into_iter().map(f64::from).collect();
            let (a, b, c) = (&values[..1024], &values[1024..2048], &values[2048..3072]);
            let a_block = if transposed.0 { block(3, 1, k, m) } else { block(3, 1, m, k) };
            let b_block = if transposed.1 { block(0, 7, n, k) } else { block(0, 7, k, n) };
            let turn = |o: Operand<'static, f64>, t| if t { o.transposed() } else { o };
            let leak = |v: &[f64]| -> &'static [f64] { v.to_vec().leak() };
            let (a_op, b_op) = (Operand::new(leak(a), 32, a_block), Operand::new(leak(b), 32, b_block));
            let mut out = c.to_vec();
            multiply((&mut out, 32, block(2, 5, m, n)), 1.0, -2.0, turn(a_op, transposed.0), turn(b_op, transposed.1), Threads::One);
            for row in 0..32 {
                for col in 0..32 {
                    let inside = (2..2 + m).contains(&row) && (5..5 + n).contains(&col);
                    let expected: f64 = if inside {
                        let (i, j) = (row - 2, col - 5);
                        let a_at = |i, t| if transposed.0 { a[(3 + t) * 32 + 1 + i] } else { a[(3 + i) * 32 + 1 + t] };
                        let b_at = |t, j| if transposed.1 { b[j * 32 + 7 + t] } else { b[t * 32 + 7 + j] };
                        (0..k).map(|t| -2.0 * a_at(i, t) * b_at(t, j)).sum()
                    } else { 0.0 };
                    prop_assert_eq!(out[row * 32 + col], c[row * 32 + col] + expected);
                }
            }
            if within {
                // Three rectangles of one matrix of 64 columns: left, right upper, right lower.
                let mut data = values.clone();
                let (dst, x, y) = (block(0, 0, m, n), block(0, 32, m, k), block(32, 20, n, k));
                subtract_within(&mut data, 64, dst, x, y);
                for i in 0..m {
                    for j in 0..n {
                        let product: f64 = (0..k).map(|t| values[i * 64 + 32 + t] * values[(32 + j) * 64 + 20 + t]).sum();
                        prop_assert_eq!(data[i * 64 + j], values[i * 64 + j] - product);
                    }
                }
            }
        }
    }

    #[test]
    #[should_panic(expected = "overlaps")]
    fn overlapping_rectangles_are_refused() {
        subtract_within(&mut [0f32; 64], 8, block(0, 0, 4, 4), block(3, 3, 4, 2), block(4, 4, 4, 2));
    }
}
