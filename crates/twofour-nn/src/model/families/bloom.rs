//! BLOOM.

use super::{
    Family, Kind,
    fields::Fields,
    layout::{Layout, by_head},
};
use crate::{
    engine::Nonlinearity,
    model::{
        CheckpointError,
        config::{
            Alibi, FeedForwardConfig, GptConfig, ModelInput, ModelOutput, NormConfig, Positions, TokenInput,
            TransformerConfig,
        },
    },
};

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "bloom",
    kind: Kind::Decoder,
    layers: "n_layer",
    prefixes: &["transformer."],
    sizes: None,
    config: |source| config(source.fields),
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

/// The longest text, where a configuration does not tell: what the models were trained on.
const CONTEXT: usize = 2048;

fn config(fields: &Fields) -> Result<TransformerConfig, CheckpointError> {
    // Older configurations have the second name.
    let named =
        |names: [&'static str; 2]| names.into_iter().find(|name| fields.get(name).is_some()).unwrap_or(names[0]);
    fields.expect_flag("apply_residual_connection_post_layernorm", false, "blocks add to what their norms read")?;
    let width = fields.size(named(["n_embed", "hidden_size"]))?;
    let sizes = GptConfig {
        layers: fields.layers(named(["n_layer", "num_hidden_layers"]))?,
        width,
        heads: fields.size(named(["n_head", "num_attention_heads"]))?,
        context: fields.size_if("seq_length")?.unwrap_or(CONTEXT),
        feed_forward: width.saturating_mul(4),
    };
    let gpt = TransformerConfig::from(&sizes);
    let input = TokenInput { is_normalized: true, ..TokenInput::plain(fields.size("vocab_size")?, sizes.context) };
    Ok(TransformerConfig {
        input: ModelInput::Tokens(input),
        positions: Positions::Alibi(Alibi { rounded: false }),
        norm: NormConfig { epsilon: fields.positive("layer_norm_epsilon", 1e-5)? as f32, ..gpt.norm },
        feed_forward: FeedForwardConfig { activation: Nonlinearity::TanhGelu, ..gpt.feed_forward },
        output: ModelOutput::Vocabulary { tied: fields.flag("tie_word_embeddings", true)?, soft_cap: None },
        ..gpt
    })
}

fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let (width, hidden, heads) = (config.width, config.feed_forward.hidden, config.attention.heads);
    let mut layout = Layout::default();
    for layer in 0..config.layers {
        let (ours, theirs) =
            (|part: &str| format!("blocks.{layer}.{part}"), |part: &str| format!("{prefix}h.{layer}.{part}"));
        layout.norm(&ours("attn.norm"), &theirs("input_layernorm"), width);
        layout.norm(&ours("mlp.norm"), &theirs("post_attention_layernorm"), width);
        let qkv = theirs("self_attention.query_key_value");
        layout.orders.insert(qkv.clone(), by_head(heads, 1, config.attention.head_dim).into());
        layout.one_linear(ours("attn.qkv"), qkv, (config.qkv_width(), width));
        layout.one_linear(ours("attn.out"), theirs("self_attention.dense"), (width, config.query_width()));
        layout.one_linear(ours("mlp.up"), theirs("mlp.dense_h_to_4h"), (hidden, width));
        layout.one_linear(ours("mlp.down"), theirs("mlp.dense_4h_to_h"), (width, hidden));
    }
    layout.norm("embedding.norm", &format!("{prefix}word_embeddings_layernorm"), width);
    layout.norm("norm", &format!("{prefix}ln_f"), width);
    layout.vocabulary(config, &format!("{prefix}word_embeddings"), "lm_head.weight");
    layout
}
