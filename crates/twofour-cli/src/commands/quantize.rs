//! `twofour quantize`.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;
use twofour::{
    file::{self, Convert, Kept, Outcome, Quantization, Quantized, Reader},
    int4::Granularity,
    quantization::ScaleRule,
};

use super::{
    converted::{self, Converted, Row, shrunk},
    effect::expect_to_quantize,
    model::expect_model,
    next,
    output::{BesideAnswer, OutputOptions, path, show},
};
use crate::{
    exit::Verdict,
    hub, interrupt,
    present::{
        Screen, escape,
        style::{self, paint},
        table::Align,
        units,
    },
    selection::{Selection, SelectionOptions},
};

/// Store 2:4 weights in 8-bit or 4-bit integers
///
/// Weights that are 2:4, dense with zeros or compressed, become compressed ones of integers with symmetric scales;
/// masks stay as they are. Weights that are not 2:4, embeddings, norms and the output head keep their type; with
/// `--head` embeddings and output head become dense integers. A directory gives a directory, with configuration and
/// tokenizer.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour quantize pruned/ -o int8/ --dtype int8
  twofour quantize pruned/ -o int4/ --dtype int4 --group 128
  twofour quantize small.safetensors -o int4.safetensors --dtype int4 \\
      --scale least-squares
  twofour quantize pruned/ -o int8/ --dtype int8 --head int8
  twofour quantize pruned/ -o int8/ --dtype int8 --include '*'

int8 has a scale for each row, --group 128 one for 128 columns of a row. With --head int8 embeddings and head are \
stored in 8 bits, too, dense; with --include '*' where they are 2:4.

The error of a weight is ‖W - Q‖ / ‖W‖ in the Frobenius norm. The format is specified in docs/reference/format.md; \
`decompress` writes the weights dense again.")]
pub(crate) struct Quantize {
    /// The model: a .safetensors or .gguf file, an index, a directory, or OWNER/NAME or OWNER/NAME@REVISION on the
    /// Hugging Face hub
    input: PathBuf,

    #[command(flatten)]
    output: OutputOptions,

    #[command(flatten)]
    selection: SelectionOptions,

    /// The integers that weights become
    #[arg(long, value_enum)]
    dtype: Integer,

    /// Columns that share a scale: 128, 64, or `row` for all [default: row for int8, 128 for int4]
    #[arg(long, value_name = "COLUMNS", value_parser = granularity)]
    group: Option<Granularity>,

    /// How a scale follows from the weights that share it
    #[arg(long, value_enum, default_value_t)]
    scale: Scale,

    /// Store embeddings and output head as dense integers, too, with a scale for each row
    #[arg(long, value_enum, value_name = "DTYPE")]
    head: Option<Head>,
}

/// The integers that embeddings and output head become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Head {
    /// -127 to 127
    Int8,
}

/// The integers that weights become.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(super) enum Integer {
    /// -127 to 127
    Int8,
    /// 4 bits, two in a byte
    Int4,
}

/// How a scale follows from the weights that share it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Scale {
    /// The largest magnitude becomes the largest integer
    #[default]
    MaxAbs,
    /// The least squared error of 33 scales, down to half of that one; larger weights are clipped
    LeastSquares,
}

pub(super) fn granularity(text: &str) -> Result<Granularity, String> {
    if text == "row" {
        return Ok(Granularity::Row);
    }
    text.parse().ok().and_then(Granularity::of_columns).ok_or_else(|| "use 128, 64 or `row`".to_owned())
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    #[serde(serialize_with = "path")]
    output: &'a PathBuf,
    dtype: &'static str,
    /// Columns that share a scale; null for a row.
    group: Option<usize>,
    bytes_before: usize,
    bytes_after: usize,
    tensors: Vec<TensorAnswer<'a>>,
    beside: BesideAnswer,
}

#[derive(Debug, Serialize)]
struct TensorAnswer<'a> {
    #[serde(flatten)]
    tensor: Converted<'a>,
    quantized: bool,
    /// Whether it stayed dense.
    dense: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    relative_error: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    /// Groups that are not 2:4, where that is the reason.
    #[serde(skip)]
    violations: usize,
}

impl<'a> AsRef<Converted<'a>> for TensorAnswer<'a> {
    fn as_ref(&self) -> &Converted<'a> {
        &self.tensor
    }
}

impl Integer {
    /// With scales for so many columns, or, where nothing is said, for a row of int8 and a group of int4.
    pub(super) fn with(self, group: Option<Granularity>) -> Quantization {
        match self {
            Integer::Int8 => Quantization::Int8(group.unwrap_or(Granularity::Row)),
            Integer::Int4 => Quantization::Int4(group.unwrap_or(Granularity::Group)),
        }
    }
}

impl Quantize {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let globs = self.selection.globs()?;
        self.input = hub::locate(&self.input, screen)?;
        let reader = Reader::open(&self.input)?;
        expect_model(&reader)?;
        let mut selection = globs.of_model(&reader)?;
        let reader = selection.unstack(reader)?;
        if self.head.is_none() {
            selection.expect_compressible(&reader)?;
        }
        let overwrite = self.output.overwrite();
        file::check_output(&reader, &self.output.output, overwrite)?;
        tracing::info!(input = %reader.path().display(), "quantizing");

        let to = self.dtype.with(self.group);
        let quantize = file::Quantize {
            which: &|name, dtype, shape| selection.of_compressible(name, dtype, shape).is_ok(),
            dense: &|name, dtype, shape| self.head.is_some() && selection.is_head_or_embedding(name, dtype, shape),
            to,
            rule: match self.scale {
                Scale::MaxAbs => ScaleRule::MaxAbs,
                Scale::LeastSquares => ScaleRule::LeastSquares,
            },
        };
        let _guard = interrupt::guard();
        expect_to_quantize(&reader, quantize.which, quantize.dense)?;
        let mut progress = screen.progress();
        let convert = Convert::new(reader).overwrite(overwrite).progress(|p| show(&mut progress, p));
        let report = convert.run(&self.output.output, quantize)?;
        drop(progress);
        let (dtype, granularity) = match to {
            Quantization::Int8(granularity) => ("I8", granularity),
            Quantization::Int4(granularity) => ("I4", granularity),
        };
        let tensors: Vec<TensorAnswer<'_>> = report.tensors.iter().map(|t| tensor_answer(t, &selection)).collect();
        let [bytes_before, bytes_after] = converted::bytes(tensors.iter().map(AsRef::as_ref));
        let answer = Answer {
            output: &self.output.output,
            dtype,
            group: granularity.columns(),
            bytes_before,
            bytes_after,
            tensors,
            beside: BesideAnswer::of(&self.input, &self.output.output)?,
        };
        tell(screen, &answer)?;
        screen.json(&answer)?;
        Ok(Verdict::Yes)
    }
}

fn tell(screen: &mut Screen, answer: &Answer<'_>) -> Result<()> {
    let mut table = converted::table(screen, &[("error", Align::Right)]);
    let alike = |t: &TensorAnswer<'_>| {
        let reason = if t.violations > 0 { None } else { t.reason.clone() };
        (t.quantized, t.dense, t.violations > 0, reason)
    };
    for Row { mut cells, tensors } in converted::rows(screen, &answer.tensors, alike) {
        let first = tensors[0];
        match &first.reason {
            Some(reason) => {
                let violations = tensors.iter().map(|t| t.violations).sum();
                let reason = if violations > 0 { not_sparse(violations) } else { reason.clone() };
                // The note is in the place of the bytes after, which are those before.
                cells.pop();
                table.row_with_note(cells, &paint(style::FAINT, format!("kept: {reason}")));
            }
            None => {
                let to = if first.dense { "I8, dense" } else { answer.dtype };
                cells[1] = format!("{} -> {to}", first.tensor.dtype);
                let errors: f64 = tensors.iter().filter_map(|t| t.relative_error).sum();
                cells.push(units::percent(errors / tensors.len() as f64));
                table.row(cells);
            }
        }
    }
    screen.line(table)?;
    if answer.tensors.iter().any(|t| t.quantized) {
        screen.note("error: the norm of what rounding changed, by the norm of the weights, ‖W - Q‖ / ‖W‖")?;
    }
    let quantized = answer.tensors.iter().filter(|t| t.quantized).count();
    screen.line(format!(
        "\n{quantized} of {} quantized, {}, written to {}",
        units::plural(answer.tensors.len(), "tensor"),
        shrunk(answer.bytes_before, answer.bytes_after),
        escape::path(answer.output)
    ))?;
    answer.beside.tell(screen)?;
    screen.next(&next::run(answer.output, None))
}

fn not_sparse(violations: usize) -> String {
    format!("not 2:4, {}", units::plural(violations, "violation"))
}

fn tensor_answer<'a>(t: &'a file::Converted<Quantized>, selection: &Selection) -> TensorAnswer<'a> {
    let (relative_error, reason) = match t.outcome {
        Outcome::Changed(quantized) => (Some(quantized.relative_error), None),
        Outcome::Copied(Kept::NotSparse { violations }) => (None, Some(not_sparse(violations))),
        Outcome::Copied(Kept::Integers) => (None, Some("integers already".to_owned())),
        Outcome::Copied(_) => {
            let skipped = t.stored().and_then(|dtype| selection.of_compressible(&t.name, dtype, &t.shape).err());
            (None, Some(skipped.map_or("not a matrix".to_owned(), |reason| reason.to_string())))
        }
    };
    TensorAnswer {
        tensor: Converted {
            name: &t.name,
            dtype: t.dtype,
            shape: &t.shape,
            bytes_before: t.bytes_before,
            bytes_after: t.bytes_after,
        },
        quantized: relative_error.is_some(),
        dense: !matches!(t.outcome, Outcome::Changed(Quantized { is_dense: false, .. })),
        relative_error,
        reason,
        violations: match t.outcome {
            Outcome::Copied(Kept::NotSparse { violations }) => violations,
            _ => 0,
        },
    }
}
