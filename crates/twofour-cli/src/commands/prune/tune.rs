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
use crate::interrupt;

/// The learning rate, unless one is given.
const RATE: f64 = 1e-4;
/// Passes, unless a number is given.
const PASSES: u32 = 1;

/// How kept weights are tuned.
#[derive(Debug, Clone, Args)]
pub(super) struct TuningOptions {
    /// Train a decoder's kept weights, block by block, to compute what the dense block does: so many passes over
    /// calibration pieces; 0 for none [default with --calibration: 1, for decoders that train]
    ///
    /// With --quantize the integers are tuned, too, in as many passes more.
    #[arg(long, value_name = "PASSES", requires = "calibration")]
    tune: Option<u32>,

    /// Tune on at most so many of the calibration's pieces
    #[arg(long, value_name = "COUNT", requires = "calibration", default_value_t = 64,
        value_parser = clap::value_parser!(u32).range(1..))]
    tune_samples: u32,

    /// The learning rate of tuning at first; it falls to 0
    #[arg(long, value_name = "RATE", requires = "calibration", default_value_t = RATE, value_parser = rate)]
    tune_rate: f64,

    /// What tuning makes less
    #[arg(long, value_enum, value_name = "ERROR", requires = "calibration", default_value_t)]
    tune_error: TuningError,
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
        let left =
            self.errors.iter().map(|[before, after]| if *before > 0.0 { after.min(*before) / before } else { 1.0 });
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
    /// Where passes were asked for, a model that is no decoder, or that does not train; a device that cannot be used.
    pub(super) fn tuner(
        &self,
        input: &Path,
        place: &Place,
        quantization: Option<Quantization>,
    ) -> Result<Option<BlockTuner>> {
        if self.tune == Some(0) {
            return Ok(None);
        }
        let found = Checkpoint::open(input).context("--tune is for the blocks of decoders").and_then(|checkpoint| {
            BlockTuning::expect_tunable(&checkpoint)?;
            Ok(checkpoint)
        });
        let checkpoint = match found {
            Ok(checkpoint) => checkpoint,
            Err(_) if self.tune.is_none() => return Ok(None),
            Err(error) => return Err(error),
        };
        let engine = match place {
            Place::Cpu => TuningEngine::Cpu,
            Place::Gpu(device, _) => TuningEngine::Cuda(Box::new(CudaEngine::new(device, twofour::DataType::F32)?)),
        };
        let passes = self.tune.unwrap_or(PASSES) as usize;
        let tuning = BlockTuning { passes, learning_rate: self.tune_rate, measure: self.tune_error.into() };
        Ok(Some(BlockTuner { checkpoint, tuning, samples: self.tune_samples as usize, quantization, engine }))
    }
}

impl BlockTuner {
    /// The most texts that are tuned on.
    pub(super) fn samples(&self) -> usize {
        self.samples
    }

    /// What tuning did: `errors` are those of blocks, before and after.
    pub(super) fn answer(&self, errors: &[[f64; 2]]) -> TuningAnswer {
        let BlockTuning { passes, learning_rate, .. } = self.tuning;
        TuningAnswer { passes, samples: self.samples, learning_rate, errors: errors.to_vec() }
    }

    /// Tunes the weights that were pruned in the block in front of which the texts were, rounds them and tunes their
    /// integers where that is asked for, and takes the texts back there. Returns the mean error of a token before and
    /// after.
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
            let behind = round(solver, weights, seen, to)?;
            errors[1] = self.tune_as(solver, weights, index, texts, Some((to, &behind)))?[1];
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

    /// Tunes pruned weights as floats, or as the integers that they are with the floats behind them, and returns the
    /// errors.
    fn tune_as<R: Runner>(
        &self,
        solver: &Solver<'_, R>,
        weights: &mut HashMap<String, Solution>,
        index: usize,
        texts: BlockTexts<'_>,
        integers: Option<(Quantization, &HashMap<String, Vec<f32>>)>,
    ) -> Result<[f64; 2]> {
        let scales = |name: &str| weights.get(name)?.adjusted.as_ref()?.scales(solver.store).ok().flatten();
        let rounding = integers.map(|(to, _)| WeightRounding { largest: to.grid().bits.largest(), scales: &scales });
        let mut tuned = TunedBlock { weights: vec![], errors: [0.0; 2] };
        with_solutions(solver, weights, |replace| {
            let behind = |name: &str| integers?.1.get(name).cloned();
            let replace = |name: &str| behind(name).or_else(|| replace(name));
            let is_pruned = |name: &str| weights.contains_key(name);
            let block = PrunedBlock { index, replace: &replace, is_pruned: &is_pruned, rounding };
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
        Ok(tuned.errors)
    }

    fn run(&self, block: &PrunedBlock<'_>, texts: BlockTexts<'_>) -> twofour_nn::Result<TunedBlock> {
        let (tuning, stopped) = (self.tuning, &interrupt::requested);
        match &self.engine {
            TuningEngine::Cpu => self.checkpoint.tune_block(&CpuEngine, block, texts, tuning, stopped),
            TuningEngine::Cuda(engine) => self.checkpoint.tune_block(&**engine, block, texts, tuning, stopped),
        }
    }
}

/// Rounds tuned weights for their layers' outputs. Returns the floats behind the integers: the tuned ones, kept from
/// rounding to another integer.
fn round<R: Runner>(
    solver: &Solver<'_, R>,
    weights: &mut HashMap<String, Solution>,
    seen: &[SeenInput],
    to: Quantization,
) -> Result<HashMap<String, Vec<f32>>> {
    /// Of a step between integers, from the integer.
    const FARTHEST: f32 = 0.49;
    let mut behind = HashMap::new();
    for SeenInput { weights: names, statistic, .. } in seen {
        let Some(Statistic::Hessian(hessian)) = statistic else { continue };
        for name in names {
            interrupt::check()?;
            let Some(solution) = weights.get_mut(name) else { continue };
            let mut values = solver.values(name, solution)?;
            let tuned = MatrixRef::new(solution.mask.rows(), solution.mask.cols(), &values)?;
            let integers = solve::round(tuned, &solution.mask, &values, hessian, to.grid())
                .and_then(|solved| QuantizedWeight::of_solved(&solved, to))
                .map_err(|error| error.in_tensor(name))?;
            let rounded = integers.dequantize().to_dense();
            for ((value, rounded), scale) in values.iter_mut().zip(rounded).zip(integers.scales_of_elements()) {
                *value = value.clamp(rounded - FARTHEST * scale, rounded + FARTHEST * scale);
            }
            solution.adjusted = Some(Adjusted::integers(solver.store, &integers)?);
            behind.insert(name.clone(), values);
        }
    }
    Ok(behind)
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
