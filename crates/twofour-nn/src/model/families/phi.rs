//! Phi-3, whose queries, keys and values are one tensor, and so are gate and up.

use super::{
    Family, Kind,
    layout::Layout,
    llama::{self, Kin},
};
use crate::model::config::{Positions, TransformerConfig};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "phi3",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["model."],
    config: |source| {
        let fields = source.fields;
        let config = llama::config(fields, Kin::Phi)?;
        match config.positions {
            Positions::Rotary(rope) if rope.scaling.is_some() => {
                let field = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
                Err(fields.unsupported(field, "supported is rope_type default"))
            }
            _ => Ok(config),
        }
    },
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

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
