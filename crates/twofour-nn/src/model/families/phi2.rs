//! Phi-1, Phi-1.5 and Phi-2: blocks side by side behind one norm, a part of each head rotated, and a head with a bias.

use super::{
    Family, Kind,
    fields::Fields,
    layout::Layout,
    llama::{self, Kin, activation},
};
use crate::model::{
    CheckpointError,
    config::{AttentionConfig, FeedForwardConfig, NormConfig, NormKind, NormPlace, TransformerConfig},
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "phi",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["model."],
    sizes: None,
    config: |source| config(source.fields),
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

fn config(fields: &Fields) -> Result<TransformerConfig, CheckpointError> {
    fields.expect_flag("qk_layernorm", false, "queries and keys have no norms")?;
    let own = llama::config(&fields.clone().with_defaults(&[("partial_rotary_factor", 0.5)]), Kin::Partial)?;
    let epsilon = fields.positive("layer_norm_eps", 1e-5)? as f32;
    Ok(TransformerConfig {
        norm: NormConfig { kind: NormKind::Layer, place: NormPlace::Parallel, epsilon },
        attention: AttentionConfig { qkv_bias: true, out_bias: true, ..own.attention },
        feed_forward: FeedForwardConfig {
            activation: activation(fields, "hidden_act", "gelu_new")?,
            gated: false,
            bias: true,
            ..own.feed_forward
        },
        ..own
    })
}

/// LLaMA's with other names and biases.
fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let (width, hidden) = (config.width, config.feed_forward.hidden);
    let mut layout = llama::layout(config, prefix);
    for layer in 0..config.layers {
        let (ours, theirs) =
            (|part: &str| format!("blocks.{layer}.{part}"), |part: &str| format!("{prefix}layers.{layer}.{part}"));
        layout.norm(&ours("attn.norm"), &theirs("input_layernorm"), width);
        layout.norm(&ours("mlp.norm"), &theirs("input_layernorm"), width);
        layout.one_linear(ours("attn.out"), theirs("self_attn.dense"), (width, config.query_width()));
        layout.one_linear(ours("mlp.up"), theirs("mlp.fc1"), (hidden, width));
        layout.one_linear(ours("mlp.down"), theirs("mlp.fc2"), (width, hidden));
    }
    layout.norm("norm", &format!("{prefix}final_layernorm"), width);
    if let Some(head) = layout.linears.get_mut("head") {
        head.has_bias = true;
    }
    layout
}
