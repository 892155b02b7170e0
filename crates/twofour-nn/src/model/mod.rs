//! Whole models over an [`Engine`](crate::engine::Engine), and their files.

mod config;
mod file;
mod gpt;
mod inference;
mod sampling;
#[cfg(test)]
mod tests;

pub use config::{GptConfig, VOCABULARY};
pub use gpt::{Gpt, Layer};
pub use inference::{Inference, Session};
pub use sampling::Sampling;
