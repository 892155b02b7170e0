//! Times products with many tokens against the `gemm` crate's dense f32 product: `cargo run --release -p twofour
//! --example prefill -- [rows] [cols] [tokens] [rounds]`. `RAYON_NUM_THREADS` sets the threads.
//!
//! Contenders take turns in one process; figures are medians.

use std::time::Instant;

use half::bf16;
use twofour::{
    Arithmetic, Compressed, Element, MatrixRef,
    kernel::{DenseWeight, Engine, Epilogue, KernelElement, SparseWeight},
};

fn main() -> twofour::Result<()> {
    let arguments: Vec<usize> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let argument = |i: usize, default| arguments.get(i).copied().unwrap_or(default);
    let (rows, cols, tokens, rounds) = (argument(0, 4096), argument(1, 4096), argument(2, 512), argument(3, 9));
    println!("[{rows}, {cols}] × {tokens} tokens, {}, {} threads", Engine::best()?, rayon::current_num_threads());
    let w = noise(rows * cols, 1);
    let x = noise(tokens * cols, 2);
    let dy = noise(tokens * rows, 3);
    let (sparse, dense) = pack::<f32>(&w, rows, cols)?;
    let (sparse16, dense16) = pack::<bf16>(&w, rows, cols)?;
    let (x16, dy16): (Vec<bf16>, Vec<bf16>) = (narrow(&x), narrow(&dy));
    let none = Epilogue::default();
    let (forward, backward) = (tokens * rows, tokens * cols);
    let mut contenders = [
        contender("gemm f32 x·Wᵀ", forward, |y| {
            gemm_linear(&w, &x, rows, cols, tokens, y);
            Ok(())
        }),
        contender("gemm f32 dy·W", backward, |dx| {
            gemm_gradient(&w, &dy, rows, cols, tokens, dx);
            Ok(())
        }),
        contender("2:4 f32 x·Wᵀ", forward, |y| sparse.linear(&x, tokens, none, y)),
        contender("2:4 f32 dy·W", backward, |dx| sparse.input_gradient(&dy, tokens, dx)),
        contender("dense f32 x·Wᵀ", forward, |y| dense.linear(&x, tokens, none, y)),
        contender("dense f32 dy·W", backward, |dx| dense.input_gradient(&dy, tokens, dx)),
        contender("2:4 bf16 x·Wᵀ", forward, |y| sparse16.linear(&x16, tokens, none, y)),
        contender("2:4 bf16 dy·W", backward, |dx| sparse16.input_gradient(&dy16, tokens, dx)),
        contender("dense bf16 x·Wᵀ", forward, |y| dense16.linear(&x16, tokens, none, y)),
        contender("dense bf16 dy·W", backward, |dx| dense16.input_gradient(&dy16, tokens, dx)),
    ];
    let mut times = vec![Vec::new(); contenders.len()];
    for round in 0..=rounds {
        for ((_, run), times) in contenders.iter_mut().zip(&mut times) {
            let start = Instant::now();
            run()?;
            // The first round warms up.
            if round > 0 {
                times.push(start.elapsed().as_secs_f64());
            }
        }
    }
    let medians: Vec<f64> = times
        .iter_mut()
        .map(|times| {
            times.sort_by(f64::total_cmp);
            times[times.len() / 2]
        })
        .collect();
    for (i, ((name, _), median)) in contenders.iter().zip(&medians).enumerate() {
        let gflops = 2e-9 * (rows * cols * tokens) as f64 / median;
        println!(
            "{name:16} {:9.3} ms  {gflops:7.1} dense-equivalent GFLOP/s  {:5.2}x of gemm",
            median * 1e3,
            medians[i % 2] / median
        );
    }
    Ok(())
}

/// A name and what to time: a product into an output of its own.
type Contender<'a> = (&'static str, Box<dyn FnMut() -> twofour::Result<()> + 'a>);

fn contender<'a, T: Element>(
    name: &'static str,
    output: usize,
    mut run: impl FnMut(&mut [T]) -> twofour::Result<()> + 'a,
) -> Contender<'a> {
    let mut output = vec![T::ZERO; output];
    (name, Box::new(move || run(&mut output)))
}

fn pack<T: KernelElement>(w: &[f32], rows: usize, cols: usize) -> twofour::Result<(SparseWeight<T>, DenseWeight<T>)> {
    let w: Vec<T> = narrow(w);
    let w = MatrixRef::new(rows, cols, &w)?;
    Ok((SparseWeight::pack(Compressed::from_pruned(w)?)?, DenseWeight::pack(w)?))
}

fn narrow<T: Arithmetic>(values: &[f32]) -> Vec<T> {
    values.iter().map(|v| T::from_f32(*v)).collect()
}

/// Uniform in [-1, 1), from a linear congruential generator.
fn noise(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    (0..len)
        .map(|_| {
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            (state >> 40) as f32 / (1 << 23) as f32 - 1.0
        })
        .collect()
}

/// A row-major matrix as gemm wants it: data, rows, columns, steps between columns and between rows.
type Operand<'a> = (&'a [f32], isize, isize);

fn gemm_linear(w: &[f32], x: &[f32], rows: usize, cols: usize, tokens: usize, y: &mut [f32]) {
    gemm_product((tokens, rows, cols), y, (x, 1, cols as isize), (w, cols as isize, 1));
}

fn gemm_gradient(w: &[f32], dy: &[f32], rows: usize, cols: usize, tokens: usize, dx: &mut [f32]) {
    gemm_product((tokens, cols, rows), dx, (dy, 1, rows as isize), (w, 1, cols as isize));
}

/// `out = a · b`, of `(m, n, k)`; `out` is row-major.
fn gemm_product((m, n, k): (usize, usize, usize), out: &mut [f32], a: Operand<'_>, b: Operand<'_>) {
    assert!(out.len() == m * n && a.0.len() == m * k && b.0.len() == n * k);
    // SAFETY: the buffers have the lengths that the shapes and strides reach, as asserted.
    unsafe {
        gemm::gemm(
            m,
            n,
            k,
            out.as_mut_ptr(),
            1,
            n as isize,
            false,
            a.0.as_ptr(),
            a.1,
            a.2,
            b.0.as_ptr(),
            b.1,
            b.2,
            0.0,
            1.0,
            false,
            false,
            false,
            gemm::Parallelism::Rayon(rayon::current_num_threads()),
        );
    }
}
