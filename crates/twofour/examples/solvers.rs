//! Time of the pruning methods for one layer: `cargo run --release -p twofour --example solvers -- ROWS COLS [TOKENS]
//! [ROUNDS] [METHOD]`.
//!
//! METHOD is `norms`, `wanda`, `ria`, `hessian`, `sparsegpt` (the Hessian given), `sparsegpt-f64` or all of them. One
//! line a method and round: its name and seconds. Weights and activations are random; `bench/peers/sparsegpt.py` runs
//! this in turns with the published algorithm in torch.

use std::{error::Error, time::Instant};

use twofour::{
    MatrixRef,
    calibration::{Hessian, InputNorms},
    criterion::{self, Ria, Wanda, WandaVariant},
    select::Sparsity,
    solve::{Precision, SparseGpt, sparsegpt},
};

/// Numbers of variance 1, from a linear congruential generator.
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        // A sum of four uniform numbers is near enough to a Gaussian one.
        let mut sum = 0.0;
        for _ in 0..4 {
            self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            sum += (self.0 >> 40) as f32 / (1 << 23) as f32 - 1.0;
        }
        sum * 0.866
    }
}

fn main() -> Result<(), Box<dyn Error>> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |i: usize, default| arguments.get(i).map_or(Ok(default), |text| text.parse::<usize>());
    let (rows, cols, tokens, rounds) = (number(0, 4096)?, number(1, 4096)?, number(2, 8192)?, number(3, 3)?);
    let method = arguments.get(4).map_or("all", String::as_str);
    let mut random = Random(7);
    let weight: Vec<f32> = (0..rows * cols).map(|_| random.next() * 0.02).collect();
    let matrix = MatrixRef::new(rows, cols, &weight)?;
    // Features of different size, in batches of 512 tokens.
    let sizes: Vec<f32> = (0..cols).map(|_| random.next().exp()).collect();
    let batch: Vec<f32> = (0..512).flat_map(|_| sizes.iter().map(|s| s * random.next()).collect::<Vec<_>>()).collect();
    let two_four = Sparsity::Groups(twofour::Pattern::TWO_FOUR);

    let mut norms = InputNorms::new(cols);
    norms.add(&batch)?;
    let mut hessian = Hessian::new(cols)?;
    hessian.add(&batch)?;
    for _ in 0..rounds {
        let time = |name: &str, work: &mut dyn FnMut() -> Result<(), twofour::Error>| -> Result<(), twofour::Error> {
            if method == "all" || method == name {
                let start = Instant::now();
                work()?;
                println!("{name} {:.4}", start.elapsed().as_secs_f64());
            }
            Ok(())
        };
        time("norms", &mut || {
            let mut norms = InputNorms::new(cols);
            (0..tokens / 512).try_for_each(|_| norms.add(&batch))
        })?;
        time("wanda", &mut || {
            let wanda = Wanda { norms: &norms, variant: WandaVariant::Paper };
            criterion::mask(matrix, &wanda, two_four)?.apply(matrix).map(drop)
        })?;
        time("ria", &mut || {
            let ria = Ria { norms: &norms, exponent: Ria::EXPONENT };
            criterion::mask(matrix, &ria, two_four)?.apply(matrix).map(drop)
        })?;
        time("hessian", &mut || {
            let mut hessian = Hessian::new(cols)?;
            (0..tokens / 512).try_for_each(|_| hessian.add(&batch))
        })?;
        let settings = SparseGpt::new(two_four);
        time("sparsegpt", &mut || sparsegpt(matrix, &hessian, &settings).map(drop))?;
        let settings = SparseGpt { precision: Precision::F64, ..settings };
        time("sparsegpt-f64", &mut || sparsegpt(matrix, &hessian, &settings).map(drop))?;
    }
    Ok(())
}
