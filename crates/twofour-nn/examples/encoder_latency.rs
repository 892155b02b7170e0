//! Median time of a batch through encoders on the CPU, in interleaved rounds: dense, 2:4, compressed.
//!
//! `cargo run --release -p twofour-nn --example encoder_latency -- DIR ... [--dtype f32|bf16|f16] [--batch 4,16,64]
//! [--tokens 128] [--rounds 15]`
//!
//! Each DIR is a BERT as transformers stores it; the first is what the others are compared with. A round runs every
//! model once for every batch size, in an order that changes from round to round. It prints one JSON object.
//! `RAYON_NUM_THREADS` sets the number of threads.

use std::{collections::BTreeMap, path::Path, time::Instant};

use half::{bf16, f16};
use twofour::{file::StoredElement, kernel::KernelElement};
use twofour_nn::model::{Encoder, EncoderInput};

type Failure = Box<dyn std::error::Error>;

struct Arguments {
    models: Vec<String>,
    batches: Vec<usize>,
    tokens: usize,
    rounds: usize,
    dtype: String,
}

fn arguments() -> Result<Arguments, Failure> {
    let mut found =
        Arguments { models: vec![], batches: vec![4, 16, 64], tokens: 128, rounds: 15, dtype: "f32".to_owned() };
    let mut given = std::env::args().skip(1);
    while let Some(argument) = given.next() {
        let mut value = || given.next().ok_or(format!("{argument} requires a value"));
        match argument.as_str() {
            "--batch" => found.batches = value()?.split(',').map(str::parse).collect::<Result<_, _>>()?,
            "--tokens" => found.tokens = value()?.parse()?,
            "--rounds" => found.rounds = value()?.parse()?,
            "--dtype" => found.dtype = value()?,
            _ => found.models.push(argument),
        }
    }
    if found.models.is_empty() || found.rounds == 0 {
        return Err("give the directory of one encoder or more, and one round or more".into());
    }
    Ok(found)
}

fn median(times: &mut [f64]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[times.len() / 2]
}

fn measure<T: KernelElement + StoredElement>(arguments: &Arguments) -> Result<serde_json::Value, Failure> {
    let Arguments { models, batches, tokens, rounds, dtype } = arguments;
    let encoders = models.iter().map(Encoder::<T>::load).collect::<Result<Vec<_>, _>>()?;
    let vocabulary = encoders.iter().map(|encoder| encoder.config().vocabulary()).min().unwrap_or(1) as u32;
    let most = batches.iter().max().copied().unwrap_or(1);
    let ids: Vec<u32> = (0..(most * tokens) as u32).map(|i| i.wrapping_mul(2_654_435_761) % vocabulary).collect();
    let inputs: Vec<_> = ids.chunks(*tokens).map(|tokens| EncoderInput { tokens, types: None }).collect();
    let mut times: BTreeMap<(usize, usize), Vec<f64>> = BTreeMap::new();
    for round in 0..=*rounds {
        for &batch in batches {
            for turn in 0..encoders.len() {
                let which = (round + turn) % encoders.len();
                let begin = Instant::now();
                let hidden = encoders[which].forward(&inputs[..batch])?;
                let seconds = begin.elapsed().as_secs_f64();
                std::hint::black_box(hidden);
                // The first round warms up.
                if round > 0 {
                    times.entry((batch, which)).or_default().push(seconds * 1e3);
                }
            }
        }
    }
    let mut rows = vec![];
    for &batch in batches {
        let mut dense = None;
        for (which, model) in models.iter().enumerate() {
            let Some(times) = times.get_mut(&(batch, which)) else { continue };
            let ms = median(times);
            let dense = *dense.get_or_insert(ms);
            let name = Path::new(model).file_name().unwrap_or_default().to_string_lossy();
            rows.push(serde_json::json!({
                "model": name, "batch": batch, "ms": ms, "speedup": dense / ms,
                "weight_bytes": encoders[which].weight_bytes(),
            }));
        }
    }
    Ok(serde_json::json!({
        "dtype": dtype, "tokens": tokens, "rounds": rounds, "threads": rayon::current_num_threads(), "rows": rows,
    }))
}

fn main() -> Result<(), Failure> {
    let arguments = arguments()?;
    let record = match arguments.dtype.as_str() {
        "f32" => measure::<f32>(&arguments)?,
        "bf16" => measure::<bf16>(&arguments)?,
        "f16" => measure::<f16>(&arguments)?,
        other => return Err(format!("--dtype {other}: f32, bf16 and f16 are supported").into()),
    };
    println!("{}", serde_json::to_string_pretty(&record)?);
    Ok(())
}
