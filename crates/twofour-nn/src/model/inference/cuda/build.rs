//! Reading a model onto a GPU.

use std::{marker::PhantomData, sync::Mutex};

use half::{bf16, f16};
use twofour::{
    DataType,
    file::Reader,
    kernel::{Activation, KernelElement},
};
use twofour_cuda::{
    Device,
    layer::{DeviceBuffer, LayerContext},
};

use super::{
    CudaInference, CudaLinear,
    feed_forward::FeedForward,
    linear::into_dense,
    norm::CudaNorm,
    stack::{Around, CudaLayer, CudaStack},
};
use crate::{
    Error, Result,
    engine::Nonlinearity,
    model::{
        config::{ExpertsConfig, NormKind, NormPlace, Positions, TransformerConfig},
        file,
        float::match_float,
        inference::{
            experts::correction,
            gpt::OfFile,
            linear::LinearPart,
            parts::{Parts, naming},
            passes::narrowed,
            relative::RelativePositions,
            rotation::Rotations,
            weight::Weight,
        },
    },
};

/// Most elements of the residual stream: what the norm's kernel has.
const MAX_WIDTH: usize = 8192;

impl CudaInference {
    /// Reads a file that [`Gpt::save`](crate::model::Gpt::save) wrote onto a device, as
    /// [`CudaInference::of_checkpoint`] does.
    ///
    /// # Errors
    /// A file that is not a model's, lacks a tensor or holds one of another shape; those of
    /// [`CudaInference::of_checkpoint`].
    pub fn from_reader(device: &Device, reader: &Reader, dtype: DataType) -> Result<Self> {
        let config = file::config_of(reader)?;
        Self::of_parts(repeatable(device)?, &config, &OfFile { reader, config: &config }, dtype)
    }

    pub(in crate::model) fn of_parts(
        context: LayerContext,
        config: &TransformerConfig,
        parts: &(impl Parts<f32> + Parts<bf16> + Parts<f16>),
        dtype: DataType,
    ) -> Result<Self> {
        match_float!(dtype, |T| Self::build(Build::<T, _>::new(context, config, parts)?))
    }

    fn build<T: KernelElement>(build: Build<'_, T, impl Parts<T>>) -> Result<Self> {
        let (config, parts) = (build.config, build.parts);
        let (width, vocabulary) = (config.width, config.vocabulary());
        let mut head = parts.linear_parts("head", (vocabulary, width))?;
        if config.is_tied() {
            // The embedding reads its values.
            let dense = |part: LinearPart<T>| LinearPart { weight: Weight::Dense(into_dense(part.weight)), ..part };
            head = head.into_iter().map(dense).collect();
        }
        // transformers multiplies in the type that the model computes in.
        let embedding_scale = config.tokens()?.scale.map(|scale| T::from_f32(scale).to_f32());
        Ok(CudaInference {
            embedding: (!config.is_tied()).then(|| build.table("embedding.weight", [vocabulary, width])).transpose()?,
            learned: match config.positions {
                Positions::Rotary(_) | Positions::Alibi(_) => None,
                Positions::Learned => Some(build.table("positions.weight", [config.context(), width])?),
            },
            norm: build.last_norm()?,
            head: CudaLinear::new(&build.context, head, Activation::Identity).map_err(|error| naming(error, "head"))?.0,
            embedding_scale,
            rotations: Rotations::of(config),
            busy: Mutex::default(),
            stack: build.stack()?,
        })
    }
}

/// What the parts of a model are made of.
pub(in crate::model) struct Build<'a, T, P> {
    context: LayerContext,
    config: &'a TransformerConfig,
    parts: &'a P,
    element: PhantomData<T>,
}

impl<'a, T: KernelElement, P: Parts<T>> Build<'a, T, P> {
    /// The parts of a model that the kernels have.
    pub(in crate::model) fn new(context: LayerContext, config: &'a TransformerConfig, parts: &'a P) -> Result<Self> {
        config.validate()?;
        expect_supported(config)?;
        Ok(Build { context, config, parts, element: PhantomData })
    }

    /// Values in the type to compute in.
    pub(in crate::model) fn matrix(&self, values: &[f32]) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer::from_host(&self.context, &narrowed::<T>(values))?)
    }

    /// A table of embeddings, in the type to compute in.
    pub(in crate::model) fn table(&self, name: &str, shape: [usize; 2]) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer::from_host(&self.context, &self.parts.table(name, shape)?)?)
    }

    /// Values in f32.
    pub(in crate::model) fn floats(&self, values: &[f32]) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer::from_host(&self.context, values)?)
    }

    fn vector(&self, name: &str, len: usize) -> Result<DeviceBuffer> {
        self.floats(&self.parts.vector(name, len)?)
    }

    /// A norm of that kind.
    pub(in crate::model) fn norm_of(
        &self,
        name: &str,
        width: usize,
        (kind, epsilon): (NormKind, f32),
    ) -> Result<CudaNorm> {
        let of = |part: &str| self.vector(&format!("{name}.{part}"), width);
        let bias = (kind == NormKind::Layer).then(|| of("bias")).transpose()?;
        Ok(CudaNorm { gain: of("weight")?, bias, epsilon })
    }

    /// The model's description.
    pub(super) fn config(&self) -> &'a TransformerConfig {
        self.config
    }

    /// A norm of the model's kind.
    pub(super) fn norm(&self, name: &str) -> Result<CudaNorm> {
        self.norm_of(name, self.config.width, (self.config.norm.kind, self.config.norm.epsilon))
    }

    /// The norm behind the last layer.
    pub(in crate::model) fn last_norm(&self) -> Result<CudaNorm> {
        match self.config.norm.place {
            NormPlace::After => self.norm(&format!("blocks.{}.mlp.norm", self.config.layers - 1)),
            NormPlace::Before | NormPlace::Around | NormPlace::Parallel => self.norm("norm"),
        }
    }

    /// A linear layer `[outputs, inputs]`, with an activation in the GEMM's epilogue; and whether its GEMM has one.
    pub(in crate::model) fn linear(
        &self,
        name: &str,
        shape: (usize, usize),
        activation: Activation,
    ) -> Result<(CudaLinear, bool)> {
        let parts = self.parts.linear_parts(name, shape);
        let linear = parts.and_then(|parts| CudaLinear::new(&self.context, parts, activation));
        linear.map_err(|error| naming(error, name))
    }

    /// What is added to the weights of experts where they are chosen, where something is.
    pub(super) fn correction(&self, experts: &ExpertsConfig, at: &str) -> Result<Option<Vec<f32>>> {
        correction(experts, self.parts, at)
    }

    /// Linear layers of one input, with their shapes, as one whose outputs follow each other.
    pub(super) fn joined(&self, layers: &[(String, (usize, usize))]) -> Result<CudaLinear> {
        let mut all = vec![];
        for (name, shape) in layers {
            all.append(&mut self.parts.linear_parts(name, *shape).map_err(|error| naming(error, name))?);
        }
        Ok(CudaLinear::new(&self.context, all, Activation::Identity)?.0)
    }

    /// The layers.
    pub(in crate::model) fn stack(self) -> Result<CudaStack> {
        let layers = (0..self.config.layers).map(|layer| self.layer(layer)).collect::<Result<_>>()?;
        Ok(CudaStack { layers, context: self.context, config: self.config.clone(), dtype: T::DTYPE })
    }

    /// One of the layers alone.
    pub(super) fn one_layer(self, layer: usize) -> Result<CudaStack> {
        let layers = vec![self.layer(layer)?];
        Ok(CudaStack { layers, context: self.context, config: self.config.clone(), dtype: T::DTYPE })
    }

    /// What is around a block, with the norm of that name before it.
    fn around(&self, name: &str, norm: &str) -> Result<Around> {
        let around = self.config.norm.place == NormPlace::Around;
        let factors = || self.vector(&format!("{name}.scale"), self.config.width);
        Ok(Around {
            norm: self.norm(norm)?,
            post_norm: around.then(|| self.norm(&format!("{name}.post_norm"))).transpose()?,
            factors: self.config.layer_scale.then(factors).transpose()?,
        })
    }

    fn layer(&self, layer: usize) -> Result<CudaLayer> {
        let config = self.config;
        let attention = &config.attention;
        let (width, head_dim) = (config.width, attention.head_dim);
        let at = |part: &str| format!("blocks.{layer}.{part}");
        let plain = |name: &str, shape: (usize, usize)| -> Result<CudaLinear> {
            Ok(self.linear(&at(name), shape, Activation::Identity)?.0)
        };
        let of_head = |part: &str| self.vector(&at(&format!("{part}.weight")), head_dim);
        let head_norms = || -> Result<_> { Ok([of_head("attn.query_norm")?, of_head("attn.key_norm")?]) };
        let relative = || -> Result<[DeviceBuffer; 2]> {
            let [rows, columns] = config.span(layer).map(|span| (2 * span - 1) * head_dim);
            let [of_rows, of_columns] = RelativePositions::NAMES;
            Ok([self.vector(&at(of_rows), rows)?, self.vector(&at(of_columns), columns)?])
        };
        let qkv_bias = || -> Result<Option<DeviceBuffer>> {
            let parts = self.parts.linear_parts(&at("attn.qkv"), (config.qkv_width(), width))?;
            let bias: Vec<f32> = parts.into_iter().flat_map(|part| part.bias.unwrap_or_default()).collect();
            if bias.is_empty() { Ok(None) } else { self.matrix(&bias).map(Some) }
        };
        let is_cut = !config.attention.is_causal && config.window(layer).is_some();
        // The norms of a post-norm model are before the next block here.
        let before = match (config.norm.place, layer) {
            (NormPlace::Before | NormPlace::Around | NormPlace::Parallel, _) => [at("attn.norm"), at("mlp.norm")],
            (NormPlace::After, 0) => ["embedding.norm".to_owned(), at("attn.norm")],
            (NormPlace::After, _) => [format!("blocks.{}.mlp.norm", layer - 1), at("attn.norm")],
        };
        Ok(CudaLayer {
            around_attention: self.around(&at("attn"), &before[0])?,
            qkv: plain("attn.qkv", (config.qkv_width(), width))?,
            qkv_bias: if is_cut { qkv_bias()? } else { None },
            head_norms: config.attention.head_norms.then(head_norms).transpose()?,
            relative: config.attention.relative_positions.then(relative).transpose()?,
            sinks: attention.sinks.then(|| self.vector(&at("attn.sinks"), attention.heads)).transpose()?,
            out: plain("attn.out", (width, config.query_width()))?,
            around_feed_forward: self.around(&at("mlp"), &before[1])?,
            feed_forward: FeedForward::build(self, layer)?,
        })
    }
}

/// The activation that a GEMM's epilogue has.
pub(in crate::model) fn fused(function: Nonlinearity) -> Activation {
    match function {
        Nonlinearity::Relu => Activation::Relu,
        Nonlinearity::Gelu => Activation::Gelu,
        Nonlinearity::Silu => Activation::Silu,
        Nonlinearity::TanhGelu | Nonlinearity::SquaredRelu => Activation::Identity,
    }
}

pub(in crate::model) fn repeatable(device: &Device) -> Result<LayerContext> {
    let stream = LayerContext::new(device)?.stream().clone();
    Ok(LayerContext::repeatable(device, stream))
}

/// An error for a model that the kernels do not have.
pub(super) fn expect_supported(config: &TransformerConfig) -> Result<()> {
    let attention = &config.attention;
    let (width, head_dim) = (config.width, attention.head_dim);
    let tokens = config.tokens().ok();
    let is_full = !attention.is_causal;
    let bends_scores =
        attention.soft_cap.is_some() || attention.scale.is_some() || attention.head_norms || attention.sinks;
    let checks = [
        (config.norm.place == NormPlace::Parallel, "attention and feed-forward blocks side by side".into()),
        (attention.rotated.is_some(), "heads of which a part is rotated".into()),
        (matches!(config.positions, Positions::Alibi(_)), "positions by distance (ALiBi)".into()),
        (attention.latent.is_some(), "keys and values of latents".into()),
        (attention.qkv_bound.is_some(), "bounded queries, keys and values".into()),
        (!is_full && config.layer_scale, "factors of the outputs of blocks in a decoder".into()),
        (config.is_projected(), "a table of tokens of another width".into()),
        (config.rotates_by_length(), "rotations that depend on the length of a text (longrope)".into()),
        (width > MAX_WIDTH, format!("a width of {width}, but at most {MAX_WIDTH}")),
        (
            config.feed_forward.gated && config.feed_forward.activation == Nonlinearity::SquaredRelu,
            "squared ReLU with a gate".into(),
        ),
        (
            tokens.is_some_and(|tokens| tokens.is_normalized != (config.norm.place == NormPlace::After)),
            "norms after blocks without a norm of the embeddings, or one without the other".into(),
        ),
        (
            config.positions == Positions::Learned && tokens.is_some_and(|tokens| tokens.scale.is_some()),
            "scaled embeddings with learned positions".into(),
        ),
        (
            !is_full && ![32, 64, 128, 256].contains(&head_dim),
            format!("heads of {head_dim} elements, but those of 32, 64, 128 and 256"),
        ),
        (
            is_full && (bends_scores || attention.kv_heads != attention.heads),
            "full attention with shared keys and values, norms of heads, sinks, or another scale or bound of scores"
                .into(),
        ),
        (
            is_full && tokens.is_some() && (config.positions != Positions::Learned || !attention.windows.is_empty()),
            "full attention over text with rotated queries and keys, or with windows".into(),
        ),
    ];
    let found = checks.into_iter().find_map(|(is_unsupported, what)| is_unsupported.then_some(what));
    match found {
        Some(what) => Err(Error::Unsupported { engine: "CUDA inference", what, remedy: "run the model on the CPU" }),
        None => Ok(()),
    }
}
