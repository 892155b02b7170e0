//! GPT-NeoX, and Pythia.

use super::{
    Family, Kind, SizeFields,
    fields::Fields,
    layout::{Layout, by_head},
    llama::{Rotation, activation, rope_parameters, rotation_of},
};
use crate::model::{
    CheckpointError,
    config::{AttentionConfig, FeedForwardConfig, ModelOutput, NormConfig, NormPlace, Positions, TransformerConfig},
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "gpt_neox",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["gpt_neox."],
    sizes: Some(SizeFields::features("intermediate_size")),
    config: |source| config(source.fields),
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

fn config(fields: &Fields) -> Result<TransformerConfig, CheckpointError> {
    let sizes = fields.sizes()?;
    let llama = TransformerConfig::llama(&sizes, sizes.heads, fields.size("vocab_size")?);
    let gpt = TransformerConfig { input: llama.input, ..TransformerConfig::from(&sizes) };
    let parameters = rope_parameters(fields)?;
    let tells = |field: &str| parameters.as_ref().is_some_and(|own| own.get(field).is_some());
    let share = if tells("partial_rotary_factor") { None } else { Some(fields.positive("rotary_pct", 0.25)?) };
    let base = fields.positive("rotary_emb_base", 10_000.0)?;
    let rotation = rotation_of(fields, parameters, base)?;
    let head_dim = gpt.attention.head_dim;
    let rotation = Rotation { share: share.unwrap_or(rotation.share), ..rotation };
    if rotation.factor != 1.0 {
        return Err(fields.unsupported("rope_scaling", "supported are default, linear, dynamic and llama3"));
    }
    let bias = fields.flag("attention_bias", true)?;
    let place = match fields.flag("use_parallel_residual", true)? {
        true => NormPlace::Parallel,
        false => NormPlace::Before,
    };
    Ok(TransformerConfig {
        positions: Positions::Rotary(rotation.rope.clone()),
        norm: NormConfig { epsilon: fields.positive("layer_norm_eps", 1e-5)? as f32, place, ..gpt.norm },
        attention: AttentionConfig {
            qkv_bias: bias,
            out_bias: bias,
            rotated: rotation.rotated(head_dim),
            ..gpt.attention
        },
        feed_forward: FeedForwardConfig { activation: activation(fields, "hidden_act", "gelu")?, ..gpt.feed_forward },
        output: ModelOutput::Vocabulary { tied: fields.flag("tie_word_embeddings", false)?, soft_cap: None },
        ..gpt
    })
}

fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let (width, hidden) = (config.width, config.feed_forward.hidden);
    let AttentionConfig { heads, head_dim, qkv_bias, out_bias, .. } = config.attention;
    let ignored = vec!["attention.bias", "attention.masked_bias", "rotary_emb.inv_freq"];
    let mut layout = Layout { ignored, ..Layout::default() };
    for layer in 0..config.layers {
        let (ours, theirs) =
            (|part: &str| format!("blocks.{layer}.{part}"), |part: &str| format!("{prefix}layers.{layer}.{part}"));
        layout.norm(&ours("attn.norm"), &theirs("input_layernorm"), width);
        layout.norm(&ours("mlp.norm"), &theirs("post_attention_layernorm"), width);
        let qkv = theirs("attention.query_key_value");
        layout.orders.insert(qkv.clone(), by_head(heads, 1, head_dim).into());
        layout.parts(ours("attn.qkv"), vec![(qkv, config.qkv_width())], width, qkv_bias);
        layout.parts(ours("attn.out"), vec![(theirs("attention.dense"), width)], config.query_width(), out_bias);
        layout.one_linear(ours("mlp.up"), theirs("mlp.dense_h_to_4h"), (hidden, width));
        layout.one_linear(ours("mlp.down"), theirs("mlp.dense_4h_to_h"), (width, hidden));
    }
    layout.norm("norm", &format!("{prefix}final_layer_norm"), width);
    layout.vocabulary(config, &format!("{prefix}embed_in"), "embed_out.weight");
    layout
}
