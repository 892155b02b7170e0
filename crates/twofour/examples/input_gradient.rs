//! Times the two ways to the input gradient `dy · W` of a transposable 2:4 weight: through the packed rows of `W`
//! ([`SparseWeight::input_gradient`]), or as the forward product of a packed transpose, which has to be packed first:
//! `cargo run --release -p twofour --example input_gradient -- [rounds]`. `RAYON_NUM_THREADS` sets the threads.
//!
//! Contenders take turns in one process; figures are medians in milliseconds.

use std::time::Instant;

use half::bf16;
use twofour::{
    Arithmetic, Compressed, MatrixRef,
    kernel::{Engine, Epilogue, KernelElement, SparseWeight},
    select::{self, Transposable},
};

fn main() -> twofour::Result<()> {
    let rounds = std::env::args().nth(1).and_then(|a| a.parse().ok()).unwrap_or(7);
    println!("{}, {} threads", Engine::best()?, rayon::current_num_threads());
    println!(
        "{:<6} {:<14} {:>7} {:>10} {:>12} {:>10} {:>10}",
        "dtype", "weight", "tokens", "rows", "transpose", "repack", "ratio"
    );
    for (rows, cols) in [(2048, 512), (512, 2048), (4096, 4096)] {
        for tokens in [1, 16, 128, 512, 2048] {
            compare::<f32>(rows, cols, tokens, rounds)?;
            compare::<bf16>(rows, cols, tokens, rounds)?;
        }
    }
    println!("ratio: transpose / rows; below 1 the transpose is faster, before its packing is counted");
    Ok(())
}

fn compare<T: KernelElement>(rows: usize, cols: usize, tokens: usize, rounds: usize) -> twofour::Result<()> {
    let w: Vec<T> = noise(rows * cols, 1);
    let dy: Vec<T> = noise(tokens * rows, 2);
    let w = MatrixRef::new(rows, cols, &w)?;
    let mask = select::transposable(w, Transposable::GreedyAbs)?;
    let by_rows = SparseWeight::pack(Compressed::from_masked(w, &mask)?)?;
    let turned = w.transposed();
    let (turned, turned_mask) = (MatrixRef::new(cols, rows, &turned)?, mask.transposed());
    let mut by_transpose = SparseWeight::pack(Compressed::from_masked(turned, &turned_mask)?)?;

    let (mut dx, mut dx_too) = (vec![T::ZERO; tokens * cols], vec![T::ZERO; tokens * cols]);
    let mut times = [const { Vec::new() }; 3];
    for round in 0..=rounds {
        let begun = Instant::now();
        by_rows.input_gradient(&dy, tokens, &mut dx)?;
        let rows_took = begun.elapsed();
        let begun = Instant::now();
        by_transpose.linear(&dy, tokens, Epilogue::default(), &mut dx_too)?;
        let transpose_took = begun.elapsed();
        let begun = Instant::now();
        by_transpose.repack(turned, &turned_mask)?;
        let repack_took = begun.elapsed();
        // The first round warms up.
        if round > 0 {
            for (times, took) in times.iter_mut().zip([rows_took, transpose_took, repack_took]) {
                times.push(took.as_secs_f64() * 1e3);
            }
        }
    }
    let scale = dx.iter().fold(0.0, |largest: f32, v| largest.max(v.to_f32().abs()));
    let apart = dx.iter().zip(&dx_too).fold(0.0, |most: f32, (a, b)| most.max((a.to_f32() - b.to_f32()).abs()));
    assert!(apart <= 0.02 * scale, "the two ways disagree: {apart} of {scale}");
    let [by_rows, by_transpose, repack] = times.map(|mut times| {
        times.sort_by(f64::total_cmp);
        times[times.len() / 2]
    });
    println!(
        "{:<6} {:<14} {tokens:>7} {by_rows:>10.3} {by_transpose:>12.3} {repack:>10.3} {:>10.2}",
        T::DTYPE,
        format!("[{rows}, {cols}]"),
        by_transpose / by_rows
    );
    Ok(())
}

/// Numbers between -1 and 1.
fn noise<T: Arithmetic>(n: usize, seed: u64) -> Vec<T> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        T::from_f32((state >> 40) as f32 / (1u64 << 23) as f32 - 1.0)
    };
    (0..n).map(|_| next()).collect()
}
