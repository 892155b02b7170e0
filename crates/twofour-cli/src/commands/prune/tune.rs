//! Tuning the weights of a block after they were pruned.

use std::{collections::HashMap, path::Path, str::FromStr};

use anyhow::{Context as _, Result};
use clap::{Args, ValueEnum};
use serde::Serialize;
use twofour::{MatrixRef, calibration::ActivationSample};
use twofour_nn::model::{BlockTexts, BlockTuning, Calibration, Checkpoint, PrunedBlock, Runner, TunedBlock};
use twofour_transformer::engine::{ErrorMeasure, cpu::CpuEngine, cuda::CudaEngine};

use super::{
    calibrated::{Solver, with_solutions},
    place::Place,
    solution::{Adjusted, Solution},
};
use crate::interrupt;

/// The learning rate, unless one is given.
const RATE: f64 = 1e-4;

/// How kept weights are tuned.
#[derive(Debug, Clone, Args)]
pub(super) struct TuningOptions {
    /// Train a decoder's kept weights, block by block, to compute what the dense block does: so many passes over the
    /// calibration's pieces; requires --calibration
    #[arg(
        long,
        value_name = "PASSES",
        value_parser = clap::value_parser!(u32).range(1..),
        requires = "calibration",
        conflicts_with = "quantize"
    )]
    tune: Option<u32>,

    /// The learning rate of --tune at first; it falls to 0 [default: 0.0001]
    #[arg(long, value_name = "RATE", requires = "tune", value_parser = rate)]
    tune_rate: Option<f64>,

    /// What --tune makes less
    #[arg(long, value_enum, value_name = "ERROR", requires = "tune", default_value_t)]
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
}

/// What tunes blocks.
#[derive(Debug)]
pub(super) struct BlockTuner {
    checkpoint: Checkpoint,
    tuning: BlockTuning,
    engine: TuningEngine,
}

#[derive(Debug)]
enum TuningEngine {
    Cpu,
    Cuda(Box<CudaEngine>),
}

impl TuningOptions {
    fn passes(&self) -> Option<usize> {
        self.tune.map(|passes| passes as usize)
    }

    /// What tuning did, where it was asked for: `errors` are those of blocks, before and after.
    pub(super) fn answer(&self, errors: &[[f64; 2]]) -> Option<TuningAnswer> {
        let passes = self.passes()?;
        Some(TuningAnswer { passes, learning_rate: self.tune_rate.unwrap_or(RATE), errors: errors.to_vec() })
    }

    /// Returns what tunes the blocks of a model, where that is asked for.
    ///
    /// # Errors
    /// A model that is no decoder, or that does not train; a device that cannot be used.
    pub(super) fn tuner(&self, input: &Path, place: &Place) -> Result<Option<BlockTuner>> {
        let Some(passes) = self.passes() else { return Ok(None) };
        let engine = match place {
            Place::Cpu => TuningEngine::Cpu,
            Place::Gpu(device, _) => TuningEngine::Cuda(Box::new(CudaEngine::new(device, twofour::DataType::F32)?)),
        };
        let checkpoint = Checkpoint::open(input).context("--tune is for the blocks of decoders")?;
        BlockTuning::expect_tunable(&checkpoint)?;
        let learning_rate = self.tune_rate.unwrap_or(RATE);
        let tuning = BlockTuning { passes, learning_rate, measure: self.tune_error.into() };
        Ok(Some(BlockTuner { checkpoint, tuning, engine }))
    }
}

impl BlockTuner {
    /// Tunes the weights that were pruned in the block in front of which the texts were, and takes the texts back there.
    /// Returns the mean error of a token before and after.
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
        let entry = entry.into_iter().map(to_host).collect::<twofour_nn::Result<Vec<_>>>()?;
        let dense = dense.into_iter().map(to_host).collect::<twofour_nn::Result<Vec<_>>>()?;
        let entry: Vec<&[f32]> = entry.iter().map(AsRef::as_ref).collect();
        let dense: Vec<&[f32]> = dense.iter().map(AsRef::as_ref).collect();
        let texts = BlockTexts { inputs: &entry, outputs: &dense };
        let mut tuned = TunedBlock { weights: vec![], errors: [0.0; 2] };
        with_solutions(solver, weights, |replace| {
            let block = PrunedBlock { index, replace, is_pruned: &|name| weights.contains_key(name) };
            tuned = self.run(&block, texts)?;
            Ok(())
        })?;
        let [before, after] = tuned.errors;
        tracing::info!(block = index, before, after, "tuned");
        for (name, values) in tuned.weights {
            let values = solver.rounded(&name, values)?;
            let error = seen.iter().find(|input| input.weights.contains(&name));
            let error = error.map(|input| relative_error(solver, &name, &values, input)).transpose()?;
            if let Some(solution) = weights.get_mut(&name) {
                solution.adjusted = Some(Adjusted::floats(solver.store, &values)?);
                solution.relative_error = error.unwrap_or(solution.relative_error);
            }
        }
        calibration.rewind()?;
        Ok(Some(tuned.errors))
    }

    fn run(&self, block: &PrunedBlock<'_>, texts: BlockTexts<'_>) -> twofour_nn::Result<TunedBlock> {
        let (tuning, stopped) = (self.tuning, &interrupt::requested);
        match &self.engine {
            TuningEngine::Cpu => self.checkpoint.tune_block(&CpuEngine, block, texts, tuning, stopped),
            TuningEngine::Cuda(engine) => self.checkpoint.tune_block(&**engine, block, texts, tuning, stopped),
        }
    }
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
