//! A small byte-level GPT: bytes in, bytes out, no tokenizer.
//!
//! | file | holds |
//! |---|---|
//! | [`Config`] | the sizes |
//! | [`Gpt`] | the model: construction, forward pass, loss, gradients, its linear layers by name |
//! | `Gpt::save`, [`Gpt::load`] | its file |
//! | [`Inference`], [`Session`] | its weights packed for the kernels, and a key-value cache |
//! | [`Sampling`] | choosing the next byte |
//!
//! The architecture: byte embedding; layers of pre-norm causal attention with rotary positions and pre-norm feed-forward
//! with exact GELU; a final layer norm; an output head that is not tied to the embedding.

mod config;
mod file;
mod form;
mod inference;
mod model;
mod sampling;
#[cfg(test)]
mod tests;

pub use config::{Config, VOCABULARY};
pub use inference::{Inference, Session};
pub use model::{Gpt, Layer};
pub use sampling::Sampling;
