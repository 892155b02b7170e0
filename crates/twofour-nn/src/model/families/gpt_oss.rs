//! gpt-oss: experts in tensors of three dimensions, `[in, out]`, with the gate and `up` in turn, biases, and a sink for
//! each head.

use std::sync::Arc;

use super::{
    Family, Kind,
    fields::Fields,
    layout::{BiasRow, Layout},
    llama::{self, Kin},
    mixtral,
};
use crate::model::{
    CheckpointError,
    config::{AttentionConfig, ClampedGate, ExpertsConfig, NormConfig, Positions, TransformerConfig},
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "gpt_oss",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["model."],
    sizes: None,
    config: |source| config(source.fields),
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

type Result<T> = std::result::Result<T, CheckpointError>;

fn config(fields: &Fields) -> Result<TransformerConfig> {
    let own = llama::config(fields, Kin::Mistral)?;
    let Some(rotation) = llama::rope_parameters(fields)? else {
        return Err(fields.unsupported("rope_parameters", "the rotation is described there, or by rope_scaling"));
    };
    let rotation = llama::rotation_of(fields, Some(rotation), 150_000.0)?;
    if fields.text_if("hidden_act")?.is_some_and(|name| name != "silu") {
        return Err(fields.unsupported("hidden_act", "supported is silu"));
    }
    let head_dim = fields.size_if("head_dim")?.unwrap_or(64);
    let has_biases = fields.flag("attention_bias", true)?;
    Ok(TransformerConfig {
        positions: Positions::Rotary(rotation.rope.clone()),
        norm: NormConfig { epsilon: fields.positive("rms_norm_eps", 1e-5)? as f32, ..own.norm },
        attention: AttentionConfig {
            head_dim,
            qkv_bias: has_biases,
            out_bias: has_biases,
            scale: rotation.scale(head_dim),
            windows: windows(fields, own.layers)?,
            sinks: true,
            ..own.attention
        },
        experts: Some(ExpertsConfig {
            clamped_gate: Some(ClampedGate {
                slope: fields.positive("swiglu_alpha", 1.702)? as f32,
                limit: fields.positive("swiglu_limit", 7.0)? as f32,
            }),
            ..mixtral::experts(fields, "num_local_experts", own.feed_forward.hidden)?
        }),
        ..own
    })
}

/// The windows of the layers that `layer_types` lists, or of every other one from the first on.
fn windows(fields: &Fields, layers: usize) -> Result<Vec<Option<usize>>> {
    let Some(window) = fields.size_if("sliding_window")? else { return Ok(vec![]) };
    match fields.texts_if("layer_types")? {
        Some(types) => llama::windows_of_types(fields, &types, window),
        None => Ok((0..layers).map(|layer| layer.is_multiple_of(2).then_some(window)).collect()),
    }
}

/// Where the tensors lie: LLaMA's, with the experts that a [`Reader`](twofour::file::Reader) takes apart.
fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let width = config.width;
    let mut layout = llama::layout(config, prefix);
    for layer in 0..config.layers {
        let Some(experts) = config.experts(layer) else { continue };
        let (ours, theirs) = (format!("blocks.{layer}.mlp"), format!("{prefix}layers.{layer}.mlp"));
        layout.linears.retain(|name, _| !["up", "down"].iter().any(|part| *name == format!("{ours}.{part}")));
        let sinks = format!("{prefix}layers.{layer}.self_attn.sinks");
        layout.tensor(format!("blocks.{layer}.attn.sinks"), sinks, [config.attention.heads]);
        let in_turn: Arc<Vec<usize>> = Arc::new((0..2).flat_map(|i| (i..2 * experts.hidden).step_by(2)).collect());
        for expert in 0..experts.count {
            let parts =
                [("up", "gate_up_proj", 2 * experts.hidden, width), ("down", "down_proj", width, experts.hidden)];
            for (part, stored, outputs, inputs) in parts {
                let name = format!("{theirs}.experts.{expert}.{stored}");
                if part == "up" {
                    layout.orders.insert(name.clone(), in_turn.clone());
                }
                let tensor = format!("{theirs}.experts.{stored}_bias");
                layout.bias_rows.insert(name.clone(), BiasRow { tensor, rows: experts.count, row: expert });
                layout.parts(format!("{ours}.experts.{expert}.{part}"), vec![(name, outputs)], inputs, true);
            }
        }
        let router = vec![(format!("{theirs}.router"), experts.count)];
        layout.parts(format!("{ours}.router"), router, width, true);
    }
    layout
}
