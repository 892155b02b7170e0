//! ViT and DINOv2.

use super::super::{
    CheckpointError,
    fields::Fields,
    layout::{Layout, StoredLinear},
    llama::activation,
};
use crate::model::image::{ImageEncoderConfig, ImageHead, ImageHeadInput, ImageOutput};

/// The families that differ in names, layer scale and what their heads read.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Family {
    Vit,
    Dinov2,
}

/// The linear layer that scores classes.
const HEAD: &str = "classifier";

pub(super) fn config(
    fields: &Fields,
    family: Family,
    shape_of: impl Fn(&str) -> Option<Vec<usize>>,
) -> Result<ImageEncoderConfig, CheckpointError> {
    let width = fields.size("hidden_size")?;
    let (feed_forward, epsilon, patch) = match family {
        Family::Vit => (fields.size("intermediate_size")?, 1e-12, 16),
        Family::Dinov2 => {
            fields.expect_flag("use_swiglu_ffn", false, "feed-forward blocks have one activation and no gate")?;
            let ratio = fields.number_if("mlp_ratio")?.unwrap_or(4.0);
            // What transformers makes of it: rounded down.
            ((width as f64 * ratio) as usize, 1e-6, 14)
        }
    };
    let input = match family {
        Family::Vit => ImageHeadInput::ClassToken,
        Family::Dinov2 => ImageHeadInput::ClassTokenAndMean,
    };
    // The number of classes is that of the names of labels, which a configuration may leave out.
    let classes = shape_of(&format!("{HEAD}.weight")).and_then(|shape| shape.first().copied());
    let [patch_height, patch_width] = fields.sides("patch_size", patch)?;
    if patch_height != patch_width {
        return Err(fields.unsupported("patch_size", "patches are square"));
    }
    Ok(ImageEncoderConfig {
        image: fields.sides("image_size", 224)?,
        channels: fields.size_if("num_channels")?.unwrap_or(3),
        patch: patch_height,
        layers: fields.size("num_hidden_layers")?,
        width,
        heads: fields.size("num_attention_heads")?,
        feed_forward,
        epsilon: fields.number_if("layer_norm_eps")?.unwrap_or(epsilon) as f32,
        activation: activation(fields, "hidden_act", "gelu")?,
        qkv_bias: fields.flag("qkv_bias", true)?,
        class_token: true,
        layer_scale: family == Family::Dinov2,
        relative_positions: false,
        windows: None,
        output: ImageOutput::Norm { head: classes.map(|classes| ImageHead { classes, input }) },
    })
}

/// Where the tensors lie; `prefix` is `vit.` or `dinov2.`, or nothing where the model was stored without a head's class.
pub(super) fn layout(config: &ImageEncoderConfig, family: Family, prefix: &str) -> Layout {
    let ImageEncoderConfig { width, feed_forward, .. } = *config;
    let mut layout = Layout {
        ignored: vec!["embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias"],
        ..Layout::default()
    };
    let embeddings = |part: &str| format!("{prefix}embeddings.{part}");
    layout.patches(config, &embeddings("patch_embeddings.projection"));
    layout.tensor("class", embeddings("cls_token"), [1, 1, width]);
    layout.tensor("positions", embeddings("position_embeddings"), [1, config.tokens(), width]);
    let names = match family {
        Family::Vit => {
            Names { norms: ["layernorm_before", "layernorm_after"], up: "intermediate.dense", down: "output.dense" }
        }
        Family::Dinov2 => Names { norms: ["norm1", "norm2"], up: "mlp.fc1", down: "mlp.fc2" },
    };
    for layer in 0..config.layers {
        let ours = |part: &str| format!("blocks.{layer}.{part}");
        let theirs = |part: &str| format!("{prefix}encoder.layer.{layer}.{part}");
        layout.norm(&ours("attn.norm"), &theirs(names.norms[0]), width);
        let parts = ["query", "key", "value"].map(|part| (theirs(&format!("attention.attention.{part}")), width));
        let qkv =
            StoredLinear { parts: parts.to_vec(), inputs: width, has_bias: config.qkv_bias, is_transposed: false };
        layout.linear(ours("attn.qkv"), qkv);
        layout.one_linear(ours("attn.out"), theirs("attention.output.dense"), (width, width));
        layout.norm(&ours("mlp.norm"), &theirs(names.norms[1]), width);
        layout.one_linear(ours("mlp.up"), theirs(names.up), (feed_forward, width));
        layout.one_linear(ours("mlp.down"), theirs(names.down), (width, feed_forward));
        if config.layer_scale {
            layout.tensor(ours("attn.scale"), theirs("layer_scale1.lambda1"), [width]);
            layout.tensor(ours("mlp.scale"), theirs("layer_scale2.lambda1"), [width]);
        }
    }
    layout.norm("norm", &format!("{prefix}layernorm"), width);
    if let ImageOutput::Norm { head: Some(ImageHead { classes, input }) } = config.output {
        layout.one_linear("head".to_owned(), HEAD.to_owned(), (classes, input.len(width)));
    }
    layout
}

/// How a family names the parts of a layer.
struct Names {
    norms: [&'static str; 2],
    up: &'static str,
    down: &'static str,
}
