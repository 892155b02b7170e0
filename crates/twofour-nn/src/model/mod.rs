//! Whole models over an [`Engine`](crate::engine::Engine), their files, and inference.

mod batch;
mod bert;
mod calibration;
mod checkpoint;
mod config;
mod distillation;
mod encoder;
mod error;
mod families;
mod file;
mod float;
mod generation;
mod gpt;
mod hidden_states;
mod image;
mod inference;
mod language;
mod observation;
mod perplexity;
pub(crate) mod run;
mod sampling;
mod saved;
mod shrink;
#[cfg(test)]
mod tests;
mod trained;
mod transformer;
mod tuning;
mod violations;
mod vit;

pub use crate::parts::{ModelPart, ModelParts};
pub use crate::text::{FileTokenizer, TextDecoder, Tokenizer, VOCABULARY, is_guarded};
pub use batch::IndexBatch;
pub use bert::{Bert, BertBatch, BertConfig, BertSamples, EncoderTask, EncoderTasks};
#[cfg(feature = "cuda")]
pub use calibration::GpuRunner;
pub use calibration::{
    Beside, BlockwiseCheckpoint, Calibration, CheckpointBlock, FreeFeatures, Gathered, Host, HostGathered, InputPart,
    Observe, OutputOrder, Runner, States, Stepped, open_blockwise,
};
pub(crate) use checkpoint::StoredParts;
pub use checkpoint::{Checkpoint, EncoderCheckpoint, ImageCheckpoint, Replace, StoredRows, is_llama, save_llama};
pub use config::{
    Alibi, AttentionConfig, ClampedGate, ExpertGroups, ExpertsConfig, FeedForwardConfig, GptConfig, ImageHead,
    ImageHeadInput, ImageInput, LatentConfig, ModelInput, ModelOutput, NormConfig, NormKind, NormPlace, Positions,
    Rope, RopeScaling, Routing, ScoreFunction, SharedExpert, TokenInput, TransformerConfig,
};
pub use distillation::{DistillationLoss, Objective};
#[cfg(feature = "cuda")]
pub use encoder::CudaEncoder;
pub use encoder::{Encoder, MaskedEncoder, SentenceEncoder, Similarity};
pub use error::CheckpointError;
pub use generation::{Decoder, Likelihood, SampledTexts, Sequence};
pub(crate) use gpt::expect_trainable;
pub use gpt::{Gpt, NextToken};
pub use hidden_states::EncoderInput;
pub(crate) use hidden_states::HiddenStates;
#[cfg(feature = "cuda")]
pub use image::{CudaImageBatch, CudaImageEncoder};
pub use image::{ImageEncoder, ImageWeights, WeightForm};
#[cfg(feature = "cuda")]
pub use inference::{CudaInference, CudaRandomWeights, CudaSession};
pub use inference::{Inference, RandomWeights, Session};
pub use language::LanguageModel;
pub use observation::{BlockInput, Observation};
pub use perplexity::{Perplexity, Windows};
pub use run::{CHECKPOINT_FILE, is_checkpoint};
pub(crate) use run::{WeightScales, mask_beside};
pub use sampling::Sampling;
pub use saved::SavedModel;
pub use shrink::{BlockSizes, KeptParts, PartScores, Shrinking};
pub use trained::TrainedModel;
pub(crate) use transformer::expect_below;
pub use transformer::{Layer, Saved, Task, Transformer};
pub use tuning::{BlockTexts, BlockTuning, PrunedBlock, TunedBlock, WeightRounding};
pub use violations::mask_violation;
pub use vit::{ImageClasses, Pooling, Vit, VitConfig};
