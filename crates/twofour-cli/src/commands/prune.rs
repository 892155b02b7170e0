//! `twofour prune`.

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;
use twofour::{
    Axis, Pattern,
    file::{self, PruneOutcome, PruneReport, Reader},
    select::{Selector, Transposable},
};

use super::output::OutputOptions;
use crate::{
    exit::{Usage, Verdict},
    interrupt,
    present::{
        Screen,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
    selection::{Selection, SelectionOptions, Skipped},
};

/// Write a model with its weights pruned: dense, with zeros
///
/// Keeps the elements of largest magnitude of every group, ties to the lower index, and writes +0.0 in the place of the others.
/// Everything else is copied byte for byte. What was pruned, what was not and why is shown.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour prune model.safetensors -o pruned.safetensors
  twofour prune model/ -o pruned/ --exclude '*.v_proj.weight'      a sharded model gives a directory
  twofour prune model.safetensors -o out.safetensors --pattern 4:8 --include '*.mlp.*'
  twofour prune model.safetensors -o out.safetensors --transposable optimal

A weight that is not finite is an error that names the element; nothing is written then.")]
pub(crate) struct Prune {
    /// The model: a .safetensors file, an index, or a directory
    input: PathBuf,

    #[command(flatten)]
    output: OutputOptions,

    #[command(flatten)]
    selection: SelectionOptions,

    /// At most N non-zeros in every M consecutive elements
    #[arg(long, default_value_t = Pattern::TWO_FOUR, value_name = "N:M")]
    pattern: Pattern,

    /// What makes an element worth keeping
    #[arg(long, value_enum, default_value_t)]
    method: Method,

    /// The axis along which groups run; kernels need rows
    #[arg(long, value_enum, default_value_t)]
    axis: AxisOption,

    /// Prune along both axes at once, in tiles of 4x4, by this rule: greedy, greedy-signed, causal1122 or optimal
    #[arg(long, value_name = "RULE", conflicts_with = "axis")]
    transposable: Option<Transposable>,
}

/// What makes an element worth keeping.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Method {
    /// Its absolute value.
    #[default]
    Magnitude,
}

/// The axis along which groups run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum AxisOption {
    /// Consecutive elements of a row: the reduction axis of a Linear weight [out, in]
    #[default]
    Row,
    /// Consecutive elements of a column
    Column,
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    output: &'a PathBuf,
    pattern: String,
    tensors: Vec<TensorAnswer<'a>>,
}

#[derive(Debug, Serialize)]
struct TensorAnswer<'a> {
    name: &'a str,
    dtype: &'static str,
    shape: &'a [usize],
    pruned: bool,
    #[serde(skip_serializing_if = "Option::is_none")]
    reason: Option<String>,
    #[serde(skip_serializing_if = "Option::is_none")]
    density_before: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    mask_density: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_l1: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    kept_l2: Option<f64>,
}

impl Prune {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let Method::Magnitude = self.method;
        let selection = self.selection.selection()?;
        let reader = Reader::open(&self.input)?;
        selection.expect_matches(&reader)?;
        let selector = self.selector()?;
        tracing::info!(input = %reader.path().display(), "pruning");
        drop(reader);

        let _guard = interrupt::guard();
        let mut progress = screen.progress();
        let report = file::prune(
            &self.input,
            &self.output.output,
            self.output.overwrite(),
            &mut |tensor| match selection.of(&tensor.name, tensor.dtype, &tensor.shape) {
                Ok(()) => Some(selector),
                Err(_) => None,
            },
            &mut |p| super::output::show(&mut progress, p),
        )?;
        drop(progress);
        let tensors = answers(&report, &selection);
        self.tell(screen, &tensors)?;
        screen.json(&Answer { output: &self.output.output, pattern: self.pattern.to_string(), tensors })?;
        Ok(Verdict::Yes)
    }

    fn selector(&self) -> Result<Selector, Usage> {
        if let Some(rule) = self.transposable {
            if self.pattern != Pattern::TWO_FOUR {
                return Err(Usage(format!("--transposable prunes to 2:4, not to {}", self.pattern)));
            }
            return Ok(Selector::Transposable(rule));
        }
        let axis = match self.axis {
            AxisOption::Row => Axis::Row,
            AxisOption::Column => Axis::Column,
        };
        Ok(Selector::Magnitude { pattern: self.pattern, axis })
    }

    fn tell(&self, screen: &mut Screen, tensors: &[TensorAnswer<'_>]) -> Result<()> {
        let mut table = Table::new([
            ("tensor", Align::Left),
            ("dtype", Align::Left),
            ("shape", Align::Right),
            ("density", Align::Right),
            ("mask", Align::Right),
            ("kept L1", Align::Right),
            ("kept L2", Align::Right),
            ("", Align::Left),
        ]);
        let cell = |share: Option<f64>| share.map_or(String::new(), units::percent);
        for t in tensors {
            let note = t.reason.as_ref().map_or(String::new(), |r| paint(style::FAINT, format!("kept: {r}")));
            table.row([
                t.name.to_owned(),
                t.dtype.to_owned(),
                units::shape(t.shape),
                cell(t.density_before),
                cell(t.mask_density),
                cell(t.kept_l1),
                cell(t.kept_l2),
                note,
            ]);
        }
        screen.line(table)?;
        let pruned = tensors.iter().filter(|t| t.pruned).count();
        screen.line(format!(
            "\n{} of {} pruned to {}, written to {}",
            pruned,
            units::plural(tensors.len(), "tensor"),
            self.pattern,
            self.output.output.display()
        ))?;
        if pruned == 0 {
            screen.warn("no tensor was pruned; choose some with --include");
        }
        Ok(())
    }
}

fn answers<'a>(report: &'a PruneReport, selection: &Selection) -> Vec<TensorAnswer<'a>> {
    let answer = |t: &'a file::PrunedTensor| {
        let mut answer = TensorAnswer {
            name: &t.name,
            dtype: t.dtype.name(),
            shape: &t.shape,
            pruned: false,
            reason: None,
            density_before: None,
            mask_density: None,
            kept_l1: None,
            kept_l2: None,
        };
        match t.outcome {
            PruneOutcome::Pruned { density_before, density, kept_l1, kept_l2, .. } => {
                answer.pruned = true;
                answer.density_before = Some(density_before);
                answer.mask_density = Some(density);
                answer.kept_l1 = Some(kept_l1);
                answer.kept_l2 = Some(kept_l2);
            }
            PruneOutcome::AlreadyCompressed => answer.reason = Some("compressed already".to_owned()),
            _ => {
                let reason = selection.of(&t.name, t.dtype, &t.shape).err().unwrap_or(Skipped::NoMatrix);
                answer.reason = Some(reason.to_string());
            }
        }
        answer
    };
    report.tensors.iter().map(answer).collect()
}
