//! ViT and DINOv2.

use super::{Family, Kind, Source, layout::Layout, llama::activation};
use crate::{
    Result,
    engine::Nonlinearity,
    model::CheckpointError,
    model::config::{
        AttentionConfig, FeedForwardConfig, GptConfig, ImageHead, ImageHeadInput, ImageInput, ModelOutput, NormConfig,
        TransformerConfig,
    },
};

/// DINOv2, from which the others differ in names, layer scale, registers and what their heads read.
const DINOV2: Family = Family {
    name: "dinov2",
    kind: Kind::Image,
    layers: "num_hidden_layers",
    prefixes: &["dinov2."],
    sizes: None,
    config: |source| config(source, Kin::Dinov2),
    layout: |source, config| layout(config, source.prefix),
};

pub(super) const FAMILIES: &[Family] = &[
    Family { name: "vit", prefixes: &["vit."], config: |source| config(source, Kin::Vit), ..DINOV2 },
    DINOV2,
    Family {
        name: "dinov2_with_registers",
        prefixes: &["dinov2_with_registers."],
        config: |source| config(source, Kin::Dinov2WithRegisters),
        ..DINOV2
    },
];

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kin {
    Vit,
    Dinov2,
    Dinov2WithRegisters,
}

/// The linear layer that scores classes.
const HEAD: &str = "classifier";

fn config(source: &Source<'_>, family: Kin) -> std::result::Result<TransformerConfig, CheckpointError> {
    let fields = source.fields;
    let width = fields.size("hidden_size")?;
    let is_vit = family == Kin::Vit;
    let gated = !is_vit && fields.flag("use_swiglu_ffn", false)?;
    let (feed_forward, epsilon, patch) = if is_vit {
        (fields.size("intermediate_size")?, 1e-12, 16)
    } else {
        let ratio = fields.number_if("mlp_ratio")?.unwrap_or(4.0);
        // What transformers makes of it: rounded down; with a gate two thirds of it, rounded up to a multiple of 8.
        let hidden = (width as f64 * ratio) as usize;
        let hidden = if gated { (hidden as f64 * 2.0 / 3.0) as usize } else { hidden };
        (if gated { hidden.next_multiple_of(8) } else { hidden }, 1e-6, 14)
    };
    let reads = if is_vit { ImageHeadInput::ClassToken } else { ImageHeadInput::ClassTokenAndMean };
    let registers = match family {
        Kin::Dinov2WithRegisters => fields.size_if("num_register_tokens")?.unwrap_or(4),
        Kin::Vit | Kin::Dinov2 => 0,
    };
    // The number of classes is that of the names of labels, which a configuration may leave out.
    let classes = source.shape_of(&format!("{HEAD}.weight")).and_then(|shape| shape.first().copied());
    let [patch_height, patch_width] = fields.sides("patch_size", patch)?;
    if patch_height != patch_width {
        return Err(fields.unsupported("patch_size", "patches are square"));
    }
    let input = ImageInput {
        image: fields.sides("image_size", 224)?,
        channels: fields.size_if("num_channels")?.unwrap_or(3),
        patch: patch_height,
        class_token: true,
        registers,
    };
    let sizes = GptConfig {
        layers: fields.layers("num_hidden_layers")?,
        width,
        heads: fields.size("num_attention_heads")?,
        context: 0,
        feed_forward,
    };
    let vit = TransformerConfig::vit(&sizes, input);
    Ok(TransformerConfig {
        norm: NormConfig { epsilon: fields.positive("layer_norm_eps", epsilon)? as f32, ..vit.norm },
        attention: AttentionConfig { qkv_bias: fields.flag("qkv_bias", true)?, ..vit.attention },
        feed_forward: FeedForwardConfig {
            // The gate's function is no field.
            activation: if gated { Nonlinearity::Silu } else { activation(fields, "hidden_act", "gelu")? },
            gated,
            ..vit.feed_forward
        },
        layer_scale: !is_vit,
        output: ModelOutput::Hidden { head: classes.map(|classes| ImageHead { classes, input: reads }) },
        ..vit
    })
}

/// Where the tensors lie; `prefix` is the family's, or nothing where the model was stored without a head's class.
fn layout(config: &TransformerConfig, prefix: &str) -> Result<Layout> {
    let (width, feed_forward, input) = (config.width, config.feed_forward.hidden, config.image()?);
    let mut layout = Layout {
        ignored: vec!["embeddings.mask_token", "pooler.dense.weight", "pooler.dense.bias"],
        ..Layout::default()
    };
    let embeddings = |part: &str| format!("{prefix}embeddings.{part}");
    layout.patches(width, input, &embeddings("patch_embeddings.projection"));
    layout.tensor("class", embeddings("cls_token"), [1, 1, width]);
    layout.tensor("positions", embeddings("position_embeddings"), [1, input.tokens() - input.registers, width]);
    if input.registers > 0 {
        layout.tensor("registers", embeddings("register_tokens"), [1, input.registers, width]);
    }
    // ViT has no layer scale.
    let names = match (config.layer_scale, config.feed_forward.gated) {
        (false, _) => {
            Names { norms: ["layernorm_before", "layernorm_after"], up: "intermediate.dense", down: "output.dense" }
        }
        (true, false) => Names { norms: ["norm1", "norm2"], up: "mlp.fc1", down: "mlp.fc2" },
        (true, true) => Names { norms: ["norm1", "norm2"], up: "mlp.weights_in", down: "mlp.weights_out" },
    };
    for layer in 0..config.layers {
        let ours = |part: &str| format!("blocks.{layer}.{part}");
        let theirs = |part: &str| format!("{prefix}encoder.layer.{layer}.{part}");
        layout.norm(&ours("attn.norm"), &theirs(names.norms[0]), width);
        let parts = ["query", "key", "value"].map(|part| (theirs(&format!("attention.attention.{part}")), width));
        layout.parts(ours("attn.qkv"), parts.to_vec(), width, config.attention.qkv_bias);
        layout.one_linear(ours("attn.out"), theirs("attention.output.dense"), (width, width));
        layout.norm(&ours("mlp.norm"), &theirs(names.norms[1]), width);
        layout.one_linear(ours("mlp.up"), theirs(names.up), (config.up_width(), width));
        layout.one_linear(ours("mlp.down"), theirs(names.down), (width, feed_forward));
        if config.layer_scale {
            layout.tensor(ours("attn.scale"), theirs("layer_scale1.lambda1"), [width]);
            layout.tensor(ours("mlp.scale"), theirs("layer_scale2.lambda1"), [width]);
        }
    }
    layout.norm("norm", &format!("{prefix}layernorm"), width);
    if let ModelOutput::Hidden { head: Some(ImageHead { classes, input: reads }) } = config.output {
        layout.one_linear("head", HEAD, (classes, reads.elements(width)));
    }
    Ok(layout)
}

/// How a family names the parts of a layer.
struct Names {
    norms: [&'static str; 2],
    up: &'static str,
    down: &'static str,
}
