//! Training a [`Gpt`](crate::model::Gpt) on text, a [`Bert`](crate::model::Bert) on questions or masked text, or a
//! [`Vit`](crate::model::Vit) on images, dense or 2:4.
//!
//! | item | |
//! |---|---|
//! | [`Corpus`] | the text, split into training and validation parts, and the batches drawn from it |
//! | [`EncoderData`] | [`QuestionSet`], questions and their texts, or [`MaskedText`], text with masked tokens; split too |
//! | [`ImageSet`] | the images, split into training and validation parts |
//! | [`SparsityPlan`] | which layers are 2:4, when, and how they are trained |
//! | [`methods`] | the methods of sparse training, a file for each |
//! | [`DecaySearch`] | trial runs that find the strength of the decay of pruned weights |
//! | [`Trainer`] | the loop: [`Trainer::step`], [`Trainer::validate`] |
//! | [`Trainer::learn_from`] | a teacher, whose outputs the model learns |
//! | [`Trainer::save`], [`Trainer::resume`] | checkpoints, from which training goes on, on either engine |
//! | [`ranks`] | data parallel training: several engines, each with its share of every batch |
//!
//! A step does this, in this order: forward and backward passes of all micro-batches, whose gradients are added; the
//! global norm; clipping; decay of pruned weights; AdamW; new masks and packed weights for the next step; masks that a
//! method chooses on the host, where they are due.
//!
//! Everything random depends on the seed and the step number alone, so a run can be repeated and resumed bit for bit
//! (on a CPU with one number of threads: GEMMs may add in another order elsewhere).

mod checkpoint;
mod corpus;
mod data;
mod decay_search;
mod encoder_data;
mod forms;
mod idx;
mod images;
mod loss_scale;
mod masked_text;
mod masks;
pub mod methods;
mod passes;
mod probe;
mod progress;
mod question_set;
pub mod ranks;
mod report;
mod schedule;
mod settings;
mod step;
mod teacher;
#[cfg(test)]
mod tests;
mod together;
mod trainer;

pub use checkpoint::checkpoint_steps;
pub use corpus::Corpus;
pub use data::{Batch, ConfigOf, TrainingData};
pub use decay_search::{DecayCandidate, DecayChoice, DecaySearch, DecayTrial};
pub use encoder_data::EncoderData;
pub use idx::{Idx, IdxError};
pub use images::ImageSet;
pub use loss_scale::LossScale;
pub use masked_text::{MaskedSample, MaskedText};
pub use methods::{
    BlockNorm, Decay, LevelSchedule, PatternText, SparseBegin, SparsifierPlan, SparsifierRule, SparsityPlan,
};
pub use probe::LinearProbe;
pub use question_set::QuestionSet;
pub use ranks::GradientReduction;
pub use report::{Evaluation, StepReport};
pub use schedule::Schedule;
pub use settings::{OptimizerKind, Precision, ScheduleKind, TrainingSettings};
pub use trainer::Trainer;
