//! Putting a model together from its parts by name.

use twofour::kernel::KernelElement;

use super::{
    Inference,
    alibi::Slopes,
    entry::Entry,
    feed_forward::FeedForward,
    latent::Latents,
    layer::Layer,
    norm::{Norm, Residual},
    parts::Parts,
    relative::RelativePositions,
    rotation::Rotations,
    windows::WindowGrid,
};
use crate::{
    Error, Result,
    model::config::{NormKind, NormPlace, Positions, TransformerConfig},
};

impl<T: KernelElement> Inference<T> {
    pub(crate) fn build(config: TransformerConfig, parts: &impl Parts<T>) -> Result<Self> {
        config.validate()?;
        let (width, table_width) = (config.width, config.table_width());
        let layers = (0..config.layers).map(|layer| Layer::build(&config, parts, layer)).collect::<Result<_>>()?;
        let entry = Entry::build(&config, parts)?;
        let rotations = Rotations::of(&config);
        let has_norm = config.norm.place != NormPlace::After;
        let norm = has_norm.then(|| norm(&config, parts, "norm", width, config.norm.kind)).transpose()?;
        let projected = config.is_projected().then(|| parts.linear("project_out", (table_width, width))).transpose()?;
        let head = parts.linear("head", (config.vocabulary(), table_width))?;
        Ok(Inference { entry, layers, norm, projected, head, rotations, config })
    }
}

impl<T: KernelElement> Layer<T> {
    /// The layer of that number.
    pub(crate) fn build(config: &TransformerConfig, parts: &impl Parts<T>, index: usize) -> Result<Self> {
        let at = |part: &str| format!("blocks.{index}.{part}");
        let (width, head_dim) = (config.width, config.attention.head_dim);
        if !config.attention.is_causal && config.positions != Positions::Learned {
            let (engine, what) = ("inference", "full attention with rotated queries and keys".into());
            return Err(Error::Unsupported { engine, what, remedy: "use a model with learned positions" });
        }
        let of_head = |part: &str| norm(config, parts, &at(part), head_dim, NormKind::RootMeanSquare);
        let head_norms = match config.attention.head_norms {
            true => Some([of_head("attn.query_norm")?, of_head("attn.key_norm")?]),
            false => None,
        };
        let relative = || RelativePositions::read(parts, at, config.span(index), head_dim);
        Ok(Layer {
            index,
            attention: Residual::build(config, parts, &at("attn"))?,
            qkv: parts.linear(&at("attn.qkv"), (config.attention_outputs(), width))?,
            latents: Latents::build(config, parts, at)?,
            head_norms,
            relative: config.attention.relative_positions.then(relative).transpose()?,
            sinks: config
                .attention
                .sinks
                .then(|| parts.vector(&at("attn.sinks"), config.attention.heads))
                .transpose()?,
            slopes: Slopes::of(config),
            windows: WindowGrid::of(config, index),
            out: parts.linear(&at("attn.out"), (width, config.value_width()))?,
            feed_forward: Residual::build(config, parts, &at("mlp"))?,
            hidden: FeedForward::build(config, parts, index)?,
        })
    }
}

fn norm<T: KernelElement>(
    config: &TransformerConfig,
    parts: &impl Parts<T>,
    name: &str,
    width: usize,
    kind: NormKind,
) -> Result<Norm> {
    Norm::read(kind, config.norm.epsilon, |part| parts.vector(&format!("{name}.{part}"), width))
}
