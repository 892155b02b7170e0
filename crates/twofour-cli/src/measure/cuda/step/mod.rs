//! The suites `step` and `block`: whole training steps of a model, dense and with 2:4 MLPs whose masks are selected in every step.

mod contender;
mod model;

use anyhow::Result;
use serde::Serialize;
use twofour_cuda::Device;
use twofour_nn::{model::GptConfig, train::TrainingData};

use contender::Contender;
pub(crate) use model::{BLOCK_MODELS, STEP_MODELS, StepModel, named};
use model::{Sizes, Task};

/// One contender's training step.
#[derive(Debug, Serialize)]
pub(crate) struct StepRow {
    /// Data type of activations and of GEMM operands; masters, gradients and moments are f32.
    pub(crate) dtype: &'static str,
    /// The kind of the model: `gpt` or `vit`.
    pub(crate) kind: &'static str,
    /// Layers, width, heads, tokens of a sample, width of the feed-forward block.
    pub(crate) model: [usize; 5],
    /// Parameters.
    pub(crate) parameters: usize,
    /// Samples of a batch: sequences or images.
    pub(crate) batch: usize,
    /// The contender.
    pub(crate) contender: &'static str,
    /// Whether the contenders' steps were interleaved; otherwise memory holds one model, and they ran one after the other.
    pub(crate) interleaved: bool,
    /// Median milliseconds of a step, as the host sees it.
    pub(crate) ms: f64,
    /// The 90th percentile, milliseconds.
    pub(crate) p90_ms: f64,
    /// The minimum, milliseconds.
    pub(crate) min_ms: f64,
    /// Whether the steps were replays of a CUDA graph.
    pub(crate) captured: bool,
    /// Median milliseconds of steps that are launched call by call.
    pub(crate) launched_ms: f64,
    /// Tokens a second, at the median.
    pub(crate) tokens_per_s: f64,
    /// Device memory that the model, its optimizer and its steps took; without what the process takes once, for kernels and libraries.
    pub(crate) bytes: usize,
    /// Of it, what the pool of buffers took from the device.
    pub(crate) pool_bytes: usize,
    /// Of that, what is allocated. Contenders' memory is compared by this.
    pub(crate) allocated_bytes: usize,
    /// Of that, what is workspace.
    pub(crate) workspace_bytes: usize,
    /// Milliseconds of device time of each phase of a step; the median of steps that were measured apart.
    pub(crate) phases: Vec<Phase>,
    /// The loss of the last step.
    pub(crate) loss: f64,
}

/// A phase of a step.
#[derive(Debug, Serialize)]
pub(crate) struct Phase {
    /// Its name.
    pub(crate) phase: &'static str,
    /// Milliseconds.
    pub(crate) ms: f64,
}

/// Times steps of a model, `rounds` of each contender, interleaved where memory holds all of them at once.
pub(crate) fn step(device: &Device, model: &StepModel, rounds: u32) -> Result<Vec<StepRow>> {
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

/// Takes the memory that a process takes once, for kernels and libraries, so that no contender's memory has it: trains a layer of each form, one after the other.
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
