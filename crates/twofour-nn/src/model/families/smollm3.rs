//! SmolLM3: LLaMA with layers in which nothing is rotated.

use super::{
    Family, Kind,
    fields::Fields,
    llama::{self, Kin},
};
use crate::model::{
    CheckpointError,
    config::{AttentionConfig, Positions, Rope, RopeScaling, TransformerConfig},
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "smollm3",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["model."],
    sizes: None,
    config: |source| config(source.fields),
    layout: |source, config| Ok(llama::layout(config, source.prefix)),
}];

type Result<T> = std::result::Result<T, CheckpointError>;

fn config(fields: &Fields) -> Result<TransformerConfig> {
    let own = llama::config(fields, Kin::Llama)?;
    let rotation = llama::rotation_of(fields, llama::rope_parameters(fields)?, 2_000_000.0)?;
    Ok(TransformerConfig {
        positions: Positions::Rotary(rotation.rope.clone()),
        attention: AttentionConfig {
            scale: rotation.scale(own.attention.head_dim),
            windows: windows(fields, &own)?,
            local_rope: Some(Rope { scaling: Some(RopeScaling::Unrotated), ..rotation.rope }),
            ..own.attention
        },
        ..own
    })
}

/// Windows of the layers that are not rotated; of the whole context, where the model gives them none.
fn windows(fields: &Fields, own: &TransformerConfig) -> Result<Vec<Option<usize>>> {
    let rotated: Vec<bool> = match fields.sizes_if("no_rope_layers")? {
        Some(listed) if listed.len() != own.layers => {
            return Err(fields.unsupported("no_rope_layers", "one number for each layer"));
        }
        // One where it is rotated, whatever the field's name says.
        Some(listed) => listed.into_iter().map(|own| own != 0).collect(),
        None => {
            let step = fields.size_if("no_rope_layer_interval")?.unwrap_or(4).max(1);
            (1..=own.layers).map(|layer| !layer.is_multiple_of(step)).collect()
        }
    };
    let is_used = fields.flag("use_sliding_window", false)?;
    let window = fields.size_if("sliding_window")?.filter(|_| is_used);
    let listed = match (window, fields.texts_if("layer_types")?) {
        (Some(window), Some(types)) => llama::windows_of_types(fields, &types, window)?,
        (Some(window), None) => rotated.iter().map(|rotated| (!rotated).then_some(window)).collect(),
        (None, _) => vec![None; own.layers],
    };
    let of_layer = |(rotated, window): (&bool, &Option<usize>)| match (*rotated, *window) {
        (true, None) => Ok(None),
        (true, Some(_)) => Err(fields.unsupported("layer_types", "windows are in layers that are not rotated")),
        (false, window) => Ok(window.or(Some(own.context()))),
    };
    if listed.len() != own.layers {
        return Err(fields.unsupported("layer_types", "one type for each layer"));
    }
    rotated.iter().zip(&listed).map(of_layer).collect()
}
