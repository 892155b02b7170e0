//! A contender: a model, and the times of its training steps.

use anyhow::{Context, Result};
use twofour_cuda::{DataType, Device};
use twofour_nn::{
    model::ModelParts as _,
    recipe::Method,
    train::{SparsityPlan, Trainer, TrainingData},
};
use twofour_transformer::engine::cuda::CudaEngine;

use super::{
    Phase, StepRow,
    model::{ContenderForm, Task, settings},
};

/// Steps of each contender before its first one that counts: plans and memory, then masks.
const WARM_UP: usize = 4;

/// Steps that are launched call by call.
const LAUNCHED: usize = 11;

/// Steps whose phases are measured.
const PHASED: usize = 5;

/// A contender with its model.
pub(super) struct Contender<D: TrainingData> {
    name: &'static str,
    trainer: Trainer<CudaEngine, D>,
    times: Vec<f64>,
    memory: Memory,
    loss: f64,
}

/// Device memory that a contender has taken, in bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Memory {
    all: usize,
    /// By the pool of buffers, and allocated from it.
    pool: usize,
    allocated: usize,
    workspace: usize,
}

impl<D: TrainingData> Contender<D> {
    pub(super) fn new(device: &Device, task: &Task<D>, (name, form): ContenderForm) -> Result<Self> {
        // What earlier contenders left in the pool would not be counted as taken.
        device.release_pooled_memory()?;
        let (before, pool_before) = (device.context().mem_get_info()?.0, device.pooled_memory()?);
        let settings = settings(task.batch);
        let engine = CudaEngine::new(device, DataType::BF16)?;
        let model = (task.build)(&engine)?;
        let layers: Vec<String> = model.linears().map(|linear| linear.name().to_owned()).collect();
        let plan = match form {
            None => SparsityPlan::dense(),
            Some((rule, precision)) => {
                let layers = layers.into_iter().filter(|name| name.contains(".mlp.")).collect();
                SparsityPlan { rule, precision, ..SparsityPlan::of_method(Method::STE, layers, settings.steps) }
            }
        };
        let trainer = Trainer::with_model(engine, model, &settings, plan, task.data.clone())?;
        let mut contender = Contender { name, trainer, times: vec![], memory: Memory::default(), loss: f64::NAN };
        for _ in 0..WARM_UP {
            contender.step()?;
        }
        contender.times.clear();
        let pool = device.pooled_memory()?;
        contender.memory = Memory {
            all: before.saturating_sub(device.context().mem_get_info()?.0),
            pool: pool.reserved.saturating_sub(pool_before.reserved),
            allocated: pool.in_use.saturating_sub(pool_before.in_use),
            workspace: contender.trainer.engine().context().workspace_bytes(),
        };
        Ok(contender)
    }

    /// Device memory that it has taken.
    pub(super) fn bytes(&self) -> usize {
        self.memory.all
    }

    /// One step.
    pub(super) fn step(&mut self) -> Result<()> {
        let report = self.trainer.step()?;
        anyhow::ensure!(!report.skipped, "{}: loss or gradients of step {} are not finite", self.name, report.step);
        self.times.push(report.seconds * 1e3);
        self.loss = report.loss;
        Ok(())
    }

    /// Ends the timing of steps as they are replayed; times steps that are launched call by call, and phases.
    pub(super) fn row(&mut self, task: &Task<D>, interleaved: bool) -> Result<StepRow> {
        let mut times = std::mem::take(&mut self.times);
        times.sort_by(f64::total_cmp);
        let at = |share: f64| times.get(((times.len() - 1) as f64 * share).round() as usize).copied();
        let ms = at(0.5).context("no rounds")?;
        let captured = self.trainer.engine().replayed_steps() > 0;
        self.trainer.engine().capture_steps(false);
        for _ in 0..LAUNCHED {
            self.step()?;
        }
        let launched_ms = median(std::mem::take(&mut self.times));
        let mut phases: Vec<(&'static str, Vec<f64>)> = vec![];
        for _ in 0..PHASED {
            self.trainer.engine().measure_phases();
            self.step()?;
            for (name, ms) in self.trainer.engine().take_phases()? {
                match phases.iter_mut().find(|(known, _)| *known == name) {
                    Some((_, all)) => all.push(ms),
                    None => phases.push((name, vec![ms])),
                }
            }
        }
        let [_, _, _, positions, _] = task.sizes;
        let parameters = self.trainer.model().parameters();
        Ok(StepRow {
            dtype: DataType::BF16.name(),
            kind: task.kind,
            model: task.sizes,
            parameters: parameters.iter().map(|parameter| parameter.shape().iter().product::<usize>()).sum(),
            batch: task.batch,
            contender: self.name,
            interleaved,
            ms,
            p90_ms: at(0.9).unwrap_or(ms),
            min_ms: at(0.0).unwrap_or(ms),
            captured,
            launched_ms,
            tokens_per_s: (task.batch * positions) as f64 / ms * 1e3,
            bytes: self.memory.all,
            pool_bytes: self.memory.pool,
            allocated_bytes: self.memory.allocated,
            workspace_bytes: self.memory.workspace,
            phases: phases.into_iter().map(|(phase, all)| Phase { phase, ms: median(all) }).collect(),
            loss: self.loss,
        })
    }
}

/// The median of some numbers.
fn median(mut all: Vec<f64>) -> f64 {
    all.sort_by(f64::total_cmp);
    all.get(all.len() / 2).copied().unwrap_or(f64::NAN)
}
