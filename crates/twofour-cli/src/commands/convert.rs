//! `twofour convert`.

use std::{collections::BTreeMap, path::PathBuf};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use twofour::file::{
    self, Compress, ConfiguredWeights, Convert, Decompress, Export, ExportFormat, NotSparse, Outcome, Reader, Report,
};

use super::{
    converted::{self, Converted},
    effect::expect_to_compress,
    model::expect_model,
    next,
    output::{BesideAnswer, OutputOptions, path, show},
};
use crate::{
    exit::Verdict,
    interrupt,
    present::{Screen, escape, units},
    selection::{Selection, SelectionOptions},
};

/// Write a model of another tool in safetensors, or one for another tool
///
/// Read are GGUF files of the families llama, qwen2, qwen3, gemma2, gemma3 and gpt2, with configuration, tokenizer and
/// chat template; files of torch.save (pytorch_model.bin, or a .pt, .pth or .ckpt file with a state dict), of which no
/// code is run; and checkpoints in sparse-24-bitmask, marlin-24, pack-quantized (int4, int8), int-quantized and
/// float-quantized (fp8) of compressed-tensors and llm-compressor, or in marlin_24 of GPTQ. Of weights that torch made
/// semi-structured those for CUTLASS are read. Quantized weights of GGUF
/// are decoded to f16, of Gemma to bf16. What is not supported is an error that names it; nothing is written then.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour convert model-q4_k_m.gguf -o model/
  twofour convert lightning.ckpt -o model.safetensors
  twofour convert llama-2of4-w4a16-marlin24/ -o llama/ --to twofour
  twofour convert pruned/ -o archive/ --to sparse-24-bitmask
  twofour convert int4/ -o for-vllm/ --to pack-quantized
  twofour convert pruned/ -o fp8/ --to float-quantized
  twofour convert llama-2-7b/ -o llama-2-7b-24/ --mask mask_compressed.npz

Other commands read GGUF and torch.save files as they are: twofour generate model.gguf, twofour prune model.gguf -o \
pruned/. Encodings of GGUF: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K. docs/reference/models.md has the \
details, and what becomes of each format.")]
pub(crate) struct ConvertModel {
    /// The model: a .safetensors or .gguf file, one of torch.save, an index, or a directory
    input: PathBuf,

    #[command(flatten)]
    output: OutputOptions,

    /// What to write
    #[arg(long, value_enum, value_name = "FORMAT", default_value_t = Target::Dense)]
    to: Target,

    /// Multiply the weights by these masks first: mask_compressed.npz of MaskLLM, or a file of torch.save or
    /// safetensors with zeros and ones, named after their weights: WEIGHT.mask
    #[arg(long, value_name = "FILE")]
    mask: Option<PathBuf>,
}

/// A format that is written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Target {
    /// Dense, with zeros, as every program loads it; integers with scales become f32
    Dense,
    /// Compressed, as twofour compress and quantize write it; what is not 2:4 stays dense
    Twofour,
    /// Of compressed-tensors up to 0.14, vLLM 0.7 to 0.18: weights of floats
    #[value(name = "sparse-24-bitmask")]
    Sparse24Bitmask,
    /// Of compressed-tensors, for every vLLM: int4 and int8, dense with zeros, without a sparsity_config
    PackQuantized,
    /// Of compressed-tensors, vLLM with a scale for each row: int8 of twofour quantize, 2:4 or dense
    IntQuantized,
    /// Of compressed-tensors, vLLM: the weights of linear layers, 2:4 or dense, rounded to fp8 (E4M3) with a scale for
    /// each row
    FloatQuantized,
    /// Of compressed-tensors up to 0.14, vLLM up to 0.14: int4 and int8
    #[value(name = "marlin-24")]
    Marlin24,
    /// Of GPTQ, vLLM up to 0.14: int4 and int8
    #[value(name = "gptq-marlin-24")]
    GptqMarlin24,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    #[serde(serialize_with = "path")]
    output: &'a PathBuf,
    bytes_before: u64,
    bytes_after: usize,
    /// How many weights of which other tool's format were read.
    read: BTreeMap<&'static str, usize>,
    /// Scales of activations that were left out.
    activation_scales: Vec<String>,
    tensors: Vec<Converted<'a>>,
    beside: BesideAnswer,
}

impl ConvertModel {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let (input, output, overwrite) = (&self.input, &self.output.output, self.output.overwrite());
        let reader = Reader::open(input)?;
        expect_model(&reader)?;
        let bytes_before: u64 = reader.shards().iter().map(|shard| shard.file_bytes() as u64).sum();
        let reader = reader.translated()?;
        expect_readable(&reader)?;
        let reader = match &self.mask {
            Some(masks) => reader.masked(Reader::open(masks)?)?,
            None => reader,
        };
        let selection = SelectionOptions::default().globs()?.of_model(&reader)?;
        self.expect_work(&reader, &selection)?;
        file::check_output(&reader, output, overwrite)?;
        let translation = reader.translation().clone();
        let _guard = interrupt::guard();
        let mut progress = screen.progress();
        let convert = Convert::new(reader).overwrite(overwrite).progress(|p| show(&mut progress, p));
        let which = |t: &file::TensorInfo| selection.of_compressible(&t.name, t.dtype, &t.shape).is_ok();
        let export = |convert: Convert<'_>, format| convert.run(output, Export::new(format, &which)).map(tensors);
        let report = match self.to {
            Target::Dense => tensors(convert.run(output, Decompress)?),
            Target::Twofour => {
                let compress = Compress { which: &which, not_sparse: NotSparse::KeepDense, ..Compress::default() };
                tensors(convert.run(output, compress)?)
            }
            Target::Sparse24Bitmask => export(convert, ExportFormat::Sparse24Bitmask)?,
            Target::PackQuantized => export(convert, ExportFormat::PackQuantized)?,
            Target::IntQuantized => export(convert, ExportFormat::IntQuantized)?,
            Target::FloatQuantized => export(convert, ExportFormat::FloatQuantized)?,
            Target::Marlin24 => export(convert, ExportFormat::Marlin24)?,
            Target::GptqMarlin24 => export(convert, ExportFormat::GptqMarlin24)?,
        };
        drop(progress);
        let tensors: Vec<Converted<'_>> = report
            .tensors
            .iter()
            .map(|t| Converted {
                name: &t.name,
                dtype: t.dtype,
                shape: &t.shape,
                bytes_before: t.bytes_before,
                bytes_after: t.bytes_after,
            })
            .collect();
        let mut table = converted::table(screen, &[]);
        for row in converted::rows(screen, &tensors, |_| ()) {
            table.row(row.cells);
        }
        screen.line(table)?;
        screen.line(format!(
            "\n{}: {} in files became {} of weights, written to {}",
            units::plural(tensors.len(), "tensor"),
            units::bytes(bytes_before),
            units::bytes(report.bytes_after() as u64),
            escape::path(output)
        ))?;
        for (format, count) in &translation.weights {
            screen.line(format!("read: {} of {format}", units::plural(*count, "weight")))?;
        }
        if let Some(first) = translation.left_out.first() {
            screen.line(format!(
                "left out, scales of activations, which are quantized for each token here: {}, the first {}",
                translation.left_out.len(),
                escape::line(first)
            ))?;
        }
        let beside = BesideAnswer::of(input, output)?;
        beside.tell(screen)?;
        if matches!(self.to, Target::Dense | Target::Twofour) {
            screen.next(&next::run(output, None))?;
        }
        screen.json(&Answer {
            output,
            bytes_before,
            bytes_after: report.bytes_after(),
            read: translation.weights,
            activation_scales: translation.left_out,
            tensors,
            beside,
        })?;
        Ok(Verdict::Yes)
    }

    /// An error where the output would be a copy of the input.
    fn expect_work(&self, reader: &Reader, selection: &Selection) -> Result<()> {
        if self.mask.is_some() || !reader.is_safetensors() || !reader.translation().weights.is_empty() {
            return Ok(());
        }
        let is_packed = || reader.tensors().any(|tensor| reader.is_dense_int8(&tensor.name));
        match self.to {
            Target::Dense if reader.compressed_weights().next().is_none() && !is_packed() => bail!(
                "{}: the model is in safetensors already, and dense, so nothing was written",
                reader.path().display()
            ),
            Target::Twofour => {
                let chosen = |name: &str, dtype, shape: &[usize]| selection.of_compressible(name, dtype, shape).is_ok();
                expect_to_compress(reader, &chosen, true)
            }
            _ => Ok(()),
        }
    }
}

/// An error where another tool packed weights in a format that is not read.
fn expect_readable(reader: &Reader) -> Result<()> {
    let path = reader.path().display();
    let formats = "sparse-24-bitmask, marlin-24, pack-quantized, int-quantized and float-quantized of compressed-tensors \
                   and marlin_24 of GPTQ are read; start from the model that was quantized";
    if let Some(tensor) = reader.foreign_packed() {
        bail!("{path}: another tool packed the weights (`{}`) in a format that is not read; {formats}", tensor.name);
    }
    let is_own = reader.compressed_weights().next().is_some() || !reader.translation().weights.is_empty();
    let Some(text) = reader.beside("config.json")?.filter(|_| !is_own) else { return Ok(()) };
    if let Ok(config) = serde_json::from_slice(&text)
        && let ConfiguredWeights::Foreign { by } = ConfiguredWeights::of(&config)
    {
        bail!("{path}: config.json says that the weights are stored by another tool ({by}), and none is; {formats}");
    }
    Ok(())
}

/// What became of each tensor, whatever the operation tells of it.
fn tensors<C>(report: Report<C>) -> Report<()> {
    let plain = |tensor: file::Converted<C>| file::Converted {
        name: tensor.name,
        dtype: tensor.dtype,
        shape: tensor.shape,
        bytes_before: tensor.bytes_before,
        bytes_after: tensor.bytes_after,
        outcome: match tensor.outcome {
            Outcome::Changed(_) => Outcome::Changed(()),
            Outcome::Copied(kept) => Outcome::Copied(kept),
        },
    };
    Report { tensors: report.tensors.into_iter().map(plain).collect() }
}
