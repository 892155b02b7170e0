//! LLaMA, Mistral, Qwen2 and Qwen3.

use super::{Family, Kind, SizeFields, Source, fields::Fields, layout::Layout, phi};
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
    Family {
        sizes: Some(SizeFields { divides_width: true, ..SizeFields::LLAMA }),
        ..family("llama", |source| config(source.fields, Kin::Llama))
    },
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
        sizes: Some(SizeFields::LLAMA),
        config,
        layout: |source, config| Ok(layout(config, source.prefix)),
    }
}

/// What a family of this shape has beside the sizes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kin {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    /// Heads are rotated in part.
    Partial,
    Phi,
}

type Result<T> = std::result::Result<T, CheckpointError>;

/// Reads the configuration.
pub(super) fn config(fields: &Fields, family: Kin) -> Result<TransformerConfig> {
    let sizes = fields.sizes()?;
    let GptConfig { layers, width, heads, .. } = sizes;
    let kv_heads = match (fields.size_if("num_key_value_heads")?, family) {
        (Some(heads), _) => heads,
        (None, Kin::Llama | Kin::Partial | Kin::Phi) => heads,
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
        Kin::Mistral | Kin::Qwen2 | Kin::Partial | Kin::Phi => false,
    };
    let llama = TransformerConfig::llama(&sizes, kv_heads, fields.size("vocab_size")?);
    let rotation = match family {
        Kin::Phi => phi::rotation(fields)?,
        Kin::Partial => rotation_of(fields, rope_parameters(fields)?, 10_000.0)?,
        _ => rotation(fields)?,
    };
    Ok(TransformerConfig {
        norm: NormConfig { epsilon: fields.positive("rms_norm_eps", 1e-6)? as f32, ..llama.norm },
        attention: AttentionConfig {
            head_dim,
            qkv_bias: attention_bias || family == Kin::Qwen2,
            out_bias: attention_bias,
            head_norms: family == Kin::Qwen3,
            scale: rotation.scale(head_dim),
            rotated: rotation.rotated(head_dim),
            windows: windows(fields, family, layers)?,
            ..llama.attention
        },
        feed_forward: FeedForwardConfig {
            activation: activation(fields, "hidden_act", "silu")?,
            bias: family == Kin::Llama && fields.flag("mlp_bias", false)?,
            ..llama.feed_forward
        },
        output: ModelOutput::Vocabulary { tied: fields.flag("tie_word_embeddings", false)?, soft_cap: None },
        positions: Positions::Rotary(rotation.rope),
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

/// A rotation, and what goes with it.
#[derive(Debug, Clone)]
pub(super) struct Rotation {
    pub(super) rope: Rope,
    /// What queries and keys are multiplied by, each.
    pub(super) factor: f64,
    /// The share of a head that is rotated.
    pub(super) share: f64,
}

impl Rotation {
    /// The scale of scores of heads of so many elements, where it is not the usual one.
    pub(super) fn scale(&self, head_dim: usize) -> Option<f32> {
        let scale = self.factor * self.factor / (head_dim as f64).sqrt();
        Some(scale as f32).filter(|_| self.factor != 1.0)
    }

    /// How many elements of heads of so many are rotated, where not all are.
    pub(super) fn rotated(&self, head_dim: usize) -> Option<usize> {
        Some((head_dim as f64 * self.share) as usize).filter(|rotated| *rotated != head_dim)
    }
}

/// Rotary positions: `rope_scaling`, as older versions and users write it, comes before `rope_parameters`, and with
/// either, `rope_theta` may be in it or beside it. transformers 5 has the same order.
pub(super) fn rotation(fields: &Fields) -> Result<Rotation> {
    let found = rotation_of(fields, rope_parameters(fields)?, 10_000.0)?;
    if found.share != 1.0 {
        let [own, above] = [rope_parameters(fields)?.unwrap_or_else(|| fields.clone()), fields.clone()];
        let holder = if own.get("partial_rotary_factor").is_some() { own } else { above };
        return Err(holder.unsupported("partial_rotary_factor", "whole heads are rotated"));
    }
    Ok(found)
}

/// What describes the rotation, where it is not in fields beside others.
pub(super) fn rope_parameters(fields: &Fields) -> Result<Option<Fields>> {
    match fields.object_if("rope_scaling")?.filter(|scaling| !scaling.is_empty()) {
        Some(scaling) => Ok(Some(scaling)),
        None => fields.object_if("rope_parameters"),
    }
}

/// The rotation that these parameters describe, or the fields beside them, without its scaling.
pub(super) fn unscaled(fields: &Fields, parameters: Option<&Fields>, default_base: f64) -> Result<Rotation> {
    let holder = parameters.filter(|parameters| parameters.get("rope_theta").is_some()).unwrap_or(fields);
    let base = holder.positive("rope_theta", default_base)?;
    let holders = [parameters, Some(fields)];
    let shares = holders.into_iter().flatten().map(|holder| holder.number_if("partial_rotary_factor"));
    let share = shares.collect::<Result<Vec<_>>>()?.into_iter().flatten().next().unwrap_or(1.0);
    Ok(Rotation { rope: Rope { base, scaling: None }, factor: 1.0, share })
}

/// The field of the type of a scaling, which had another name in older versions.
pub(super) fn type_field(parameters: &Fields) -> &'static str {
    if parameters.get("rope_type").is_some() { "rope_type" } else { "type" }
}

/// The rotation that these parameters describe, or the fields beside them.
pub(super) fn rotation_of(fields: &Fields, parameters: Option<Fields>, default_base: f64) -> Result<Rotation> {
    let plain = unscaled(fields, parameters.as_ref(), default_base)?;
    let Some(parameters) = parameters.as_ref() else { return Ok(plain) };
    let (base, key) = (plain.rope.base, type_field(parameters));
    let scaled = |scaling| Ok(Rotation { rope: Rope { base, scaling: Some(scaling) }, ..plain });
    match parameters.text_if(key)? {
        None | Some("default") => Ok(plain),
        Some("linear") => scaled(RopeScaling::Linear { factor: parameters.positive_number("factor")? }),
        // Up to the context, the longest text here, frequencies are those that the model was trained with.
        Some("dynamic") => parameters.positive_number("factor").map(|_| plain),
        Some("llama3") => scaled(RopeScaling::Llama3 {
            factor: parameters.positive_number("factor")?,
            low_frequency_factor: parameters.positive_number("low_freq_factor")?,
            high_frequency_factor: parameters.positive_number("high_freq_factor")?,
            original_context: original_context(fields, parameters)?,
        }),
        // The place of a pair is a logarithm to that base.
        Some("yarn") if base <= 1.0 => {
            let holder = if parameters.get("rope_theta").is_some() { parameters } else { fields };
            Err(holder.unsupported("rope_theta", "yarn requires a base above 1"))
        }
        Some("yarn") => {
            let (factor, original_context) = yarn_sizes(fields, parameters)?;
            let scaling = RopeScaling::Yarn {
                factor,
                fast_turns: parameters.positive("beta_fast", 32.0)?,
                slow_turns: parameters.positive("beta_slow", 1.0)?,
                original_context,
                rounded: parameters.flag("truncate", true)?,
            };
            Ok(Rotation { factor: yarn_factor(parameters, factor)?, ..scaled(scaling)? })
        }
        Some(_) => Err(parameters.unsupported(key, "supported are default, linear, dynamic, yarn and llama3")),
    }
}

/// By how much YaRN stretches the context, and the context before.
fn yarn_sizes(fields: &Fields, scaling: &Fields) -> Result<(f64, f64)> {
    let original_context = original_context(fields, scaling)?;
    let factor = match scaling.get("factor") {
        Some(_) => scaling.positive_number("factor")?,
        None => fields.positive_number("max_position_embeddings")? / original_context,
    };
    Ok((factor, original_context))
}

/// What YaRN multiplies queries and keys by.
fn yarn_factor(scaling: &Fields, stretch: f64) -> Result<f64> {
    if scaling.get("attention_factor").is_some() {
        return scaling.positive_number("attention_factor");
    }
    let by = |scale: f64| if stretch <= 1.0 { 1.0 } else { 0.1 * scale * stretch.ln() + 1.0 };
    let [own, all] = ["mscale", "mscale_all_dim"].map(|field| scaling.number_if(field));
    Ok(match (own?.filter(|scale| *scale != 0.0), all?.filter(|scale| *scale != 0.0)) {
        (Some(own), Some(all)) => by(own) / by(all),
        _ => by(1.0),
    })
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
        Kin::Llama | Kin::Partial => return Ok(vec![]),
        Kin::Mistral | Kin::Phi => true,
        Kin::Qwen2 | Kin::Qwen3 => fields.flag("use_sliding_window", false)?,
    };
    let Some(window) = fields.size_if("sliding_window")?.filter(|_| is_used) else { return Ok(vec![]) };
    let Some(types) = fields.texts_if("layer_types")? else {
        let first = match family {
            Kin::Qwen2 | Kin::Qwen3 => fields.size_if("max_window_layers")?.unwrap_or(28),
            Kin::Llama | Kin::Mistral | Kin::Partial | Kin::Phi => 0,
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
    let (width, head_dim) = (config.width, config.attention.head_dim);
    let feed_forward = config.feed_forward.hidden;
    let (queries, keys) = (config.query_width(), config.kv_width());
    let mut layout = Layout { ignored: vec!["rotary_emb.inv_freq"], ..Layout::default() };
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
        layout.parts(ours("attn.qkv"), qkv, width, config.attention.qkv_bias);
        let out = vec![(theirs("self_attn.o_proj"), width)];
        layout.parts(ours("attn.out"), out, queries, config.attention.out_bias);
        let up = ["gate", "up"].map(|part| (theirs(&format!("mlp.{part}_proj")), feed_forward)).to_vec();
        layout.parts(ours("mlp.up"), up, width, config.feed_forward.bias);
        let down = vec![(theirs("mlp.down_proj"), width)];
        layout.parts(ours("mlp.down"), down, feed_forward, config.feed_forward.bias);
    }
    layout.gain("norm".to_owned(), format!("{prefix}norm"), width, 0.0);
    layout.vocabulary(config, &format!("{prefix}embed_tokens"), "lm_head.weight");
    layout
}
