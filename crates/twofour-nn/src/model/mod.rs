//! Whole models over an [`Engine`](crate::engine::Engine), and their files.

mod config;
mod file;
mod gpt;
#[cfg(test)]
mod tests;

pub use config::{GptConfig, VOCABULARY};
pub use gpt::{Gpt, Layer};
