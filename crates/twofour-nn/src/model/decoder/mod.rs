//! What a decoder is made of: its sizes, norms, positions and activations. Checkpoints and recipes are read into this description, and models are built from it.

mod config;
mod named;
mod rope;

pub use config::{DecoderBiases, DecoderConfig, NormKind, Positions};
pub use rope::{Rope, RopeScaling};
