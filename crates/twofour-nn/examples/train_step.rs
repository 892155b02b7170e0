//! Median time of a training step of a [`Gpt`], dense and 2:4, steps of the two alternated.
//!
//! `cargo run --release -p twofour-nn --example train_step -- [STEPS] [BATCH] [dense|sparse]`; defaults: 8 steps of
//! each, batch 4, both forms; a model of two layers of width 1024. It prints one JSON object.
//! `bench/peers/pytorch_gpt_step.py` times the same step in PyTorch.

use std::{sync::Arc, time::Instant};

use twofour_nn::{
    model::{Gpt, GptConfig},
    recipe::{Method, TrainingSettings},
    train::{Corpus, SparsityPlan, Trainer},
};
use twofour_transformer::engine::cpu::CpuEngine;

fn trainer(config: &GptConfig, training: &TrainingSettings, method: Method) -> twofour_nn::Result<Trainer<CpuEngine>> {
    let text: Vec<u8> = (0..100_000u32).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let layers = config.linear_layers().into_iter().map(|(name, ..)| name).filter(|name| name != "head").collect();
    let plan = SparsityPlan::of_method(method, layers, training.steps);
    let model = Gpt::new(&CpuEngine, config, 0)?;
    Trainer::with_model(CpuEngine, model, training, plan, Arc::new(Corpus::new(text, 0.1)?))
}

fn median(mut times: Vec<f64>) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn main() -> Result<(), Box<dyn std::error::Error>> {
    let argument = |at: usize, default: usize| std::env::args().nth(at).map_or(Ok(default), |text| text.parse());
    let (steps, batch) = (argument(1, 8)?.max(1), argument(2, 4)?);
    let config = GptConfig { layers: 2, width: 1024, heads: 8, context: 256, feed_forward: 3072 };
    let training = TrainingSettings { batch, steps: 1000, ..Default::default() };
    let only = std::env::args().nth(3);
    let forms = [("dense_ms", "dense", Method::DENSE), ("sparse_ms", "sparse", Method::STE)];
    let mut contenders = vec![];
    for (key, form, method) in forms {
        if only.as_deref().is_none_or(|only| only == form) {
            contenders.push((key, trainer(&config, &training, method)?, vec![]));
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
