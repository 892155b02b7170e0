//! The language part of models of text and images: LLaVA and Qwen2.5-VL. It computes text alone; the other part stays
//! as it is stored.

use super::{Family, Kind, Source, fields::Fields, layout::Layout};
use crate::model::{CheckpointError, config::TransformerConfig};

pub(super) const FAMILIES: &[Family] =
    &[family("llava"), family("llava_next"), family("qwen2_vl"), family("qwen2_5_vl")];

type Result<T> = std::result::Result<T, CheckpointError>;

const fn family(name: &'static str) -> Family {
    Family {
        name,
        kind: Kind::Decoder,
        layers: "text_config",
        prefixes: &["language_model.model.", "model.language_model.", "language_model.", "model."],
        sizes: None,
        config,
        layout,
    }
}

/// What LLaVA's configurations leave out: the defaults of LLaMA.
const LLAMA: [(&str, usize); 6] = [
    ("vocab_size", 32_000),
    ("hidden_size", 4096),
    ("intermediate_size", 11_008),
    ("num_hidden_layers", 32),
    ("num_attention_heads", 32),
    ("max_position_embeddings", 2048),
];

/// The text's family, and its fields: an object of their own, or, in older configurations, beside those of images.
fn text(fields: &Fields) -> Result<(&'static Family, Fields)> {
    let own = fields.object_if("text_config")?.unwrap_or_else(|| fields.clone());
    let name = match own.text_if("model_type")? {
        Some("qwen2_vl" | "qwen2_vl_text" | "qwen2_5_vl" | "qwen2_5_vl_text") => "qwen2",
        Some(name) => name,
        None => "llama",
    };
    let family = Family::named(name).filter(|family| family.kind == Kind::Decoder);
    let family =
        family.ok_or_else(|| own.unsupported("model_type", "the text's model is to be one of the decoders"))?;
    let mut own = if name == "llama" { own.with_defaults(&LLAMA) } else { own };
    own.inherit(fields, "tie_word_embeddings");
    Ok((family, own.with_rotation_of_text()?))
}

fn config(source: &Source<'_>) -> Result<TransformerConfig> {
    let (family, fields) = text(source.fields)?;
    (family.config)(&Source { fields: &fields, ..*source })
}

fn layout(source: &Source<'_>, config: &TransformerConfig) -> crate::Result<Layout> {
    let (family, fields) = text(source.fields)?;
    let mut layout = (family.layout)(&Source { fields: &fields, ..*source }, config)?;
    let head = layout.linears.get_mut("head").and_then(|head| head.parts.first_mut());
    if let Some((name, _)) = head.filter(|_| source.prefix == "language_model.model.")
        && name == "lm_head"
    {
        *name = "language_model.lm_head".to_owned();
    }
    for other in ["visual.", "vision_tower.", "multi_modal_projector.", "image_newline"] {
        layout.ignored_beginnings.extend([other.into(), format!("model.{other}").into()]);
    }
    Ok(layout)
}
