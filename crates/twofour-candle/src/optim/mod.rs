//! Updating parameters: AdamW in one pass over memory, clipping by the global norm, and a learning-rate schedule.
//!
//! candle's own `AdamW` runs some eighteen operators for each parameter and cannot save its state; it has neither
//! clipping nor schedules. [`AdamW`] here computes the same numbers.

mod adamw;
mod moments;
mod schedule;
#[cfg(test)]
mod tests;
mod update;

pub use adamw::{AdamW, AdamWConfig};
pub use schedule::CosineSchedule;
