//! AdamW with the two phases of STEP (Lu et al., "STEP: Learning N:M Structured Sparsity Masks from Scratch with
//! Precondition", ICML 2023): the variances of masked parameters settle while these train dense, and are frozen when
//! they switch to 2:4.
//!
//! | step of training | item |
//! |---|---|
//! | one parameter's update, and the size of its variance's change | [`update`] |
//! | when to switch | [`PhaseSwitch`] |

mod switch;
mod update;

pub use switch::PhaseSwitch;
pub use update::{AdamWStep, ChangeMean, Moments, VariancePhase, update};
