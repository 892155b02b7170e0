//! `twofour convert`.

use std::path::PathBuf;

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use twofour::file::{self, Convert, Reader};

use super::{
    converted::{self, Converted},
    model::expect_model,
    next,
    output::{BesideAnswer, OutputOptions, path, show},
};
use crate::{
    exit::Verdict,
    interrupt,
    present::{Screen, escape, units},
};

/// Write a model of llama.cpp or of torch.save in safetensors
///
/// A GGUF file of the families llama, qwen2, qwen3, gemma2, gemma3 and gpt2 becomes a directory as transformers has it:
/// safetensors, config.json, the tokenizer and the chat template. Quantized weights are decoded to f16, of Gemma to
/// bf16. Of a file of torch.save (pytorch_model.bin, or a .pt, .pth or .ckpt file with a state dict) the tensors are
/// written, and no code is run. What is not supported is an error that names it; nothing is written then.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour convert model-q4_k_m.gguf -o model/
  twofour convert model-q4_k_m.gguf -o model.safetensors
  twofour convert lightning.ckpt -o model.safetensors

Other commands read such files as they are: twofour generate model.gguf, twofour prune model.gguf -o pruned/. \
Encodings of GGUF: F32, F16, BF16, Q4_0, Q4_1, Q5_0, Q5_1, Q8_0, Q2_K to Q6_K. docs/reference/models.md has the details.")]
pub(crate) struct ConvertModel {
    /// The model: a .gguf file, one of torch.save, or a directory or index of such
    input: PathBuf,

    #[command(flatten)]
    output: OutputOptions,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    #[serde(serialize_with = "path")]
    output: &'a PathBuf,
    bytes_before: u64,
    bytes_after: usize,
    tensors: Vec<Converted<'a>>,
    beside: BesideAnswer,
}

impl ConvertModel {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let (input, output, overwrite) = (&self.input, &self.output.output, self.output.overwrite());
        let reader = Reader::open(input)?;
        expect_model(&reader)?;
        if reader.is_safetensors() {
            bail!("{}: the model is in safetensors already, so nothing was written", input.display());
        }
        file::check_output(&reader, output, overwrite)?;
        let bytes_before: u64 = reader.shards().iter().map(|shard| shard.file_bytes() as u64).sum();
        let _guard = interrupt::guard();
        let mut progress = screen.progress();
        let convert = Convert::new(reader).overwrite(overwrite).progress(|p| show(&mut progress, p));
        let report = convert.run(output, file::Unchanged)?;
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
            "\n{}: a file of {} became {} of weights, written to {}",
            units::plural(tensors.len(), "tensor"),
            units::bytes(bytes_before),
            units::bytes(report.bytes_after() as u64),
            escape::path(output)
        ))?;
        let beside = BesideAnswer::of(input, output)?;
        beside.tell(screen)?;
        screen.next(&next::run(output, None))?;
        screen.json(&Answer { output, bytes_before, bytes_after: report.bytes_after(), tensors, beside })?;
        Ok(Verdict::Yes)
    }
}
