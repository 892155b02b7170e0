//! The three dense f32 products of a linear layer, on slices, in parallel on rayon's current pool.
//!
//! `x` is `[tokens, in]`, `y` and `dy` are `[tokens, out]`, `w` and `dw` are `[out, in]`, all row-major.

use gemm::Parallelism;
use twofour::{
    MatrixRef,
    kernel::{Activation, DenseRef, Engine, Epilogue},
    layer::{self, Accumulate},
};

use crate::Result;

/// A row-major matrix, read as it lies or transposed.
#[derive(Clone, Copy)]
struct Operand<'a> {
    data: &'a [f32],
    rows: usize,
    cols: usize,
    row_stride: usize,
    col_stride: usize,
}

impl<'a> Operand<'a> {
    fn new(data: &'a [f32], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "a [{rows}, {cols}] operand of {} elements", data.len());
        Operand { data, rows, cols, row_stride: cols, col_stride: 1 }
    }

    fn transposed(self) -> Self {
        Operand { rows: self.cols, cols: self.rows, row_stride: self.col_stride, col_stride: self.row_stride, ..self }
    }
}

/// `c = a·b`.
fn multiply(a: Operand<'_>, b: Operand<'_>, c: &mut [f32]) {
    assert_eq!(a.cols, b.rows);
    assert_eq!(c.len(), a.rows * b.cols);
    if c.is_empty() {
        return;
    }
    if a.cols == 0 {
        c.fill(0.0);
        return;
    }
    // SAFETY: each operand's slice has rows * cols elements and is addressed by strides that stay within it
    // (`Operand::new` checked the length, `transposed` swaps both), and so has `c`, borrowed mutably; the strides of
    // existing slices fit in isize.
    unsafe {
        gemm::gemm(
            a.rows,
            b.cols,
            a.cols,
            c.as_mut_ptr(),
            1,
            b.cols as isize,
            false,
            a.data.as_ptr(),
            a.col_stride as isize,
            a.row_stride as isize,
            b.data.as_ptr(),
            b.col_stride as isize,
            b.row_stride as isize,
            0.0,
            1.0,
            false,
            false,
            false,
            Parallelism::Rayon(0),
        );
    }
}

/// `y = act(x·Wᵀ + bias)`. The lengths must fit the dimensions.
///
/// # Errors
/// Those of [`DenseRef::linear`].
pub fn forward(
    x: &[f32],
    w: &[f32],
    (tokens, outputs, inputs): (usize, usize, usize),
    epilogue: Epilogue<'_>,
    y: &mut [f32],
) -> Result<()> {
    match kernels(w, outputs, inputs)? {
        Some(w) => w.linear(x, tokens, epilogue, y)?,
        None => {
            multiply(Operand::new(x, tokens, inputs), Operand::new(w, outputs, inputs).transposed(), y);
            finish(y, outputs, epilogue);
        }
    }
    Ok(())
}

/// `dx = dy·W`. The lengths must fit the dimensions.
///
/// # Errors
/// Those of [`DenseRef::input_gradient`].
pub fn input_gradient(
    dy: &[f32],
    w: &[f32],
    (tokens, outputs, inputs): (usize, usize, usize),
    dx: &mut [f32],
) -> Result<()> {
    match kernels(w, outputs, inputs)? {
        Some(w) => w.input_gradient(dy, tokens, dx)?,
        None => multiply(Operand::new(dy, tokens, outputs), Operand::new(w, outputs, inputs), dx),
    }
    Ok(())
}

/// The weight for twofour's dense kernels, which are faster than the `gemm` crate (`docs/explanation/kernels/cpu.md`);
/// on a machine whose instructions they do not use, nothing.
fn kernels(w: &[f32], outputs: usize, inputs: usize) -> Result<Option<DenseRef<'_, f32>>> {
    Ok(match Engine::best()? {
        Engine::Scalar => None,
        engine => Some(DenseRef::new(MatrixRef::new(outputs, inputs, w)?, engine)?),
    })
}

/// `dW = dyᵀ·x`, or added to it. The lengths must fit the dimensions.
///
/// # Errors
/// Those of [`layer::weight_gradient`].
pub fn weight_gradient(
    dy: &[f32],
    x: &[f32],
    dims: (usize, usize, usize),
    accumulate: Accumulate,
    dw: &mut [f32],
) -> Result<()> {
    let (tokens, outputs, inputs) = dims;
    match (Engine::best()?, accumulate) {
        (Engine::Scalar, Accumulate::Overwrite) => {
            multiply(Operand::new(dy, tokens, outputs).transposed(), Operand::new(x, tokens, inputs), dw);
        }
        _ => layer::weight_gradient((dy, x), dims, accumulate, dw)?,
    }
    Ok(())
}

/// Adds the bias and applies the activation, as the sparse kernels do inside their loop.
fn finish(y: &mut [f32], outputs: usize, epilogue: Epilogue<'_>) {
    use rayon::prelude::*;
    if outputs == 0 || (epilogue.bias.is_none() && epilogue.activation == Activation::Identity) {
        return;
    }
    let activation = epilogue.activation;
    y.par_chunks_mut(outputs).for_each(|row| {
        if let Some(bias) = epilogue.bias {
            for (value, bias) in row.iter_mut().zip(bias) {
                *value += bias;
            }
        }
        if activation != Activation::Identity {
            row.iter_mut().for_each(|value| *value = activation.apply(*value));
        }
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn close(found: &[f32], expected: &[f64]) -> bool {
        found.iter().zip(expected).all(|(f, e)| (f64::from(*f) - e).abs() <= 1e-4 * (1.0 + e.abs()))
    }

    proptest! {
        #[test]
        fn agree_with_sums_in_f64(tokens in 0usize..9, outputs in 0usize..12, inputs in 0usize..20, seed in any::<u32>()) {
            let mut state = seed;
            let mut next = || { state = state.wrapping_mul(1664525).wrapping_add(1013904223); (state >> 8) as f32 / 8388608.0 - 1.0 };
            let x: Vec<f32> = (0..tokens * inputs).map(|_| next()).collect();
            let w: Vec<f32> = (0..outputs * inputs).map(|_| next()).collect();
            let dy: Vec<f32> = (0..tokens * outputs).map(|_| next()).collect();
            let dims = (tokens, outputs, inputs);
            let (mut y, mut dx, mut dw) = (vec![f32::NAN; dy.len()], vec![f32::NAN; x.len()], vec![f32::NAN; w.len()]);
            forward(&x, &w, dims, Epilogue::default(), &mut y).unwrap();
            input_gradient(&dy, &w, dims, &mut dx).unwrap();
            weight_gradient(&dy, &x, dims, Accumulate::Overwrite, &mut dw).unwrap();
            let (mut y64, mut dx64, mut dw64) = (vec![0f64; y.len()], vec![0f64; dx.len()], vec![0f64; dw.len()]);
            for t in 0..tokens { for o in 0..outputs { for i in 0..inputs {
                let (xv, wv, dv) = (f64::from(x[t * inputs + i]), f64::from(w[o * inputs + i]), f64::from(dy[t * outputs + o]));
                y64[t * outputs + o] += xv * wv;
                dx64[t * inputs + i] += dv * wv;
                dw64[o * inputs + i] += dv * xv;
            }}}
            prop_assert!(close(&y, &y64) && close(&dx, &dx64) && close(&dw, &dw64));
        }
    }
}
