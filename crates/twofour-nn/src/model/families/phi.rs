//! Phi-3, whose queries, keys and values are one tensor, and so are gate and up; of Phi-4-mini a part of each head is
//! rotated. Long contexts have LongRoPE.

use super::{
    Family, Kind, SizeFields,
    fields::Fields,
    layout::Layout,
    llama::{self, Kin, Rotation, rope_parameters, type_field, unscaled},
};
use crate::model::{
    CheckpointError,
    config::{Rope, RopeScaling, TransformerConfig},
};

/// The context before scaling, where a configuration does not tell.
const ORIGINAL_CONTEXT: f64 = 4096.0;

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "phi3",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["model."],
    sizes: Some(SizeFields::LLAMA),
    config: |source| llama::config(source.fields, Kin::Phi),
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

/// The rotation. Older configurations call LongRoPE `su` or `yarn`. The original context is the configuration's own
/// field, never one of the scaling, as in transformers 5.
pub(super) fn rotation(fields: &Fields) -> Result<Rotation, CheckpointError> {
    let parameters = rope_parameters(fields)?;
    let plain = unscaled(fields, parameters.as_ref(), 10_000.0)?;
    let Some(parameters) = parameters.as_ref() else { return Ok(plain) };
    let key = type_field(parameters);
    match parameters.text_if(key)? {
        None | Some("default") => Ok(plain),
        Some("longrope" | "su" | "yarn") => {
            let original_context = fields.positive("original_max_position_embeddings", ORIGINAL_CONTEXT)?;
            let stretch = match parameters.get("factor") {
                Some(_) => parameters.positive_number("factor")?,
                None => fields.positive_number("max_position_embeddings")? / original_context,
            };
            let usual = if stretch > 1.0 { (1.0 + stretch.ln() / original_context.ln()).sqrt() } else { 1.0 };
            let scaling = RopeScaling::Long {
                short: parameters.positive_numbers("short_factor")?,
                long: parameters.positive_numbers("long_factor")?,
                attention_factor: parameters.positive("attention_factor", usual)?,
                original_context,
            };
            Ok(Rotation { rope: Rope { scaling: Some(scaling), ..plain.rope }, ..plain })
        }
        Some(_) => Err(parameters.unsupported(key, "supported are default and longrope")),
    }
}

fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let mut layout = llama::layout(config, prefix);
    for layer in 0..config.layers {
        let at = format!("{prefix}layers.{layer}");
        let qkv = vec![(format!("{at}.self_attn.qkv_proj"), config.qkv_width())];
        layout.parts(format!("blocks.{layer}.attn.qkv"), qkv, config.width, false);
        let up = vec![(format!("{at}.mlp.gate_up_proj"), config.up_width())];
        layout.parts(format!("blocks.{layer}.mlp.up"), up, config.width, false);
    }
    layout
}
