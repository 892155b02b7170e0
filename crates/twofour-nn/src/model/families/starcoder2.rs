//! StarCoder2.

use super::{
    Family, Kind,
    fields::Fields,
    layout::Layout,
    llama::{self, Kin, activation},
};
use crate::model::{
    CheckpointError,
    config::{AttentionConfig, FeedForwardConfig, ModelOutput, NormConfig, NormKind, TransformerConfig},
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "starcoder2",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["model."],
    sizes: None,
    config: |source| config(source.fields),
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

fn config(fields: &Fields) -> Result<TransformerConfig, CheckpointError> {
    let own = llama::config(fields, Kin::Mistral)?;
    let bias = fields.flag("use_bias", true)?;
    let epsilon = fields.positive("norm_epsilon", 1e-5)? as f32;
    Ok(TransformerConfig {
        norm: NormConfig { kind: NormKind::Layer, epsilon, ..own.norm },
        attention: AttentionConfig { qkv_bias: bias, out_bias: bias, ..own.attention },
        feed_forward: FeedForwardConfig {
            activation: activation(fields, "hidden_act", "gelu_pytorch_tanh")?,
            gated: false,
            bias,
            ..own.feed_forward
        },
        output: ModelOutput::Vocabulary { tied: fields.flag("tie_word_embeddings", true)?, soft_cap: None },
        ..own
    })
}

/// LLaMA's, with biases of norms and a hidden layer without a gate.
fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let (width, hidden, bias) = (config.width, config.feed_forward.hidden, config.feed_forward.bias);
    let mut layout = llama::layout(config, prefix);
    for layer in 0..config.layers {
        let (ours, theirs) =
            (|part: &str| format!("blocks.{layer}.{part}"), |part: &str| format!("{prefix}layers.{layer}.{part}"));
        layout.norm(&ours("attn.norm"), &theirs("input_layernorm"), width);
        layout.norm(&ours("mlp.norm"), &theirs("post_attention_layernorm"), width);
        layout.parts(ours("mlp.up"), vec![(theirs("mlp.c_fc"), hidden)], width, bias);
        layout.parts(ours("mlp.down"), vec![(theirs("mlp.c_proj"), width)], hidden, bias);
    }
    layout.norm("norm", &format!("{prefix}norm"), width);
    layout
}
