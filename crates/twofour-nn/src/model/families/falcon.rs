//! Falcon.

use super::{
    Family, Kind, SizeFields, Source,
    fields::Fields,
    layout::{Layout, by_head},
    llama::{activation, rope_parameters, rotation_of},
};
use crate::model::{
    CheckpointError,
    config::{
        Alibi, AttentionConfig, FeedForwardConfig, GptConfig, ModelOutput, NormConfig, NormPlace, Positions,
        TransformerConfig,
    },
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "falcon",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["transformer."],
    sizes: Some(SizeFields::features("ffn_hidden_size")),
    config: |source| config(source.fields),
    layout,
}];

fn config(fields: &Fields) -> Result<TransformerConfig, CheckpointError> {
    let (width, heads) = (fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let grouped = fields.flag("new_decoder_architecture", false)?;
    let kv_heads = match (grouped, fields.flag("multi_query", true)?) {
        (true, _) => fields.size_if("num_kv_heads")?.unwrap_or(heads),
        (false, true) => 1,
        (false, false) => heads,
    };
    let sizes = GptConfig {
        layers: fields.layers("num_hidden_layers")?,
        width,
        heads,
        context: fields.size_if("max_position_embeddings")?.unwrap_or(2048),
        feed_forward: fields.size_if("ffn_hidden_size")?.unwrap_or(width.saturating_mul(4)),
    };
    let llama = TransformerConfig::llama(&sizes, kv_heads, fields.size("vocab_size")?);
    let gpt = TransformerConfig::from(&sizes);
    let (positions, scale) = match fields.flag("alibi", false)? {
        true => (Positions::Alibi(Alibi { rounded: true }), None),
        false => {
            let rotation = rotation_of(fields, rope_parameters(fields)?, 10_000.0)?;
            if rotation.share != 1.0 {
                return Err(fields.unsupported("partial_rotary_factor", "whole heads are rotated"));
            }
            let scale = rotation.scale(llama.attention.head_dim);
            (Positions::Rotary(rotation.rope), scale)
        }
    };
    let bias = fields.flag("bias", false)?;
    let place = match grouped || fields.flag("parallel_attn", true)? {
        true => NormPlace::Parallel,
        false => NormPlace::Before,
    };
    Ok(TransformerConfig {
        positions,
        norm: NormConfig { epsilon: fields.positive("layer_norm_epsilon", 1e-5)? as f32, place, ..gpt.norm },
        attention: AttentionConfig { qkv_bias: bias, out_bias: bias, scale, ..llama.attention },
        feed_forward: FeedForwardConfig {
            activation: activation(fields, "activation", "gelu")?,
            bias,
            ..gpt.feed_forward
        },
        output: ModelOutput::Vocabulary { tied: fields.flag("tie_word_embeddings", true)?, soft_cap: None },
        ..llama
    })
}

/// Where the tensors lie. Queries, keys and values are in groups of heads that share keys and values. Blocks side by
/// side have a norm each, or share one.
fn layout(source: &Source<'_>, config: &TransformerConfig) -> crate::Result<Layout> {
    let (width, hidden) = (config.width, config.feed_forward.hidden);
    let AttentionConfig { heads, kv_heads, head_dim, qkv_bias: bias, .. } = config.attention;
    let prefix = source.prefix;
    let mut layout = Layout { ignored: vec!["rotary_emb.inv_freq"], ..Layout::default() };
    for layer in 0..config.layers {
        let (ours, theirs) =
            (|part: &str| format!("blocks.{layer}.{part}"), |part: &str| format!("{prefix}h.{layer}.{part}"));
        let has = |part: &str| source.shape_of(&theirs(part)).is_some();
        let norms = match config.norm.place {
            NormPlace::Parallel if has("ln_attn.weight") => ["ln_attn", "ln_mlp"],
            NormPlace::Parallel => ["input_layernorm"; 2],
            _ => ["input_layernorm", "post_attention_layernorm"],
        };
        layout.norm(&ours("attn.norm"), &theirs(norms[0]), width);
        layout.norm(&ours("mlp.norm"), &theirs(norms[1]), width);
        let qkv = theirs("self_attention.query_key_value");
        layout.orders.insert(qkv.clone(), by_head(kv_heads, heads / kv_heads, head_dim).into());
        layout.parts(ours("attn.qkv"), vec![(qkv, config.qkv_width())], width, bias);
        layout.parts(ours("attn.out"), vec![(theirs("self_attention.dense"), width)], config.query_width(), bias);
        layout.parts(ours("mlp.up"), vec![(theirs("mlp.dense_h_to_4h"), hidden)], width, bias);
        layout.parts(ours("mlp.down"), vec![(theirs("mlp.dense_4h_to_h"), width)], hidden, bias);
    }
    layout.norm("norm", &format!("{prefix}ln_f"), width);
    layout.vocabulary(config, &format!("{prefix}word_embeddings"), "lm_head.weight");
    Ok(layout)
}
