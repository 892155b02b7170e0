//! MPT.

use super::{Family, Kind, fields::Fields, layout::Layout};
use crate::model::{
    CheckpointError,
    config::{
        Alibi, AttentionConfig, FeedForwardConfig, GptConfig, ModelOutput, NormConfig, Positions, TransformerConfig,
    },
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "mpt",
    kind: Kind::Decoder,
    layers: "n_layers",
    prefixes: &["transformer."],
    sizes: None,
    config: |source| config(source.fields),
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

type Result<T> = std::result::Result<T, CheckpointError>;

fn config(fields: &Fields) -> Result<TransformerConfig> {
    let width = fields.size("d_model")?;
    let sizes = GptConfig {
        layers: fields.layers("n_layers")?,
        width,
        heads: fields.size("n_heads")?,
        context: fields.size_if("max_seq_len")?.unwrap_or(2048),
        feed_forward: width.saturating_mul(4),
    };
    if fields.size_if("expansion_ratio")?.unwrap_or(4) != 4 {
        return Err(fields.unsupported("expansion_ratio", "the hidden layer is four times as wide as the model"));
    }
    if fields.get("logit_scale").is_some() {
        return Err(fields.unsupported("logit_scale", "scores of tokens are not scaled"));
    }
    fields.expect_flag("no_bias", true, "linear layers and norms have no biases")?;
    let gpt = TransformerConfig::from(&sizes);
    let llama = TransformerConfig::llama(&sizes, sizes.heads, fields.size("vocab_size")?);
    let own = fields.object_if("attn_config")?;
    let own = own.as_ref();
    if let Some(own) = own {
        own.expect_flag("alibi", true, "positions enter by their distance")?;
        own.expect_flag("prefix_lm", false, "attention is causal")?;
        own.expect_flag("qk_ln", false, "queries and keys have no norms")?;
        if own.text_if("attn_type")?.is_some_and(|kind| kind != "multihead_attention") {
            return Err(own.unsupported("attn_type", "supported is multihead_attention"));
        }
    }
    // transformers computes with 8, whatever is said here.
    if let Some(own) = own.filter(|own| own.number_if("alibi_bias_max").is_ok_and(|most| most.unwrap_or(8.0) != 8.0)) {
        return Err(own.unsupported("alibi_bias_max", "slopes are powers of two down to 2^-8"));
    }
    let number = |field: &str| -> Result<Option<f64>> {
        let Some(own) = own.filter(|own| own.get(field).is_some()) else { return Ok(None) };
        own.positive_number(field).map(Some)
    };
    Ok(TransformerConfig {
        input: llama.input,
        positions: Positions::Alibi(Alibi { rounded: false }),
        norm: NormConfig { epsilon: fields.positive("layer_norm_epsilon", 1e-5)? as f32, ..gpt.norm },
        attention: AttentionConfig {
            scale: number("softmax_scale")?.map(|scale| scale as f32),
            qkv_bound: number("clip_qkv")?.map(|bound| bound as f32),
            ..llama.attention
        },
        feed_forward: FeedForwardConfig { bias: false, ..gpt.feed_forward },
        output: ModelOutput::Vocabulary { tied: fields.flag("tie_word_embeddings", true)?, soft_cap: None },
        ..llama
    })
}

fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let (width, hidden) = (config.width, config.feed_forward.hidden);
    let mut layout = Layout::default();
    for layer in 0..config.layers {
        let (ours, theirs) =
            (|part: &str| format!("blocks.{layer}.{part}"), |part: &str| format!("{prefix}blocks.{layer}.{part}"));
        layout.norm_without_bias(&ours("attn.norm"), &theirs("norm_1"), width);
        layout.norm_without_bias(&ours("mlp.norm"), &theirs("norm_2"), width);
        let mut linear = |part: &str, name: &str, outputs: usize, inputs: usize| {
            layout.parts(ours(part), vec![(theirs(name), outputs)], inputs, false);
        };
        linear("attn.qkv", "attn.Wqkv", config.qkv_width(), width);
        linear("attn.out", "attn.out_proj", width, config.query_width());
        linear("mlp.up", "ffn.up_proj", hidden, width);
        linear("mlp.down", "ffn.down_proj", width, hidden);
    }
    layout.norm_without_bias("norm", &format!("{prefix}norm_f"), width);
    layout.vocabulary(config, &format!("{prefix}wte"), "lm_head.weight");
    layout
}
