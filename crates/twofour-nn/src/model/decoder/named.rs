//! Sizes of published models, for measurements with random weights.

use super::{DecoderBiases, DecoderConfig, NormKind, Positions, Rope, RopeScaling};
use crate::engine::Nonlinearity;

/// What LLaMA models differ in.
struct Sizes {
    name: &'static str,
    vocabulary: usize,
    context: usize,
    layers: usize,
    width: usize,
    heads: usize,
    kv_heads: usize,
    feed_forward: usize,
    rope: Rope,
    tied: bool,
}

/// The rotation of Llama 3, whose context is 8192 tokens.
const LLAMA_3: Rope = Rope { base: 500_000.0, scaling: None };

/// The rotation of Llama 3.2, which stretches Llama 3's to 131072 tokens.
const LLAMA_3_2: Rope = Rope {
    base: 500_000.0,
    scaling: Some(RopeScaling {
        factor: 32.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_context: 8192.0,
    }),
};

/// From the models' `config.json`.
const LLAMA: [Sizes; 4] = [
    Sizes {
        name: "llama-3.2-1b",
        vocabulary: 128_256,
        context: 131_072,
        layers: 16,
        width: 2048,
        heads: 32,
        kv_heads: 8,
        feed_forward: 8192,
        rope: LLAMA_3_2,
        tied: true,
    },
    Sizes {
        name: "llama-3.2-3b",
        vocabulary: 128_256,
        context: 131_072,
        layers: 28,
        width: 3072,
        heads: 24,
        kv_heads: 8,
        feed_forward: 8192,
        rope: LLAMA_3_2,
        tied: true,
    },
    Sizes {
        name: "llama-3-8b",
        vocabulary: 128_256,
        context: 8192,
        layers: 32,
        width: 4096,
        heads: 32,
        kv_heads: 8,
        feed_forward: 14_336,
        rope: LLAMA_3,
        tied: false,
    },
    Sizes {
        name: "llama-2-7b",
        vocabulary: 32_000,
        context: 4096,
        layers: 32,
        width: 4096,
        heads: 32,
        kv_heads: 32,
        feed_forward: 11_008,
        rope: Rope { base: 10_000.0, scaling: None },
        tied: false,
    },
];

impl DecoderConfig {
    /// The names that [`DecoderConfig::named`] has a description for.
    pub fn names() -> impl Iterator<Item = &'static str> {
        LLAMA.iter().map(|sizes| sizes.name)
    }

    /// The description of a published model: `llama-3.2-1b`, `llama-3.2-3b`, `llama-3-8b` or `llama-2-7b`; nothing for another name.
    pub fn named(name: &str) -> Option<Self> {
        let sizes = LLAMA.iter().find(|sizes| sizes.name == name)?;
        Some(DecoderConfig {
            vocabulary: sizes.vocabulary,
            context: sizes.context,
            layers: sizes.layers,
            width: sizes.width,
            heads: sizes.heads,
            kv_heads: sizes.kv_heads,
            head_dim: sizes.width / sizes.heads,
            feed_forward: sizes.feed_forward,
            norm: NormKind::RootMeanSquare,
            epsilon: 1e-5,
            positions: Positions::Rotary(sizes.rope),
            activation: Nonlinearity::Silu,
            gated: true,
            biases: DecoderBiases { qkv: false, out: false, feed_forward: false },
            head_norms: false,
            tied: sizes.tied,
            windows: vec![],
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn published_models_have_their_published_numbers_of_parameters() {
        let published = [
            ("llama-3.2-1b", 1_235_814_400),
            ("llama-3.2-3b", 3_212_749_824),
            ("llama-3-8b", 8_030_261_248),
            ("llama-2-7b", 6_738_415_616),
        ];
        assert!(DecoderConfig::names().eq(published.map(|(name, _)| name)));
        for (name, parameters) in published {
            let config = DecoderConfig::named(name).unwrap();
            config.validate().unwrap();
            assert_eq!(config.parameters(), parameters, "{name}");
        }
        assert_eq!(DecoderConfig::named("llama-3.2"), None);
    }
}
