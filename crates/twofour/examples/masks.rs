//! Compares the selectors: what they keep, how stable they are, what they cost. `cargo run --release -p twofour
//! --example masks -- [MODEL.safetensors]`; without a model, on Gaussian weights [4096, 4096]. `RAYON_NUM_THREADS` sets
//! the threads.
//!
//! The figures in `docs/explanation/masks.md` come from here. Of a model, every two-dimensional tensor of floats with
//! at least 64 rows and columns is taken together. The flip rate is that between the masks before and after adding
//! Gaussian noise of 1 % of the weights' root mean square.

use std::time::{Duration, Instant};

use half::{bf16, f16};
use twofour::{
    Axis, Element, Mask, MatrixRef, Pattern, Result,
    file::{Reader, StoredDType, StoredElement},
    select::{self, Transposable},
};

struct Weight {
    rows: usize,
    cols: usize,
    data: Vec<f32>,
    noisy: Vec<f32>,
}

/// Sums over all weights for one selector.
#[derive(Default)]
struct Sums {
    kept: f64,
    l1: f64,
    l2: f64,
    flips: f64,
    full_tiles: usize,
    time: Duration,
}

type Selector = Box<dyn Fn(MatrixRef<'_, f32>) -> Result<Mask>>;

fn main() -> Result<()> {
    let mut noise = Gaussian(1);
    let weights = match std::env::args().nth(1) {
        Some(path) => of_model(&Reader::open(path)?, &mut noise)?,
        None => {
            let data = (0..4096 * 4096).map(|_| noise.next()).collect();
            vec![Weight::new(4096, 4096, data, &mut noise)]
        }
    };
    let elements: usize = weights.iter().map(|w| w.data.len()).sum();
    let total =
        |power: i32| -> f64 { weights.iter().flat_map(|w| &w.data).map(|v| f64::from(v.abs()).powi(power)).sum() };
    let (total_l1, total_l2) = (total(1), total(2));

    let mut selectors: Vec<(String, Selector)> = Vec::new();
    for (n, m) in [(2, 4), (1, 2), (4, 8), (8, 16), (1, 4)] {
        let pattern = Pattern::new(n, m)?;
        selectors.push((format!("{pattern}"), Box::new(move |w| select::magnitude(w, pattern, Axis::Row))));
    }
    selectors.push(("2:4 column".into(), Box::new(|w| select::magnitude(w, Pattern::TWO_FOUR, Axis::Column))));
    for rule in Transposable::ALL {
        selectors.push((rule.to_string(), Box::new(move |w| select::transposable(w, rule))));
    }
    let mut all = Vec::new();
    for (name, select) in &selectors {
        let mut sums = Sums::default();
        for weight in &weights {
            let matrix = weight.matrix(&weight.data)?;
            let mut times: Vec<Duration> = Vec::new();
            let mut mask = None;
            for _ in 0..3 {
                let begun = Instant::now();
                mask = Some(select(matrix)?);
                times.push(begun.elapsed());
            }
            times.sort();
            sums.time += times[1];
            let Some(mask) = mask else { continue };
            sums.kept += mask.count() as f64;
            let mass = |power: i32| -> f64 { matrix.data().iter().map(|v| f64::from(v.abs()).powi(power)).sum() };
            sums.l1 += mask.kept_l1(matrix)? * mass(1);
            sums.l2 += mask.kept_l2(matrix)? * mass(2);
            sums.flips += mask.flip_rate(&select(weight.matrix(&weight.noisy)?)?)? * matrix.data().len() as f64;
            sums.full_tiles += full_tiles(&mask);
        }
        all.push((name, sums));
    }

    let tiles: usize = weights.iter().map(|w| (w.rows / 4) * (w.cols / 4)).sum();
    let best = all.iter().find(|(name, _)| *name == "optimal").map_or(f64::NAN, |(_, sums)| sums.l1);
    println!("{} weights, {elements} elements, {} threads", weights.len(), rayon::current_num_threads());
    println!(
        "{:<14} {:>8} {:>8} {:>8} {:>11} {:>11} {:>10} {:>11}",
        "selector", "density", "kept L1", "kept L2", "of optimal", "tiles of 8", "flip rate", "ns/element"
    );
    for (name, sums) in &all {
        println!(
            "{name:<14} {:>7.2}% {:>7.2}% {:>7.2}% {:>10.2}% {:>10.2}% {:>9.3}% {:>11.3}",
            100.0 * sums.kept / elements as f64,
            100.0 * sums.l1 / total_l1,
            100.0 * sums.l2 / total_l2,
            100.0 * sums.l1 / best,
            100.0 * sums.full_tiles as f64 / tiles as f64,
            100.0 * sums.flips / elements as f64,
            sums.time.as_nanos() as f64 / elements as f64,
        );
    }
    Ok(())
}

impl Weight {
    fn new(rows: usize, cols: usize, data: Vec<f32>, noise: &mut Gaussian) -> Self {
        let squares: f64 = data.iter().map(|v| f64::from(*v).powi(2)).sum();
        let size = 0.01 * (squares / data.len() as f64).sqrt() as f32;
        let noisy = data.iter().map(|v| v + size * noise.next()).collect();
        Weight { rows, cols, data, noisy }
    }

    fn matrix<'a>(&self, data: &'a [f32]) -> Result<MatrixRef<'a, f32>> {
        MatrixRef::new(self.rows, self.cols, data)
    }
}

fn of_model(reader: &Reader, noise: &mut Gaussian) -> Result<Vec<Weight>> {
    fn wide<T: Element + StoredElement>(reader: &Reader, name: &str) -> Result<Vec<f32>> {
        Ok(reader.tensor(name)?.elements::<T>()?.iter().map(|v| v.to_f32()).collect())
    }
    let mut weights = Vec::new();
    for tensor in reader.tensors() {
        let &[rows, cols] = tensor.shape.as_slice() else { continue };
        if rows < 64 || cols < 64 {
            continue;
        }
        let data = match tensor.dtype {
            StoredDType::F32 => wide::<f32>(reader, &tensor.name)?,
            StoredDType::F16 => wide::<f16>(reader, &tensor.name)?,
            StoredDType::BF16 => wide::<bf16>(reader, &tensor.name)?,
            _ => continue,
        };
        weights.push(Weight::new(rows, cols, data, noise));
    }
    Ok(weights)
}

/// Whole tiles that keep eight of their sixteen.
fn full_tiles(mask: &Mask) -> usize {
    let tiles = (0..mask.rows() / 4).flat_map(|band| (0..mask.cols() / 4).map(move |tile| (band, tile)));
    tiles
        .filter(|&(band, tile)| {
            let kept = (0..16).filter(|i| mask.is_kept(4 * band + i / 4, 4 * tile + i % 4)).count();
            kept == 8
        })
        .count()
}

/// Gaussian numbers by Box and Muller's method over a linear congruential generator: any fair ones will do.
struct Gaussian(u64);

impl Gaussian {
    fn uniform(&mut self) -> f64 {
        self.0 = self.0.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        ((self.0 >> 40) as f64 + 0.5) / (1u64 << 24) as f64
    }

    fn next(&mut self) -> f32 {
        ((-2.0 * self.uniform().ln()).sqrt() * (std::f64::consts::TAU * self.uniform()).cos()) as f32
    }
}
