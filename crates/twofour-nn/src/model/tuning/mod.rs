//! Tuning the kept weights of a pruned block, so that it computes what the dense block computes.

#[cfg(test)]
mod tests;

use std::fmt;

use twofour::{Mask, layer::Accumulate};

use super::{Checkpoint, Layer, Replace, StoredParts, expect_trainable, transformer::SavedLayer};
use crate::{
    Error, Result,
    block::{BatchShape, Stream, Workspace},
    engine::{AdamWStep, Engine, ErrorMeasure, Kind, OptimizerStep, PrunedDecay, SecondMoment, StepLimits},
    linear::{Linear, Masking},
    parts::{ModelPart, ModelParts as _},
};

/// Tokens of a step, unless a text has more.
const STEP_TOKENS: usize = 4096;

/// How the kept weights of a block are tuned: by Adam, with a learning rate that falls linearly to 0.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct BlockTuning {
    /// Passes over the texts.
    pub passes: usize,
    /// The learning rate at first.
    pub learning_rate: f64,
    /// What is made less.
    pub measure: ErrorMeasure,
}

impl BlockTuning {
    /// Checks that a checkpoint's blocks can be tuned.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model that does not train, with what it has.
    pub fn expect_tunable(checkpoint: &Checkpoint) -> Result<()> {
        // The texts' lengths are checked when they are there.
        expect_trainable(&checkpoint.config().clone().with_context(1))
    }
}

/// A block of a checkpoint whose weights have been pruned.
pub struct PrunedBlock<'a> {
    /// Its number.
    pub index: usize,
    /// The values of the weights that were pruned, in place of the stored ones.
    pub replace: Replace<'a>,
    /// Whether a weight, by its stored name, was pruned.
    pub is_pruned: &'a dyn Fn(&str) -> bool,
    /// The integers that pruned weights are rounded to; without it they are floats.
    pub rounding: Option<WeightRounding<'a>>,
}

/// The integers times scales that pruned weights are.
#[derive(Clone, Copy)]
pub struct WeightRounding<'a> {
    /// The largest integer.
    pub largest: f32,
    /// The scale of each element of a weight, by its stored name and as the weight is stored; 0 where it is pruned.
    pub scales: Replace<'a>,
    /// The floats that training begins with, which round to the integers that the weight has.
    pub floats: Replace<'a>,
}

impl fmt::Debug for WeightRounding<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("WeightRounding").field("largest", &self.largest).finish_non_exhaustive()
    }
}

impl fmt::Debug for PrunedBlock<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PrunedBlock").field("index", &self.index).finish_non_exhaustive()
    }
}

/// Texts in front of a block and behind it, each `[tokens, width]`.
#[derive(Debug, Clone, Copy)]
pub struct BlockTexts<'a> {
    /// What the pruned block reads.
    pub inputs: &'a [&'a [f32]],
    /// What it is to compute: the dense block's outputs.
    pub outputs: &'a [&'a [f32]],
}

/// What tuning has found.
#[derive(Debug, Clone, PartialEq)]
pub struct TunedBlock {
    /// The tuned weights as they are stored, by their names; none where no weight could be tuned, or the error did not
    /// fall.
    pub weights: Vec<(String, Vec<f32>)>,
    /// The mean error of a token of the first step's texts, before and after.
    pub errors: [f64; 2],
}

/// A block in training.
struct Tuner<'a, E: Engine> {
    engine: &'a E,
    layer: Layer<E>,
    steps: Vec<Step<E>>,
    workspace: Workspace<E>,
    measure: ErrorMeasure,
    loss: E::Buffer,
    guard: E::StepGuard,
}

/// Texts of one length in the engine's memory.
struct Step<E: Engine> {
    shape: BatchShape,
    inputs: E::Buffer,
    outputs: E::Buffer,
}

impl Checkpoint {
    /// Tunes a pruned block of the checkpoint on texts: the weights that were pruned, where they are kept. A layer that
    /// is stored as several weights is tuned where all of them were pruned. The masks stay.
    ///
    /// # Errors
    /// Texts that do not fit the block or each other; settings out of range; those of reading and of the engine;
    /// [`twofour::Error::Interrupted`] where `is_stopped` asks for it.
    pub fn tune_block<E: Engine>(
        &self,
        engine: &E,
        block: &PrunedBlock<'_>,
        texts: BlockTexts<'_>,
        tuning: BlockTuning,
        is_stopped: &dyn Fn() -> bool,
    ) -> Result<TunedBlock> {
        let width = self.config().width;
        check(texts, tuning, width)?;
        let steps = steps_of(engine, texts, width)?;
        let Some(longest) = steps.iter().map(|step| step.shape.positions).max() else {
            return Ok(TunedBlock { weights: vec![], errors: [0.0; 2] });
        };
        let config = self.config().clone().with_context(longest);
        expect_trainable(&config)?;
        let parts = self.parts().replacing(Some(block.replace));
        let layer = Layer::build(engine, config, block.index, |name, _| parts.values(name))?;
        let (loss, guard) = (engine.zeros(Kind::Wide, 1)?, engine.step_guard(1)?);
        let workspace = Workspace::default();
        let (measure, all) = (tuning.measure, tuning.passes * steps.len());
        let mut tuner = Tuner { engine, layer, steps, workspace, measure, loss, guard };
        let names = tuner.begin(&parts, block)?;
        let before = E::scope(|| tuner.error())?;
        if names.is_empty() {
            return Ok(TunedBlock { weights: vec![], errors: [before; 2] });
        }
        for number in 0..all {
            if is_stopped() {
                return Err(twofour::Error::Interrupted.into());
            }
            let learning_rate = tuning.learning_rate * (1.0 - number as f64 / all as f64);
            E::scope(|| tuner.step(number, learning_rate))?;
        }
        let after = E::scope(|| tuner.error())?;
        let weights = if after < before { tuner.weights(&parts, &names)? } else { vec![] };
        Ok(TunedBlock { weights, errors: [before, after] })
    }
}

fn check(texts: BlockTexts<'_>, tuning: BlockTuning, width: usize) -> Result<()> {
    let BlockTexts { inputs, outputs } = texts;
    if !(tuning.learning_rate > 0.0 && tuning.learning_rate.is_finite()) || tuning.passes == 0 {
        let found = format!("{} passes at a rate of {}", tuning.passes, tuning.learning_rate);
        let expected = "at least one pass, at a finite rate above 0";
        return Err(Error::Setting { what: "the tuning of a block", found, expected });
    }
    if inputs.len() != outputs.len() {
        let (expected, found) = (inputs.len(), outputs.len());
        return Err(Error::length("texts behind a block", expected, found));
    }
    for (input, output) in inputs.iter().zip(outputs) {
        if input.is_empty() || !input.len().is_multiple_of(width) || input.len() != output.len() {
            let found = format!("{} elements in front and {} behind", input.len(), output.len());
            let expected = "as many in front of a block as behind it, whole tokens of the model's width";
            return Err(Error::Setting { what: "a text for tuning", found, expected });
        }
    }
    Ok(())
}

/// The texts, those of one length together.
fn steps_of<E: Engine>(engine: &E, texts: BlockTexts<'_>, width: usize) -> Result<Vec<Step<E>>> {
    let mut order: Vec<usize> = (0..texts.inputs.len()).collect();
    order.sort_by_key(|&text| texts.inputs[text].len());
    let mut steps = vec![];
    for alike in order.chunk_by(|&a, &b| texts.inputs[a].len() == texts.inputs[b].len()) {
        let positions = texts.inputs[alike[0]].len() / width;
        for part in alike.chunks((STEP_TOKENS / positions).max(1)) {
            let shape = BatchShape { batch: part.len(), positions };
            let upload = |texts: &[&[f32]]| -> Result<E::Buffer> {
                let values = part.iter().map(|&text| texts[text]).collect::<Vec<_>>().concat();
                let mut buffer = engine.zeros(Kind::Compute, values.len())?;
                engine.write(&mut buffer, &values)?;
                Ok(buffer)
            };
            steps.push(Step { shape, inputs: upload(texts.inputs)?, outputs: upload(texts.outputs)? });
        }
    }
    Ok(steps)
}

impl<E: Engine> Tuner<'_, E> {
    /// Masks or rounds the layers that are tuned, and returns their names.
    fn begin(&mut self, parts: &StoredParts<'_>, block: &PrunedBlock<'_>) -> Result<Vec<String>> {
        // The backward pass of a norm writes its own gradients, too.
        let mut outcome = Ok(());
        self.layer.visit_mut(&mut |part| {
            if let ModelPart::Parameter(norm) = part
                && outcome.is_ok()
            {
                outcome = norm.begin_training(self.engine);
            }
        });
        outcome?;
        let mut names = vec![];
        for linear in self.layer.linears_mut() {
            if !parts.weights_of(linear.name()).iter().all(|weight| (block.is_pruned)(weight)) {
                continue;
            }
            match block.rounding {
                Some(WeightRounding { largest, scales, floats }) => {
                    for weight in parts.weights_of(linear.name()) {
                        if scales(&weight).is_none() || floats(&weight).is_none() {
                            let (what, expected) =
                                ("the rounding of a block", "scales and floats of each pruned weight");
                            return Err(Error::Setting { what, found: format!("none of `{weight}`"), expected });
                        }
                    }
                    let name = format!("{}.weight", linear.name());
                    let [scales, floats] = [scales, floats].map(|values| parts.replacing(Some(values)).values(&name));
                    linear.weight_mut().write(self.engine, &floats?)?;
                    linear.make_rounded(self.engine, &scales?, largest)?;
                }
                None => {
                    let (rows, cols) = (linear.out_features(), linear.in_features());
                    let values = self.engine.read(linear.weight().master())?;
                    let mask = Mask::from_fn(rows, cols, |row, col| values[row * cols + col] != 0.0);
                    linear.make_masked(self.engine, mask, Masking::InPlace)?;
                }
            }
            linear.weight_mut().begin_training(self.engine)?;
            names.push(linear.name().to_owned());
        }
        Ok(names)
    }

    /// The block's outputs on a step's texts, and what its backward pass needs.
    fn forward(&mut self, number: usize) -> Result<(E::Buffer, SavedLayer<E>)> {
        let Tuner { engine, layer, steps, workspace, .. } = self;
        let step = &steps[number];
        let mut x = workspace.compute(*engine, step.shape.tokens() * layer.width())?;
        engine.clear(&mut x)?;
        engine.add(&step.inputs, &mut x)?;
        let (output, saved) = layer.forward(*engine, workspace, (Stream::Plain(x), step.shape), None)?;
        Ok((output.into_x(workspace), saved))
    }

    /// The mean error of a token of the first step's texts.
    fn error(&mut self) -> Result<f64> {
        let (x, saved) = self.forward(0)?;
        saved.release(self.engine, &mut self.workspace);
        let dx = self.difference(&x, 0)?;
        self.workspace.give([x, dx]);
        let sum = self.engine.read(&self.loss)?.iter().map(|&sum| f64::from(sum)).sum::<f64>();
        Ok(sum / self.steps[0].shape.tokens() as f64)
    }

    /// The gradient of the error for the block's outputs; the error itself is in `loss`.
    fn difference(&mut self, x: &E::Buffer, number: usize) -> Result<E::Buffer> {
        let Tuner { engine, layer, steps, workspace, measure, loss, .. } = self;
        let step = &steps[number];
        let (tokens, width) = (step.shape.tokens(), layer.width());
        let mut dx = workspace.compute(*engine, tokens * width)?;
        engine.clear(loss)?;
        let scaling = (1.0, 1.0 / tokens as f32);
        engine.squared_error(*measure, width, (x, &step.outputs), scaling, &mut dx, loss)?;
        Ok(dx)
    }

    /// The update of that number, counted from 0.
    fn step(&mut self, number: usize, learning_rate: f64) -> Result<()> {
        let step = number % self.steps.len();
        let (x, saved) = self.forward(step)?;
        let dx = self.difference(&x, step)?;
        self.workspace.give([x]);
        let Tuner { engine, layer, workspace, loss, guard, .. } = self;
        let dx = layer.backward(*engine, workspace, saved, dx, Accumulate::Overwrite)?;
        workspace.give([dx]);
        let parameters = layer.parameters();
        let gradients: Vec<&E::Buffer> = parameters.iter().filter_map(|parameter| parameter.gradient()).collect();
        engine.judge(&gradients, loss, StepLimits { clip_norm: 0.0, loss_scale: 1.0 }, guard)?;
        let adam = OptimizerStep::AdamW(AdamWStep {
            learning_rate,
            beta1: 0.9,
            beta2: 0.999,
            // Relative errors have small gradients.
            epsilon: 1e-12,
            weight_decay: 0.0,
            step: number as u64 + 1,
            gradient_scale: 1.0,
            second_moment: SecondMoment::Moving,
            pruned_decay: PrunedDecay::None,
        });
        for linear in layer.linears_mut().filter(|linear| linear.masked().is_some()) {
            linear.update_weight(*engine, &adam, guard)?;
            linear.refresh(*engine, false)?;
        }
        Ok(())
    }

    /// The weights of the tuned layers as they are stored.
    fn weights(&self, parts: &StoredParts<'_>, names: &[String]) -> Result<Vec<(String, Vec<f32>)>> {
        let is_tuned = |linear: &&Linear<E>| names.iter().any(|name| name == linear.name());
        let mut weights = vec![];
        for linear in self.layer.linears().filter(is_tuned) {
            weights.extend(parts.split(linear.name(), &linear.squashed(self.engine)?));
        }
        Ok(weights)
    }
}
