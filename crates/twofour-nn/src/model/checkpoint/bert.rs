//! BERT.

use std::path::Path;

use twofour::file::Reader;

use super::{
    CheckpointError,
    fields::Fields,
    layout::{Layout, StoredLinear},
    llama::activation,
};
use crate::{Result, model::encoder::EncoderConfig};

/// An encoder's directory whose configuration and headers were read and checked.
#[derive(Debug)]
pub(crate) struct EncoderCheckpoint {
    pub(crate) config: EncoderConfig,
    pub(crate) reader: Reader,
    pub(crate) layout: Layout,
}

impl EncoderCheckpoint {
    /// Opens a directory.
    pub(crate) fn open(directory: &Path) -> Result<Self> {
        let fields = Fields::read(&directory.join(super::CONFIG_FILE))?;
        if fields.text_if("model_type")? != Some("bert") {
            let found = fields.get("model_type").map_or("absent".to_owned(), ToString::to_string);
            let path = fields.path().to_owned();
            return Err(CheckpointError::UnsupportedModel { path, found, supported: "bert" }.into());
        }
        let config = config(&fields)?;
        config.validate()?;
        let reader = Reader::open(directory)?;
        if config.layers > reader.tensors().count() {
            return Err(fields.unsupported("num_hidden_layers", "the files have fewer tensors than that").into());
        }
        let has = |prefix: &str| reader.tensors().any(|tensor| tensor.name.starts_with(prefix));
        let prefix = if has("bert.") { "bert." } else { "" };
        let layout = layout(&config, prefix, has(&format!("{prefix}pooler.")));
        layout.check(&reader)?;
        Ok(EncoderCheckpoint { config, reader, layout })
    }
}

fn config(fields: &Fields) -> Result<EncoderConfig, CheckpointError> {
    fields.expect_flag("is_decoder", false, "attention is full")?;
    fields.expect_flag("add_cross_attention", false, "there is no other sequence to attend to")?;
    if fields.text_if("position_embedding_type")?.is_some_and(|kind| kind != "absolute") {
        return Err(fields.unsupported("position_embedding_type", "positions are absolute"));
    }
    Ok(EncoderConfig {
        vocabulary: fields.size("vocab_size")?,
        context: fields.size("max_position_embeddings")?,
        token_types: fields.size_if("type_vocab_size")?.unwrap_or(2),
        layers: fields.size("num_hidden_layers")?,
        width: fields.size("hidden_size")?,
        heads: fields.size("num_attention_heads")?,
        feed_forward: fields.size("intermediate_size")?,
        epsilon: fields.number_if("layer_norm_eps")?.unwrap_or(1e-12) as f32,
        activation: activation(fields, "hidden_act", "gelu")?,
    })
}

/// Where the tensors lie; `prefix` is `bert.`, or nothing where the model was stored without a head's class.
fn layout(config: &EncoderConfig, prefix: &str, has_pooler: bool) -> Layout {
    let EncoderConfig { vocabulary, context, token_types, width, feed_forward, .. } = *config;
    let mut layout = Layout {
        ignored: vec!["embeddings.position_ids"],
        ignored_beginnings: vec!["cls.", "classifier.", "qa_outputs."],
        ..Layout::default()
    };
    let embeddings = |part: &str| format!("{prefix}embeddings.{part}");
    layout.tensor("embedding.weight", embeddings("word_embeddings.weight"), [vocabulary, width]);
    layout.tensor("positions.weight", embeddings("position_embeddings.weight"), [context, width]);
    layout.tensor("types.weight", embeddings("token_type_embeddings.weight"), [token_types, width]);
    let norm = |layout: &mut Layout, ours: String, theirs: String| {
        for part in ["weight", "bias"] {
            layout.tensor(format!("{ours}.{part}"), format!("{theirs}.{part}"), [width]);
        }
    };
    norm(&mut layout, "embedding.norm".to_owned(), embeddings("LayerNorm"));
    let linear = |parts: Vec<(String, usize)>, inputs: usize| StoredLinear {
        parts,
        inputs,
        has_bias: true,
        is_transposed: false,
    };
    for layer in 0..config.layers {
        let ours = |part: &str| format!("blocks.{layer}.{part}");
        let theirs = |part: &str| format!("{prefix}encoder.layer.{layer}.{part}");
        let qkv = ["query", "key", "value"].map(|part| (theirs(&format!("attention.self.{part}")), width));
        layout.linear(ours("attn.qkv"), linear(qkv.to_vec(), width));
        layout.linear(ours("attn.out"), linear(vec![(theirs("attention.output.dense"), width)], width));
        norm(&mut layout, ours("attn.norm"), theirs("attention.output.LayerNorm"));
        layout.linear(ours("mlp.up"), linear(vec![(theirs("intermediate.dense"), feed_forward)], width));
        layout.linear(ours("mlp.down"), linear(vec![(theirs("output.dense"), width)], feed_forward));
        norm(&mut layout, ours("mlp.norm"), theirs("output.LayerNorm"));
    }
    if has_pooler {
        layout.linear("pooler", linear(vec![(format!("{prefix}pooler.dense"), width)], width));
    }
    layout
}
