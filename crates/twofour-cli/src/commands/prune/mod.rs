//! `twofour prune`.

mod calibrated;
mod evaluation;
mod low_rank;
pub(super) mod method;
mod order;
pub(super) mod own_text;
mod place;
mod report;
pub(super) mod sampling;
mod solution;
mod store;
mod tune;

use std::{cell::RefCell, path::PathBuf};

use anyhow::{Result, bail};
use clap::{Args, ValueEnum};
use serde::Serialize;
use twofour::{
    Axis, MatrixRef, Pattern, Selector,
    file::{self, Convert, PruneAndQuantize, PruneWith, Quantization, Reader, TensorInfo},
    role::Layout,
    select::{Sparsity, Transposable},
};

use self::{
    calibrated::How,
    evaluation::{EvaluationOptions, PerplexityAnswer},
    low_rank::{LowRankAnswer, LowRankOptions},
    method::{CalibrationOptions, JointOptions, MethodOptions},
    place::PlaceOptions,
    report::TensorAnswer,
    tune::{TuningAnswer, TuningOptions},
};
use super::{
    effect::expect_to_prune,
    eval,
    model::expect_model,
    next,
    output::{BesideAnswer, OutputOptions, path},
    sensitivity::Plan,
};
use crate::{
    exit::{Usage, Verdict},
    hub, interrupt,
    present::{Screen, escape, units},
    selection::SelectionOptions,
};

/// Write a model with its weights pruned: dense, with zeros
///
/// Keeps the best elements of every group (or the best blocks, rows or columns), ties to the lower index, and writes
/// +0.0 in the place of the others. By
/// magnitude that requires the weights alone; the other methods run the model on a text, block by block, with the
/// weights of one block in memory. Everything else is copied byte for byte; of a directory also configuration,
/// tokenizer and all other files but the same model in other formats; what is left out is listed. What was pruned, what
/// was not and why is shown, by kind of layer; with -v each tensor.
#[derive(Debug, Args)]
#[command(after_long_help = "\
Examples:
  twofour prune model.safetensors -o pruned.safetensors
  twofour prune model/ -o pruned/ --exclude '*.v_proj.weight'
  twofour prune model/ -o pruned/ --calibration text.txt --eval held-out.txt
  twofour prune model/ -o int4/ --calibration text.txt --quantize int4
  twofour prune model/ -o pruned/ --calibration prose.txt --calibration code.txt
  twofour prune model/ -o pruned/ --calibration text.txt --device cuda \\
      --tune 2 --tune-samples 128
  twofour prune model/ -o pruned/ --calibration text.txt --low-rank eora
  twofour prune model.safetensors -o out.safetensors --pattern 4:8 \\
      --include '*.mlp.*'
  twofour prune model/ -o pruned/ --pattern block:64x64@0.8
  twofour prune model.safetensors -o out.safetensors --transposable optimal

A directory gives a directory. A weight that is not finite is an error that names the element; nothing is written \
then.")]
pub(crate) struct Prune {
    /// The model: a .safetensors or .gguf file, an index, a directory, or OWNER/NAME or OWNER/NAME@REVISION on the
    /// Hugging Face hub
    input: PathBuf,

    #[command(flatten)]
    output: OutputOptions,

    #[command(flatten)]
    selection: SelectionOptions,

    /// What is pruned: N:M, V:N:M, block:RxC@SHARE, rows@SHARE, columns@SHARE, unstructured@SHARE or
    /// unstructured-rows@SHARE
    ///
    /// N:M keeps N of every M consecutive elements, V:N:M (64:2:8) 4 of every M columns for V rows and N of those 4 in
    /// each row. Of blocks of R rows and C columns, of rows (output features), of columns (input features), of all
    /// elements, or of each row's elements, SHARE is pruned, rounded down: block:64x64@0.8 prunes 80 % of the blocks.
    /// Blocks, rows and columns are compared by the mean score of their elements.
    #[arg(long, default_value_t = Sparsity::Groups(Pattern::TWO_FOUR), value_name = "PATTERN")]
    pattern: Sparsity,

    /// A plan of `twofour sensitivity`: of the chosen weights only those are pruned that it has as sparse
    #[arg(long, value_name = "FILE")]
    plan: Option<PathBuf>,

    #[command(flatten)]
    method: MethodOptions,

    #[command(flatten)]
    calibration: CalibrationOptions,

    #[command(flatten)]
    place: PlaceOptions,

    #[command(flatten)]
    tuning: TuningOptions,

    #[command(flatten)]
    joint: JointOptions,

    #[command(flatten)]
    low_rank: LowRankOptions,

    #[command(flatten)]
    evaluation: EvaluationOptions,

    /// The axis along which groups run
    #[arg(long, value_enum, default_value_t)]
    axis: AxisOption,

    /// Prune along both axes at once, in tiles of 4x4, by this rule: greedy, greedy-signed, causal1122 or optimal
    #[arg(long, value_name = "RULE", conflicts_with = "axis")]
    transposable: Option<Transposable>,
}

/// The axis along which groups run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum AxisOption {
    /// The axis that the layer sums: rows of a Linear weight [out, in], columns of GPT-2's [in, out]; of a convolution
    /// the input channels at each position of the kernel, rows of [out, positions * in]
    #[default]
    Reduction,
    /// Consecutive elements of a stored row, or of a row of a convolution's matrix
    Row,
    /// Consecutive elements of a stored column, or of a column of a convolution's matrix
    Column,
}

impl AxisOption {
    /// The axis of a weight that is stored so.
    fn of(self, layout: Layout) -> Axis {
        match self {
            AxisOption::Reduction => layout.reduction(),
            AxisOption::Row => Axis::Row,
            AxisOption::Column => Axis::Column,
        }
    }
}

#[derive(Debug, Serialize)]
struct Answer<'a> {
    #[serde(serialize_with = "path")]
    output: &'a PathBuf,
    pattern: String,
    method: &'static str,
    /// Tokens that the model ran on, and where.
    #[serde(skip_serializing_if = "Option::is_none")]
    calibration_tokens: Option<usize>,
    #[serde(skip_serializing_if = "Option::is_none")]
    device: Option<String>,
    /// The most exchanges in a row, and the steps of refitting, after the method.
    #[serde(skip_serializing_if = "is_zero")]
    swaps: usize,
    #[serde(skip_serializing_if = "is_zero")]
    refit: usize,
    /// The share of the errors of earlier layers that each layer made up for.
    #[serde(skip_serializing_if = "Option::is_none")]
    compensation: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    tuning: Option<TuningAnswer>,
    /// Tensors that were stored in another order of their features, with which the model computes the same.
    #[serde(skip_serializing_if = "is_zero")]
    reordered: usize,
    /// The integers of the pruned weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    quantization: Option<QuantizationAnswer>,
    /// The low-rank part beside the pruned weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    low_rank: Option<LowRankAnswer>,
    #[serde(skip_serializing_if = "Option::is_none")]
    perplexity: Option<PerplexityAnswer>,
    tensors: Vec<TensorAnswer<'a>>,
    beside: BesideAnswer,
}

fn is_zero(count: &usize) -> bool {
    *count == 0
}

/// The integers that weights became.
#[derive(Debug, Serialize)]
struct QuantizationAnswer {
    dtype: &'static str,
    /// Columns that share a scale; null for a row.
    group: Option<usize>,
}

impl From<Quantization> for QuantizationAnswer {
    fn from(quantization: Quantization) -> Self {
        let (dtype, granularity) = match quantization {
            Quantization::Int8(granularity) => ("I8", granularity),
            Quantization::Int4(granularity) => ("I4", granularity),
        };
        QuantizationAnswer { dtype, group: granularity.columns() }
    }
}

impl Prune {
    /// Runs the command.
    pub(crate) fn run(mut self, screen: &mut Screen) -> Result<Verdict> {
        let quantization = self.joint.quantization(self.pattern)?;
        let pruning = self.method.pruning(self.pattern, self.calibration.is_given(), quantization)?;
        let method = pruning.method.name();
        let sampling = self.calibration.sampling();
        if sampling.is_some() && (self.transposable.is_some() || self.axis != AxisOption::Reduction) {
            return Err(Usage(format!(
                "--method {method} prunes along the reduction axis; leave out --axis and --transposable"
            ))
            .into());
        }
        self.low_rank.expect_no_other(&self.output.output)?;
        let part = self.low_rank.part(&pruning, &self.output.output, quantization.is_some())?;
        let globs = match &self.plan {
            Some(file) => self.selection.globs()?.only(Plan::read(file)?.sparse),
            None => self.selection.globs()?,
        };
        self.input = hub::locate(&self.input, screen)?;
        let reader = Reader::open(&self.input)?;
        expect_model(&reader)?;
        // A plan names each expert.
        let apart = |reader: Reader| if self.plan.is_some() { reader.unstacked(|_| true) } else { Ok(reader) };
        let reader = apart(reader)?;
        let mut selection = globs.of_model(&reader)?;
        self.expect_pattern_of_tiles()?;
        let places = (self.input.as_path(), self.output.output.as_path());
        let overwrite = self.output.overwrite();
        file::check_output(&reader, places.1, overwrite)?;
        expect_to_prune(&reader, &|name, dtype, shape| selection.of(name, dtype, shape).is_ok())?;
        if part.is_some() {
            low_rank::expect_modules(&reader, &|tensor| {
                selection.of(&tensor.name, tensor.dtype, &tensor.shape).is_ok()
            })?;
        }
        tracing::info!(input = %reader.path().display(), "pruning");
        // Each expert is pruned by its own tokens.
        let reader = if sampling.is_some() { selection.unstack(reader)? } else { reader };
        drop(reader);

        let place = self.place.open()?;
        let tuner = match sampling {
            // A low-rank part beside the weights makes up for their error instead.
            Some(_) if part.is_none() => self.tuning.tuner(places.0, &place, quantization)?,
            _ => {
                self.tuning.expect_none("--low-rank makes up for the error instead")?;
                None
            }
        };
        if let (Some(tuner), Some(sampling)) = (&tuner, &sampling) {
            sampling.expect_tuned(tuner.samples())?;
        }
        let before = self.evaluation.before(screen, places)?;
        let guard = interrupt::guard();
        let solutions = match sampling {
            None => None,
            Some(sampling) => {
                let permutes = self.method.permutes() && matches!(self.pattern, Sparsity::Groups(_));
                let how = How { pruning, quantization, permutes, low_rank: part, tunes: tuner.is_some() };
                let solutions =
                    calibrated::solve(screen, places, (&selection, &place), how, &sampling, tuner.as_ref())?;
                if solutions.is_empty() {
                    bail!(
                        "{}: no chosen tensor is a weight of the model's blocks, which are all that --method {method} \
                         prunes, so nothing was written",
                        self.input.display(),
                    );
                }
                Some(solutions)
            }
        };
        let mut progress = screen.progress();
        let mut reader = apart(Reader::open(places.0)?)?;
        if let Some(solutions) = &solutions {
            reader = selection.unstack(reader)?.reordered(solutions.orders())?;
        }
        let mut low_rank = None;
        if let (Some(part), Some(solutions)) = (&part, &solutions) {
            let (files, answer) = low_rank::files(part, &reader, solutions, places.1)?;
            for (name, contents) in files {
                reader = reader.with_beside(name, contents);
            }
            low_rank = Some(answer);
        }
        let convert = Convert::new(reader)
            .overwrite(overwrite)
            .progress(|p: file::Progress<'_>| super::output::show(&mut progress, p));
        let report = match (&solutions, quantization) {
            (None, _) => {
                let choose = |tensor: &TensorInfo| {
                    let layout = selection.of(&tensor.name, tensor.dtype, &tensor.shape).ok()?;
                    Some(self.selector(layout))
                };
                convert.run(places.1, file::Prune::new(choose))?
            }
            (Some(solutions), Some(to)) => {
                let choose = |tensor: &TensorInfo| solutions.axis(&tensor.name).is_some();
                convert.run(places.1, PruneAndQuantize::new(to, choose, |tensor| solutions.quantized(tensor)))?
            }
            (Some(solutions), None) => {
                let choose = |tensor: &TensorInfo| Some((self.pattern, solutions.axis(&tensor.name)?));
                let prune = |tensor: &TensorInfo, _: MatrixRef<'_, f32>| solutions.pruned(tensor);
                convert.run(places.1, PruneWith::new(choose, prune))?
            }
        };
        drop(progress);
        let tuning = solutions
            .as_ref()
            .zip(tuner.as_ref())
            .map(|(solutions, tuner)| tuner.answer(solutions.texts, &solutions.tuned));
        let tensors = report::answers(&report, &selection, solutions.as_ref());
        // The model is written; measuring it may be interrupted at once.
        drop(guard);
        let perplexity = match (before, &solutions) {
            (Some(before), Some(solutions)) if low_rank.is_some() => {
                let (written, failed) = (Reader::open(places.1)?, RefCell::new(None));
                let sum = |name: &str| match low_rank::sum(&written, solutions, name) {
                    Ok(sum) => sum,
                    Err(error) => {
                        failed.replace(Some(error));
                        None
                    }
                };
                let found = before.after(screen, places.1, Some(&sum));
                if let Some(error) = failed.into_inner() {
                    return Err(error);
                }
                Some(found?)
            }
            (before, _) => before.map(|before| before.after(screen, places.1, None)).transpose()?,
        };
        report::show(screen, &tensors)?;
        match &tuning {
            Some(tuning) => {
                let left = units::percent(tuning.left());
                let mean = "of the error of the blocks' outputs, in the mean over the blocks";
                screen.line(format!("tuning left {left} {mean}"))?;
            }
            None if solutions.is_some() && part.is_none() && self.tuning.is_default() => {
                screen.note("Blocks were not tuned, which is for decoders that train.")?;
            }
            None => {}
        }
        if let Some(low_rank) = &low_rank {
            low_rank.tell(screen)?;
        }
        self.tell(screen, &tensors, perplexity.as_ref())?;
        let beside = BesideAnswer::of(places.0, places.1)?;
        beside.tell(screen)?;
        screen.next(&self.next(&tensors))?;
        let answer = Answer {
            output: &self.output.output,
            pattern: self.pattern.to_string(),
            method,
            calibration_tokens: solutions.as_ref().map(|solutions| solutions.tokens),
            device: solutions.as_ref().map(|_| self.place.name()),
            swaps: pruning.swaps,
            compensation: Some(pruning.compensation).filter(|share| *share > 0.0),
            refit: pruning.refit,
            tuning,
            reordered: solutions.as_ref().map_or(0, |solutions| solutions.orders().len()),
            quantization: quantization.map(QuantizationAnswer::from),
            low_rank,
            perplexity,
            tensors,
            beside,
        };
        screen.json(&answer)?;
        Ok(Verdict::Yes)
    }

    fn expect_pattern_of_tiles(&self) -> Result<(), Usage> {
        if self.transposable.is_some() && self.pattern != Pattern::TWO_FOUR.into() {
            return Err(Usage(format!("--transposable prunes to 2:4, not to {}", self.pattern)));
        }
        Ok(())
    }

    /// Returns how a weight that is stored so is pruned by magnitude.
    fn selector(&self, layout: Layout) -> Selector {
        match self.transposable {
            Some(rule) => Selector::Transposable(rule),
            None => Selector::by_magnitude(self.pattern, self.axis.of(layout)),
        }
    }

    fn tell(
        &self,
        screen: &mut Screen,
        tensors: &[TensorAnswer<'_>],
        perplexity: Option<&PerplexityAnswer>,
    ) -> Result<()> {
        let pruned = tensors.iter().filter(|t| t.pruned).count();
        screen.line(format!(
            "\n{} of {} pruned to {}, written to {}",
            pruned,
            units::plural(tensors.len(), "tensor"),
            self.pattern,
            escape::path(&self.output.output)
        ))?;
        if let Some(PerplexityAnswer { before, after, tokens, .. }) = perplexity {
            screen.line(format!("perplexity {before:.4} before, {after:.4} after, over {tokens} tokens"))?;
            screen.note(eval::PERPLEXITY)?;
        }
        Ok(())
    }

    /// What a person may do next: run it, and store what is 2:4 along rows compressed.
    fn next(&self, tensors: &[TensorAnswer<'_>]) -> Vec<String> {
        let output = &self.output.output;
        let mut commands = next::run(output, self.evaluation.text());
        commands.extend(next::compare(output, &self.input));
        let is_two_of_four =
            self.pattern == Pattern::TWO_FOUR.into() && tensors.iter().all(|t| t.axis != Some("column"));
        // Convolutions are not compressed.
        let has_matrix = tensors.iter().any(|t| t.pruned && t.shape.len() == 2);
        if is_two_of_four && has_matrix && !self.joint.quantizes() {
            commands.push(next::compress(output));
        }
        commands
    }
}
