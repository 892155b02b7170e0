//! Training a [`Gpt`](crate::gpt::Gpt) on bytes.
//!
//! | | |
//! |---|---|
//! | [`Corpus`] | the text, split into training and validation parts, and the batches drawn from it |
//! | [`TrainConfig`] | batch, learning rate, schedule, clipping, seed |
//! | [`Trainer`] | the loop: [`Trainer::step`], [`Trainer::validate`] |
//! | [`Trainer::save`], [`Trainer::resume`] | checkpoints, from which training goes on bit for bit |
//!
//! Everything random depends on the seed and the step number alone, so a run can be repeated and resumed exactly (on one
//! machine and with one number of threads: the products may add in another order elsewhere).

mod checkpoint;
mod config;
mod corpus;
#[cfg(test)]
mod tests;
mod trainer;

pub use checkpoint::CHECKPOINT_FILE;
pub use config::TrainConfig;
pub use corpus::Corpus;
pub use trainer::{StepReport, Trainer};
