//! Median time of a training step of a [`Gpt`], dense and 2:4, steps of the two alternated.
//!
//! `cargo run --release --example train_step -- [STEPS] [BATCH]`; defaults: 8 steps of each, batch 4, the quickstart's
//! model. It prints one JSON object. `bench/pytorch_gpt_step.py` times the same step in PyTorch.

use std::{sync::Arc, time::Instant};

use candle_core::Device;
use twofour_candle::{
    gpt::{Config, Gpt},
    linear::{HasLinears, SparseSettings},
    train::{Corpus, TrainConfig, Trainer},
};

fn trainer(
    config: &Config,
    training: TrainConfig,
    settings: Option<SparseSettings>,
) -> twofour_candle::Result<Trainer> {
    let text: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let mut model = Gpt::new(config, 0, &Device::Cpu)?;
    if let Some(settings) = settings {
        model.visit_linears(&mut |name, linear| {
            if name != "head" {
                *linear = linear.sparse(settings)?;
            }
            Ok(())
        })?;
    }
    Trainer::new(model, Arc::new(Corpus::new(text, 0.1)?), training)
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let argument = |at: usize, default: usize| std::env::args().nth(at).map_or(Ok(default), |text| text.parse());
    let (steps, batch) = (argument(1, 8)?.max(1), argument(2, 4)?);
    let config = Config::quickstart();
    let training = TrainConfig { batch, steps: 1000, ..Default::default() };
    let mut contenders =
        [trainer(&config, training, None)?, trainer(&config, training, Some(SparseSettings::default()))?];
    let mut times = [vec![], vec![]];
    // Two steps to fill the work buffers and warm up.
    for step in 0..steps + 2 {
        for (trainer, times) in contenders.iter_mut().zip(&mut times) {
            let start = Instant::now();
            trainer.step()?;
            if step >= 2 {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let [dense, sparse] = times.map(median);
    let tokens = batch * config.context;
    let line = serde_json::json!({
        "config": config, "batch": batch, "steps": steps, "parameters": config.parameters(),
        "threads": rayon::current_num_threads(),
        "dense_ms": dense, "sparse_ms": sparse,
        "dense_tokens_per_s": tokens as f64 / dense * 1e3, "sparse_tokens_per_s": tokens as f64 / sparse * 1e3,
    });
    println!("{line}");
    Ok(())
}
