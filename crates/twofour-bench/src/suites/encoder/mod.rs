//! The suite `encoder`: forward passes of encoders, dense and 2:4.

mod cuda_images;
mod cuda_pair;
mod image;
mod images;
mod measured;
mod pair;
mod place;

use std::path::{Path, PathBuf};

use anyhow::{Result, bail};
use clap::Args;
use half::{bf16, f16};
use serde::Serialize;
use twofour::DataType;
use twofour_cli::{
    device::ComputeDevice,
    dtype::computing,
    exit::{Usage, Verdict},
    interrupt,
    measure::{self, median, random::Random},
    present::{
        Screen,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
};
use twofour_nn::model::{Checkpoint, EncoderCheckpoint, SavedModel};

use self::{
    cuda_pair::CudaEncoderPair,
    image::{ImageModel, ImageOptions},
    measured::Measured,
    pair::{CpuEncoderPair, EncoderPair},
    place::Place,
};
use crate::output::Output;

/// Measure the latency of an encoder (BERT, ViT, DINOv2, SAM): its 2:4 layers against the same layers dense
///
/// The model is a pruned or compressed one. It is packed twice: as it is, its 2:4 layers for the 2:4 kernels, and with
/// every layer for the dense kernels. Both hold the same values. They are interleaved in shuffled order, on batches of
/// random tokens; a call is a whole forward pass, from tokens to hidden states. The result is the median over the
/// rounds, and the median of the rounds' ratios.
///
/// For image encoders a batch is random images of the model's size, and the table shows images per second. Name one of
/// SAM's (sam-vit-b, sam-vit-l, sam-vit-h) instead of a directory to use its shape with random weights in several
/// forms: int8 and 2:4 in attention and in each layer of the MLP, alone and together.
///
/// On a GPU it is the forward pass of training, in bf16 or f16, captured in a CUDA graph; tokens and hidden states stay
/// in its memory. For image encoders it is inference, launched kernel by kernel, from patches in the GPU's memory; the
/// bytes of memory that each form takes are printed, too.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour-bench encoder pruned/
  twofour-bench encoder pruned/ --batch 4,16,64,256 --length 384 -o latency.json
  twofour-bench encoder int8/ --dtype bf16
  twofour-bench encoder pruned/ --length 384 --device cuda -o latency.json
  twofour-bench encoder vit-24/ --batch 1,8
  twofour-bench encoder sam-vit-h --batch 1,32 --device cuda -o sam.json

Integers of a quantized model are compared with dense layers in the type to compute in.")]
pub(crate) struct Encoder {
    /// A checkpoint's directory (config.json, safetensors) of an encoder, or the folder of `train`; pruned or
    /// compressed. Or a name: sam-vit-b, sam-vit-l, sam-vit-h
    model: PathBuf,

    /// Sequences or images of a batch
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "4,16,64,256",
        value_name = "LIST",
        value_parser = clap::value_parser!(u32).range(1..=65_536)
    )]
    batch: Vec<u32>,

    /// Tokens of a sequence [default: 128]
    #[arg(long, value_name = "TOKENS", value_parser = clap::value_parser!(u32).range(1..=65_536))]
    length: Option<u32>,

    /// What to compute in: f32, bf16 or f16 [default: the type of the weights; of a name bf16]
    #[arg(long, value_name = "DTYPE", value_parser = computing())]
    dtype: Option<DataType>,

    /// Rounds, after one that warms up
    #[arg(long, default_value_t = 7, value_name = "NUMBER", value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,

    /// Where to compute: cpu, cuda, or cuda:NUMBER
    #[arg(long, value_name = "DEVICE", default_value = "cpu")]
    device: ComputeDevice,

    #[command(flatten)]
    output: Output,
}

/// The answer; `bench/studies/tutorial.py` reads its JSON.
#[derive(Debug, Serialize)]
struct Answer {
    machine: Measured,
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
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        if let Some(model) = ImageModel::find(&self.model)? {
            return self.images(&model, screen);
        }
        let path = SavedModel::locate(&self.model);
        let is_other = Checkpoint::is_at(&path) && !EncoderCheckpoint::is_at(&path);
        let checkpoint = match EncoderCheckpoint::open(path) {
            Err(error) if is_other => {
                let measured = "the suite encoder measures bert, vit, dinov2, dinov2_with_registers and sam, the suite \
                                generate decoders";
                return Err(anyhow::Error::from(error).context(measured));
            }
            opened => opened?,
        };
        let (length, context) = (self.length(), checkpoint.config().context());
        if length > context {
            bail!(Usage(format!("--length {length}: the model's context is {context} tokens")));
        }
        self.output.expect_writable()?;
        let _guard = interrupt::guard();
        let place = Place::new(&self.device, self.dtype, checkpoint.dtype())?;
        let mut pair: Box<dyn EncoderPair> = match (&place.gpu, place.dtype) {
            (Some(device), dtype) => Box::new(CudaEncoderPair::new(device, &checkpoint, dtype, length)?),
            (None, DataType::BF16) => Box::new(CpuEncoderPair::<bf16>::new(&checkpoint, length)?),
            (None, DataType::F16) => Box::new(CpuEncoderPair::<f16>::new(&checkpoint, length)?),
            (None, _) => Box::new(CpuEncoderPair::<f32>::new(&checkpoint, length)?),
        };
        let answer = self.measured(&mut *pair, place.measured()?, place.dtype, screen)?;
        answer.tell(screen)?;
        screen.json(&answer)?;
        self.output.write(&answer)?;
        Ok(Verdict::Yes)
    }

    /// Measures an image encoder.
    fn images(&self, model: &ImageModel, screen: &mut Screen) -> Result<Verdict> {
        if self.length.is_some() {
            bail!(Usage("--length: images have as many tokens as the model says".to_owned()));
        }
        self.output.expect_writable()?;
        let _guard = interrupt::guard();
        let options = ImageOptions {
            model: self.shown_model(),
            command: self.told(None),
            batch: &self.batch,
            rounds: self.rounds,
            dtype: self.dtype,
            device: &self.device,
        };
        let answer = model.run(&options, screen)?;
        answer.tell(screen)?;
        screen.json(&answer)?;
        self.output.write(&answer)?;
        Ok(Verdict::Yes)
    }

    /// Tokens of a sequence.
    fn length(&self) -> usize {
        self.length.unwrap_or(128) as usize
    }

    fn measured(
        &self,
        pair: &mut dyn EncoderPair,
        machine: Measured,
        dtype: DataType,
        screen: &Screen,
    ) -> Result<Answer> {
        let [dense_weight_bytes, sparse_weight_bytes] = pair.weight_bytes();
        if dense_weight_bytes <= sparse_weight_bytes {
            bail!(Usage(format!(
                "{}: no linear layer is 2:4, so there is nothing to compare; prune it first: twofour prune",
                self.model.display()
            )));
        }
        let mut answer = Answer {
            machine,
            command: self.told(Some(self.length())),
            model: self.shown_model(),
            dtype: dtype.to_string(),
            length: self.length(),
            dense_weight_bytes,
            sparse_weight_bytes,
            load_average: vec![],
            rows: vec![],
        };
        let mut progress = screen.progress();
        let rounds = u64::from(self.rounds) + 1;
        for (index, &batch) in self.batch.iter().enumerate() {
            answer.load_average.push(measure::load_average());
            pair.begin(batch as usize)?;
            let mut seconds = [vec![], vec![]];
            // The same orders in every run.
            let mut random = Random::new();
            // The round before the first warms up.
            for round in 0..rounds {
                progress.steps(
                    &format!("batch {batch}"),
                    index as u64 * rounds + round,
                    self.batch.len() as u64 * rounds,
                );
                let mut order = [0, 1];
                random.shuffle(&mut order);
                for which in order {
                    interrupt::check()?;
                    let found = pair.seconds(which)?;
                    if round > 0 {
                        seconds[which].push(found);
                    }
                }
            }
            answer.rows.push(row(batch as usize, seconds));
        }
        Ok(answer)
    }

    /// The model's name, without paths of this machine.
    fn shown_model(&self) -> String {
        let name = self.model.file_name().map(|name| name.to_string_lossy().into_owned());
        name.unwrap_or_else(|| self.model.display().to_string())
    }

    /// Returns the command line, without paths of this machine.
    fn told(&self, length: Option<usize>) -> String {
        let length = length.map_or(String::new(), |length| format!(" --length {length}"));
        let batches: Vec<String> = self.batch.iter().map(u32::to_string).collect();
        let dtype = self.dtype.map_or(String::new(), |dtype| format!(" --dtype {dtype}"));
        let device =
            if self.device == ComputeDevice::Cpu { String::new() } else { format!(" --device {}", self.device) };
        format!(
            "twofour-bench encoder {} --batch {}{length} --rounds {}{dtype}{device}",
            self.shown_model(),
            batches.join(","),
            self.rounds
        )
    }
}

fn row(batch: usize, [dense_s, sparse_s]: [Vec<f64>; 2]) -> Row {
    let ratios = dense_s.iter().zip(&sparse_s).map(|(dense, sparse)| dense / sparse);
    Row {
        batch,
        dense_ms: 1e3 * median(&mut dense_s.clone()),
        sparse_ms: 1e3 * median(&mut sparse_s.clone()),
        speedup: median(&mut ratios.collect::<Vec<_>>()),
        dense_s,
        sparse_s,
    }
}

impl Answer {
    fn tell(&self, screen: &mut Screen) -> Result<()> {
        screen.line(&self.machine)?;
        screen.line(format!(
            "{}: {}, sequences of {} tokens; linear layers of {} dense, {} 2:4",
            Path::new(&self.model).display(),
            self.dtype,
            self.length,
            units::bytes(self.dense_weight_bytes as u64),
            units::bytes(self.sparse_weight_bytes as u64)
        ))?;
        self.machine.warn_if_busy(self.load_average.first().copied().flatten(), screen)?;
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
