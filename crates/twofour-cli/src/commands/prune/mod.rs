//! `twofour prune`.

mod calibrated;
mod method;

use std::path::PathBuf;

use anyhow::Result;
use clap::{Args, ValueEnum};
use serde::Serialize;
use twofour::{
    Axis, MatrixRef, Pattern,
    file::{self, PruneOutcome, PruneReport, Reader, TensorInfo},
    select::{Selector, Sparsity, Transposable},
};

use self::{
    calibrated::Solutions,
    method::{CalibrationOptions, Method},
};
use super::output::OutputOptions;
use crate::{
    exit::{Usage, Verdict},
    interrupt,
    present::{
        Screen,
        layers::by_layer,
        style::{self, paint},
        table::{Align, Table},
        units,
    },
    selection::{Selection, SelectionOptions, Skipped},
};

/// Write a model with its weights pruned: dense, with zeros
///
/// Keeps the best elements of every group, ties to the lower index, and writes +0.0 in the place of the others. By magnitude that requires the weights alone; the other
/// methods run the model on a text, block by block, with the weights of one block in memory. Everything else is copied byte for byte; of a directory also configuration, tokenizer and
/// all other files but weights of other formats. What was pruned, what was not and why is shown, by kind of layer; with -v each tensor.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour prune model.safetensors -o pruned.safetensors
  twofour prune model/ -o pruned/ --exclude '*.v_proj.weight'      a directory gives a directory
  twofour prune model/ -o pruned/ --method sparsegpt --calibration text.txt
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

    /// How weights are pruned
    #[arg(long, value_enum, default_value_t)]
    method: Method,

    #[command(flatten)]
    calibration: CalibrationOptions,

    /// The axis along which groups run; kernels need rows
    #[arg(long, value_enum, default_value_t)]
    axis: AxisOption,

    /// Prune along both axes at once, in tiles of 4x4, by this rule: greedy, greedy-signed, causal1122 or optimal
    #[arg(long, value_name = "RULE", conflicts_with = "axis")]
    transposable: Option<Transposable>,
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
    method: &'static str,
    /// Tokens that the model ran on.
    #[serde(skip_serializing_if = "Option::is_none")]
    calibration_tokens: Option<usize>,
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
    /// The squared change of the layer's outputs over their square, on some of the calibration's tokens.
    #[serde(skip_serializing_if = "Option::is_none")]
    relative_error: Option<f64>,
}

impl Prune {
    /// Runs the command.
    pub(crate) fn run(self, screen: &mut Screen) -> Result<Verdict> {
        let sampling = self.calibration.sampling(self.method)?;
        if sampling.is_some() && (self.transposable.is_some() || self.axis == AxisOption::Column) {
            let method = self.method.name();
            return Err(
                Usage(format!("--method {method} prunes along rows; leave out --axis and --transposable")).into()
            );
        }
        let selection = self.selection.selection()?;
        let reader = Reader::open(&self.input)?;
        selection.expect_matches(&reader)?;
        let selector = self.selector()?;
        tracing::info!(input = %reader.path().display(), "pruning");
        drop(reader);

        let _guard = interrupt::guard();
        let places = (self.input.as_path(), self.output.output.as_path());
        let solutions = match sampling {
            None => None,
            Some(sampling) => {
                let how = (self.method, self.pattern);
                Some(calibrated::solve(screen, places, &selection, how, &sampling)?)
            }
        };
        let mut progress = screen.progress();
        let mut show = |p: file::Progress<'_>| super::output::show(&mut progress, p);
        let chosen = |tensor: &TensorInfo| selection.of(&tensor.name, tensor.dtype, &tensor.shape).is_ok();
        let overwrite = self.output.overwrite();
        let report = match &solutions {
            None => {
                let mut choose = |tensor: &TensorInfo| chosen(tensor).then_some(selector);
                file::prune(places.0, places.1, overwrite, &mut choose, &mut show)?
            }
            Some(solutions) => {
                let sparsity = Sparsity::Groups(self.pattern);
                let mut choose = |tensor: &TensorInfo| Some((sparsity, solutions.axis(&tensor.name)?));
                let mut prune = |tensor: &TensorInfo, _: MatrixRef<'_, f32>| solutions.pruned(tensor);
                file::prune_with(places.0, places.1, overwrite, &mut choose, &mut prune, &mut show)?
            }
        };
        drop(progress);
        let tensors = answers(&report, &selection, solutions.as_ref());
        self.tell(screen, &tensors)?;
        let answer = Answer {
            output: &self.output.output,
            pattern: self.pattern.to_string(),
            method: self.method.name(),
            calibration_tokens: solutions.as_ref().map(|solutions| solutions.tokens),
            tensors,
        };
        screen.json(&answer)?;
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
            (if screen.is_detailed() { "tensor" } else { "layers" }, Align::Left),
            ("dtype", Align::Left),
            ("shape", Align::Right),
            ("density", Align::Right),
            ("mask", Align::Right),
            ("kept L1", Align::Right),
            ("kept L2", Align::Right),
            ("error", Align::Right),
            ("", Align::Left),
        ]);
        // The means of one kind of layer in one row.
        let alike = |t: &TensorAnswer<'_>| (t.dtype, t.shape.to_vec(), t.pruned, t.reason.clone());
        let rows = by_layer(tensors, screen.is_detailed(), |t| (t.name, alike(t)));
        for (label, row) in rows {
            let first = row[0];
            let mean = |of: fn(&TensorAnswer<'_>) -> Option<f64>| {
                let values: Vec<f64> = row.iter().filter_map(|t| of(t)).collect();
                if values.is_empty() {
                    String::new()
                } else {
                    units::percent(values.iter().sum::<f64>() / values.len() as f64)
                }
            };
            let note = first.reason.as_ref().map_or(String::new(), |r| paint(style::FAINT, format!("kept: {r}")));
            table.row([
                label,
                first.dtype.to_owned(),
                units::shape(first.shape),
                mean(|t| t.density_before),
                mean(|t| t.mask_density),
                mean(|t| t.kept_l1),
                mean(|t| t.kept_l2),
                mean(|t| t.relative_error),
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

fn answers<'a>(report: &'a PruneReport, selection: &Selection, solutions: Option<&Solutions>) -> Vec<TensorAnswer<'a>> {
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
            relative_error: solutions.and_then(|solutions| solutions.relative_error(&t.name)),
        };
        match t.outcome {
            PruneOutcome::Pruned { density_before, density, kept_l1, kept_l2, .. }
            | PruneOutcome::PrunedBy { density_before, density, kept_l1, kept_l2, .. } => {
                answer.pruned = true;
                answer.density_before = Some(density_before);
                answer.mask_density = Some(density);
                answer.kept_l1 = Some(kept_l1);
                answer.kept_l2 = Some(kept_l2);
            }
            PruneOutcome::AlreadyCompressed => answer.reason = Some("compressed already".to_owned()),
            _ => {
                let reason = match selection.of(&t.name, t.dtype, &t.shape) {
                    Err(skipped) => skipped.to_string(),
                    Ok(()) if solutions.is_some() => "no linear layer of a block".to_owned(),
                    Ok(()) => Skipped::NoMatrix.to_string(),
                };
                answer.reason = Some(reason);
            }
        }
        answer
    };
    report.tensors.iter().map(answer).collect()
}
