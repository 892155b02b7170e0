//! Whole models over an [`Engine`](crate::engine::Engine), their files, and inference.

mod calibration;
mod checkpoint;
mod config;
mod decoder;
mod encoder;
mod file;
mod gpt;
mod inference;
mod language;
mod sampling;
#[cfg(test)]
mod tests;
mod tokenizer;
mod trained;
mod vit;

pub use calibration::{Calibration, Observation, Replace};
pub use checkpoint::{Checkpoint, CheckpointError};
pub use config::{GptConfig, VOCABULARY};
pub use decoder::{DecoderBiases, DecoderConfig, NormKind, Positions, Rope, RopeScaling};
pub use encoder::{Encoder, EncoderConfig, EncoderInput};
pub use gpt::{Gpt, Layer};
pub use inference::{Inference, Perplexity, Session, Windows};
pub use language::{Decoder, LanguageModel};
pub use sampling::Sampling;
pub use tokenizer::{FileTokenizer, TextDecoder, Tokenizer};
pub use trained::TrainedModel;
pub use vit::{Vit, VitConfig};
