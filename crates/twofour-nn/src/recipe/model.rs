//! The model of a recipe.

use std::path::PathBuf;

use serde::{Deserialize, Serialize};

use super::Recipe;
use crate::{
    model::{BertConfig, EncoderTask, GptConfig, Pooling, TransformerConfig, VitConfig},
    settings::Named,
    text::VOCABULARY,
};

/// The architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
#[non_exhaustive]
pub enum ModelKind {
    /// A decoder with layer norms, rotary positions and a GELU feed-forward block.
    #[default]
    Gpt,
    /// A decoder as LLaMA's: root-mean-square norms, rotary positions, grouped queries and a SwiGLU feed-forward block,
    /// without biases.
    Llama,
    /// A vision transformer: classes of images.
    Vit,
    /// An encoder, of a checkpoint that training starts from: answers to questions, or masked tokens.
    Bert,
}

impl Named for EncoderTask {
    const ALL: &'static [(&'static str, Self)] =
        &[("answers", EncoderTask::Answers), ("masked-tokens", EncoderTask::MaskedTokens)];
}

impl Named for ModelKind {
    const ALL: &'static [(&'static str, Self)] =
        &[("gpt", ModelKind::Gpt), ("llama", ModelKind::Llama), ("vit", ModelKind::Vit), ("bert", ModelKind::Bert)];
}

impl Named for Pooling {
    const ALL: &'static [(&'static str, Self)] = &[("class", Pooling::Class), ("mean", Pooling::Mean)];
}

/// The sizes of a model.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelSettings {
    /// The model that training starts from ([`SavedModel`](crate::model::SavedModel),
    /// [`EncoderCheckpoint`](crate::model::EncoderCheckpoint)): its path, and its weights instead of random ones;
    /// relative to the recipe. The sizes are then the model's own.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub from: Option<PathBuf>,
    /// The architecture.
    #[serde(default)]
    pub kind: ModelKind,
    /// Number of layers, each an attention block and a feed-forward block.
    pub layers: usize,
    /// Width of the residual stream.
    pub width: usize,
    /// Heads of attention.
    pub heads: usize,
    /// Heads of keys and values of a `llama`, which groups of heads share; as many as heads if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// What a `bert` learns.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub task: Option<EncoderTask>,
    /// The longest sequence, in tokens, and of a `bert` every sequence; 0 for a `vit`, whose images decide it.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub context: usize,
    /// Width of the feed-forward block's hidden layer; four times the width if absent.
    pub feed_forward: Option<usize>,
    /// Height and width of the images of a `vit`, in pixels.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub image: Option<usize>,
    /// Height and width of a patch of a `vit`, in pixels; a divisor of `image`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub patch: Option<usize>,
    /// Values of a pixel for a `vit`; 1 if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub channels: Option<usize>,
    /// Number of classes of a `vit`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub classes: Option<usize>,
    /// What the head of a `vit` reads; the class token if absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub pooling: Option<Pooling>,
}

fn is_zero(size: &usize) -> bool {
    *size == 0
}

impl ModelSettings {
    /// Width of the feed-forward block's hidden layer.
    pub fn feed_forward(&self) -> usize {
        self.feed_forward.unwrap_or(4 * self.width)
    }
}

impl From<&ModelSettings> for GptConfig {
    fn from(settings: &ModelSettings) -> Self {
        let ModelSettings { layers, width, heads, context, .. } = *settings;
        GptConfig { layers, width, heads, context, feed_forward: settings.feed_forward() }
    }
}

impl From<&ModelSettings> for TransformerConfig {
    fn from(settings: &ModelSettings) -> Self {
        let sizes = GptConfig::from(settings);
        match settings.kind {
            // Vision transformers and encoders have descriptions of their own.
            ModelKind::Gpt | ModelKind::Vit | ModelKind::Bert => TransformerConfig::from(&sizes),
            ModelKind::Llama => {
                TransformerConfig::llama(&sizes, settings.kv_heads.unwrap_or(settings.heads), VOCABULARY)
            }
        }
    }
}

impl From<&ModelSettings> for VitConfig {
    fn from(settings: &ModelSettings) -> Self {
        let ModelSettings { layers, width, heads, image, patch, channels, classes, pooling, .. } = *settings;
        VitConfig {
            image: [image.unwrap_or(0); 2],
            channels: channels.unwrap_or(1),
            patch: patch.unwrap_or(0),
            classes: classes.unwrap_or(0),
            pooling: pooling.unwrap_or_default(),
            layers,
            width,
            heads,
            feed_forward: settings.feed_forward(),
            epsilon: 1e-6,
            squared_relu: false,
        }
    }
}

/// The description of a recipe's model.
#[derive(Debug, Clone, PartialEq)]
pub enum ModelConfig {
    /// A decoder of text.
    Decoder(TransformerConfig),
    /// A vision transformer.
    Vit(VitConfig),
    /// An encoder.
    Bert(BertConfig),
}

impl ModelConfig {
    /// Tokens of a sample: the context, or the tokens of an image.
    pub fn positions(&self) -> usize {
        match self {
            ModelConfig::Decoder(config) => config.context(),
            ModelConfig::Vit(config) => config.tokens(),
            ModelConfig::Bert(config) => config.positions,
        }
    }

    /// Output and input features of every linear layer with its name, in the order of computation.
    pub fn linear_layers(&self) -> Vec<(String, usize, usize)> {
        match self {
            ModelConfig::Decoder(config) => config.linear_layers(),
            ModelConfig::Vit(config) => config.linear_layers(),
            ModelConfig::Bert(config) => config.linear_layers(),
        }
    }

    /// Number of trainable parameters.
    pub fn parameters(&self) -> usize {
        match self {
            ModelConfig::Decoder(config) => config.parameters(),
            ModelConfig::Vit(config) => config.parameters(),
            ModelConfig::Bert(config) => config.parameters(),
        }
    }
}

impl Recipe {
    /// The model's description.
    pub fn model_config(&self) -> ModelConfig {
        match self.model.kind {
            ModelKind::Vit => ModelConfig::Vit(VitConfig::from(&self.model)),
            ModelKind::Bert => ModelConfig::Bert(self.encoder()),
            ModelKind::Gpt | ModelKind::Llama => ModelConfig::Decoder(self.decoder()),
        }
    }
}
