//! StableLM: LLaMA with layer norms, and a part of each head rotated.

use super::{
    Family, Kind,
    fields::Fields,
    layout::Layout,
    llama::{self, Kin},
};
use crate::model::{
    CheckpointError,
    config::{AttentionConfig, NormConfig, NormKind, NormPlace, TransformerConfig},
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "stablelm",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["model."],
    sizes: None,
    config: |source| config(source.fields),
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

fn config(fields: &Fields) -> Result<TransformerConfig, CheckpointError> {
    fields.expect_flag("qk_layernorm", false, "queries and keys have no norms")?;
    let own = llama::config(&fields.clone().with_defaults(&[("partial_rotary_factor", 0.25)]), Kin::Partial)?;
    let place = match fields.flag("use_parallel_residual", false)? {
        true => NormPlace::Parallel,
        false => NormPlace::Before,
    };
    Ok(TransformerConfig {
        norm: NormConfig { kind: NormKind::Layer, place, epsilon: fields.positive("layer_norm_eps", 1e-5)? as f32 },
        attention: AttentionConfig { qkv_bias: fields.flag("use_qkv_bias", false)?, ..own.attention },
        ..own
    })
}

/// LLaMA's, with biases of norms. Blocks side by side share a norm.
fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let mut layout = llama::layout(config, prefix);
    let of_hidden = if config.norm.place == NormPlace::Parallel { "input" } else { "post_attention" };
    for layer in 0..config.layers {
        for (ours, theirs) in [("attn", "input"), ("mlp", of_hidden)] {
            let theirs = format!("{prefix}layers.{layer}.{theirs}_layernorm");
            layout.norm(&format!("blocks.{layer}.{ours}.norm"), &theirs, config.width);
        }
    }
    layout.norm("norm", &format!("{prefix}norm"), config.width);
    layout
}
