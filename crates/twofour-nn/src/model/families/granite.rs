//! Granite: LLaMA with factors of embeddings, scores of attention, outputs of blocks and scores of tokens.

use super::{
    Family, Kind, Source,
    fields::Fields,
    layout::Layout,
    llama::{self, Kin},
};
use crate::model::{
    CheckpointError,
    config::{AttentionConfig, ModelInput, TokenInput, TransformerConfig},
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "granite",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["model."],
    sizes: None,
    config: |source| config(source.fields),
    layout,
}];

fn config(fields: &Fields) -> Result<TransformerConfig, CheckpointError> {
    let own = llama::config(fields, Kin::Llama)?;
    let factor = |field: &str| fields.positive(field, 1.0).map(|factor| factor as f32);
    let usual = TokenInput::plain(own.vocabulary(), own.context());
    let scale = Some(factor("embedding_multiplier")?).filter(|scale| *scale != 1.0);
    // What a scaled rotation multiplies scores by, it does here, too.
    let of_rotation = own.attention.scale.map_or(1.0, |scale| scale * (own.attention.head_dim as f32).sqrt());
    Ok(TransformerConfig {
        input: ModelInput::Tokens(TokenInput { scale, ..usual }),
        attention: AttentionConfig { scale: Some(factor("attention_multiplier")? * of_rotation), ..own.attention },
        layer_scale: true,
        ..own
    })
}

/// LLaMA's; the outputs of all blocks have one factor, and that of scores of tokens is one of the norm before.
fn layout(source: &Source<'_>, config: &TransformerConfig) -> crate::Result<Layout> {
    let mut layout = llama::layout(config, source.prefix);
    let factor = source.fields.positive("residual_multiplier", 1.0)? as f32;
    for block in (0..config.layers).flat_map(|layer| ["attn", "mlp"].map(|part| format!("blocks.{layer}.{part}"))) {
        layout.constants.insert(format!("{block}.scale"), (config.width, factor));
    }
    let divisor = source.fields.positive("logits_scaling", 1.0)? as f32;
    if let Some(norm) = layout.tensors.get_mut("norm.weight") {
        norm.factor = 1.0 / divisor;
    }
    Ok(layout)
}
