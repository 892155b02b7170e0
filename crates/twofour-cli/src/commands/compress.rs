//! `twofour compress`.

use std::path::PathBuf;

use anyhow::Result;
use clap::Args;
use serde::Serialize;
use twofour::file::{self, Convert, Kept, MadeCompressed, NegativeZeros, NotSparse, Outcome, Reader, Report};

use super::{
    converted::{self, Converted, Row, shrunk},
    effect::expect_to_compress,
    model::expect_model,
    next,
    output::{BesideAnswer, OutputOptions, path, show},
};
use crate::{
    exit::Verdict,
    hub, interrupt,
    present::{
        Screen, escape,
        shell::word,
        style::{self, paint},
        table::Align,
        units,
    },
    selection::{Selection, SelectionOptions},
};

/// Store 2:4 weights compressed, bit for bit
///
/// A bf16 weight shrinks to 9/16, an f32 one to 17/32, an int8 one to 5/8. `decompress` restores every bit, with one
/// exception: the compressed form has one zero, so -0.0 comes back as +0.0, and their number is shown.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour compress pruned.safetensors -o small.safetensors
  twofour compress mixed.safetensors -o small.safetensors --keep-dense
  twofour compress dense.safetensors -o small.safetensors --prune

A chosen weight that is not 2:4 along its rows is an error that names tensor, row and group, unless --prune or \
--keep-dense is given. The format is specified in docs/reference/format.md.")]
pub(crate) struct Compress {
    /// The model: a .safetensors or .gguf file, an index, a directory, or OWNER/NAME or OWNER/NAME@REVISION on the
    /// Hugging Face hub
    input: PathBuf,

    #[command(flatten)]
    output: OutputOptions,

    #[command(flatten)]
    selection: SelectionOptions,

    /// Prune chosen weights that are not 2:4 by magnitude
    #[arg(long, conflicts_with = "keep_dense")]
    prune: bool,

    /// Leave chosen weights that are not 2:4 dense
    #[arg(long)]
    keep_dense: bool,

    /// Fail where a weight holds -0.0, which would come back as +0.0
    #[arg(long)]
    exact: bool,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    #[serde(serialize_with = "path")]
    output: &'a PathBuf,
    bytes_before: usize,
    bytes_after: usize,
    negative_zeros: usize,
    tensors: Vec<TensorAnswer<'a>>,
    beside: BesideAnswer,
}

#[derive(Debug, Serialize)]
struct TensorAnswer<'a> {
    #[serde(flatten)]
    tensor: Converted<'a>,
    compressed: bool,
    note: String,
    /// What pruning on the way kept.
    #[serde(skip)]
    kept_l1: Option<f64>,
    /// Groups that are not 2:4, where it stayed dense for that.
    #[serde(skip)]
    violations: usize,
}

impl<'a> AsRef<Converted<'a>> for TensorAnswer<'a> {
    fn as_ref(&self) -> &Converted<'a> {
        &self.tensor
    }
}

impl Compress {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let globs = self.selection.globs()?;
        self.input = hub::locate(&self.input, screen)?;
        let reader = Reader::open(&self.input)?;
        expect_model(&reader)?;
        let mut selection = globs.of_model(&reader)?;
        let reader = selection.unstack(reader)?;
        selection.expect_compressible(&reader)?;
        let overwrite = self.output.overwrite();
        file::check_output(&reader, &self.output.output, overwrite)?;
        tracing::info!(input = %reader.path().display(), "compressing");

        let _guard = interrupt::guard();
        let chosen = |name: &str, dtype, shape: &[usize]| selection.of_compressible(name, dtype, shape).is_ok();
        expect_to_compress(&reader, &chosen, self.keep_dense)?;
        let mut progress = screen.progress();
        let compress = file::Compress {
            which: &|t| chosen(&t.name, t.dtype, &t.shape),
            not_sparse: match (self.prune, self.keep_dense) {
                (true, _) => NotSparse::Prune,
                (_, true) => NotSparse::KeepDense,
                _ => NotSparse::Error,
            },
            negative_zeros: if self.exact { NegativeZeros::Refuse } else { NegativeZeros::Normalise },
        };
        let convert = Convert::new(reader).overwrite(overwrite).progress(|p| show(&mut progress, p));
        let report = convert.run(&self.output.output, compress)?;
        drop(progress);
        self.tell(screen, &report, &selection)?;
        Ok(Verdict::Yes)
    }

    fn tell(&self, screen: &mut Screen, report: &Report<MadeCompressed>, selection: &Selection) -> Result<()> {
        let tensors: Vec<TensorAnswer<'_>> = report.tensors.iter().map(|t| tensor_answer(t, selection)).collect();
        let [bytes_before, bytes_after] = converted::bytes(tensors.iter().map(AsRef::as_ref));
        let answer = Answer {
            output: &self.output.output,
            bytes_before,
            bytes_after,
            negative_zeros: report.changed().map(|(_, made)| made.negative_zeros).sum(),
            tensors,
            beside: BesideAnswer::of(&self.input, &self.output.output)?,
        };
        let mut table = converted::table(screen, &[("kept L1", Align::Right), ("", Align::Left)]);
        let is_pruned = |t: &TensorAnswer<'_>| t.kept_l1.is_some();
        let note = |t: &TensorAnswer<'_>| match (is_pruned(t), t.violations) {
            (true, _) => "pruned".to_owned(),
            (_, 0) => t.note.clone(),
            _ => String::new(),
        };
        for Row { mut cells, tensors } in converted::rows(screen, &answer.tensors, note) {
            let first = tensors[0];
            let violations = tensors.iter().map(|t| t.violations).sum();
            let note = if violations > 0 { kept_dense(violations) } else { note(first) };
            let kept: f64 = tensors.iter().filter_map(|t| t.kept_l1).sum();
            cells.extend([
                if is_pruned(first) { units::percent(kept / tensors.len() as f64) } else { String::new() },
                if first.compressed { note } else { paint(style::FAINT, note) },
            ]);
            table.row(cells);
        }
        screen.line(table)?;
        if answer.tensors.iter().any(|t| t.compressed) {
            screen.note(
                "after: kept values, and 4 bits of metadata for every four weights, which say where the kept two stand",
            )?;
        }
        if answer.tensors.iter().any(is_pruned) {
            screen.note("kept L1: the share of the sum of |w| that is kept")?;
        }
        screen.line(format!(
            "\n{}, written to {}",
            shrunk(bytes_before, bytes_after),
            escape::path(&self.output.output)
        ))?;
        answer.beside.tell(screen)?;
        if answer.negative_zeros > 0 {
            screen.warn(format!(
                "{} -0.0 will come back as +0.0; --exact refuses such weights",
                units::count(answer.negative_zeros)
            ));
        }
        let mut commands = next::run(answer.output, None);
        commands.push(format!("twofour decompress {} -o DENSE", word(answer.output)));
        screen.next(&commands)?;
        screen.json(&answer)
    }
}

fn kept_dense(violations: usize) -> String {
    format!("dense: {}", units::plural(violations, "violation"))
}

fn tensor_answer<'a>(t: &'a file::Converted<MadeCompressed>, selection: &Selection) -> TensorAnswer<'a> {
    let mut kept_l1 = None;
    let mut violations = 0;
    let (compressed, note) = match t.outcome {
        Outcome::Changed(MadeCompressed { pruned: Some((kept, _)), .. }) => {
            kept_l1 = Some(kept);
            (true, format!("pruned, {} of L1 kept", units::percent(kept)))
        }
        Outcome::Changed(MadeCompressed { pruned: None, .. }) => (true, "compressed".to_owned()),
        Outcome::Copied(Kept::NotSparse { violations: found }) => {
            violations = found;
            (false, kept_dense(found))
        }
        Outcome::Copied(Kept::Compressed) => (true, "compressed already".to_owned()),
        Outcome::Copied(_) => match t.stored().map(|dtype| selection.of_compressible(&t.name, dtype, &t.shape)) {
            Some(Err(reason)) => (false, format!("dense: {reason}")),
            _ => (false, "dense".to_owned()),
        },
    };
    TensorAnswer {
        tensor: Converted {
            name: &t.name,
            dtype: t.dtype,
            shape: &t.shape,
            bytes_before: t.bytes_before,
            bytes_after: t.bytes_after,
        },
        compressed,
        note,
        kept_l1,
        violations,
    }
}
