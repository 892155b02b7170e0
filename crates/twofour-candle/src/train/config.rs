//! The settings of a training run.

use serde::{Deserialize, Serialize};

use crate::{Error, Result, optim::CosineSchedule};

/// The settings of a training run.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct TrainConfig {
    /// Sequences in a batch, each as long as the model's context.
    pub batch: usize,
    /// Steps of the whole run; the learning rate falls over all of them.
    pub steps: u64,
    /// The learning rate after the warm-up.
    pub learning_rate: f64,
    /// The learning rate at the last step.
    pub final_learning_rate: f64,
    /// Steps over which the learning rate rises linearly from zero.
    pub warm_up: u64,
    /// Decoupled weight decay of matrices; biases and norms have none.
    pub weight_decay: f64,
    /// Gradients are scaled down to this global norm if theirs is larger; infinity for no limit.
    #[serde(with = "limit")]
    pub clip_norm: f64,
    /// Decides which batches are drawn.
    pub seed: u64,
}

impl Default for TrainConfig {
    fn default() -> Self {
        TrainConfig {
            batch: 4,
            steps: 200,
            learning_rate: 1e-3,
            final_learning_rate: 1e-4,
            warm_up: 20,
            weight_decay: 0.1,
            clip_norm: 1.0,
            seed: 0,
        }
    }
}

impl TrainConfig {
    /// Checks every setting.
    ///
    /// # Errors
    /// [`Error::Setting`] with the first that is out of its range.
    pub fn validate(&self) -> Result<()> {
        let positive = |what, value: u64| match value {
            0 => Err(Error::Setting { what, found: "0".to_owned(), expected: "at least 1" }),
            _ => Ok(()),
        };
        positive("batch", self.batch as u64)?;
        positive("steps", self.steps)?;
        self.schedule()?;
        if !(self.weight_decay >= 0.0 && self.weight_decay.is_finite()) {
            let found = self.weight_decay.to_string();
            return Err(Error::Setting { what: "weight_decay", found, expected: "a number from 0 up" });
        }
        if self.clip_norm > 0.0 {
            Ok(())
        } else {
            let found = self.clip_norm.to_string();
            Err(Error::Setting { what: "clip_norm", found, expected: "above 0, or infinity" })
        }
    }

    /// The learning rate's way: linear warm-up, then half a cosine down to the final one.
    ///
    /// # Errors
    /// A final rate above the first, or a warm-up longer than the run.
    pub fn schedule(&self) -> Result<CosineSchedule> {
        CosineSchedule::new(self.learning_rate, self.final_learning_rate, self.warm_up, self.steps)
    }
}

/// JSON has no infinity: no limit is `null`.
mod limit {
    use serde::{Deserialize, Deserializer, Serialize, Serializer};

    pub(super) fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        value.is_finite().then_some(*value).serialize(serializer)
    }

    pub(super) fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        Ok(Option::<f64>::deserialize(deserializer)?.unwrap_or(f64::INFINITY))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn settings_out_of_range_are_named() {
        let good = TrainConfig::default();
        good.validate().unwrap();
        TrainConfig { clip_norm: f64::INFINITY, ..good }.validate().unwrap();
        for (bad, word) in [
            (TrainConfig { batch: 0, ..good }, "batch"),
            (TrainConfig { steps: 0, ..good }, "steps"),
            (TrainConfig { learning_rate: f64::NAN, ..good }, "learning rate"),
            (TrainConfig { warm_up: 1000, ..good }, "warm-up"),
            (TrainConfig { weight_decay: -1.0, ..good }, "weight_decay"),
            (TrainConfig { clip_norm: 0.0, ..good }, "clip_norm"),
        ] {
            assert!(bad.validate().unwrap_err().to_string().contains(word));
        }
    }

    #[test]
    fn no_limit_survives_json() {
        let config = TrainConfig { clip_norm: f64::INFINITY, ..Default::default() };
        let text = serde_json::to_string(&config).unwrap();
        assert_eq!(serde_json::from_str::<TrainConfig>(&text).unwrap(), config);
    }
}
