//! Measuring on this machine, fairly: contenders take turns in one process, weights come from memory, medians count.

mod alternate;
mod layer;
mod machine;

pub(crate) use alternate::medians;
pub(crate) use layer::{LayerTiming, WeightDType, layer};
pub(crate) use machine::{Machine, machine};
