//! The suite `step`: whole training steps of a model, dense and with 2:4 MLPs whose masks are selected in every step.

mod contender;
mod model;

use anyhow::{Result, bail};
use clap::Args;
use serde::Serialize;
use twofour_cli::{exit::Usage, present::table::Table};
use twofour_cuda::Device;
use twofour_nn::{model::GptConfig, train::TrainingData};

use self::{
    contender::Contender,
    model::{MODELS, Sizes, StepModel, Task, named},
};
use super::{
    shapes::ProductOptions,
    suite::{Bench, Suite},
};

/// One contender's training step.
#[derive(Debug, Serialize)]
pub(crate) struct StepRow {
    /// Data type of activations and of GEMM operands; masters, gradients and moments are f32.
    dtype: &'static str,
    /// The kind of the model: `gpt` or `vit`.
    kind: &'static str,
    /// Layers, width, heads, tokens of a sample, width of the feed-forward block.
    model: [usize; 5],
    /// Parameters.
    parameters: usize,
    /// Samples of a batch: sequences or images.
    batch: usize,
    /// The contender.
    contender: &'static str,
    /// Whether the contenders' steps were interleaved; otherwise memory holds one model, and they ran one after the
    /// other.
    interleaved: bool,
    /// Median milliseconds of a step, as the host sees it.
    ms: f64,
    /// The 90th percentile, milliseconds.
    p90_ms: f64,
    /// The minimum, milliseconds.
    min_ms: f64,
    /// Whether the steps were replays of a CUDA graph.
    captured: bool,
    /// Median milliseconds of steps that are launched call by call.
    launched_ms: f64,
    /// Tokens a second, at the median.
    tokens_per_s: f64,
    /// Device memory that the model, its optimizer and its steps took; without what the process takes once, for kernels
    /// and libraries.
    bytes: usize,
    /// Of it, what the pool of buffers took from the device.
    pool_bytes: usize,
    /// Of that, what is allocated. Contenders' memory is compared by this.
    allocated_bytes: usize,
    /// Of that, what is workspace.
    workspace_bytes: usize,
    /// Milliseconds of device time of each phase of a step; the median of steps that were measured apart.
    phases: Vec<Phase>,
    /// The loss of the last step.
    loss: f64,
}

/// A phase of a step.
#[derive(Debug, Serialize)]
pub(crate) struct Phase {
    /// Its name.
    phase: &'static str,
    /// Milliseconds.
    ms: f64,
}

/// Measure whole training steps with AdamW in bf16
///
/// Of a GPT at GPT-2 774M's sizes and at a third of its layers, over 8 sequences of 1024 bytes, and of ViT-L over 32
/// images of 257 tokens and 8 of 1626: dense, and with 2:4 MLPs whose masks are selected in every step, transposable
/// and for the GPT along rows; with the device time of each phase, and the memory. bench/python/gpt_step.py and
/// vit_step.py measure PyTorch's.
///
/// With --shape, a GPT of width IN and 36 layers with MLPs of OUT features, over one sequence of up to 1024 tokens, or
/// several of 1024.
#[derive(Debug, Args)]
#[command(after_help = "Example: twofour-bench cuda step --model vit-l -o step-vit.json")]
pub(crate) struct Step {
    /// The model: gpt2-12-layers, gpt2-774m, vit-l-32x257, vit-l-8x1626, or all of gpt2 or vit-l [default: all]
    #[arg(long, value_name = "NAME", conflicts_with = "shape")]
    model: Option<String>,

    #[command(flatten)]
    products: ProductOptions,
}

/// Layers of a GPT of given shapes.
const LAYERS: usize = 36;

impl Step {
    /// The models that were asked for.
    fn models(&self) -> Result<Vec<StepModel>> {
        let Some(name) = &self.model else {
            let mut models = vec![];
            for [tokens, inputs, outputs] in self.products.products(&[]) {
                let model = StepModel::gpt(LAYERS, [outputs, inputs], tokens);
                models.push(model.map_err(|reason| Usage(format!("--shape: {reason}")))?);
            }
            return Ok(if models.is_empty() { MODELS.to_vec() } else { models });
        };
        let models: Vec<_> = named(&MODELS, name).cloned().collect();
        if models.is_empty() {
            let known: Vec<_> = MODELS.iter().map(StepModel::name).collect();
            let known = known.join(", ");
            bail!(Usage(format!(
                "--model {name}: expected {known}, or what some of these names begin with: gpt2, vit-l"
            )));
        }
        Ok(models)
    }
}

impl Suite for Step {
    const NAME: &'static str = "step";
    const NOTE: &'static str = "Medians. Phases: device time of steps that were measured apart.";
    type Row = StepRow;

    fn expect_valid(&self) -> Result<()> {
        self.models().map(drop)
    }

    fn measure(&self, bench: &mut Bench<'_>) -> Result<Vec<StepRow>> {
        let models = self.models()?;
        let mut rows = Vec::new();
        for (done, model) in models.iter().enumerate() {
            bench.begin(model.name(), done, models.len());
            rows.extend(step(bench.device, model, bench.rounds)?);
        }
        Ok(rows)
    }

    fn table(rows: &[StepRow]) -> Table {
        let phases = ["forward", "backward", "update", "masks"];
        let mut table = Table::of(
            ["model", "baseline"],
            [
                "step",
                "p90",
                "without graph",
                "tokens/s",
                "over dense",
                phases[0],
                phases[1],
                phases[2],
                phases[3],
                "memory",
            ],
        );
        for row in rows {
            let dense = rows
                .iter()
                .find(|other| (other.kind, other.model) == (row.kind, row.model))
                .map_or(row.ms, |dense| dense.ms);
            let of = |name| row.phases.iter().find(|phase| phase.phase == name);
            let [forward, backward, update, masks] =
                phases.map(|name| of(name).map_or_else(String::new, |phase| format!("{:.2} ms", phase.ms)));
            table.row([
                row.shown_model(),
                row.contender.into(),
                format!("{:.2} ms", row.ms),
                format!("{:.2} ms", row.p90_ms),
                format!("{:.2} ms", row.launched_ms),
                format!("{:.0}", row.tokens_per_s),
                format!("{:.3}", dense / row.ms),
                forward,
                backward,
                update,
                masks,
                format!("{:.2} GB", row.bytes as f64 / 1e9),
            ]);
        }
        table
    }

    fn told(&self) -> String {
        let model = self.model.as_ref().map_or(String::new(), |model| format!(" --model {model}"));
        model + &self.products.told()
    }
}

impl StepRow {
    /// The model and its batch.
    fn shown_model(&self) -> String {
        let [layers, _, _, tokens, _] = self.model;
        let plural = if layers == 1 { "" } else { "s" };
        format!("{}, {layers} layer{plural}, {} x {tokens}", self.kind, self.batch)
    }
}

/// Times steps of a model, `rounds` of each contender, interleaved where memory holds all of them at once.
fn step(device: &Device, model: &StepModel, rounds: u32) -> Result<Vec<StepRow>> {
    match model.sizes {
        Sizes::Gpt { config, batch } => {
            load(device, &Task::gpt(GptConfig { layers: 1, ..config }, batch)?)?;
            measure(device, &Task::gpt(config, batch)?, rounds)
        }
        Sizes::Vit { layers, tokens, batch } => {
            load(device, &Task::vit(1, tokens, batch)?)?;
            measure(device, &Task::vit(layers, tokens, batch)?, rounds)
        }
    }
}

/// Takes the memory that a process takes once, for kernels and libraries, so that no contender's memory has it: trains
/// a layer of each form, one after the other.
fn load<D: TrainingData>(device: &Device, layer: &Task<D>) -> Result<()> {
    for form in layer.contenders {
        Contender::new(device, layer, *form)?;
    }
    device.release_pooled_memory().map_err(Into::into)
}

fn measure<D: TrainingData>(device: &Device, task: &Task<D>, rounds: u32) -> Result<Vec<StepRow>> {
    let free = device.context().mem_get_info()?.0;
    let forms = task.contenders;
    let first = Contender::new(device, task, forms[0])?;
    let fits = first.bytes().saturating_mul(forms.len()) <= free / 20 * 19;
    let mut rows = Vec::new();
    if fits {
        let mut all = vec![first];
        for form in forms.iter().skip(1) {
            all.push(Contender::new(device, task, *form)?);
        }
        for round in 0..rounds as usize {
            // Every round begins with another contender, and every other one goes backwards.
            let mut order: Vec<usize> = (0..all.len()).map(|i| (i + round) % forms.len()).collect();
            if round % 2 == 1 {
                order.reverse();
            }
            for which in order {
                all[which].step()?;
            }
        }
        for contender in &mut all {
            rows.push(contender.row(task, true)?);
        }
        return Ok(rows);
    }
    let mut held = Some(first);
    for form in forms {
        let mut contender = match held.take() {
            Some(first) => first,
            None => Contender::new(device, task, *form)?,
        };
        for _ in 0..rounds {
            contender.step()?;
        }
        rows.push(contender.row(task, false)?);
    }
    Ok(rows)
}

#[cfg(test)]
mod tests {
    use clap::Parser;

    use super::*;

    #[derive(Debug, Parser)]
    struct Line {
        #[command(flatten)]
        step: Step,
    }

    fn step(line: &str) -> Step {
        Line::try_parse_from(["x"].into_iter().chain(line.split_whitespace())).unwrap().step
    }

    #[test]
    fn models_are_named_or_given_by_shape_or_refused() {
        let names = |line: &str| step(line).models().unwrap().iter().map(|m| m.name().to_owned()).collect::<Vec<_>>();
        assert_eq!(names("").len(), 4);
        assert_eq!(names("--model gpt2"), ["gpt2-12-layers", "gpt2-774m"]);
        assert_eq!(names("--shape 512x128 --tokens 100,4096"), ["512x128, 1 x 100", "512x128, 4 x 1024"]);
        for (line, word) in
            [("--model bert", "vit-l"), ("--shape 96x65", "65"), ("--shape 512x128 --tokens 1500", "1024")]
        {
            let error = step(line).models().unwrap_err();
            assert!(error.is::<Usage>() && error.to_string().contains(word), "{error}");
        }
    }
}
