//! Decoders of experts: Mixtral, Qwen2-MoE and Qwen3-MoE.

use super::{
    Family, Kind, Source,
    fields::Fields,
    layout::Layout,
    llama::{self, Kin},
};
use crate::model::{
    CheckpointError,
    config::{ExpertsConfig, Routing, SharedExpert, TransformerConfig},
};

pub(super) const FAMILIES: &[Family] = &[
    family("mixtral", |source| mixtral(source.fields), |source, config| Ok(layout(source, config, &MIXTRAL))),
    family("qwen2_moe", |source| qwen(source.fields, Kin::Qwen2), |source, config| Ok(layout(source, config, &QWEN))),
    family("qwen3_moe", |source| qwen(source.fields, Kin::Qwen3), |source, config| Ok(layout(source, config, &QWEN))),
];

type Result<T> = std::result::Result<T, CheckpointError>;

const fn family(
    name: &'static str,
    config: fn(&Source<'_>) -> Result<TransformerConfig>,
    layout: fn(&Source<'_>, &TransformerConfig) -> crate::Result<Layout>,
) -> Family {
    let (kind, prefixes) = (Kind::Decoder, &["model."]);
    Family { name, kind, layers: "num_hidden_layers", prefixes, sizes: None, config, layout }
}

/// What a family calls the parts of its blocks of experts.
pub(super) struct Names {
    block: &'static str,
    shared: &'static str,
    gate: &'static str,
    up: &'static str,
    down: &'static str,
}

const MIXTRAL: Names = Names { block: "block_sparse_moe", shared: "", gate: "w1", up: "w3", down: "w2" };

const QWEN: Names =
    Names { block: "mlp", shared: "shared_expert", gate: "gate_proj", up: "up_proj", down: "down_proj" };

pub(super) const DEEPSEEK: Names = Names { shared: "shared_experts", ..QWEN };

fn mixtral(fields: &Fields) -> Result<TransformerConfig> {
    let own = llama::config(fields, Kin::Mistral)?;
    let experts = Some(experts(fields, "num_local_experts", own.feed_forward.hidden)?);
    Ok(TransformerConfig { experts, ..own })
}

/// Experts in every layer, as Mixtral has them, as many as a field tells.
pub(super) fn experts(fields: &Fields, count: &str, hidden: usize) -> Result<ExpertsConfig> {
    Ok(ExpertsConfig {
        count: fields.size(count)?,
        per_token: fields.size("num_experts_per_tok")?,
        hidden,
        shared: None,
        routing: Routing::default(),
        is_normalized: true,
        dense_layers: vec![],
        clamped_gate: None,
    })
}

fn qwen(fields: &Fields, kin: Kin) -> Result<TransformerConfig> {
    let mut own = llama::config(fields, kin)?;
    if kin == Kin::Qwen2 {
        own.attention.qkv_bias = fields.flag("qkv_bias", true)?;
    }
    own.attention.windows = windows(fields, kin, own.layers)?;
    let step = fields.size_if("decoder_sparse_step")?.unwrap_or(1).max(1);
    let mut dense_layers = fields.sizes_if("mlp_only_layers")?.unwrap_or_default();
    dense_layers.extend((0..own.layers).filter(|layer| !(layer + 1).is_multiple_of(step)));
    let count = if fields.get("num_experts").is_some() { "num_experts" } else { "num_local_experts" };
    let experts = ExpertsConfig {
        shared: match kin {
            Kin::Qwen2 => {
                Some(SharedExpert { hidden: fields.size("shared_expert_intermediate_size")?, has_gate: true })
            }
            _ => None,
        },
        is_normalized: fields.flag("norm_topk_prob", false)?,
        dense_layers,
        ..experts(fields, count, fields.size("moe_intermediate_size")?)?
    };
    Ok(TransformerConfig { experts: Some(experts), ..own })
}

/// Qwen2-MoE has windows in every other of its first layers, or in those that `layer_types` lists, Qwen3-MoE in all.
fn windows(fields: &Fields, kin: Kin, layers: usize) -> Result<Vec<Option<usize>>> {
    let is_used = fields.flag("use_sliding_window", false)?;
    let window = fields.size_if("sliding_window")?.filter(|window| is_used && *window > 0);
    let Some(window) = window else { return Ok(vec![]) };
    match (kin, fields.texts_if("layer_types")?) {
        (Kin::Qwen2, Some(types)) => llama::windows_of_types(fields, &types, window),
        (Kin::Qwen2, None) => {
            let end = fields.size_if("max_window_layers")?.unwrap_or(28);
            Ok((0..layers).map(|layer| (layer.is_multiple_of(2) && layer < end).then_some(window)).collect())
        }
        _ => Ok(vec![Some(window); layers]),
    }
}

/// Where the tensors lie: LLaMA's, with a router and experts in the place of a feed-forward block. Where transformers
/// stored the experts joined, as it computes with them, the gate lies above `up` in one tensor, and a block is `mlp`.
pub(super) fn layout(source: &Source<'_>, config: &TransformerConfig, names: &Names) -> Layout {
    let (width, prefix) = (config.width, source.prefix);
    let is_joined =
        |layer: usize| source.shape_of(&format!("{prefix}layers.{layer}.mlp.experts.0.gate_up_proj.weight")).is_some();
    let mut layout = llama::layout(config, prefix);
    for layer in 0..config.layers {
        let Some(experts) = config.experts(layer) else { continue };
        let is_joined = is_joined(layer);
        let names = if is_joined { &Names { shared: names.shared, ..QWEN } } else { names };
        let (ours, theirs) = (format!("blocks.{layer}.mlp"), format!("{prefix}layers.{layer}.{}", names.block));
        layout.linears.retain(|name, _| !["up", "down"].iter().any(|part| *name == format!("{ours}.{part}")));
        let mut pair = |ours: String, theirs: String, hidden: usize, is_joined: bool| {
            let up = match is_joined {
                true => vec![(format!("{theirs}.gate_up_proj"), 2 * hidden)],
                false => [names.gate, names.up].map(|part| (format!("{theirs}.{part}"), hidden)).to_vec(),
            };
            layout.parts(format!("{ours}.up"), up, width, false);
            layout.parts(format!("{ours}.down"), vec![(format!("{theirs}.{}", names.down), width)], hidden, false);
        };
        for expert in 0..experts.count {
            pair(format!("{ours}.experts.{expert}"), format!("{theirs}.experts.{expert}"), experts.hidden, is_joined);
        }
        if let Some(SharedExpert { hidden, has_gate }) = experts.shared {
            let stored = format!("{theirs}.{}", names.shared);
            pair(format!("{ours}.shared"), stored.clone(), hidden, false);
            if has_gate {
                layout.parts(format!("{ours}.shared_gate"), vec![(format!("{stored}_gate"), 1)], width, false);
            }
        }
        if experts.routing.is_corrected {
            let correction = format!("{theirs}.gate.e_score_correction_bias");
            layout.tensor(format!("{ours}.correction"), correction, [experts.count]);
        }
        layout.parts(format!("{ours}.router"), vec![(format!("{theirs}.gate"), experts.count)], width, false);
    }
    layout
}
