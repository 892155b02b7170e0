//! The numbers that the trainer gives to [`StepOperations::adamw`](crate::engine::StepOperations::adamw): learning rates, the factor of clipping, and loss scales.

mod loss_scale;
mod schedule;

pub use loss_scale::LossScale;
pub use schedule::Schedule;
pub use twofour_transformer::engine::clip_factor;
