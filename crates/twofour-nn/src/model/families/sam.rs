//! The image encoder of SAM.

use super::{Family, Kind, fields::Fields, layout::Layout, llama::activation};
use crate::{
    Error, Result,
    model::CheckpointError,
    model::config::{
        AttentionConfig, FeedForwardConfig, GptConfig, ImageInput, ModelInput, ModelOutput, NormConfig,
        TransformerConfig,
    },
};

/// The whole model, and its image encoder alone.
pub(super) const FAMILIES: &[Family] = &[
    Family {
        name: "sam",
        kind: Kind::Image,
        layers: "vision_config.num_hidden_layers",
        prefixes: &[],
        sizes: None,
        config: |source| {
            let vision = source.fields.object_if("vision_config")?;
            let description = "the description of the image encoder is required";
            config(&vision.ok_or_else(|| source.fields.unsupported("vision_config", description))?)
        },
        layout: |_, config| layout(config),
    },
    Family {
        name: "sam_vision_model",
        kind: Kind::Image,
        layers: "num_hidden_layers",
        prefixes: &[],
        sizes: None,
        config: |source| config(source.fields),
        layout: |_, config| layout(config),
    },
];

fn config(fields: &Fields) -> std::result::Result<TransformerConfig, CheckpointError> {
    fields.expect_flag("use_abs_pos", true, "positions are embedded")?;
    let width = fields.size_if("hidden_size")?.unwrap_or(768);
    let feed_forward = match fields.size_if("mlp_dim")? {
        Some(size) => size,
        // What transformers makes of it: rounded down.
        None => (width as f64 * fields.number_if("mlp_ratio")?.unwrap_or(4.0)) as usize,
    };
    let [height, image_width] = fields.sides("image_size", 1024)?;
    if height != image_width {
        return Err(fields.unsupported("image_size", "images are square"));
    }
    let [patch, patch_width] = fields.sides("patch_size", 16)?;
    if patch != patch_width {
        return Err(fields.unsupported("patch_size", "patches are square"));
    }
    let side = fields.size_if("window_size")?.unwrap_or(14);
    let global = fields.sizes_if("global_attn_indexes")?.unwrap_or_else(|| vec![2, 5, 8, 11]);
    let layers = if fields.get("num_hidden_layers").is_some() { fields.layers("num_hidden_layers")? } else { 12 };
    if let Some(layer) = global.iter().find(|layer| **layer >= layers) {
        let (what, found) = ("a layer with global attention", format!("{layer} of {layers}"));
        return Err(fields.not_valid(&Error::Setting { what, found, expected: "one of the layers" }));
    }
    let sizes = GptConfig {
        layers,
        width,
        heads: fields.size_if("num_attention_heads")?.unwrap_or(12),
        context: 0,
        feed_forward,
    };
    let sam = TransformerConfig::sam(&sizes, height, (side, &global));
    let channels = fields.size_if("num_channels")?.unwrap_or(3);
    Ok(TransformerConfig {
        input: ModelInput::Image(ImageInput { image: [height; 2], channels, patch, class_token: false, registers: 0 }),
        norm: NormConfig { epsilon: fields.positive("layer_norm_eps", 1e-6)? as f32, ..sam.norm },
        attention: AttentionConfig {
            qkv_bias: fields.flag("qkv_bias", true)?,
            relative_positions: fields.flag("use_rel_pos", true)?,
            // A side of 0 stands for attention over the whole image in every layer.
            windows: if side > 0 { sam.attention.windows } else { vec![] },
            ..sam.attention
        },
        feed_forward: FeedForwardConfig { activation: activation(fields, "hidden_act", "gelu")?, ..sam.feed_forward },
        output: ModelOutput::Neck { channels: fields.size_if("output_channels")?.unwrap_or(256) },
        ..sam
    })
}

/// Where the tensors lie.
fn layout(config: &TransformerConfig) -> Result<Layout> {
    let (width, head_dim, feed_forward) = (config.width, config.attention.head_dim, config.feed_forward.hidden);
    let input = config.image()?;
    let [rows, columns] = input.grid();
    let mut layout = Layout {
        ignored_beginnings: ["prompt_encoder.", "mask_decoder.", "shared_image_embedding."].map(Into::into).into(),
        ..Layout::default()
    };
    let encoder = |part: &str| format!("vision_encoder.{part}");
    layout.patches(width, input, &encoder("patch_embed.projection"));
    layout.tensor("positions", encoder("pos_embed"), [1, rows, columns, width]);
    for layer in 0..config.layers {
        let ours = |part: &str| format!("blocks.{layer}.{part}");
        let theirs = |part: &str| encoder(&format!("layers.{layer}.{part}"));
        layout.norm(&ours("attn.norm"), &theirs("layer_norm1"), width);
        let parts = vec![(theirs("attn.qkv"), 3 * width)];
        layout.parts(ours("attn.qkv"), parts, width, config.attention.qkv_bias);
        if config.attention.relative_positions {
            let [rows, columns] = config.span(layer).map(|span| (2 * span).saturating_sub(1));
            layout.tensor(ours("attn.relative_rows"), theirs("attn.rel_pos_h"), [rows, head_dim]);
            layout.tensor(ours("attn.relative_columns"), theirs("attn.rel_pos_w"), [columns, head_dim]);
        }
        layout.one_linear(ours("attn.out"), theirs("attn.proj"), (width, width));
        layout.norm(&ours("mlp.norm"), &theirs("layer_norm2"), width);
        layout.one_linear(ours("mlp.up"), theirs("mlp.lin1"), (feed_forward, width));
        layout.one_linear(ours("mlp.down"), theirs("mlp.lin2"), (width, feed_forward));
    }
    if let ModelOutput::Neck { channels } = config.output {
        layout.tensor("neck.reduce.weight", encoder("neck.conv1.weight"), [channels, width, 1, 1]);
        layout.norm("neck.reduce_norm", &encoder("neck.layer_norm1"), channels);
        layout.tensor("neck.convolution.weight", encoder("neck.conv2.weight"), [channels, channels, 3, 3]);
        layout.norm("neck.norm", &encoder("neck.layer_norm2"), channels);
    }
    Ok(layout)
}
