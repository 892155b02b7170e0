//! The suite `generate`: a whole model's decoding, with random weights of a named shape, by a replayed CUDA graph.

use std::time::Instant;

use anyhow::{Context, Result, bail};
use clap::Args;
use serde::Serialize;
use twofour_cli::{exit::Usage, present::table::Table};
use twofour_cuda::{DataType, Device, layer::LayerContext};
use twofour_nn::model::{CudaInference, CudaRandomWeights, CudaSession, Positions, Rope, TransformerConfig};

use super::suite::{Bench, Suite};

/// Steps between two readings of the clock.
const STEPS: usize = 16;

/// Steps before the first reading: the first plans, the second is captured.
const WARM_UP: usize = 4;

/// One form of weights at one batch size.
#[derive(Debug, Serialize)]
pub(crate) struct GenerationRow {
    /// The model whose shape it is, without biases.
    model: String,
    /// Its layers.
    layers: usize,
    /// The form of the linear layers' weights; embedding and head are dense, of the type to compute in.
    weights: String,
    /// The type to compute in.
    dtype: &'static str,
    /// Sequences.
    batch: usize,
    /// Tokens of a sequence that the cache has room for.
    context: usize,
    /// Tokens in the cache, at the first and at the last timed step.
    positions: [usize; 2],
    /// Median milliseconds of a step.
    step_ms: f64,
    /// The minimum and the maximum.
    step_ms_range: [f64; 2],
    /// Tokens a second of all sequences, by the median.
    tokens_per_s: f64,
    /// Bytes of the linear layers' weights and of the head.
    weight_bytes: usize,
    /// Bytes of weights, keys and values that a step reads, over its time.
    gb_per_s: f64,
    /// Bytes of device memory that are allocated: embedding and weights, cache, and tensors of a step. The workspace,
    /// which all forms share, counts for the first.
    allocated_bytes: usize,
}

/// Measure whole-model decoding
///
/// Random weights of a model's shape, without biases, by a replayed CUDA graph, for each of --batch and
/// --weights: tokens a second, bytes, bandwidth. All forms of weights are in memory at a time.
#[derive(Debug, Args)]
#[command(after_help = "Example: twofour-bench cuda generate --batch 1,8 --weights dense-bf16,2:4-bf16 --rounds 5")]
pub(crate) struct Generate {
    /// The published model whose shape it is; a name that is not known lists those that are
    #[arg(long, value_name = "NAME", default_value = "llama-3-8b")]
    model: String,

    /// Layers, if not all of the model's
    #[arg(long, value_name = "NUMBER", value_parser = clap::value_parser!(u16).range(1..))]
    layers: Option<u16>,

    /// Sequences at a time
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,8,32",
        value_name = "NUMBERS",
        value_parser = clap::value_parser!(u32).range(1..=256)
    )]
    batch: Vec<u32>,

    /// Tokens that a sequence's cache has room for
    #[arg(
        long,
        default_value_t = 512,
        value_name = "TOKENS",
        value_parser = clap::value_parser!(u32).range(128..=8192)
    )]
    context: u32,

    /// Tokens of each prompt
    #[arg(
        long,
        default_value_t = 64,
        value_name = "TOKENS",
        value_parser = clap::value_parser!(u32).range(1..=8192)
    )]
    prompt: u32,

    /// Forms of weights: dense-bf16, 2:4-bf16, dense-int8, 2:4-int8, 2:4-int4; dense-int8-cublaslt, int8-weight-only
    /// (dense, a scale for each row), int4-weight-only (dense, groups of 64)
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "dense-bf16,2:4-bf16,dense-int8,2:4-int8,2:4-int4",
        value_name = "FORMS"
    )]
    weights: Vec<String>,
}

impl Generate {
    fn forms(&self) -> Result<Vec<(String, CudaRandomWeights)>> {
        let form = |name: &String| match WEIGHTS.iter().find(|(known, _)| known == name) {
            Some((_, form)) => Ok((name.clone(), *form)),
            None => {
                let known: Vec<&str> = WEIGHTS.iter().map(|(name, _)| *name).collect();
                bail!(Usage(format!("--weights {name}: expected some of {}", known.join(", "))));
            }
        };
        self.weights.iter().map(form).collect()
    }

    fn config(&self) -> Result<TransformerConfig> {
        let config = shape(&self.model).with_context(|| {
            let known: Vec<_> = TransformerConfig::decoders().collect();
            Usage(format!("--model {}: expected one of {}", self.model, known.join(", ")))
        })?;
        Ok(TransformerConfig { layers: self.layers.map_or(config.layers, usize::from), ..config })
    }

    /// Rounds that fit behind the prompt.
    fn rounds(&self, asked: u32) -> Result<usize> {
        let behind = (self.context as usize).saturating_sub(self.prompt as usize + WARM_UP + 1) / STEPS;
        if behind == 0 {
            let (prompt, context) = (self.prompt, self.context);
            bail!(Usage(format!("--prompt {prompt}: leaves no {STEPS} steps of --context {context}")));
        }
        Ok(behind.min(asked as usize))
    }
}

impl Suite for Generate {
    const NAME: &'static str = "generate";
    const NOTE: &'static str =
        "Medians of rounds of 16 steps. GB/s: of the weights, keys and values that a step reads.";
    type Row = GenerationRow;

    fn expect_valid(&self) -> Result<()> {
        self.config()?;
        self.rounds(1)?;
        self.forms().map(drop)
    }

    fn measure(&self, bench: &mut Bench<'_>) -> Result<Vec<GenerationRow>> {
        let (config, weights) = (self.config()?, self.forms()?);
        let batches: Vec<usize> = self.batch.iter().map(|batch| *batch as usize).collect();
        let (mut done, all) = (0, weights.len() * (1 + batches.len()));
        let rounds = self.rounds(bench.rounds)?;
        let settings = (batches.as_slice(), [self.context, self.prompt].map(|tokens| tokens as usize), rounds);
        generation(bench.device, &self.model, &config, &weights, settings, &mut |what| {
            bench.begin(what, done, all);
            done += 1;
        })
    }

    fn table(rows: &[GenerationRow]) -> Table {
        let mut table =
            Table::of(["model", "weights"], ["batch", "step", "tokens/s", "weight GB", "GB/s", "memory GB"]);
        for row in rows {
            table.row([
                row.model.clone(),
                row.weights.clone(),
                row.batch.to_string(),
                format!("{:.3} ms", row.step_ms),
                format!("{:.1}", row.tokens_per_s),
                format!("{:.2}", row.weight_bytes as f64 * 1e-9),
                format!("{:.0}", row.gb_per_s),
                format!("{:.1}", row.allocated_bytes as f64 * 1e-9),
            ]);
        }
        table
    }

    fn told(&self) -> String {
        let batch: Vec<String> = self.batch.iter().map(u32::to_string).collect();
        let (batch, weights) = (batch.join(","), self.weights.join(","));
        let layers = self.layers.map_or_else(String::new, |layers| format!(" --layers {layers}"));
        let Generate { model, context, prompt, .. } = self;
        format!(" --model {model}{layers} --batch {batch} --context {context} --prompt {prompt} --weights {weights}")
    }
}

/// A decoder's shape, without biases.
fn shape(name: &str) -> Option<TransformerConfig> {
    let config = TransformerConfig::named(name).filter(TransformerConfig::is_decoder)?.with_context(8192);
    let positions = Positions::Rotary(Rope { base: 500_000.0, scaling: None });
    let mut config = TransformerConfig { positions, ..config };
    config.attention.qkv_bias = false;
    Some(config)
}

/// The forms of weights by name.
const WEIGHTS: [(&str, CudaRandomWeights); 8] = [
    ("dense-bf16", CudaRandomWeights::Dense),
    ("2:4-bf16", CudaRandomWeights::TwoFour),
    ("dense-int8", CudaRandomWeights::DenseInt8),
    ("dense-int8-cublaslt", CudaRandomWeights::DenseInt8ByLibrary),
    ("int8-weight-only", CudaRandomWeights::Int8WeightOnly),
    ("int4-weight-only", CudaRandomWeights::Int4WeightOnly),
    ("2:4-int8", CudaRandomWeights::TwoFourInt8),
    ("2:4-int4", CudaRandomWeights::TwoFourInt4),
];

/// Times the forms at one batch size, interleaved: each has `STEPS` steps in every round. All forms are in memory at a
/// time.
fn generation(
    device: &Device,
    name: &str,
    config: &TransformerConfig,
    weights: &[(String, CudaRandomWeights)],
    (batches, [context, prompt], rounds): (&[usize], [usize; 2], usize),
    progress: &mut dyn FnMut(&str),
) -> Result<Vec<GenerationRow>> {
    let dtype = DataType::BF16;
    let shared = LayerContext::new(device)?;
    let (mut models, mut of_weights) = (vec![], vec![]);
    for (form, weights) in weights {
        progress(&format!("weights {form}"));
        let before = device.pooled_memory()?.in_use;
        models.push(CudaInference::random(shared.clone(), config, *weights, dtype)?);
        shared.synchronize()?;
        of_weights.push(device.pooled_memory()?.in_use.saturating_sub(before));
    }
    let mut rows = vec![];
    for &batch in batches {
        let mut sessions = vec![];
        for (model, (form, _)) in models.iter().zip(weights) {
            progress(&format!("{form}, batch {batch}"));
            let before = device.pooled_memory()?.in_use;
            let mut session = model.session(batch, context)?;
            prefill(&mut session, (batch, prompt), config.vocabulary())?;
            session.decode()?;
            shared.synchronize()?;
            // The pool keeps what it took for other sessions: what is allocated is counted.
            sessions.push((session, device.pooled_memory()?.in_use.saturating_sub(before)));
        }
        // A graph is captured once no memory is freed any more.
        for (session, _) in &mut sessions {
            for _ in 1..WARM_UP {
                session.decode()?;
            }
        }
        let mut times = vec![vec![]; sessions.len()];
        for round in 0..rounds {
            // Another contender is first in every round.
            for index in 0..sessions.len() {
                let index = (index + round) % sessions.len();
                let session = &mut sessions[index].0;
                // Uploads of a graph and of what another model left are not timed.
                shared.synchronize()?;
                let begun = Instant::now();
                for _ in 0..STEPS {
                    session.decode()?;
                }
                shared.synchronize()?;
                times[index].push(begun.elapsed().as_secs_f64() * 1e3 / STEPS as f64);
            }
        }
        for (index, (model, times)) in models.iter().zip(&mut times).enumerate() {
            times.sort_by(f64::total_cmp);
            let step_ms = times[times.len() / 2];
            let last = prompt + WARM_UP + rounds * STEPS;
            let middle = (prompt + WARM_UP + last) / 2;
            let cached = 2 * dtype.bytes() * config.layers * batch * middle * config.kv_width();
            rows.push(GenerationRow {
                model: name.to_owned(),
                layers: config.layers,
                weights: weights[index].0.clone(),
                dtype: dtype.name(),
                batch,
                context,
                positions: [prompt + WARM_UP, last],
                step_ms,
                step_ms_range: [times[0], times[times.len() - 1]],
                tokens_per_s: batch as f64 / step_ms * 1e3,
                weight_bytes: model.weight_bytes(),
                gb_per_s: (model.weight_bytes() + cached) as f64 / step_ms * 1e-6,
                allocated_bytes: of_weights[index] + sessions[index].1,
            });
        }
    }
    Ok(rows)
}

/// Feeds each sequence another prompt.
fn prefill(session: &mut CudaSession<'_>, (batch, tokens): (usize, usize), vocabulary: usize) -> Result<()> {
    for sequence in 0..batch {
        let prompt: Vec<u32> = (0..tokens).map(|i| ((sequence * 977 + i * 7919) % vocabulary) as u32).collect();
        session.prefill(sequence, &prompt)?;
    }
    Ok(session.choose()?)
}
