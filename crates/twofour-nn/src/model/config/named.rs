//! Sizes of published models, for measurements with random weights.

use super::{GptConfig, ModelOutput, Positions, Rope, RopeScaling, TransformerConfig};

/// What LLaMA models, and others of their kind, differ in.
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
    qkv_bias: bool,
}

/// The rotation of Llama 3, whose context is 8192 tokens.
const LLAMA_3: Rope = Rope { base: 500_000.0, scaling: None };

/// The rotation of Llama 3.2, which stretches Llama 3's to 131072 tokens.
const LLAMA_3_2: Rope = Rope {
    base: 500_000.0,
    scaling: Some(RopeScaling::Llama3 {
        factor: 32.0,
        low_frequency_factor: 1.0,
        high_frequency_factor: 4.0,
        original_context: 8192.0,
    }),
};

/// From the models' `config.json`.
const DECODERS: [Sizes; 6] = [
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
        qkv_bias: false,
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
        qkv_bias: false,
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
        qkv_bias: false,
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
        qkv_bias: false,
    },
    Sizes {
        name: "llama-3-70b",
        vocabulary: 128_256,
        context: 8192,
        layers: 80,
        width: 8192,
        heads: 64,
        kv_heads: 8,
        feed_forward: 28_672,
        rope: LLAMA_3,
        tied: false,
        qkv_bias: false,
    },
    Sizes {
        name: "qwen-2.5-14b",
        vocabulary: 152_064,
        context: 131_072,
        layers: 48,
        width: 5120,
        heads: 40,
        kv_heads: 8,
        feed_forward: 13_824,
        rope: Rope { base: 1_000_000.0, scaling: None },
        tied: false,
        qkv_bias: true,
    },
];

impl TransformerConfig {
    /// The decoders that [`TransformerConfig::named`] has a description of.
    pub fn decoders() -> impl Iterator<Item = &'static str> {
        DECODERS.iter().map(|sizes| sizes.name)
    }

    /// The description of a published model, one of [`TransformerConfig::decoders`] or SAM's image encoder
    /// (`sam-vit-b` of 90 M parameters, `sam-vit-l` of 308 M, `sam-vit-h` of 637 M, for images of 1024 by 1024
    /// pixels); nothing for another name.
    pub fn named(name: &str) -> Option<Self> {
        let sam = |width, layers, heads, global: &[usize]| {
            let sizes = GptConfig { layers, width, heads, context: 0, feed_forward: 4 * width };
            Some(Self::sam(&sizes, 1024, (14, global)))
        };
        match name {
            "sam-vit-b" => return sam(768, 12, 12, &[2, 5, 8, 11]),
            "sam-vit-l" => return sam(1024, 24, 16, &[5, 11, 17, 23]),
            "sam-vit-h" => return sam(1280, 32, 16, &[7, 15, 23, 31]),
            _ => {}
        }
        let sizes = DECODERS.iter().find(|sizes| sizes.name == name)?;
        let Sizes { vocabulary, context, layers, width, heads, feed_forward, tied, .. } = *sizes;
        let own = GptConfig { layers, width, heads, context, feed_forward };
        let mut config = TransformerConfig {
            positions: Positions::Rotary(sizes.rope.clone()),
            output: ModelOutput::Vocabulary { tied, soft_cap: None },
            ..TransformerConfig::llama(&own, sizes.kv_heads, vocabulary)
        };
        config.attention.qkv_bias = sizes.qkv_bias;
        Some(config)
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
            ("llama-3-70b", 70_553_706_496),
            ("qwen-2.5-14b", 14_770_033_664),
        ];
        assert!(TransformerConfig::decoders().eq(published.map(|(name, _)| name)));
        for (name, parameters) in published {
            let config = TransformerConfig::named(name).unwrap();
            config.validate().unwrap();
            assert_eq!(config.parameters(), parameters, "{name}");
        }
        assert_eq!(TransformerConfig::named("llama-3.2"), None);
    }
}
