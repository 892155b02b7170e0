//! Median time of a training step of a [`Gpt`], dense and 2:4, steps of the two alternated.
//!
//! `cargo run --release --example train_step -- [STEPS] [BATCH] [dense|sparse]`; defaults: 8 steps of each, batch 4, both
//! forms; a model of two layers of width 1024. It prints one JSON object. `bench/pytorch_gpt_step.py` times the same step in PyTorch.

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
    let config = Config { layers: 2, width: 1024, heads: 8, context: 256, feed_forward: 3072 };
    let training = TrainConfig { batch, steps: 1000, ..Default::default() };
    let only = std::env::args().nth(3);
    let forms = [("dense_ms", "dense", None), ("sparse_ms", "sparse", Some(SparseSettings::default()))];
    let mut contenders = vec![];
    for (key, form, settings) in forms {
        if only.as_deref().is_none_or(|only| only == form) {
            contenders.push((key, trainer(&config, training, settings)?, vec![]));
        }
    }
    // Two steps to fill the work buffers and warm up.
    for step in 0..steps + 2 {
        for (_, trainer, times) in &mut contenders {
            let start = Instant::now();
            trainer.step()?;
            if step >= 2 {
                times.push(start.elapsed().as_secs_f64() * 1e3);
            }
        }
    }
    let mut line = serde_json::json!({
        "config": config, "batch": batch, "steps": steps, "parameters": config.parameters(),
        "tokens": batch * config.context, "threads": rayon::current_num_threads(),
    });
    for (key, _, times) in contenders {
        line[key] = median(times).into();
    }
    println!("{line}");
    Ok(())
}
