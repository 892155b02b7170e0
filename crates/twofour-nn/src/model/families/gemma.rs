//! Gemma 1, 2 and 3, of text.

use super::{
    Family, Kind, SizeFields,
    fields::Fields,
    layout::Layout,
    llama::{self, Rotation, activation, rotation, rotation_of, windows_of_types},
};
use crate::{
    engine::Nonlinearity,
    model::{
        CheckpointError, ModelInput,
        config::{
            AttentionConfig, FeedForwardConfig, ModelOutput, NormConfig, NormPlace, Positions, Rope, TokenInput,
            TransformerConfig,
        },
    },
};

pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "gemma",
        kind: Kind::Decoder,
        layers: "num_hidden_layers",
        prefixes: &["model."],
        sizes: None,
        config: |source| {
            let fields = source.fields;
            let own = common(fields, 1, None)?;
            let head_dim = own.attention.head_dim;
            let rope = rotation(fields)?;
            // The first configurations say `gelu` and mean the other.
            let activation = match fields.text_if("hidden_act")? {
                Some("gelu") => Nonlinearity::TanhGelu,
                _ => activation(fields, "hidden_act", "gelu_pytorch_tanh")?,
            };
            Ok(TransformerConfig {
                positions: Positions::Rotary(rope.rope.clone()),
                norm: NormConfig { place: NormPlace::Before, ..own.norm },
                attention: AttentionConfig { scale: rope.scale(head_dim), windows: vec![], ..own.attention },
                feed_forward: FeedForwardConfig { activation, ..own.feed_forward },
                ..own
            })
        },
        layout: |source, config| Ok(layout(config, source.prefix)),
    },
    Family {
        name: "gemma2",
        kind: Kind::Decoder,
        layers: "num_hidden_layers",
        prefixes: &["model."],
        sizes: Some(SizeFields { divides_width: true, ..SizeFields::LLAMA }),
        config: |source| {
            let (fields, own) = (source.fields, common(source.fields, 2, Some(30.0))?);
            let soft_cap = bound(fields, "attn_logit_softcapping", Some(50.0))?;
            let attention = AttentionConfig { soft_cap, ..own.attention };
            let rope = plain(fields, rotation(fields)?)?;
            Ok(TransformerConfig { positions: Positions::Rotary(rope), attention, ..own })
        },
        layout: |source, config| Ok(layout(config, source.prefix)),
    },
    Family {
        name: "gemma3_text",
        kind: Kind::Decoder,
        layers: "num_hidden_layers",
        prefixes: &["model."],
        sizes: Some(SizeFields { divides_width: true, ..SizeFields::LLAMA }),
        config: |source| {
            let fields = source.fields;
            let pattern = fields.size_if("sliding_window_pattern")?.or(fields.size_if("_sliding_window_pattern")?);
            let own = common(fields, pattern.unwrap_or(6), None)?;
            if fields.get("attn_logit_softcapping").is_some() {
                return Err(fields.unsupported("attn_logit_softcapping", "scores of attention have no bound"));
            }
            let [all, windowed] = ropes(fields)?;
            let attention = AttentionConfig { head_norms: true, local_rope: Some(windowed), ..own.attention };
            Ok(TransformerConfig { positions: Positions::Rotary(all), attention, ..own })
        },
        layout: |source, config| Ok(layout(config, source.prefix)),
    },
];

type Result<T> = std::result::Result<T, CheckpointError>;

/// The description that all versions share: every `pattern`-th layer attends to the whole sequence, the others in
/// windows.
fn common(fields: &Fields, pattern: usize, logit_soft_cap: Option<f64>) -> Result<TransformerConfig> {
    fields.expect_flag("use_bidirectional_attention", false, "attention is causal")?;
    let sizes = fields.sizes()?;
    let (layers, width) = (sizes.layers, sizes.width);
    let vocabulary = fields.size("vocab_size")?;
    let llama = TransformerConfig::llama(&sizes, fields.size_if("num_key_value_heads")?.unwrap_or(4), vocabulary);
    let window = fields.size_if("sliding_window")?.unwrap_or(4096);
    let by_number = || (1..=layers).map(|layer| Some(window).filter(|_| !layer.is_multiple_of(pattern))).collect();
    let windows = match fields.texts_if("layer_types")? {
        Some(types) => windows_of_types(fields, &types, window)?,
        None => by_number(),
    };
    let bias = fields.flag("attention_bias", false)?;
    let per_score = fields.positive("query_pre_attn_scalar", 256.0)?;
    Ok(TransformerConfig {
        input: ModelInput::Tokens(TokenInput {
            scale: Some((width as f32).sqrt()),
            begins_windows: true,
            ..TokenInput::plain(vocabulary, sizes.context)
        }),
        norm: NormConfig {
            place: NormPlace::Around,
            epsilon: fields.positive("rms_norm_eps", 1e-6)? as f32,
            ..llama.norm
        },
        attention: AttentionConfig {
            head_dim: fields.size_if("head_dim")?.unwrap_or(256),
            qkv_bias: bias,
            out_bias: bias,
            scale: Some(per_score.powf(-0.5) as f32),
            windows,
            ..llama.attention
        },
        feed_forward: FeedForwardConfig {
            activation: activation(fields, "hidden_activation", "gelu_pytorch_tanh")?,
            ..llama.feed_forward
        },
        output: ModelOutput::Vocabulary {
            tied: fields.flag("tie_word_embeddings", true)?,
            soft_cap: bound(fields, "final_logit_softcapping", logit_soft_cap)?,
        },
        ..llama
    })
}

/// A bound of scores: none where the field is null.
fn bound(fields: &Fields, field: &str, default: Option<f64>) -> Result<Option<f32>> {
    let bound = match fields.values().contains_key(field) {
        true => fields.get(field).map(|_| fields.positive_number(field)).transpose()?,
        false => default,
    };
    Ok(bound.map(|bound| bound as f32))
}

/// The rotations of layers that attend to the whole sequence, and of those with a window: an object for each type of
/// layer in `rope_parameters`, or the fields of older
/// configurations, of which `rope_scaling` is for the whole sequence.
fn ropes(fields: &Fields) -> Result<[Rope; 2]> {
    let parameters = fields.object_if("rope_parameters")?;
    let of_type = |name: &str| parameters.as_ref().map(|parameters| parameters.object_if(name)).transpose();
    let older = || fields.object_if("rope_scaling").map(|scaling| scaling.filter(|scaling| !scaling.is_empty()));
    let all = of_type("full_attention")?.flatten().map_or_else(older, |own| Ok(Some(own)))?;
    let windowed = match of_type("sliding_attention")?.flatten() {
        Some(own) => plain(fields, rotation_of(fields, Some(own), 10_000.0)?)?,
        None => Rope { base: fields.positive("rope_local_base_freq", 10_000.0)?, scaling: None },
    };
    Ok([plain(fields, rotation_of(fields, all, 1_000_000.0)?)?, windowed])
}

/// The rotation of whole heads that multiplies no scores.
fn plain(fields: &Fields, found: Rotation) -> Result<Rope> {
    if found.factor == 1.0 && found.share == 1.0 {
        return Ok(found.rope);
    }
    let field = if fields.get("rope_scaling").is_some() { "rope_scaling" } else { "rope_parameters" };
    Err(fields.unsupported(field, "whole heads are rotated, with the usual scale of scores"))
}

/// Where the tensors lie: LLaMA's with norms of the outputs of blocks, and gains that are stored less one.
fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let (width, head_dim) = (config.width, config.attention.head_dim);
    let mut layout = llama::layout(config, prefix);
    for layer in 0..config.layers {
        let mut gain = |ours: &str, theirs: &str, width: usize| {
            let ours = format!("blocks.{layer}.{ours}");
            layout.gain(ours, format!("{prefix}layers.{layer}.{theirs}"), width, 1.0);
        };
        gain("attn.norm", "input_layernorm", width);
        match config.norm.place {
            NormPlace::Around => {
                gain("attn.post_norm", "post_attention_layernorm", width);
                gain("mlp.norm", "pre_feedforward_layernorm", width);
                gain("mlp.post_norm", "post_feedforward_layernorm", width);
            }
            _ => gain("mlp.norm", "post_attention_layernorm", width),
        }
        if config.attention.head_norms {
            gain("attn.query_norm", "self_attn.q_norm", head_dim);
            gain("attn.key_norm", "self_attn.k_norm", head_dim);
        }
    }
    layout.gain("norm".to_owned(), format!("{prefix}norm"), width, 1.0);
    layout
}
