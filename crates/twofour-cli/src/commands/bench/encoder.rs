//! `twofour bench encoder`.

use std::{
    path::{Path, PathBuf},
    time::Instant,
};

use anyhow::{Result, bail};
use clap::Args;
use half::{bf16, f16};
use serde::Serialize;
use twofour::{DataType, file::StoredElement, kernel::KernelElement};
use twofour_nn::model::{Encoder as Model, EncoderCheckpoint, EncoderInput, SavedModel};

use super::{answer::warn_if_busy, output::Output};
use crate::{
    dtype::computing,
    exit::{Usage, Verdict},
    interrupt,
    measure::{self, Machine, median, random::Random},
    present::{
        Screen,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
};

/// Measure the latency of an encoder (BERT) on the CPU: its 2:4 layers against the same layers dense
///
/// The model is a pruned or compressed one. It is packed twice: as it is, its 2:4 layers for the 2:4 kernels, and with every layer for the dense kernels. Both hold the same values.
/// They take turns in shuffled order with batches of random tokens; a call is a whole forward pass, from tokens to hidden states. The result is the median over the
/// rounds, and the median of the rounds' ratios.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour bench encoder pruned/
  twofour bench encoder pruned/ --batch 4,16,64,256 --length 384 -o latency.json
  twofour bench encoder int8/ --dtype bf16

Integers of a quantized model are compared with dense layers in the type to compute in.")]
pub(super) struct Encoder {
    /// A checkpoint's directory (config.json, safetensors) of an encoder, or the folder of `train`; pruned or compressed
    model: PathBuf,

    /// Sequences of a batch
    #[arg(long, value_delimiter = ',', default_value = "4,16,64,256", value_name = "LIST", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    batch: Vec<u32>,

    /// Tokens of a sequence
    #[arg(long, default_value_t = 128, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    length: u32,

    /// What to compute in: f32, bf16 or f16 [default: the type of the weights]
    #[arg(long, value_name = "DTYPE", value_parser = computing())]
    dtype: Option<DataType>,

    /// Rounds; before them each contender runs once
    #[arg(long, default_value_t = 7, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    #[command(flatten)]
    output: Output,
}

/// The answer.
#[derive(Debug, Serialize)]
struct Answer {
    machine: Machine,
    command: String,
    model: String,
    dtype: String,
    /// Tokens of a sequence.
    length: usize,
    /// Bytes of the linear layers' weights.
    dense_weight_bytes: usize,
    sparse_weight_bytes: usize,
    /// Of the last minute, before each batch size; null where the operating system does not tell.
    load_average: Vec<Option<f64>>,
    rows: Vec<Row>,
}

/// One size of a batch.
#[derive(Debug, Serialize)]
struct Row {
    batch: usize,
    /// Medians over the rounds.
    dense_ms: f64,
    sparse_ms: f64,
    /// The median of the rounds' ratios, dense over 2:4.
    speedup: f64,
    /// Seconds of each round.
    dense_s: Vec<f64>,
    sparse_s: Vec<f64>,
}

impl Encoder {
    /// Runs the command.
    pub(super) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let checkpoint = EncoderCheckpoint::open(SavedModel::locate(&self.model))?;
        let (length, context) = (self.length as usize, checkpoint.config().context);
        if length > context {
            bail!(Usage(format!("--length {length}: the model's context is {context} tokens")));
        }
        self.output.expect_writable()?;
        let _guard = interrupt::guard();
        let answer = match self.dtype.unwrap_or_else(|| checkpoint.dtype()) {
            DataType::F32 => self.measured::<f32>(&checkpoint, screen)?,
            DataType::BF16 => self.measured::<bf16>(&checkpoint, screen)?,
            DataType::F16 => self.measured::<f16>(&checkpoint, screen)?,
            other => bail!(Usage(format!("--dtype {other}: f32, bf16 and f16 are supported"))),
        };
        answer.tell(screen)?;
        screen.json(&answer)?;
        self.output.write(&answer)?;
        Ok(Verdict::Yes)
    }

    fn measured<T: KernelElement + StoredElement>(
        &self,
        checkpoint: &EncoderCheckpoint,
        screen: &Screen,
    ) -> Result<Answer> {
        let models = [checkpoint.dense_inference::<T>()?, checkpoint.inference::<T>()?];
        let [dense_weight_bytes, sparse_weight_bytes] = [0, 1].map(|which: usize| models[which].weight_bytes());
        if dense_weight_bytes <= sparse_weight_bytes {
            let model = self.model.display();
            bail!(Usage(format!(
                "{model}: no linear layer is 2:4, so there is nothing to compare; prune it first: twofour prune"
            )));
        }
        let length = self.length as usize;
        let mut answer = Answer {
            machine: measure::machine()?,
            command: self.told(),
            model: self.shown_model(),
            dtype: T::DTYPE.to_string(),
            length,
            dense_weight_bytes,
            sparse_weight_bytes,
            load_average: vec![],
            rows: vec![],
        };
        let mut progress = screen.progress();
        let steps = self.batch.len() as u64 * u64::from(self.rounds + 1);
        for (index, batch) in self.batch.iter().enumerate() {
            answer.load_average.push(measure::load_average());
            let tokens = tokens(*batch as usize * length, checkpoint.config().vocabulary);
            let inputs: Vec<_> = tokens.chunks(length).map(|tokens| EncoderInput { tokens, types: None }).collect();
            let mut seconds = [vec![], vec![]];
            let mut random = Random::new();
            // The round before the first warms up.
            for round in 0..=self.rounds {
                let done = index as u64 * u64::from(self.rounds + 1) + u64::from(round);
                progress.steps(&format!("batch {batch}"), done, steps);
                let mut order = [0, 1];
                random.shuffle(&mut order);
                for which in order {
                    interrupt::check()?;
                    let found = timed(&models[which], &inputs)?;
                    if round > 0 {
                        seconds[which].push(found);
                    }
                }
            }
            let [dense_s, sparse_s] = seconds;
            let ratios = dense_s.iter().zip(&sparse_s).map(|(dense, sparse)| dense / sparse);
            answer.rows.push(Row {
                batch: *batch as usize,
                dense_ms: 1e3 * median(&mut dense_s.clone()),
                sparse_ms: 1e3 * median(&mut sparse_s.clone()),
                speedup: median(&mut ratios.collect::<Vec<_>>()),
                dense_s,
                sparse_s,
            });
        }
        Ok(answer)
    }

    /// The model's name, without paths of this machine.
    fn shown_model(&self) -> String {
        let name = self.model.file_name().map(|name| name.to_string_lossy().into_owned());
        name.unwrap_or_else(|| self.model.display().to_string())
    }

    /// Returns the command line, without paths of this machine.
    fn told(&self) -> String {
        let batches: Vec<String> = self.batch.iter().map(u32::to_string).collect();
        let dtype = self.dtype.map_or(String::new(), |dtype| format!(" --dtype {dtype}"));
        format!(
            "twofour bench encoder {} --batch {} --length {} --rounds {}{dtype}",
            self.shown_model(),
            batches.join(","),
            self.length,
            self.rounds
        )
    }
}

/// Seconds of a forward pass.
fn timed<T: KernelElement>(model: &Model<T>, inputs: &[EncoderInput<'_>]) -> Result<f64> {
    let begun = Instant::now();
    std::hint::black_box(model.forward(inputs)?);
    Ok(begun.elapsed().as_secs_f64())
}

/// Random tokens, the same in every run.
fn tokens(count: usize, vocabulary: usize) -> Vec<u32> {
    let mut random = Random::new();
    (0..count).map(|_| random.below(vocabulary) as u32).collect()
}

impl Answer {
    fn tell(&self, screen: &mut Screen) -> Result<()> {
        let Machine { cpu, engine, threads, .. } = &self.machine;
        screen.line(format!("{cpu}, engine {engine}, {}", units::plural(*threads, "thread")))?;
        screen.line(format!(
            "{}: {}, sequences of {} tokens; linear layers of {} dense, {} 2:4",
            Path::new(&self.model).display(),
            self.dtype,
            self.length,
            units::bytes(self.dense_weight_bytes as u64),
            units::bytes(self.sparse_weight_bytes as u64)
        ))?;
        warn_if_busy(screen, self.load_average.first().copied().flatten(), &self.machine)?;
        screen.line("")?;
        let mut table = Table::new([
            ("batch", Align::Right),
            ("dense, ms", Align::Right),
            ("2:4, ms", Align::Right),
            ("speedup", Align::Right),
        ]);
        for row in &self.rows {
            table.row([
                row.batch.to_string(),
                format!("{:.1}", row.dense_ms),
                format!("{:.1}", row.sparse_ms),
                paint(style::STRONG, format!("{:.2}x", row.speedup)),
            ]);
        }
        screen.line(table)
    }
}
