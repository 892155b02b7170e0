//! The numbers that the trainer gives to [`StepOperations::adamw`](crate::engine::StepOperations::adamw): learning rates, the factor of clipping, and loss scales.

mod clip;
mod loss_scale;
mod schedule;

pub use clip::clip_factor;
pub use loss_scale::LossScale;
pub use schedule::Schedule;
