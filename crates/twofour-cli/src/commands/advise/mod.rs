//! `twofour advise`.

mod answer;
mod cpu;
mod cuda;
mod finding;
mod format;
mod passes;
mod timing;

use std::{
    collections::{BTreeMap, HashSet},
    path::PathBuf,
};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use twofour::{DataType, file::Reader};

use self::answer::{Answer, Machinery, Total, verdict};
use crate::{
    exit::Verdict,
    hub,
    measure::{self, Machine, Shape},
    present::Screen,
    selection::SelectionOptions,
    threads,
    weight_format::WeightFormat,
};

/// Measure whether 2:4 would be faster on this machine, before pruning anything
///
/// For every distinct layer shape: time and bytes of this project's 2:4 kernel and of the strongest dense contender (the faster of this
/// project's own dense kernel and the gemm crate), in interleaved rounds, with weights that come from memory as in a model. The
/// weights' values are random; no tensor's data is read.
///
/// Everything is measured in at least three passes, each in a process of its own, and again (up to eight passes) until the 99 % confidence
/// interval of the speedup is within about 5 %. Where it stays wider than 20 % from end to end, or leaves open whether 2:4 is faster or
/// slower, the answer is "too noisy" and not a verdict (after five passes where it is hopeless). At one token no speedup above the bandwidth limit (bytes of the dense weight by those of the
/// 2:4 one) is reported. Above one token the dense contender's share of its own limit is measured, and remarked on where it is below 70 %.
///
/// With `--device cuda`, on the first GPU: the best of cuBLASLt's kernels for dense weights against the best of this project's and of cuSPARSELt's.
/// With `--dtype int4`, dense bf16 against the best kernel for int4 2:4 weights. The choice of the best kernels is cached; their times are measured
/// anew.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour advise model.safetensors
  twofour advise --shape 14336x4096 --shape 4096x14336 --tokens 1 --dtype f32
  twofour advise model.safetensors --device cuda --tokens 1,64,4096
  twofour advise --shape 28672x4096 --device cuda --dtype int4 --tokens 1,16,64
  twofour advise --json model/ --threads 1 | jq '.totals'

1 token is decoding (a language model writing its next word), many tokens are prefill (reading a prompt) or a batch.

With --json, each of shapes[].timings and totals has:
  speed_up              time of dense by time of 2:4, at one token at most bandwidth_limit; null if too noisy
  interval              median, low and high: the 99 % confidence interval
  verdict               faster, as_fast, slower or too_noisy
and each of shapes[].timings:
  measured_speed_up     the median as measured; capped tells whether it was above bandwidth_limit
  bandwidth_limit       bytes of the dense weight by those of the 2:4 one
  dense_share_of_limit  least time that read bandwidth and arithmetic allow the dense GEMM, by the time it took
  passes, rounds        how often both were measured")]
pub(crate) struct Advise {
    /// The model whose layer shapes to measure, or its name on the Hugging Face hub
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

    /// The dtype of weights and activations (with i8, activations are f32, quantized token by token)
    #[arg(long, value_parser = WeightFormat::parser(), default_value_t = WeightFormat::Plain(DataType::BF16))]
    dtype: WeightFormat,

    /// Where the model is to run
    #[arg(long, value_enum, default_value_t)]
    device: Where,

    /// Threads to compute with [default: all]; on a CPU
    #[arg(long, value_name = "COUNT", value_parser = threads::option)]
    threads: Option<usize>,

    /// Seconds to spend on each measurement, up to 8/3 of that where the spread is large; on a CPU
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

impl Advise {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let mut seen = HashSet::new();
        self.tokens.retain(|tokens| seen.insert(*tokens));
        let shapes = self.shapes(screen)?;
        let threads = self.threads.unwrap_or_else(threads::of_machine);
        let (machine, shapes) = match self.device {
            Where::Cpu => {
                let machine = Machine { threads, ..measure::machine()? };
                (Machinery::Cpu(machine), cpu::measure(&self, screen, threads, &shapes)?)
            }
            Where::Cuda => cuda::measure(screen, self.dtype, &self.tokens, &shapes)?,
        };
        let totals: Vec<Total> = (0..self.tokens.len()).map(|i| Total::of(&shapes, i)).collect();
        let answer = Answer { machine, dtype: self.dtype, verdict: verdict(&totals), shapes, totals };
        answer.tell(screen)?;
        screen.json(&answer)?;
        Ok(Verdict::Yes)
    }

    /// Returns the distinct shapes with the number of layers that have them.
    fn shapes(&self, screen: &Screen) -> Result<BTreeMap<Shape, usize>> {
        let mut shapes = BTreeMap::new();
        let Some(file) = &self.file else {
            self.shape.iter().for_each(|&shape| *shapes.entry(shape).or_default() += 1);
            return Ok(shapes);
        };
        let globs = self.selection.globs()?;
        let reader = Reader::open(hub::locate(file, screen)?)?;
        let selection = globs.of_model(&reader)?;
        for t in reader.plain_tensors() {
            if let (Ok(layout), &[rows, cols]) = (selection.of(&t.name, t.dtype, &t.shape), t.shape.as_slice()) {
                let [out, inputs] = layout.features([rows, cols]);
                *shapes.entry(Shape { out, inputs }).or_default() += 1;
            }
        }
        for w in reader.compressed_weights() {
            if selection.of(&w.name, w.format.dense().into(), &[w.rows, w.cols]).is_ok() {
                *shapes.entry(Shape { out: w.rows, inputs: w.cols }).or_default() += 1;
            }
        }
        if shapes.is_empty() {
            bail!("{}: no tensor is a weight matrix; choose some with --include", file.display());
        }
        Ok(shapes)
    }
}
