//! GPT-2.

use super::{
    CheckpointError,
    fields::Fields,
    layout::{Layout, StoredLinear},
    llama::activation,
};
use crate::model::decoder::{DecoderBiases, DecoderConfig, NormKind, Positions};

/// Reads the configuration.
pub(super) fn config(fields: &Fields) -> Result<DecoderConfig, CheckpointError> {
    fields.expect_flag("scale_attn_weights", true, "scores are divided by the root of the head's size")?;
    fields.expect_flag("scale_attn_by_inverse_layer_idx", false, "scores are not scaled by layer")?;
    fields.expect_flag("add_cross_attention", false, "there is no encoder to attend to")?;
    let (width, heads) = (fields.size("n_embd")?, fields.size("n_head")?);
    Ok(DecoderConfig {
        vocabulary: fields.size("vocab_size")?,
        context: fields.size("n_positions")?,
        layers: fields.size("n_layer")?,
        width,
        heads,
        kv_heads: heads,
        head_dim: width / heads.max(1),
        feed_forward: fields.size_if("n_inner")?.unwrap_or(4 * width),
        norm: NormKind::Layer,
        epsilon: fields.positive("layer_norm_epsilon", 1e-5)? as f32,
        positions: Positions::Learned,
        activation: activation(fields, "activation_function", "gelu_new")?,
        gated: false,
        biases: DecoderBiases { qkv: true, out: true, feed_forward: true },
        head_norms: false,
        tied: fields.flag("tie_word_embeddings", true)?,
        windows: vec![],
    })
}

/// Where the tensors lie; `prefix` is `transformer.`, or nothing where the model was stored without its head's class.
pub(super) fn layout(config: &DecoderConfig, prefix: &str) -> Layout {
    let DecoderConfig { width, feed_forward, vocabulary, context, .. } = *config;
    let mut layout = Layout { ignored: vec![".attn.bias", ".attn.masked_bias"], ..Layout::default() };
    let norm = |layout: &mut Layout, ours: String, theirs: String| {
        for part in ["weight", "bias"] {
            layout.tensor(format!("{ours}.{part}"), format!("{theirs}.{part}"), [width]);
        }
    };
    for layer in 0..config.layers {
        let (ours, theirs) =
            (|part: &str| format!("blocks.{layer}.{part}"), |part: &str| format!("{prefix}h.{layer}.{part}"));
        norm(&mut layout, ours("attn.norm"), theirs("ln_1"));
        norm(&mut layout, ours("mlp.norm"), theirs("ln_2"));
        for (part, name, outputs, inputs) in [
            ("attn.qkv", "attn.c_attn", 3 * width, width),
            ("attn.out", "attn.c_proj", width, width),
            ("mlp.up", "mlp.c_fc", feed_forward, width),
            ("mlp.down", "mlp.c_proj", width, feed_forward),
        ] {
            let parts = vec![(theirs(name), outputs)];
            layout.linear(ours(part), StoredLinear { parts, inputs, has_bias: true, is_transposed: true });
        }
    }
    norm(&mut layout, "norm".to_owned(), format!("{prefix}ln_f"));
    layout.tensor("positions.weight", format!("{prefix}wpe.weight"), [context, width]);
    let head = |name: String| StoredLinear {
        parts: vec![(name, vocabulary)],
        inputs: width,
        has_bias: false,
        is_transposed: false,
    };
    if config.tied {
        layout.ignored.push("lm_head.weight");
        layout.linear("head", head(format!("{prefix}wte")));
    } else {
        layout.tensor("embedding.weight", format!("{prefix}wte.weight"), [vocabulary, width]);
        layout.linear("head", head("lm_head".to_owned()));
    }
    layout
}
