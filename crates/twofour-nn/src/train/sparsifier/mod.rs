//! A [`Sparsifier`](twofour::sparsify::Sparsifier) inside the training loop: masks of any pattern, whose levels follow a schedule.
//!
//! A layer that it masks computes with dense GEMMs over `W ∘ M` ([`Linear::make_masked`](crate::linear::Linear::make_masked)). The mask is chosen on the host, from the
//! master weight as it is then.

mod level;
mod masks;
mod plan;
mod resolve;
mod rule;

pub use level::LevelSchedule;
pub(super) use masks::{Chosen, choose, masking_of, prepared, restore};
pub use plan::SparsifierPlan;
pub use rule::{BlockNorm, SparsifierRule};
