//! `twofour advise`.

mod cuda;
mod dtype;

use std::{collections::BTreeMap, path::PathBuf, thread, time::Duration};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use dtype::DType;
use serde::Serialize;
use twofour::file::Reader;

use crate::{
    exit::{Usage, Verdict},
    measure::{self, Bandwidth, Machine, Message, Outcome, Request, Shape, Single, Work, cuda::Gpu},
    present::{
        Screen,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
    selection::SelectionOptions,
};

/// Measure whether 2:4 would be faster on this machine, before pruning anything
///
/// For every distinct layer shape: time and bytes of this project's 2:4 kernel and of the strongest dense contender (the best of this
/// project's own dense kernel, candle and the gemm crate), taking turns, with weights that come from memory as in a model. The weights'
/// values are random; no tensor's data is read.
///
/// With `--device cuda`, on the first GPU: the best of cuBLASLt's kernels for dense weights against the best of this project's and of cuSPARSELt's.
/// With `--dtype int4`, the same against the best method for 2:4 weights of four bits. Which kernels are the best is remembered.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour advise model.safetensors
  twofour advise --shape 14336x4096 --shape 4096x14336 --tokens 1 --dtype f32
  twofour advise model.safetensors --device cuda --tokens 1,64,4096
  twofour advise --shape 28672x4096 --device cuda --dtype int4 --tokens 1,16,64
  twofour advise --json model/ --threads 1 | jq '.totals'

1 token is decoding (a language model writing its next word), many tokens are prefill (reading a prompt) or a batch.")]
pub(crate) struct Advise {
    /// The model whose layer shapes to measure
    #[arg(required_unless_present = "shape", conflicts_with = "shape")]
    file: Option<PathBuf>,

    /// A layer's shape, output by input features; may be repeated
    #[arg(long, value_name = "OUTxIN")]
    shape: Vec<Shape>,

    #[command(flatten)]
    selection: SelectionOptions,

    /// Numbers of tokens to multiply at once
    #[arg(long, value_delimiter = ',', default_value = "1,16,512", value_name = "LIST", value_parser = clap::value_parser!(u32).range(1..=65536))]
    tokens: Vec<u32>,

    /// The dtype of weights and activations (with i8, activations are f32, quantised token by token)
    #[arg(long, value_enum, default_value_t)]
    dtype: DType,

    /// Where the model is to run
    #[arg(long, value_enum, default_value_t)]
    device: Where,

    /// Threads to compute with [default: all]; on a CPU
    #[arg(long, value_name = "COUNT", value_parser = clap::value_parser!(u16).range(1..=4096))]
    threads: Option<u16>,

    /// Seconds to spend on each measurement; on a CPU
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    budget: f64,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Where {
    /// This machine's processor.
    #[default]
    Cpu,
    /// The first NVIDIA GPU.
    Cuda,
}

/// What was measured on.
#[derive(Debug, Serialize)]
#[serde(untagged)]
enum Machinery {
    Cpu(Machine),
    Gpu(Gpu),
}

#[derive(Debug, Serialize)]
struct Answer {
    machine: Machinery,
    dtype: DType,
    shapes: Vec<ShapeAnswer>,
    totals: Vec<Total>,
    verdict: String,
}

#[derive(Debug, Serialize)]
struct ShapeAnswer {
    out: usize,
    #[serde(rename = "in")]
    inputs: usize,
    /// Layers of this shape in the model.
    layers: usize,
    timings: Vec<Timing>,
}

#[derive(Debug, Clone, Serialize)]
struct Timing {
    tokens: usize,
    /// Median time of the fastest dense product.
    dense_us: f64,
    /// Whose product that was.
    dense_contender: String,
    /// Median time of the 2:4 product.
    sparse_us: f64,
    /// Whose product that was.
    sparse_contender: String,
    dense_bytes: usize,
    /// Values and metadata.
    sparse_bytes: usize,
    speed_up: f64,
}

impl Timing {
    fn of(outcome: Outcome<'_>) -> Self {
        let Outcome { sparse, best_dense } = outcome;
        Timing {
            tokens: sparse.tokens,
            dense_us: best_dense.median_us,
            dense_contender: best_dense.contender.to_string(),
            sparse_us: sparse.median_us,
            sparse_contender: sparse.contender.to_string(),
            dense_bytes: best_dense.weight_bytes,
            sparse_bytes: sparse.weight_bytes,
            speed_up: outcome.speed_up(),
        }
    }
}

/// All layers together.
#[derive(Debug, Serialize)]
struct Total {
    tokens: usize,
    dense_us: f64,
    sparse_us: f64,
    dense_bytes: usize,
    sparse_bytes: usize,
    speed_up: f64,
}

impl Advise {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let shapes = self.shapes()?;
        let threads = match self.threads {
            Some(threads) => threads.into(),
            None => thread::available_parallelism().map_or(1, usize::from),
        };
        let (machine, shapes) = match self.device {
            Where::Cpu => {
                let machine = Machine { threads, ..measure::machine()? };
                (Machinery::Cpu(machine), self.measure(screen, threads, &shapes)?)
            }
            Where::Cuda => cuda::measure(screen, self.dtype, &self.tokens, &shapes)?,
        };
        let totals: Vec<Total> = (0..self.tokens.len()).map(|i| total(&shapes, i)).collect();
        let answer = Answer { machine, dtype: self.dtype, verdict: verdict(&totals), shapes, totals };
        tell(screen, &answer)?;
        screen.json(&answer)?;
        Ok(Verdict::Yes)
    }

    /// Distinct shapes with the number of layers that have them.
    fn shapes(&self) -> Result<BTreeMap<Shape, usize>> {
        let mut shapes = BTreeMap::new();
        let Some(file) = &self.file else {
            self.shape.iter().for_each(|&shape| *shapes.entry(shape).or_default() += 1);
            return Ok(shapes);
        };
        let selection = self.selection.selection()?;
        let reader = Reader::open(file)?;
        selection.expect_matches(&reader)?;
        for t in reader.plain_tensors() {
            if let (Ok(()), &[out, inputs]) = (selection.of(&t.name, t.dtype, &t.shape), t.shape.as_slice()) {
                *shapes.entry(Shape { out, inputs }).or_default() += 1;
            }
        }
        for w in reader.compressed_weights() {
            if selection.of(&w.name, w.dtype.into(), &[w.rows, w.cols]).is_ok() {
                *shapes.entry(Shape { out: w.rows, inputs: w.cols }).or_default() += 1;
            }
        }
        if shapes.is_empty() {
            bail!("{}: no tensor is a weight matrix; choose some with --include", file.display());
        }
        Ok(shapes)
    }

    fn measure(&self, screen: &Screen, threads: usize, shapes: &BTreeMap<Shape, usize>) -> Result<Vec<ShapeAnswer>> {
        let budget = match Duration::try_from_secs_f64(self.budget) {
            Ok(budget) => budget,
            Err(e) => bail!(Usage(format!("--budget {}: {e}", self.budget))),
        };
        let dtype = self.dtype.on_cpu()?;
        let of_shape =
            |&shape: &Shape| self.tokens.iter().map(move |&tokens| Work { shape, dtype, tokens: tokens as usize });
        let works: Vec<Work> = shapes.keys().flat_map(of_shape).collect();
        let all = works.len() as u64;
        let mut progress = screen.progress();
        let mut timings = Vec::with_capacity(works.len());
        let request = Request { works, budget, bandwidth: Bandwidth::Skip, single: Single::Skip };
        measure::measure(threads, &request, &mut |message| {
            match message {
                Message::Begun(work) => {
                    let what = format!("{}, {}", work.shape, units::plural(work.tokens, "token"));
                    progress.steps(&what, timings.len() as u64, all);
                }
                Message::Done(rows) => {
                    tracing::info!(?rows, "measured");
                    timings.extend(Outcome::of(&rows).map(Timing::of));
                }
                Message::Bandwidth(_) | Message::Failed(_) => {}
            }
            Ok(())
        })?;
        let answers = shapes.iter().zip(timings.chunks(self.tokens.len())).map(|((shape, &layers), timings)| {
            ShapeAnswer { out: shape.out, inputs: shape.inputs, layers, timings: timings.to_vec() }
        });
        Ok(answers.collect())
    }
}

fn total(shapes: &[ShapeAnswer], which: usize) -> Total {
    let mut total = Total { tokens: 0, dense_us: 0.0, sparse_us: 0.0, dense_bytes: 0, sparse_bytes: 0, speed_up: 0.0 };
    for shape in shapes {
        let timing = &shape.timings[which];
        total.tokens = timing.tokens;
        total.dense_us += timing.dense_us * shape.layers as f64;
        total.sparse_us += timing.sparse_us * shape.layers as f64;
        total.dense_bytes += timing.dense_bytes * shape.layers;
        total.sparse_bytes += timing.sparse_bytes * shape.layers;
    }
    total.speed_up = total.dense_us / total.sparse_us;
    total
}

/// Differences smaller than this share are noise.
const NOISE: f64 = 0.05;

/// The answer in a sentence.
fn verdict(totals: &[Total]) -> String {
    let list = |wanted: fn(f64) -> bool| {
        let hits = totals.iter().filter(|t| wanted(t.speed_up));
        hits.map(|t| format!("{} for {}", units::factor(t.speed_up), units::plural(t.tokens, "token")))
            .collect::<Vec<_>>()
    };
    let faster = list(|s| s > 1.0 + NOISE);
    let slower = list(|s| s < 1.0 - NOISE);
    let same = list(|s| (1.0 - NOISE..=1.0 + NOISE).contains(&s));
    let mut parts = Vec::new();
    if !faster.is_empty() {
        parts.push(format!("2:4 is faster here: {}", faster.join(", ")));
    }
    if !same.is_empty() {
        parts.push(format!("as fast as dense: {}", same.join(", ")));
    }
    if !slower.is_empty() {
        parts.push(format!("slower than dense: {}", slower.join(", ")));
    }
    parts.join("; ")
}

fn tell(screen: &mut Screen, answer: &Answer) -> Result<()> {
    screen.line(match &answer.machine {
        Machinery::Cpu(Machine { cpu, threads, engine, .. }) => {
            format!("{cpu}, {}, engine {engine}\n", units::plural(*threads, "thread"))
        }
        Machinery::Gpu(Gpu { gpu, architecture, .. }) => format!("{gpu}, {architecture}\n"),
    })?;
    let mut table = Table::new([
        ("shape", Align::Right),
        ("layers", Align::Right),
        ("tokens", Align::Right),
        ("dense", Align::Right),
        ("2:4", Align::Right),
        ("speed-up", Align::Right),
        ("dense", Align::Right),
        ("2:4", Align::Right),
    ]);
    let us = |us: f64| units::time(Duration::from_secs_f64(us * 1e-6));
    let mut row = |shape: String, layers: String, tokens, times: [f64; 2], bytes: [usize; 2]| {
        let speed_up = times[0] / times[1];
        let style = match speed_up {
            s if s > 1.0 + NOISE => style::GOOD,
            s if s < 1.0 - NOISE => style::BAD,
            _ => anstyle::Style::new(),
        };
        let [dense, sparse] = bytes.map(|b| units::bytes(b as u64));
        let cells = [shape, layers, units::count(tokens), us(times[0]), us(times[1])];
        table.row([&cells[..], &[paint(style, units::factor(speed_up)), dense, sparse]].concat());
    };
    for shape in &answer.shapes {
        for t in &shape.timings {
            let name = Shape { out: shape.out, inputs: shape.inputs }.to_string();
            let bytes = [t.dense_bytes, t.sparse_bytes];
            row(name, shape.layers.to_string(), t.tokens, [t.dense_us, t.sparse_us], bytes);
        }
    }
    let layers: usize = answer.shapes.iter().map(|s| s.layers).sum();
    if layers > 1 {
        for t in &answer.totals {
            let (times, bytes) = ([t.dense_us, t.sparse_us], [t.dense_bytes, t.sparse_bytes]);
            row("all".to_owned(), layers.to_string(), t.tokens, times, bytes);
        }
    }
    screen.line(table)?;
    screen.line(format!("\n{}", answer.verdict))?;
    screen.line(paint(
        style::FAINT,
        "Linear layers only, random values; whether the model stays good is another question (`twofour quickstart`).",
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_verdict_says_which_way() {
        let total = |tokens, speed_up| Total {
            tokens,
            dense_us: 1.0,
            sparse_us: 1.0,
            dense_bytes: 1,
            sparse_bytes: 1,
            speed_up,
        };
        assert_eq!(
            verdict(&[total(1, 1.7), total(16, 1.01), total(512, 0.8)]),
            "2:4 is faster here: 1.70x for 1 token; as fast as dense: 1.01x for 16 tokens; slower than dense: 0.80x for 512 tokens"
        );
    }
}
