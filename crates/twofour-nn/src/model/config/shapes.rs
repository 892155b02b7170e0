//! Descriptions of well-known shapes: GPT, LLaMA, BERT, ViT and SAM.

use super::{
    AttentionConfig, FeedForwardConfig, GptConfig, ImageInput, ModelInput, ModelOutput, NormConfig, NormKind,
    NormPlace, Positions, Rope, TokenInput, TransformerConfig,
};
use crate::{engine::Nonlinearity, text::VOCABULARY};

impl From<&GptConfig> for TransformerConfig {
    fn from(sizes: &GptConfig) -> Self {
        let llama = TransformerConfig::llama(sizes, sizes.heads, VOCABULARY);
        TransformerConfig {
            norm: NormConfig { kind: NormKind::Layer, ..llama.norm },
            attention: AttentionConfig { qkv_bias: true, out_bias: true, ..llama.attention },
            feed_forward: FeedForwardConfig {
                activation: Nonlinearity::Gelu,
                gated: false,
                bias: true,
                ..llama.feed_forward
            },
            ..llama
        }
    }
}

impl TransformerConfig {
    /// A decoder as LLaMA: root-mean-square norms, rotary positions, SiLU with a gate, no biases, and a head of its
    /// own.
    pub fn llama(sizes: &GptConfig, kv_heads: usize, vocabulary: usize) -> Self {
        let GptConfig { layers, width, heads, context, feed_forward } = *sizes;
        TransformerConfig {
            input: ModelInput::Tokens(TokenInput::plain(vocabulary, context)),
            positions: Positions::Rotary(Rope { base: 10_000.0, scaling: None }),
            layers,
            width,
            norm: NormConfig { place: NormPlace::Before, kind: NormKind::RootMeanSquare, epsilon: 1e-5 },
            attention: AttentionConfig::causal(heads, kv_heads, width / heads.max(1)),
            feed_forward: FeedForwardConfig {
                hidden: feed_forward,
                activation: Nonlinearity::Silu,
                gated: true,
                bias: false,
            },
            experts: None,
            layer_scale: false,
            output: ModelOutput::Vocabulary { tied: false, soft_cap: None },
        }
    }

    /// An encoder as BERT: layer norms after the blocks, full attention, learned positions, two token types and GELU.
    pub fn bert(sizes: &GptConfig, vocabulary: usize) -> Self {
        let GptConfig { layers, width, heads, context, feed_forward } = *sizes;
        TransformerConfig {
            input: ModelInput::Tokens(TokenInput {
                token_types: 2,
                is_normalized: true,
                ..TokenInput::plain(vocabulary, context)
            }),
            positions: Positions::Learned,
            layers,
            width,
            norm: NormConfig { place: NormPlace::After, kind: NormKind::Layer, epsilon: 1e-12 },
            attention: AttentionConfig::full(width, heads),
            feed_forward: FeedForwardConfig {
                hidden: feed_forward,
                activation: Nonlinearity::Gelu,
                gated: false,
                bias: true,
            },
            experts: None,
            layer_scale: false,
            output: ModelOutput::Hidden { head: None },
        }
    }

    /// An encoder of images as ViT: layer norms before the blocks, full attention, learned positions and GELU. The
    /// context among the sizes is not used.
    pub fn vit(sizes: &GptConfig, image: ImageInput) -> Self {
        let bert = Self::bert(sizes, 0);
        TransformerConfig {
            input: ModelInput::Image(image),
            norm: NormConfig { place: NormPlace::Before, kind: NormKind::Layer, epsilon: 1e-6 },
            ..bert
        }
    }

    /// SAM's image encoder for square images of that side, with windows of a side in all layers but those with global
    /// attention.
    pub fn sam(sizes: &GptConfig, side: usize, (window, global): (usize, &[usize])) -> Self {
        let image = ImageInput { image: [side; 2], channels: 3, patch: 16, class_token: false, registers: 0 };
        let vit = Self::vit(sizes, image);
        let windows = (0..sizes.layers).map(|layer| (!global.contains(&layer)).then_some(window)).collect();
        TransformerConfig {
            attention: AttentionConfig { windows, relative_positions: true, ..vit.attention },
            output: ModelOutput::Neck { channels: 256 },
            ..vit
        }
    }
}
