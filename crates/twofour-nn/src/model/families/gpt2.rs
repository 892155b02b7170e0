//! GPT-2.

use super::{
    Family, Kind, SizeFields,
    fields::Fields,
    layout::{Layout, StoredLinear},
    llama::activation,
};
use crate::model::{
    CheckpointError,
    config::{FeedForwardConfig, GptConfig, ModelOutput, NormConfig, Positions, TransformerConfig},
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "gpt2",
    kind: Kind::Decoder,
    layers: "n_layer",
    prefixes: &["transformer."],
    sizes: Some(SizeFields::features("n_inner")),
    config: |source| config(source.fields),
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

/// Reads the configuration.
fn config(fields: &Fields) -> Result<TransformerConfig, CheckpointError> {
    fields.expect_flag("scale_attn_weights", true, "scores are divided by the root of the head's size")?;
    fields.expect_flag("scale_attn_by_inverse_layer_idx", false, "scores are not scaled by layer")?;
    fields.expect_flag("add_cross_attention", false, "there is no encoder to attend to")?;
    let (width, heads) = (fields.size("n_embd")?, fields.size("n_head")?);
    let sizes = GptConfig {
        layers: fields.layers("n_layer")?,
        width,
        heads,
        context: fields.size("n_positions")?,
        feed_forward: fields.size_if("n_inner")?.unwrap_or(4 * width),
    };
    let llama = TransformerConfig::llama(&sizes, heads, fields.size("vocab_size")?);
    let gpt = TransformerConfig { input: llama.input, ..TransformerConfig::from(&sizes) };
    Ok(TransformerConfig {
        positions: Positions::Learned,
        norm: NormConfig { epsilon: fields.positive("layer_norm_epsilon", 1e-5)? as f32, ..gpt.norm },
        feed_forward: FeedForwardConfig {
            activation: activation(fields, "activation_function", "gelu_new")?,
            ..gpt.feed_forward
        },
        output: ModelOutput::Vocabulary { tied: fields.flag("tie_word_embeddings", true)?, soft_cap: None },
        ..gpt
    })
}

/// Where the tensors lie; `prefix` is `transformer.`, or nothing where the model was stored without its head's class.
fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let (width, context) = (config.width, config.context());
    let feed_forward = config.feed_forward.hidden;
    let mut layout = Layout { ignored: vec![".attn.bias", ".attn.masked_bias"], ..Layout::default() };
    for layer in 0..config.layers {
        let (ours, theirs) =
            (|part: &str| format!("blocks.{layer}.{part}"), |part: &str| format!("{prefix}h.{layer}.{part}"));
        layout.norm(&ours("attn.norm"), &theirs("ln_1"), width);
        layout.norm(&ours("mlp.norm"), &theirs("ln_2"), width);
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
    layout.norm("norm", &format!("{prefix}ln_f"), width);
    layout.tensor("positions.weight", format!("{prefix}wpe.weight"), [context, width]);
    layout.vocabulary(config, &format!("{prefix}wte"), "lm_head.weight");
    layout
}
