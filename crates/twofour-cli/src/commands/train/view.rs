//! A run while it goes on: a bar on a terminal, and lines elsewhere.

use anyhow::Result;
use twofour_nn::report::StepMetrics;

use crate::present::{Screen, progress::Progress, units};

/// Lines of a whole run where there is no terminal, beside those of validation losses.
const LINES: u64 = 10;

/// What is seen of a run.
pub(super) struct View {
    progress: Progress,
    steps: u64,
    told: u64,
    /// A running mean of the loss, because single batches are noisy; none after one that is not finite.
    loss: Option<f64>,
    val_loss: Option<f64>,
}

impl View {
    /// A view of a run of `steps` steps, of which `done` are done.
    pub(super) fn new(screen: &Screen, steps: u64, done: u64) -> Self {
        View { progress: screen.progress(), steps, told: done * LINES / steps.max(1), loss: None, val_loss: None }
    }

    /// Shows a step.
    pub(super) fn update(&mut self, screen: &mut Screen, metrics: &StepMetrics) -> Result<()> {
        self.loss = metrics.loss.map(|loss| self.loss.map_or(loss, |mean| 0.9 * mean + 0.1 * loss));
        self.val_loss = metrics.val_loss.or(self.val_loss);
        let done = metrics.step + 1;
        let mut message = self.loss.map_or("loss not finite".to_owned(), |loss| format!("loss {loss:.3}"));
        if let Some(loss) = self.val_loss {
            message += &format!(", validation {loss:.3}");
        }
        if metrics.flip_rate > 0.0 {
            message += &format!(", flips {:.2} %", 100.0 * metrics.flip_rate);
        }
        message += &format!(", {} tokens/s", units::count(metrics.tokens_per_s as usize));
        self.progress.steps(&message, done, self.steps);
        let lines = done.saturating_mul(LINES) / self.steps.max(1);
        if lines > self.told && !self.progress.can_show() {
            screen.line(format!("  step {done:>6} of {}  {message}", self.steps))?;
            self.told = lines;
        }
        if metrics.skipped {
            screen
                .warn(format!("step {}: loss or gradients are NaN or infinite; the update was skipped", metrics.step));
        }
        Ok(())
    }
}
