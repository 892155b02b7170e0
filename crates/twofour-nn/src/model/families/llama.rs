//! LLaMA, Mistral, Qwen2 and Qwen3.

use super::{
    Family, Kind, Source,
    fields::Fields,
    layout::{Layout, StoredLinear},
};
use crate::{
    engine::Nonlinearity,
    model::CheckpointError,
    model::config::{
        AttentionConfig, FeedForwardConfig, GptConfig, ModelOutput, NormConfig, Positions, Rope, RopeScaling,
        TransformerConfig,
    },
};

/// The families of this shape.
pub(super) const FAMILIES: &[Family] = &[
    family("llama", |source| config(source.fields, Kin::Llama)),
    family("mistral", |source| config(source.fields, Kin::Mistral)),
    family("qwen2", |source| config(source.fields, Kin::Qwen2)),
    family("qwen3", |source| config(source.fields, Kin::Qwen3)),
];

const fn family(name: &'static str, config: fn(&Source<'_>) -> Result<TransformerConfig>) -> Family {
    Family {
        name,
        kind: Kind::Decoder,
        layers: "num_hidden_layers",
        prefixes: &["model.", "transformer."],
        config,
        layout: |source, config| Ok(layout(config, source.prefix)),
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kin {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
}

type Result<T> = std::result::Result<T, CheckpointError>;

/// Reads the configuration.
fn config(fields: &Fields, family: Kin) -> Result<TransformerConfig> {
    let (layers, width, heads) =
        (fields.layers("num_hidden_layers")?, fields.size("hidden_size")?, fields.size("num_attention_heads")?);
    let kv_heads = match (fields.size_if("num_key_value_heads")?, family) {
        (Some(heads), _) => heads,
        (None, Kin::Llama) => heads,
        (None, _) => fields.size("num_key_value_heads")?,
    };
    let head_dim = match (fields.size_if("head_dim")?, family) {
        (Some(size), _) => size,
        (None, Kin::Qwen3) => fields.size("head_dim")?,
        (None, _) => width / heads.max(1),
    };
    fields.expect_flag("use_bidirectional_attention", false, "attention is causal")?;
    let attention_bias = match family {
        Kin::Llama | Kin::Qwen3 => fields.flag("attention_bias", false)?,
        Kin::Mistral | Kin::Qwen2 => false,
    };
    let sizes = GptConfig {
        layers,
        width,
        heads,
        context: fields.size("max_position_embeddings")?,
        feed_forward: fields.size("intermediate_size")?,
    };
    let llama = TransformerConfig::llama(&sizes, kv_heads, fields.size("vocab_size")?);
    Ok(TransformerConfig {
        positions: Positions::Rotary(rope(fields)?),
        norm: NormConfig { epsilon: fields.positive("rms_norm_eps", 1e-6)? as f32, ..llama.norm },
        attention: AttentionConfig {
            head_dim,
            qkv_bias: attention_bias || family == Kin::Qwen2,
            out_bias: attention_bias,
            head_norms: family == Kin::Qwen3,
            windows: windows(fields, family, layers)?,
            ..llama.attention
        },
        feed_forward: FeedForwardConfig {
            activation: activation(fields, "hidden_act", "silu")?,
            bias: family == Kin::Llama && fields.flag("mlp_bias", false)?,
            ..llama.feed_forward
        },
        output: ModelOutput::Vocabulary { tied: fields.flag("tie_word_embeddings", false)?, soft_cap: None },
        ..llama
    })
}

/// The function of that name.
pub(super) fn activation(fields: &Fields, field: &str, default: &str) -> Result<Nonlinearity> {
    Ok(match fields.text_if(field)?.unwrap_or(default) {
        "silu" | "swish" => Nonlinearity::Silu,
        "relu" => Nonlinearity::Relu,
        "gelu" => Nonlinearity::Gelu,
        "gelu_new" | "gelu_pytorch_tanh" => Nonlinearity::TanhGelu,
        _ => return Err(fields.unsupported(field, "supported are silu, relu, gelu, gelu_new and gelu_pytorch_tanh")),
    })
}

/// Rotary positions: `rope_scaling`, as older versions and users write it, comes before `rope_parameters`, and with
/// either, `rope_theta` may be in it or beside it.
/// transformers 5 has the same order.
pub(super) fn rope(fields: &Fields) -> Result<Rope> {
    let parameters = match fields.object_if("rope_scaling")?.filter(|scaling| !scaling.is_empty()) {
        Some(scaling) => Some(scaling),
        None => fields.object_if("rope_parameters")?,
    };
    rope_of(fields, parameters, 10_000.0)
}

/// The rotation that these parameters describe, or the fields beside them.
pub(super) fn rope_of(fields: &Fields, parameters: Option<Fields>, default_base: f64) -> Result<Rope> {
    let holder = parameters.as_ref().filter(|parameters| parameters.get("rope_theta").is_some()).unwrap_or(fields);
    let base = holder.positive("rope_theta", default_base)?;
    for fields in [Some(fields), parameters.as_ref()].into_iter().flatten() {
        if fields.number_if("partial_rotary_factor")?.unwrap_or(1.0) != 1.0 {
            return Err(fields.unsupported("partial_rotary_factor", "whole heads are rotated"));
        }
    }
    let Some(parameters) = parameters else { return Ok(Rope { base, scaling: None }) };
    let key = if parameters.get("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match parameters.text_if(key)? {
        None | Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear { factor: parameters.positive_number("factor")? }),
        Some("llama3") => Some(RopeScaling::Llama3 {
            factor: parameters.positive_number("factor")?,
            low_frequency_factor: parameters.positive_number("low_freq_factor")?,
            high_frequency_factor: parameters.positive_number("high_freq_factor")?,
            original_context: original_context(fields, &parameters)?,
        }),
        Some(_) => return Err(parameters.unsupported(key, "supported are default, linear and llama3")),
    };
    Ok(Rope { base, scaling })
}

/// The context that positions were trained for: the configuration's own field, that of the scaling, or the whole
/// context, in this order, as in transformers 5.
fn original_context(fields: &Fields, scaling: &Fields) -> Result<f64> {
    const FIELD: &str = "original_max_position_embeddings";
    match [fields, scaling].into_iter().find(|holder| holder.get(FIELD).is_some()) {
        Some(holder) => holder.positive_number(FIELD),
        None => fields.positive_number("max_position_embeddings"),
    }
}

/// The sliding window of each layer: of all layers, of those from `max_window_layers` on, or of those that
/// `layer_types` lists.
fn windows(fields: &Fields, family: Kin, layers: usize) -> Result<Vec<Option<usize>>> {
    let is_used = match family {
        Kin::Llama => return Ok(vec![]),
        Kin::Mistral => true,
        Kin::Qwen2 | Kin::Qwen3 => fields.flag("use_sliding_window", false)?,
    };
    let Some(window) = fields.size_if("sliding_window")?.filter(|_| is_used) else { return Ok(vec![]) };
    let Some(types) = fields.texts_if("layer_types")? else {
        let first = match family {
            Kin::Qwen2 | Kin::Qwen3 => fields.size_if("max_window_layers")?.unwrap_or(28),
            Kin::Llama | Kin::Mistral => 0,
        };
        return Ok((0..layers).map(|layer| (layer >= first).then_some(window)).collect());
    };
    windows_of_types(fields, &types, window)
}

/// The windows of layers of these types.
pub(super) fn windows_of_types(fields: &Fields, types: &[&str], window: usize) -> Result<Vec<Option<usize>>> {
    let of_type = |name: &&str| match *name {
        "full_attention" => Ok(None),
        "sliding_attention" => Ok(Some(window)),
        _ => Err(fields.unsupported("layer_types", "supported are full_attention and sliding_attention")),
    };
    types.iter().map(of_type).collect()
}

/// Where the tensors lie; `prefix` is `model.`, or nothing where the model was stored without its head's class.
pub(in crate::model) fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let (width, vocabulary, head_dim) = (config.width, config.vocabulary(), config.attention.head_dim);
    let feed_forward = config.feed_forward.hidden;
    let (queries, keys) = (config.query_width(), config.kv_width());
    let mut layout = Layout { ignored: vec!["rotary_emb.inv_freq"], ..Layout::default() };
    let embedding = format!("{prefix}embed_tokens");
    let plain = |parts: Vec<(String, usize)>, inputs: usize, has_bias: bool| StoredLinear {
        parts,
        inputs,
        has_bias,
        is_transposed: false,
    };
    for layer in 0..config.layers {
        let (ours, theirs) =
            (|part: &str| format!("blocks.{layer}.{part}"), |part: &str| format!("{prefix}layers.{layer}.{part}"));
        layout.gain(ours("attn.norm"), theirs("input_layernorm"), width, 0.0);
        layout.gain(ours("mlp.norm"), theirs("post_attention_layernorm"), width, 0.0);
        if config.attention.head_norms {
            layout.gain(ours("attn.query_norm"), theirs("self_attn.q_norm"), head_dim, 0.0);
            layout.gain(ours("attn.key_norm"), theirs("self_attn.k_norm"), head_dim, 0.0);
        }
        let qkv = [("q", queries), ("k", keys), ("v", keys)];
        let qkv = qkv.map(|(part, outputs)| (theirs(&format!("self_attn.{part}_proj")), outputs)).to_vec();
        layout.linear(ours("attn.qkv"), plain(qkv, width, config.attention.qkv_bias));
        let out = vec![(theirs("self_attn.o_proj"), width)];
        layout.linear(ours("attn.out"), plain(out, queries, config.attention.out_bias));
        let up = ["gate", "up"].map(|part| (theirs(&format!("mlp.{part}_proj")), feed_forward)).to_vec();
        layout.linear(ours("mlp.up"), plain(up, width, config.feed_forward.bias));
        let down = vec![(theirs("mlp.down_proj"), width)];
        layout.linear(ours("mlp.down"), plain(down, feed_forward, config.feed_forward.bias));
    }
    layout.gain("norm".to_owned(), format!("{prefix}norm"), width, 0.0);
    if config.is_tied() {
        layout.ignored.push("lm_head.weight");
        layout.linear("head", plain(vec![(embedding, vocabulary)], width, false));
    } else {
        layout.tensor("embedding.weight", format!("{embedding}.weight"), [vocabulary, width]);
        layout.linear("head", plain(vec![("lm_head".to_owned(), vocabulary)], width, false));
    }
    layout
}
