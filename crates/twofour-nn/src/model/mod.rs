//! Whole models over an [`Engine`](crate::engine::Engine), their files, and inference.

mod batch;
mod bert;
mod calibration;
mod checkpoint;
mod config;
mod distillation;
mod encoder;
mod families;
mod file;
mod float;
mod generation;
mod gpt;
mod image;
mod inference;
mod language;
pub(crate) mod run;
mod sampling;
mod saved;
#[cfg(test)]
mod tests;
mod trained;
mod transformer;
mod tuning;
mod vit;

pub use crate::parts::{ModelPart, ModelParts};
pub use crate::text::{FileTokenizer, TextDecoder, Tokenizer, VOCABULARY, is_guarded};
pub use batch::IndexBatch;
pub use bert::{Bert, BertBatch, BertConfig, BertSamples, EncoderTask, EncoderTasks};
#[cfg(feature = "cuda")]
pub use calibration::GpuRunner;
pub use calibration::{
    Beside, BlockInput, BlockwiseCheckpoint, Calibration, CheckpointBlock, FreeFeatures, Gathered, Host, HostGathered,
    InputPart, Observation, Observe, OutputOrder, Replace, Runner, States, Stepped, open_blockwise,
};
pub(crate) use checkpoint::StoredParts;
pub use checkpoint::{
    BlockSizes, Checkpoint, CheckpointError, EncoderCheckpoint, ImageCheckpoint, KeptParts, PartScores, Shrinking,
    StoredRows, is_llama, save_llama,
};
pub use config::{
    Alibi, AttentionConfig, ClampedGate, ExpertGroups, ExpertsConfig, FeedForwardConfig, GptConfig, ImageHead,
    ImageHeadInput, ImageInput, LatentConfig, ModelInput, ModelOutput, NormConfig, NormKind, NormPlace, Positions,
    Rope, RopeScaling, Routing, ScoreFunction, SharedExpert, TokenInput, TransformerConfig,
};
pub use distillation::{DistillationLoss, Objective};
#[cfg(feature = "cuda")]
pub use encoder::CudaEncoder;
pub(crate) use encoder::HiddenStates;
pub use encoder::{Encoder, EncoderInput, MaskedEncoder, SentenceEncoder, Similarity};
pub use generation::{Decoder, Likelihood, SampledTexts, Sequence};
pub(crate) use gpt::expect_trainable;
pub use gpt::{Gpt, NextToken};
#[cfg(feature = "cuda")]
pub use image::{CudaImageBatch, CudaImageEncoder};
pub use image::{ImageEncoder, ImageWeights, WeightForm};
#[cfg(feature = "cuda")]
pub use inference::{CudaInference, CudaRandomWeights, CudaSession};
pub use inference::{Inference, Perplexity, RandomWeights, Session, Windows};
pub use language::LanguageModel;
pub use run::{CHECKPOINT_FILE, is_checkpoint};
pub(crate) use run::{WeightScales, mask_beside};
pub use sampling::Sampling;
pub use saved::{SavedModel, mask_violation};
pub use trained::TrainedModel;
pub(crate) use transformer::expect_below;
pub use transformer::{Layer, Saved, Task, Transformer};
pub use tuning::{BlockTexts, BlockTuning, PrunedBlock, TunedBlock, WeightRounding};
pub use vit::{ImageClasses, Pooling, Vit, VitConfig};
