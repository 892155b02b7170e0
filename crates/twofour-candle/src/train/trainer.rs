//! The training loop.

use std::sync::Arc;

use serde::Serialize;

use super::{Corpus, TrainConfig};
use crate::{
    Error, Result,
    gpt::Gpt,
    linear::{Mode, set_mode},
    optim::{AdamW, AdamWConfig, CosineSchedule},
};

/// What one training step did.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct StepReport {
    /// The step, counted from 0.
    pub step: u64,
    /// The batch's loss before the update, in nats a byte.
    pub loss: f32,
    /// The learning rate of the update.
    pub learning_rate: f64,
    /// The global norm of the gradients before clipping.
    pub gradient_norm: f64,
    /// Bytes predicted.
    pub tokens: usize,
}

/// Trains a [`Gpt`] on a [`Corpus`]. Dense and sparse layers are trained alike; which are which is the model's affair.
///
/// ```
/// use std::sync::Arc;
/// use candle_core::Device;
/// use twofour_candle::{gpt::{Config, Gpt}, train::{Corpus, TrainConfig, Trainer}};
/// let corpus = Arc::new(Corpus::new(b"two of every four ".repeat(100), 0.1)?);
/// let config = Config { layers: 1, width: 16, heads: 2, context: 16, feed_forward: 32 };
/// let model = Gpt::new(&config, 0, &Device::Cpu)?;
/// let mut trainer = Trainer::new(model, corpus, TrainConfig { steps: 30, ..Default::default() })?;
/// let before = trainer.validate(8)?;
/// while !trainer.is_finished() {
///     trainer.step()?;
/// }
/// assert!(trainer.validate(8)? < before);
/// # Ok::<(), twofour_candle::Error>(())
/// ```
#[derive(Debug)]
pub struct Trainer {
    pub(super) model: Gpt,
    pub(super) corpus: Arc<Corpus>,
    pub(super) config: TrainConfig,
    pub(super) optimizer: AdamW,
    schedule: CosineSchedule,
    pub(super) step: u64,
}

/// Decay of the second moment: shorter than the usual 0.999, as is common for language models and needed by short runs.
const BETA_2: f64 = 0.95;

impl Trainer {
    /// A trainer at step 0.
    ///
    /// # Errors
    /// Bad settings, too little text for the model's context, or a model with compressed layers.
    pub fn new(model: Gpt, corpus: Arc<Corpus>, config: TrainConfig) -> Result<Self> {
        config.validate()?;
        corpus.expect_sequences_of(model.config().context)?;
        if let Some((name, _)) = model.linears().iter().find(|(_, linear)| linear.weight().is_none()) {
            let error =
                Error::WrongForm { found: "compressed, without a master to train", remedy: "load a dense checkpoint" };
            return Err(error.in_layer(name));
        }
        // Matrices decay; biases and norms do not.
        let (matrices, vectors): (Vec<_>, Vec<_>) = model.variables()?.into_iter().partition(|(_, v)| v.rank() >= 2);
        let settings = AdamWConfig {
            learning_rate: config.learning_rate,
            beta2: BETA_2,
            weight_decay: config.weight_decay,
            ..Default::default()
        };
        let mut optimizer = AdamW::new(matrices, settings)?;
        optimizer.add(vectors, 0.0)?;
        Ok(Trainer { model, corpus, config, optimizer, schedule: config.schedule()?, step: 0 })
    }

    /// The model as it is now.
    pub fn model(&self) -> &Gpt {
        &self.model
    }

    /// The model, given up.
    #[must_use]
    pub fn into_model(self) -> Gpt {
        self.model
    }

    /// The text that it is trained on.
    pub fn corpus(&self) -> &Corpus {
        &self.corpus
    }

    /// The settings.
    pub fn config(&self) -> &TrainConfig {
        &self.config
    }

    /// Steps done.
    pub fn steps_done(&self) -> u64 {
        self.step
    }

    /// Whether all steps of the schedule are done. [`Trainer::step`] goes on at the final learning rate.
    pub fn is_finished(&self) -> bool {
        self.step >= self.config.steps
    }

    /// One step: forward, backward, clipping, update.
    ///
    /// # Errors
    /// [`Error::NonFiniteGradient`] and [`Error::MissingGradient`], both with nothing updated; those of the passes.
    pub fn step(&mut self) -> Result<StepReport> {
        // On a thread of the pool: from outside, each of a step's many parallel loops would wake the pool and wait for it.
        rayon::scope(|_| self.step_in_pool())
    }

    fn step_in_pool(&mut self) -> Result<StepReport> {
        set_mode(&mut self.model, Mode::Train)?;
        let context = self.model.config().context;
        let (bytes, targets) = self.corpus.batch(self.config.seed, self.step, self.config.batch, context)?;
        let loss = self.model.loss(&bytes, &targets)?;
        let gradients = self.model.backward(&loss)?;
        let learning_rate = self.schedule.at(self.step);
        self.optimizer.set_learning_rate(learning_rate);
        let gradient_norm = self.optimizer.step_clipped(&gradients, self.config.clip_norm)?;
        let report = StepReport {
            step: self.step,
            loss: loss.to_scalar::<f32>()?,
            learning_rate,
            gradient_norm,
            tokens: bytes.elem_count(),
        };
        self.step += 1;
        Ok(report)
    }

    /// The mean loss, in nats a byte, over at most `limit` sequences that cover the validation part evenly: the same ones
    /// at every call.
    ///
    /// # Errors
    /// Those of the forward pass.
    pub fn validate(&mut self, limit: usize) -> Result<f32> {
        rayon::scope(|_| self.validate_in_pool(limit))
    }

    fn validate_in_pool(&mut self, limit: usize) -> Result<f32> {
        set_mode(&mut self.model, Mode::Evaluate)?;
        let context = self.model.config().context;
        let (mut total, mut tokens) = (0f64, 0usize);
        for batch in self.corpus.validation_batches(self.config.batch, limit, context) {
            let (bytes, targets) = batch?;
            let loss = self.model.loss(&bytes, &targets)?.to_scalar::<f32>()?;
            total += f64::from(loss) * bytes.elem_count() as f64;
            tokens += bytes.elem_count();
        }
        Ok((total / tokens as f64) as f32)
    }
}
