//! Tuning the weights of a block after they were pruned.

use std::{collections::HashMap, path::Path, str::FromStr};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use twofour::{
    MatrixRef,
    calibration::{ActivationSample, Statistic},
    file::{Quantization, QuantizedWeight},
    solve,
};
use twofour_nn::model::{
    BlockTexts, BlockTuning, Calibration, Checkpoint, PrunedBlock, Runner, TunedBlock, WeightRounding,
};
use twofour_transformer::engine::{ErrorMeasure, cpu::CpuEngine, cuda::CudaEngine};

use super::{
    calibrated::{Solver, with_solutions},
    place::Place,
    solution::{Adjusted, Solution},
};
use crate::{exit::Usage, interrupt};

/// The learning rate, unless one is given.
const RATE: f64 = 1e-4;
/// Passes, unless a number is given.
const PASSES: u32 = 1;
/// Pieces, unless a number is given.
const SAMPLES: u32 = 64;

/// How kept weights are tuned.
#[derive(Debug, Clone, Args)]
pub(super) struct TuningOptions {
    /// Train a decoder's kept weights, block by block, to compute what the dense block does: so many passes over
    /// calibration pieces; 0 for none [default with --calibration: 1, for decoders that train]
    ///
    /// With --quantize the integers are tuned, too, in as many passes more.
    #[arg(long, value_name = "PASSES", requires = "calibration")]
    tune: Option<u32>,

    /// Tune on at most so many of the calibration's pieces [default: 64]
    #[arg(long, value_name = "COUNT", requires = "calibration", value_parser = clap::value_parser!(u32).range(1..))]
    tune_samples: Option<u32>,

    /// The learning rate of tuning at first; it falls to 0 [default: 0.0001]
    #[arg(long, value_name = "RATE", requires = "calibration", value_parser = rate)]
    tune_rate: Option<f64>,

    /// What tuning makes less [default: squared]
    #[arg(long, value_enum, value_name = "ERROR", requires = "calibration")]
    tune_error: Option<TuningError>,
}

/// What tuning makes less.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum TuningError {
    /// The square of the distance from the dense block's output
    #[default]
    Squared,
    /// That square over the output's own, so that tokens of large hidden states do not outweigh the others
    Relative,
}

impl From<TuningError> for ErrorMeasure {
    fn from(error: TuningError) -> Self {
        match error {
            TuningError::Squared => ErrorMeasure::Squared,
            TuningError::Relative => ErrorMeasure::RelativeSquared,
        }
    }
}

fn rate(text: &str) -> Result<f64, String> {
    let found = f64::from_str(text).ok().filter(|rate| *rate > 0.0 && rate.is_finite());
    found.ok_or_else(|| "a finite number above 0".to_owned())
}

/// What tuning did.
#[derive(Debug, Serialize)]
pub(super) struct TuningAnswer {
    passes: usize,
    samples: usize,
    learning_rate: f64,
    /// Of each block the mean error of a token, before and after.
    errors: Vec<[f64; 2]>,
}

impl TuningAnswer {
    /// The mean over the blocks of what tuning left of the error.
    pub(super) fn left(&self) -> f64 {
        let left = self.errors.iter().map(|[before, after]| if *before > 0.0 { after / before } else { 1.0 });
        left.sum::<f64>() / self.errors.len().max(1) as f64
    }
}

/// What a layer's weights read, for their errors.
#[derive(Debug)]
pub(super) struct SeenInput {
    pub(super) weights: Vec<String>,
    pub(super) is_transposed: bool,
    pub(super) sample: ActivationSample,
    /// What they are rounded by, if they are.
    pub(super) statistic: Option<Statistic>,
}

/// What tunes blocks.
#[derive(Debug)]
pub(super) struct BlockTuner {
    checkpoint: Checkpoint,
    tuning: BlockTuning,
    /// The most texts that are tuned on.
    samples: usize,
    /// The integers that tuned weights are rounded to.
    quantization: Option<Quantization>,
    engine: TuningEngine,
}

#[derive(Debug)]
enum TuningEngine {
    Cpu,
    Cuda(Box<CudaEngine>),
}

impl TuningOptions {
    /// Returns what tunes the blocks of a model that is calibrated, and rounds them; nothing where no passes are asked
    /// for, or where none were and the model cannot be tuned.
    ///
    /// # Errors
    /// Where passes were asked for, a model that is no decoder, or that does not train; other options of tuning where
    /// nothing is tuned; a device that cannot be used.
    pub(super) fn tuner(
        &self,
        input: &Path,
        place: &Place,
        quantization: Option<Quantization>,
    ) -> Result<Option<BlockTuner>> {
        if self.tune == Some(0) {
            self.expect_none("--tune 0 leaves it out")?;
            return Ok(None);
        }
        let found = Checkpoint::open(input).context("--tune is for the blocks of decoders").and_then(|checkpoint| {
            BlockTuning::expect_tunable(&checkpoint)?;
            Ok(checkpoint)
        });
        let checkpoint = match found {
            Ok(checkpoint) => checkpoint,
            Err(error) if self.tune.is_none() => {
                self.expect_none(&format!("{error:#}"))?;
                return Ok(None);
            }
            Err(error) => return Err(error),
        };
        let engine = match place {
            Place::Cpu => TuningEngine::Cpu,
            Place::Gpu(device, _) => TuningEngine::Cuda(Box::new(CudaEngine::new(device, twofour::DataType::F32)?)),
        };
        let passes = self.tune.unwrap_or(PASSES) as usize;
        let learning_rate = self.tune_rate.unwrap_or(RATE);
        let tuning = BlockTuning { passes, learning_rate, measure: self.tune_error.unwrap_or_default().into() };
        let samples = self.tune_samples.unwrap_or(SAMPLES) as usize;
        Ok(Some(BlockTuner { checkpoint, tuning, samples, quantization, engine }))
    }

    /// Whether tuning is left to the model.
    pub(super) fn is_default(&self) -> bool {
        self.tune.is_none()
    }

    /// Refuses options of tuning where nothing is tuned.
    pub(super) fn expect_none(&self, reason: &str) -> Result<()> {
        let given = [
            ("--tune-samples", self.tune_samples.is_some()),
            ("--tune-rate", self.tune_rate.is_some()),
            ("--tune-error", self.tune_error.is_some()),
        ];
        match given.into_iter().find(|(_, is_given)| *is_given) {
            Some((option, _)) => Err(Usage(format!("{option} is for tuning: {reason}")).into()),
            None => Ok(()),
        }
    }
}

impl BlockTuner {
    /// The most texts that are tuned on.
    pub(super) fn samples(&self) -> usize {
        self.samples
    }

    /// Bytes that a block takes in training, in memory at once: master weight, gradient and two moments in f32, and for
    /// integers the scales, the rounded weight and the floats behind it.
    pub(super) fn training_bytes(&self) -> u64 {
        let mut blocks: HashMap<String, u64> = HashMap::new();
        for (name, outputs, inputs) in self.checkpoint.config().linear_layers() {
            let block = name.split('.').take(2).collect::<Vec<_>>().join(".");
            *blocks.entry(block).or_default() += (outputs as u64).saturating_mul(inputs as u64);
        }
        let weights = blocks.into_values().max().unwrap_or_default();
        weights.saturating_mul(if self.quantization.is_some() { 28 } else { 16 })
    }

    /// What tuning did on so many texts: `errors` are those of blocks, before and after.
    pub(super) fn answer(&self, texts: usize, errors: &[[f64; 2]]) -> TuningAnswer {
        let BlockTuning { passes, learning_rate, .. } = self.tuning;
        TuningAnswer { passes, samples: texts.min(self.samples), learning_rate, errors: errors.to_vec() }
    }

    /// Tunes the pruned weights of the block that the texts have passed, rounds them and tunes the integers if asked,
    /// then rewinds the texts to that block's input. Returns the mean error of a token before and after.
    pub(super) fn tune<R: Runner>(
        &self,
        solver: &Solver<'_, R>,
        weights: &mut HashMap<String, Solution>,
        calibration: &mut Calibration<'_, R>,
        seen: &[SeenInput],
    ) -> Result<Option<[f64; 2]>> {
        let index = calibration.block();
        let inputs = calibration.inputs()?;
        let is_seen = |name: &String| seen.iter().any(|input| input.weights.contains(name));
        let last = inputs.len().saturating_sub(1);
        if !inputs.last().is_some_and(|input| input.weights.iter().any(is_seen)) {
            // The dense texts are to go through the whole block.
            with_solutions(solver, weights, |replace| calibration.observe(last, replace, &mut |_, _| {}))?;
        }
        let (Some(entry), Some(dense)) = (calibration.entry(), calibration.dense_texts()) else { return Ok(None) };
        let to_host = |view| solver.runner.to_host(view);
        let dense = dense.into_iter().take(self.samples).map(to_host).collect::<twofour_nn::Result<Vec<_>>>()?;
        let entry = entry.into_iter().take(dense.len()).map(to_host).collect::<twofour_nn::Result<Vec<_>>>()?;
        let entry: Vec<&[f32]> = entry.iter().map(AsRef::as_ref).collect();
        let dense: Vec<&[f32]> = dense.iter().map(AsRef::as_ref).collect();
        let texts = BlockTexts { inputs: &entry, outputs: &dense };
        let mut errors = self.tune_as(solver, weights, index, texts, None)?;
        if let Some(to) = self.quantization {
            let rounded = round(solver, weights, seen, to)?;
            errors = self.tune_as(solver, weights, index, texts, Some((to, &rounded)))?;
        }
        let [before, after] = errors;
        tracing::info!(block = index, before, after, "tuned");
        for input in seen {
            for name in &input.weights {
                if let Some(solution) = weights.get_mut(name) {
                    let values = solver.values(name, solution)?;
                    solution.relative_error = relative_error(solver, name, &values, input)?;
                }
            }
        }
        calibration.rewind()?;
        Ok(Some(errors))
    }

    /// Tunes pruned weights as floats, or as the integers that they were rounded to, and returns the errors: the second
    /// is that of the weights that stay, which are the first where tuning made them worse.
    fn tune_as<R: Runner>(
        &self,
        solver: &Solver<'_, R>,
        weights: &mut HashMap<String, Solution>,
        index: usize,
        texts: BlockTexts<'_>,
        integers: Option<(Quantization, &HashMap<String, Rounded>)>,
    ) -> Result<[f64; 2]> {
        let scales = |name: &str| Some(integers?.1.get(name)?.scales.clone());
        let floats = |name: &str| Some(integers?.1.get(name)?.floats.clone());
        let rounding = integers.map(|(to, _)| WeightRounding {
            largest: to.grid().bits.largest(),
            scales: &scales,
            floats: &floats,
        });
        let mut tuned = TunedBlock { weights: vec![], errors: [0.0; 2] };
        with_solutions(solver, weights, |replace| {
            let is_pruned = |name: &str| weights.contains_key(name);
            let block = PrunedBlock { index, replace, is_pruned: &is_pruned, rounding };
            tuned = self.run(&block, texts)?;
            Ok(())
        })?;
        for (name, values) in tuned.weights {
            let Some(solution) = weights.get_mut(&name) else { continue };
            solution.adjusted = Some(match solution.adjusted.take() {
                Some(Adjusted::Integers(integers)) => integers.nearest_to(solver.store, &values)?,
                _ => Adjusted::floats(solver.store, &solver.rounded(&name, values)?)?,
            });
        }
        let [before, after] = tuned.errors;
        Ok([before, after.min(before)])
    }

    fn run(&self, block: &PrunedBlock<'_>, texts: BlockTexts<'_>) -> twofour_nn::Result<TunedBlock> {
        let (tuning, stopped) = (self.tuning, &interrupt::requested);
        match &self.engine {
            TuningEngine::Cpu => self.checkpoint.tune_block(&CpuEngine, block, texts, tuning, stopped),
            TuningEngine::Cuda(engine) => self.checkpoint.tune_block(&**engine, block, texts, tuning, stopped),
        }
    }
}

/// A weight that was rounded.
#[derive(Debug)]
struct Rounded {
    /// The scale of each element; 0 where it is pruned.
    scales: Vec<f32>,
    /// The weight before, no farther from each integer than what rounds to it.
    floats: Vec<f32>,
}

/// Rounds tuned weights to the integers that change their layers' outputs least.
fn round<R: Runner>(
    solver: &Solver<'_, R>,
    weights: &mut HashMap<String, Solution>,
    seen: &[SeenInput],
    to: Quantization,
) -> Result<HashMap<String, Rounded>> {
    /// The largest distance of a float from its integer, in steps.
    const FARTHEST: f32 = 0.49;
    let mut all = HashMap::new();
    for SeenInput { weights: names, statistic, .. } in seen {
        let Some(Statistic::Hessian(hessian)) = statistic else { continue };
        for name in names {
            interrupt::check()?;
            let Some(solution) = weights.get_mut(name) else { continue };
            let mut floats = solver.values(name, solution)?;
            let tuned = MatrixRef::new(solution.mask.rows(), solution.mask.cols(), &floats)?;
            let integers = solve::round(tuned, &solution.mask, &floats, hessian, to.grid())
                .and_then(|solved| QuantizedWeight::of_solved(&solved, to))
                .map_err(|error| error.in_tensor(name))?;
            let (rounded, scales) = (integers.dequantize().to_dense(), integers.scales_of_elements());
            for ((value, rounded), scale) in floats.iter_mut().zip(rounded).zip(&scales) {
                *value = value.clamp(rounded - FARTHEST * scale, rounded + FARTHEST * scale);
            }
            solution.adjusted = Some(Adjusted::integers(solver.store, &integers)?);
            all.insert(name.clone(), Rounded { scales, floats });
        }
    }
    Ok(all)
}

/// The error of a tuned weight's outputs, of which the values are as they are stored.
fn relative_error<R: Runner>(solver: &Solver<'_, R>, name: &str, values: &[f32], input: &SeenInput) -> Result<f64> {
    let (rows, cols, dense) = solver.dense(name, input.is_transposed)?;
    let tuned = match input.is_transposed {
        true => MatrixRef::new(cols, rows, values)?.transposed(),
        false => values.to_vec(),
    };
    let error = input.sample.relative_error(MatrixRef::new(rows, cols, &dense)?, MatrixRef::new(rows, cols, &tuned)?);
    Ok(error.map_err(|error| error.in_tensor(name))?)
}
