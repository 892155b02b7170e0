//! DeepSeek-V2 and DeepSeek-V3: keys and values of latents, and experts beside a shared one.

use super::{
    Family, Kind, Source,
    fields::Fields,
    layout::Layout,
    llama::{self, Kin},
    mixtral,
};
use crate::model::{
    CheckpointError,
    config::{
        AttentionConfig, ExpertGroups, ExpertsConfig, LatentConfig, Positions, Routing, ScoreFunction, SharedExpert,
        TransformerConfig,
    },
};

pub(super) const FAMILIES: &[Family] = &[
    family("deepseek_v2", |source| config(source.fields, second(source.fields)?)),
    family("deepseek_v3", |source| config(source.fields, third(source.fields)?)),
];

type Result<T> = std::result::Result<T, CheckpointError>;

const fn family(name: &'static str, config: fn(&Source<'_>) -> Result<TransformerConfig>) -> Family {
    Family {
        name,
        kind: Kind::Decoder,
        layers: "num_hidden_layers",
        prefixes: &["model."],
        sizes: None,
        config,
        layout: |source, config| layout(source, config).map_err(crate::Error::from),
    }
}

/// What one of the two versions has of its own.
struct Version {
    routing: Routing,
    is_normalized: bool,
    first_experts: usize,
    is_interleaved: bool,
}

/// An error for a text that is another than the one that the version has, where it is there.
fn expect_text(fields: &Fields, field: &str, only: &str, supported: &'static str) -> Result<()> {
    match fields.text_if(field)?.is_none_or(|text| text == only) {
        true => Ok(()),
        false => Err(fields.unsupported(field, supported)),
    }
}

fn groups(fields: &Fields, best: usize) -> Result<Option<ExpertGroups>> {
    Ok(Some(ExpertGroups { count: fields.size("n_group")?, kept: fields.size("topk_group")?, best }))
}

fn second(fields: &Fields) -> Result<Version> {
    expect_text(fields, "scoring_func", "softmax", "supported is softmax")?;
    // DeepSeek's own code divides and does not scale then, and transformers scales and does not divide.
    fields.expect_flag("norm_topk_prob", false, "programs differ in what they make of it")?;
    let groups = match fields.text_if("topk_method")?.unwrap_or("greedy") {
        "greedy" => None,
        "group_limited_greedy" => groups(fields, 1)?,
        _ => return Err(fields.unsupported("topk_method", "supported are greedy and group_limited_greedy")),
    };
    let factor = fields.positive("routed_scaling_factor", 1.0)? as f32;
    let routing = Routing { function: ScoreFunction::Softmax, is_corrected: false, groups, factor };
    Ok(Version { routing, is_normalized: false, first_experts: 0, is_interleaved: true })
}

fn third(fields: &Fields) -> Result<Version> {
    expect_text(fields, "scoring_func", "sigmoid", "supported is sigmoid")?;
    expect_text(fields, "topk_method", "noaux_tc", "supported is noaux_tc")?;
    let factor = fields.positive("routed_scaling_factor", 2.5)? as f32;
    let routing = Routing { function: ScoreFunction::Sigmoid, is_corrected: true, groups: groups(fields, 2)?, factor };
    Ok(Version {
        routing,
        is_normalized: fields.flag("norm_topk_prob", true)?,
        first_experts: 3,
        is_interleaved: fields.flag("rope_interleave", true)?,
    })
}

fn config(fields: &Fields, version: Version) -> Result<TransformerConfig> {
    fields.expect_flag("attention_bias", false, "layers of attention have no biases")?;
    fields.expect_flag("mlp_bias", false, "feed-forward layers have no biases")?;
    let own = llama::config(fields, Kin::Llama)?;
    let heads = own.attention.heads;
    if own.attention.kv_heads != heads {
        return Err(fields.unsupported("num_key_value_heads", "each head has keys of its own, made of one latent"));
    }
    if fields.size_if("moe_layer_freq")?.is_some_and(|step| step != 1) {
        return Err(fields.unsupported("moe_layer_freq", "every layer behind the first ones has experts"));
    }
    let [plain, rotated] = [fields.size("qk_nope_head_dim")?, fields.size("qk_rope_head_dim")?];
    let head_dim = plain.saturating_add(rotated);
    let rotation = llama::rotation_of(fields, llama::rope_parameters(fields)?, 10_000.0)?;
    // Null is no latent of queries; where the field is absent, transformers has a default.
    let queries = match fields.values().get("q_lora_rank") {
        Some(value) if value.is_null() => None,
        _ => Some(fields.size("q_lora_rank")?),
    };
    let shared = fields.size_if("n_shared_experts")?.filter(|count| *count > 0);
    let hidden = fields.size("moe_intermediate_size")?;
    let first = fields.size_if("first_k_dense_replace")?.unwrap_or(version.first_experts).min(own.layers);
    let experts = ExpertsConfig {
        shared: shared.map(|count| SharedExpert { hidden: count.saturating_mul(hidden), has_gate: false }),
        routing: version.routing,
        is_normalized: version.is_normalized,
        dense_layers: (0..first).collect(),
        ..mixtral::experts(fields, "n_routed_experts", hidden)?
    };
    Ok(TransformerConfig {
        positions: Positions::Rotary(rotation.rope.clone()),
        attention: AttentionConfig {
            head_dim,
            rotated: Some(rotated),
            scale: scale(fields, head_dim)?,
            latent: Some(LatentConfig {
                queries,
                keys: fields.size("kv_lora_rank")?,
                value_dim: fields.size("v_head_dim")?,
                is_interleaved: version.is_interleaved,
                factor: rotation.factor as f32,
            }),
            ..own.attention
        },
        experts: Some(experts),
        ..own
    })
}

/// The scale of scores where a stretched context changes it: of all elements, rotated or not, by `mscale_all_dim`.
fn scale(fields: &Fields, head_dim: usize) -> Result<Option<f32>> {
    let Some(scaling) = llama::rope_parameters(fields)? else { return Ok(None) };
    let is_scaled = scaling.text_if(llama::type_field(&scaling))?.is_some_and(|name| name != "default");
    let Some(all) = scaling.number_if("mscale_all_dim")?.filter(|all| is_scaled && *all != 0.0) else {
        return Ok(None);
    };
    let stretch = scaling.positive_number("factor")?;
    let factor = if stretch <= 1.0 { 1.0 } else { 0.1 * all * stretch.ln() + 1.0 };
    Ok(Some((factor * factor / (head_dim as f64).sqrt()) as f32))
}

/// Where the tensors lie: those of Qwen2-MoE, with layers around latents. The layers behind the last one, which predict
/// several tokens at once, are not read.
fn layout(source: &Source<'_>, config: &TransformerConfig) -> Result<Layout> {
    let (width, prefix) = (config.width, source.prefix);
    let mut layout = mixtral::layout(source, config, &mixtral::DEEPSEEK);
    let AttentionConfig { latent: Some(latent), .. } = &config.attention else { return Ok(layout) };
    for layer in 0..config.layers {
        let ours = |part: &str| format!("blocks.{layer}.{part}");
        let theirs = |part: &str| format!("{prefix}layers.{layer}.self_attn.{part}");
        let queries = match latent.queries {
            Some(elements) => (theirs("q_a_proj"), elements),
            None => (theirs("q_proj"), config.query_width()),
        };
        let keys = (theirs("kv_a_proj_with_mqa"), latent.keys.saturating_add(config.rotated()));
        layout.parts(ours("attn.qkv"), vec![queries, keys], width, false);
        for (name, outputs, place) in config.of_latents() {
            let stored = if name == "attn.query" { "q" } else { "kv" };
            layout.gain(ours(&format!("{name}.norm")), theirs(&format!("{stored}_a_layernorm")), place.len(), 0.0);
            layout.parts(ours(name), vec![(theirs(&format!("{stored}_b_proj")), outputs)], place.len(), false);
        }
        layout.parts(ours("attn.out"), vec![(theirs("o_proj"), width)], config.value_width(), false);
    }
    let further = source.fields.size_if("num_nextn_predict_layers")?.unwrap_or_default().min(64);
    let behind = (config.layers..config.layers + further).map(|layer| format!("{prefix}layers.{layer}.").into());
    layout.ignored_beginnings.extend(behind);
    Ok(layout)
}
