//! The form of a description in files and in checkpoints of training: flat, as it has been since the first of them.

use serde::{Deserialize, Deserializer, Serialize, Serializer, de, ser};

use super::{
    AttentionConfig, FeedForwardConfig, GptConfig, ModelInput, ModelOutput, NormConfig, NormKind, NormPlace, Positions,
    Rope, TokenInput, TransformerConfig,
};
use crate::engine::Nonlinearity;

/// A decoder. Fields that were added later are left out where a model does not have what they describe.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredDecoder {
    vocabulary: usize,
    context: usize,
    layers: usize,
    width: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    feed_forward: usize,
    norm: NormKind,
    epsilon: f32,
    positions: Positions,
    activation: Nonlinearity,
    gated: bool,
    biases: Biases,
    head_norms: bool,
    tied: bool,
    windows: Vec<Option<usize>>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    norm_place: Option<NormPlace>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    embedding_scale: Option<f32>,
    /// Where it is another than whether embeddings are scaled, as Gemma's are.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    begins_windows: Option<bool>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention_scale: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    attention_soft_cap: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    logit_soft_cap: Option<f32>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    local_rope: Option<Rope>,
}

#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct Biases {
    qkv: bool,
    out: bool,
    feed_forward: bool,
}

/// An encoder as BERT's.
#[derive(Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
struct StoredEncoder {
    vocabulary: usize,
    context: usize,
    token_types: usize,
    layers: usize,
    width: usize,
    heads: usize,
    feed_forward: usize,
    epsilon: f32,
    activation: Nonlinearity,
}

impl From<StoredDecoder> for TransformerConfig {
    fn from(stored: StoredDecoder) -> Self {
        let StoredDecoder { vocabulary, context, heads, kv_heads, head_dim, .. } = stored;
        let Biases { qkv, out, feed_forward } = stored.biases;
        let scale = stored.embedding_scale;
        TransformerConfig {
            input: ModelInput::Tokens(TokenInput {
                scale,
                begins_windows: stored.begins_windows.unwrap_or(scale.is_some()),
                ..TokenInput::plain(vocabulary, context)
            }),
            positions: stored.positions,
            layers: stored.layers,
            width: stored.width,
            norm: NormConfig {
                place: stored.norm_place.unwrap_or(NormPlace::Before),
                kind: stored.norm,
                epsilon: stored.epsilon,
            },
            attention: AttentionConfig {
                qkv_bias: qkv,
                out_bias: out,
                head_norms: stored.head_norms,
                scale: stored.attention_scale,
                soft_cap: stored.attention_soft_cap,
                windows: stored.windows,
                local_rope: stored.local_rope,
                ..AttentionConfig::causal(heads, kv_heads, head_dim)
            },
            feed_forward: FeedForwardConfig {
                hidden: stored.feed_forward,
                activation: stored.activation,
                gated: stored.gated,
                bias: feed_forward,
            },
            experts: None,
            layer_scale: false,
            output: ModelOutput::Vocabulary { tied: stored.tied, soft_cap: stored.logit_soft_cap },
        }
    }
}

impl From<StoredEncoder> for TransformerConfig {
    fn from(stored: StoredEncoder) -> Self {
        let StoredEncoder { vocabulary, context, token_types, layers, width, heads, feed_forward, .. } = stored;
        let bert = TransformerConfig::bert(&GptConfig { layers, width, heads, context, feed_forward }, vocabulary);
        TransformerConfig {
            input: ModelInput::Tokens(TokenInput {
                token_types,
                is_normalized: true,
                ..TokenInput::plain(vocabulary, context)
            }),
            norm: NormConfig { epsilon: stored.epsilon, ..bert.norm },
            feed_forward: FeedForwardConfig { activation: stored.activation, ..bert.feed_forward },
            ..bert
        }
    }
}

impl StoredDecoder {
    fn of(config: &TransformerConfig, input: TokenInput, (tied, soft_cap): (bool, Option<f32>)) -> Self {
        let AttentionConfig { heads, kv_heads, head_dim, .. } = config.attention;
        StoredDecoder {
            vocabulary: input.vocabulary,
            context: input.context,
            layers: config.layers,
            width: config.width,
            heads,
            kv_heads,
            head_dim,
            feed_forward: config.feed_forward.hidden,
            norm: config.norm.kind,
            epsilon: config.norm.epsilon,
            positions: config.positions.clone(),
            activation: config.feed_forward.activation,
            gated: config.feed_forward.gated,
            biases: Biases {
                qkv: config.attention.qkv_bias,
                out: config.attention.out_bias,
                feed_forward: config.feed_forward.bias,
            },
            head_norms: config.attention.head_norms,
            tied,
            windows: config.attention.windows.clone(),
            norm_place: Some(config.norm.place).filter(|place| *place != NormPlace::Before),
            embedding_scale: input.scale,
            begins_windows: Some(input.begins_windows).filter(|begins| *begins != input.scale.is_some()),
            attention_scale: config.attention.scale,
            attention_soft_cap: config.attention.soft_cap,
            logit_soft_cap: soft_cap,
            local_rope: config.attention.local_rope.clone(),
        }
    }
}

impl Serialize for TransformerConfig {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        let is_kept = |kept: &TransformerConfig| kept == self;
        match (self.input, self.output) {
            (ModelInput::Tokens(input), ModelOutput::Vocabulary { tied, soft_cap }) => {
                let stored = || StoredDecoder::of(self, input, (tied, soft_cap));
                if is_kept(&stored().into()) {
                    return stored().serialize(serializer);
                }
            }
            (ModelInput::Tokens(input), _) => {
                let stored = || StoredEncoder {
                    vocabulary: input.vocabulary,
                    context: input.context,
                    token_types: input.token_types,
                    layers: self.layers,
                    width: self.width,
                    heads: self.attention.heads,
                    feed_forward: self.feed_forward.hidden,
                    epsilon: self.norm.epsilon,
                    activation: self.feed_forward.activation,
                };
                if is_kept(&stored().into()) {
                    return stored().serialize(serializer);
                }
            }
            _ => {}
        }
        Err(ser::Error::custom(
            "the description of a model that no file keeps: those of decoders and of BERTs are kept",
        ))
    }
}

impl<'de> Deserialize<'de> for TransformerConfig {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let value = serde_json::Value::deserialize(deserializer)?;
        let read = match value.get("token_types") {
            Some(_) => serde_json::from_value::<StoredEncoder>(value).map(TransformerConfig::from),
            None => serde_json::from_value::<StoredDecoder>(value).map(TransformerConfig::from),
        };
        read.map_err(de::Error::custom)
    }
}
