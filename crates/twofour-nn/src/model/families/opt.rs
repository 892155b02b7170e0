//! OPT.

use super::{Family, Kind, SizeFields, fields::Fields, layout::Layout, llama::activation};
use crate::model::{
    CheckpointError,
    config::{
        FeedForwardConfig, GptConfig, ModelInput, ModelOutput, NormConfig, NormPlace, Positions, TokenInput,
        TransformerConfig,
    },
};

/// Rows of the table of positions that no token has.
const BEFORE_POSITIONS: usize = 2;

pub(super) const FAMILIES: &[Family] = &[Family {
    name: "opt",
    kind: Kind::Decoder,
    layers: "num_hidden_layers",
    prefixes: &["model.decoder.", "decoder."],
    sizes: Some(SizeFields::features("ffn_dim")),
    config: |source| config(source.fields),
    layout: |source, config| Ok(layout(config, source.prefix)),
}];

fn config(fields: &Fields) -> Result<TransformerConfig, CheckpointError> {
    let width = fields.size("hidden_size")?;
    let place = match fields.flag("do_layer_norm_before", true)? {
        true => NormPlace::Before,
        false => NormPlace::After,
    };
    fields.expect_flag("_remove_final_layer_norm", false, "there is a norm after the last layer")?;
    fields.expect_flag("layer_norm_elementwise_affine", true, "norms have parameters")?;
    fields.expect_flag("enable_bias", true, "linear layers have biases")?;
    let sizes = GptConfig {
        layers: fields.layers("num_hidden_layers")?,
        width,
        heads: fields.size("num_attention_heads")?,
        context: fields.size("max_position_embeddings")?,
        feed_forward: fields.size("ffn_dim")?,
    };
    let vocabulary = fields.size("vocab_size")?;
    let gpt = TransformerConfig::from(&sizes);
    let table_width = fields.size_if("word_embed_proj_dim")?.filter(|table| *table != width);
    Ok(TransformerConfig {
        input: ModelInput::Tokens(TokenInput { table_width, ..TokenInput::plain(vocabulary, sizes.context) }),
        positions: Positions::Learned,
        norm: NormConfig { epsilon: 1e-5, place, ..gpt.norm },
        feed_forward: FeedForwardConfig {
            activation: activation(fields, "activation_function", "relu")?,
            ..gpt.feed_forward
        },
        output: ModelOutput::Vocabulary { tied: fields.flag("tie_word_embeddings", true)?, soft_cap: None },
        ..gpt
    })
}

fn layout(config: &TransformerConfig, prefix: &str) -> Layout {
    let (width, hidden) = (config.width, config.feed_forward.hidden);
    let heads = config.query_width();
    let mut layout = Layout::default();
    for layer in 0..config.layers {
        let (ours, theirs) =
            (|part: &str| format!("blocks.{layer}.{part}"), |part: &str| format!("{prefix}layers.{layer}.{part}"));
        layout.norm(&ours("attn.norm"), &theirs("self_attn_layer_norm"), width);
        layout.norm(&ours("mlp.norm"), &theirs("final_layer_norm"), width);
        let qkv = ["q", "k", "v"].map(|part| (theirs(&format!("self_attn.{part}_proj")), heads)).to_vec();
        layout.parts(ours("attn.qkv"), qkv, width, true);
        layout.one_linear(ours("attn.out"), theirs("self_attn.out_proj"), (width, heads));
        layout.one_linear(ours("mlp.up"), theirs("fc1"), (hidden, width));
        layout.one_linear(ours("mlp.down"), theirs("fc2"), (width, hidden));
    }
    if config.norm.place == NormPlace::Before {
        layout.norm("norm", &format!("{prefix}final_layer_norm"), width);
    }
    if config.is_projected() {
        let table_width = config.table_width();
        layout.parts("project_in", vec![(format!("{prefix}project_in"), width)], table_width, false);
        layout.parts("project_out", vec![(format!("{prefix}project_out"), table_width)], width, false);
    }
    layout.positions(format!("{prefix}embed_positions.weight"), [config.context(), width], BEFORE_POSITIONS);
    layout.vocabulary(config, &format!("{prefix}embed_tokens"), "lm_head.weight");
    layout
}
