//! Whole models over an [`Engine`](crate::engine::Engine), their files, and inference.

mod batch;
mod bert;
mod calibration;
mod checkpoint;
mod config;
mod encoder;
mod families;
mod file;
mod generation;
mod gpt;
mod image;
mod inference;
mod language;
mod layers;
pub(crate) mod run;
mod sampling;
mod saved;
#[cfg(test)]
mod tests;
mod trained;
mod vit;

pub use crate::text::{FileTokenizer, TextDecoder, Tokenizer, VOCABULARY, is_guarded};
pub use batch::IndexBatch;
pub(crate) use bert::expect_below;
pub use bert::{Bert, BertBatch, BertConfig, BertLayer, BertSamples, EncoderTask};
pub use calibration::{BlockwiseCheckpoint, Calibration, CheckpointBlock, Observation, Replace, open_blockwise};
pub use checkpoint::{Checkpoint, CheckpointError, EncoderCheckpoint, ImageCheckpoint, is_llama, save_llama};
pub use config::{
    AttentionConfig, FeedForwardConfig, GptConfig, ImageHead, ImageHeadInput, ImageInput, ModelInput, ModelOutput,
    NormConfig, NormKind, NormPlace, Positions, Rope, RopeScaling, TokenInput, TransformerConfig,
};
pub use encoder::{Encoder, EncoderInput, MaskedEncoder, SentenceEncoder, Similarity};
pub use generation::{Decoder, Sequence};
pub use gpt::Gpt;
pub(crate) use gpt::expect_trainable;
#[cfg(feature = "cuda")]
pub use image::{CudaImageBatch, CudaImageEncoder};
pub use image::{ImageEncoder, ImageWeights, WeightForm};
#[cfg(feature = "cuda")]
pub use inference::{CudaInference, CudaRandomWeights, CudaSession};
pub use inference::{Inference, Perplexity, RandomWeights, Session, Windows};
pub use language::LanguageModel;
pub use layers::Layer;
pub use run::{CHECKPOINT_FILE, is_checkpoint};
pub use sampling::Sampling;
pub use saved::{SavedModel, mask_violation};
pub use trained::{ModelPart, ModelParts, TrainedModel};
pub use vit::{Pooling, Vit, VitConfig};
