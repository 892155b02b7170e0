//! Checks of the loop's settings.

use crate::{Error, Result, optim::Schedule, recipe::TrainingSettings};

/// Checks the settings of the loop.
pub(super) fn check(settings: &TrainingSettings) -> Result<()> {
    let fault = |what, found: String, expected| Err(Error::Setting { what, found, expected });
    if settings.batch == 0 || settings.steps == 0 {
        let found = format!("{} and {}", settings.batch, settings.steps);
        return fault("batch and steps", found, "at least 1 each");
    }
    if let Some(micro) = settings.micro_batch
        && (micro == 0 || !settings.batch.is_multiple_of(micro))
    {
        let found = format!("{micro} for a batch of {}", settings.batch);
        return fault("micro_batch", found, "a divisor of the batch");
    }
    for (what, beta) in [("momentum", settings.momentum), ("beta1", settings.beta1), ("beta2", settings.beta2)] {
        if !(0.0..1.0).contains(&beta) {
            return fault(what, beta.to_string(), "from 0 up to, but not including, 1");
        }
    }
    for (what, value) in
        [("weight_decay", settings.weight_decay), ("epsilon", settings.epsilon), ("clip_norm", settings.clip_norm)]
    {
        // Infinity does not clip.
        if value.is_nan() || value < 0.0 || (value.is_infinite() && what != "clip_norm") {
            return fault(what, value.to_string(), "a finite number from 0 up");
        }
    }
    Schedule::new(settings).map(|_| ())
}
