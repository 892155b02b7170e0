//! Both models, trained side by side.

use std::{
    sync::Arc,
    time::{Duration, Instant},
};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};
use twofour_nn::{
    model::CHECKPOINT_FILE,
    train::{Corpus, Trainer},
};
use twofour_transformer::engine::Engine;

use super::{Folder, Plan, folder::ELSEWHERE, plan::MIN_STEPS};

/// Time between checkpoints: the most that a killed run loses.
const CHECKPOINT_INTERVAL: Duration = Duration::from_secs(30);

/// The training losses of both models, one for each step.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub(crate) struct Losses {
    /// Of the dense model.
    pub(crate) dense: Vec<f32>,
    /// Of the 2:4 model.
    pub(crate) sparse: Vec<f32>,
    /// Seconds spent in the dense model's steps.
    pub(crate) dense_seconds: f64,
    /// Seconds spent in the 2:4 model's steps.
    pub(crate) sparse_seconds: f64,
    /// Seconds spent on the run altogether, in this process and in those before it.
    pub(crate) seconds: f64,
}

/// Two trainers, interleaved step by step.
#[derive(Debug)]
pub(crate) struct Training<E: Engine> {
    pub(crate) dense: Trainer<E>,
    pub(crate) sparse: Trainer<E>,
    pub(crate) losses: Losses,
    /// The start of the run, later by the time during which it was interrupted.
    begun: Instant,
    saved: Instant,
}

impl<E: Engine> Training<E> {
    /// Starts the run, or resumes from the folder's checkpoints, with these engines. Its time counts from `begun`.
    pub(crate) fn open(
        plan: &Plan,
        folder: &Folder,
        corpus: &Arc<Corpus>,
        begun: Instant,
        engines: [E; 2],
    ) -> Result<Self> {
        let [of_dense, of_sparse] = engines;
        let (mut dense, mut sparse) = (plan.dense(of_dense, corpus)?, plan.sparse(of_sparse, corpus)?);
        for (name, trainer) in [("dense", &mut dense), ("sparse", &mut sparse)] {
            let directory = folder.file(name);
            if directory.join(CHECKPOINT_FILE).exists() {
                trainer
                    .resume(&directory)
                    .with_context(|| format!("cannot go on with {}; {ELSEWHERE}", folder.path().display()))?;
            }
        }
        let mut losses = folder.losses()?.unwrap_or_default();
        // A process that is killed between two files leaves one of them a little newer.
        losses.dense.truncate(dense.steps_done() as usize);
        losses.sparse.truncate(sparse.steps_done() as usize);
        let earlier = Duration::try_from_secs_f64(losses.seconds).unwrap_or_default();
        let begun = begun.checked_sub(earlier).unwrap_or(begun);
        Ok(Training { dense, sparse, losses, begun, saved: Instant::now() })
    }

    /// Steps that both models have done.
    pub(crate) fn steps_done(&self) -> u64 {
        self.dense.steps_done().min(self.sparse.steps_done())
    }

    /// The time spent on the run so far.
    pub(crate) fn spent(&self) -> Duration {
        self.begun.elapsed()
    }

    /// Whether both models have done the same number of steps, and all steps are done or the time is over.
    pub(crate) fn is_finished(&self, plan: &Plan) -> bool {
        let (dense, sparse) = (self.dense.steps_done(), self.sparse.steps_done());
        let is_late = dense >= MIN_STEPS && plan.is_late(self.spent());
        dense == sparse && (self.dense.is_finished() || is_late)
    }

    /// One step of the model with fewer steps, or of both.
    pub(crate) fn step(&mut self) -> Result<()> {
        let (dense, sparse) = (self.dense.steps_done(), self.sparse.steps_done());
        if dense <= sparse {
            timed(&mut self.dense, &mut self.losses.dense, &mut self.losses.dense_seconds)?;
        }
        if sparse <= dense {
            timed(&mut self.sparse, &mut self.losses.sparse, &mut self.losses.sparse_seconds)?;
        }
        Ok(())
    }

    /// The mean of each model's last losses: single batches are noisy.
    pub(crate) fn recent(&self) -> Option<(f32, f32)> {
        let mean = |losses: &[f32]| {
            let last = &losses[losses.len().saturating_sub(10)..];
            (!last.is_empty()).then(|| last.iter().sum::<f32>() / last.len() as f32)
        };
        Some((mean(&self.losses.dense)?, mean(&self.losses.sparse)?))
    }

    /// Saves if the last checkpoint is old.
    pub(crate) fn save_if_due(&mut self, folder: &Folder) -> Result<()> {
        if self.saved.elapsed() < CHECKPOINT_INTERVAL { Ok(()) } else { self.save(folder) }
    }

    /// Saves both models and the losses.
    pub(crate) fn save(&mut self, folder: &Folder) -> Result<()> {
        self.dense.save(folder.file("dense"))?;
        self.sparse.save(folder.file("sparse"))?;
        self.losses.seconds = self.spent().as_secs_f64();
        folder.write_losses(&self.losses)?;
        self.saved = Instant::now();
        Ok(())
    }
}

fn timed<E: Engine>(trainer: &mut Trainer<E>, losses: &mut Vec<f32>, seconds: &mut f64) -> Result<()> {
    let begun = Instant::now();
    let report = trainer.step()?;
    *seconds += begun.elapsed().as_secs_f64();
    if report.skipped {
        bail!("step {}: the loss or a gradient is not finite, and nothing was updated; {ELSEWHERE}", report.step);
    }
    losses.push(report.loss as f32);
    tracing::debug!(?report, "step");
    Ok(())
}
