//! `twofour advise`.

mod answer;
mod cpu;
mod cuda;
mod format;
mod passes;
mod timing;

use std::{
    collections::{BTreeMap, HashSet},
    path::PathBuf,
};

use anyhow::{Result, bail};
use clap::Args;
use twofour::{
    DataType,
    file::{Reader, ValueFormat},
};

use super::next;

use self::answer::{Answer, Machinery, Total, verdict};
use crate::{
    device::ComputeDevice,
    dtype,
    exit::{Usage, Verdict},
    hub,
    measure::{self, Machine, Shape},
    present::Screen,
    selection::SelectionOptions,
    threads,
    weight_format::WeightFormat,
};

/// Measure whether 2:4 would be faster on this machine, before pruning anything
///
/// For every distinct layer shape: time and bytes of this project's 2:4 kernel and of the strongest dense baseline
/// (the faster of this project's own dense kernel and the gemm crate), in interleaved rounds, with weights that come
/// from memory as in a model. The weights' values are random; no tensor's data is read.
///
/// Everything is measured in at least three passes, each in a process of its own, and again (up to eight passes) until
/// the 99 % confidence interval of the speedup is within about 5 %. Where it stays wider than 20 % from end to end, the
/// interval is the answer; where it leaves open whether 2:4 is faster or slower, or one end is twice the other, the
/// answer is "too noisy" and not a verdict. At one token no speedup above the bandwidth limit (bytes of the dense
/// weight by those of the 2:4 one) is reported. Above one token the dense baseline's share of its own limit is
/// measured, and remarked on where it is below 70 %.
///
/// With `--device cuda`, on a GPU: the best of cuBLASLt's kernels for dense weights against the best of this project's
/// and of cuSPARSELt's. With `--dtype int4`, dense bf16 against the best kernel for int4 2:4 weights. The choice of the
/// best kernels is cached; their times are measured anew. This project's kernels were tuned and timed on Hopper (H100,
/// H200). Other GPUs, from compute capability 8.0 on, run generic ones, whose speed has not been measured before.
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
  speed_up              time of dense by time of 2:4; null if too noisy; at one
                        token at most bandwidth_limit
  interval              median, low and high: the 99 % confidence interval
  verdict               faster, as_fast, slower or too_noisy

Each of shapes[].timings:
  measured_speed_up     the median as measured; capped tells whether it was
                        above bandwidth_limit
  bandwidth_limit       bytes of the dense weight by those of the 2:4 one
  dense_share_of_limit  least time that read bandwidth and arithmetic allow the
                        dense GEMM, by the time it took
  passes, rounds        how often both were measured

And dtype_reason says why dtype was measured.")]
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
    #[arg(
        long,
        value_delimiter = ',',
        default_value = "1,16,512",
        value_name = "LIST",
        value_parser = clap::value_parser!(u32).range(1..=65536)
    )]
    tokens: Vec<u32>,

    /// The dtype of weights and activations (with int8, activations are f32, quantized token by token)
    /// [default: that of the model's weights, and bf16 where it is not known or the device has no 2:4 for it]
    #[arg(long, value_parser = WeightFormat::parser())]
    dtype: Option<WeightFormat>,

    /// Where the model is to run: cpu, cuda, or cuda:NUMBER
    #[arg(long, default_value = "cpu", value_name = "DEVICE")]
    device: ComputeDevice,

    /// Threads to compute with [default: all]; on a CPU
    #[arg(long, value_name = "COUNT", value_parser = threads::option)]
    threads: Option<usize>,

    /// Seconds to spend on each measurement, up to 8/3 of that where the spread is large; on a CPU
    #[arg(long, default_value_t = 1.0, value_name = "SECONDS")]
    budget: f64,
}

impl Advise {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let mut seen = HashSet::new();
        self.tokens.retain(|tokens| seen.insert(*tokens));
        let (shapes, stored) = self.shapes(screen)?;
        let dtype = Chosen::of(self.dtype, stored, &self.device);
        let threads = self.threads.unwrap_or_else(threads::of_machine);
        let (machine, shapes) = match &self.device {
            ComputeDevice::Cpu => {
                let machine = Machine { threads, ..measure::machine()? };
                (Machinery::Cpu(machine), cpu::measure(&self, dtype.format, screen, threads, &shapes)?)
            }
            ComputeDevice::Cuda(numbers) => {
                let &[number] = numbers.as_slice() else {
                    bail!(Usage("speed is measured on one GPU; name one, as in --device cuda:0".to_owned()))
                };
                cuda::measure(screen, number, dtype.format, &self.tokens, &shapes)?
            }
        };
        let totals: Vec<Total> = (0..self.tokens.len()).map(|i| Total::of(&shapes, i)).collect();
        let (dtype, dtype_reason) = (dtype.format, dtype.reason);
        let answer = Answer { machine, dtype, dtype_reason, verdict: verdict(&totals), shapes, totals };
        answer.tell(screen)?;
        if answer.is_faster() {
            let prune = self.file.as_deref().map(next::prune);
            screen.next(&[prune.unwrap_or_else(|| "twofour quickstart".to_owned())])?;
        }
        screen.json(&answer)?;
        Ok(Verdict::Yes)
    }

    /// Returns the distinct shapes with the number of layers that have them, and the format that most of the model's
    /// weights have.
    fn shapes(&self, screen: &Screen) -> Result<(BTreeMap<Shape, usize>, Option<WeightFormat>)> {
        let (mut shapes, mut formats) = (BTreeMap::new(), Vec::new());
        let mut add = |shape: Shape, format: Option<WeightFormat>| {
            *shapes.entry(shape).or_default() += 1;
            formats.push((shape.out * shape.inputs, format));
        };
        let Some(file) = &self.file else {
            self.shape.iter().for_each(|&shape| add(shape, None));
            return Ok((shapes, None));
        };
        let globs = self.selection.globs()?;
        let reader = Reader::open(hub::locate(file, screen)?)?;
        let selection = globs.of_model(&reader)?;
        for t in reader.plain_tensors() {
            if let (Ok(layout), &[rows, cols]) = (selection.of(&t.name, t.dtype, &t.shape), t.shape.as_slice()) {
                let [out, inputs] = layout.features([rows, cols]);
                add(Shape { out, inputs }, t.dtype.element().map(WeightFormat::Plain));
            }
        }
        for w in reader.compressed_weights() {
            if selection.of(&w.name, w.format.dense().into(), &[w.rows, w.cols]).is_ok() {
                let format = match w.format {
                    ValueFormat::Plain(dtype) => Some(WeightFormat::Plain(dtype)),
                    ValueFormat::ScaledI8 | ValueFormat::GroupedI8(_) => Some(WeightFormat::Plain(DataType::I8)),
                    ValueFormat::Int4(_) => Some(WeightFormat::Int4),
                    _ => None,
                };
                add(Shape { out: w.rows, inputs: w.cols }, format);
            }
        }
        if shapes.is_empty() {
            bail!("{}: no tensor is a weight matrix; choose some with --include", file.display());
        }
        Ok((shapes, most(&formats)))
    }
}

/// The format that most elements have.
fn most(formats: &[(usize, Option<WeightFormat>)]) -> Option<WeightFormat> {
    let elements = |format| formats.iter().filter(|(_, own)| *own == format).map(|(count, _)| count).sum::<usize>();
    formats.iter().map(|(_, format)| *format).max_by_key(|format| elements(*format)).flatten()
}

/// The format that is measured, and why.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Chosen {
    format: WeightFormat,
    reason: String,
}

impl Chosen {
    /// What was asked for, or else what the model has, as far as the device has 2:4 kernels for it.
    fn of(asked: Option<WeightFormat>, stored: Option<WeightFormat>, device: &ComputeDevice) -> Self {
        let usual = WeightFormat::Plain(DataType::BF16);
        let is_measured = |format: &WeightFormat| match device {
            ComputeDevice::Cpu => dtype::ON_CPU.contains(format),
            ComputeDevice::Cuda(_) => {
                !matches!(format, WeightFormat::Plain(DataType::F32 | DataType::I32) | WeightFormat::Int4)
            }
        };
        let (format, reason) = match (asked, stored) {
            (Some(format), _) => (format, "as --dtype says".to_owned()),
            (None, None) => (usual, "the usual type of models; --dtype measures another".to_owned()),
            (None, Some(format)) if is_measured(&format) => {
                (format, "the type of the model's weights; --dtype measures another".to_owned())
            }
            (None, Some(format)) => {
                (usual, format!("the model's weights are {format}, which is not measured on this device by default"))
            }
        };
        Chosen { format, reason }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_type_of_most_weights_is_measured_unless_another_is_asked_for() {
        let [f32, bf16, i8] = [DataType::F32, DataType::BF16, DataType::I8].map(WeightFormat::Plain);
        assert_eq!(most(&[(10, Some(f32)), (4, Some(bf16)), (4, Some(bf16))]), Some(f32));
        assert_eq!(most(&[(7, Some(f32)), (4, Some(bf16)), (4, Some(bf16))]), Some(bf16));
        assert_eq!(most(&[]), None);
        let (cpu, gpu) = (ComputeDevice::Cpu, ComputeDevice::Cuda(vec![0]));
        let format = |asked, stored, device: &ComputeDevice| Chosen::of(asked, stored, device).format;
        assert_eq!(format(None, Some(f32), &cpu), f32);
        assert_eq!(format(None, Some(f32), &gpu), bf16);
        assert_eq!(format(Some(i8), Some(f32), &cpu), i8);
        assert_eq!(format(None, Some(i8), &gpu), i8);
        assert_eq!(format(None, None, &cpu), bf16);
        assert!(Chosen::of(None, Some(f32), &gpu).reason.contains("f32"));
    }
}
