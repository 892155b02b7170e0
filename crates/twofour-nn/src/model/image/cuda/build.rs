//! Reading an image encoder onto a GPU.

use half::{bf16, f16};
use twofour::{
    DataType,
    kernel::{Activation, KernelElement},
};
use twofour_cuda::{
    Device,
    layer::{DeviceBuffer, LayerContext},
};

use super::{
    super::{
        ImageWeights, TransformerConfig, embeddings::position_table, neck::convolution_rows, random::RandomParts,
        relative::RelativePositions,
    },
    CudaEnd, CudaImageEncoder,
    layer::CudaImageLayer,
    neck::CudaNeck,
};
use crate::{
    Error, Result,
    engine::{Nonlinearity, cuda::functions::gate},
    model::{
        ImageCheckpoint, ModelOutput,
        inference::{
            cuda::{
                CudaLinear, CudaNorm,
                build::{MOST_WIDTH, no_dtype, repeatable},
            },
            passes::narrowed,
            stored::StoredLinears,
        },
    },
};

impl CudaImageEncoder {
    /// Reads a checkpoint's weights onto a device, to compute in `dtype`: f32, f16 or bf16. It times no GEMMs to choose
    /// among them, so that results repeat bit for bit.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a width above 8192, and 2:4 weights in f32; another type; those of reading and of the
    /// device's memory.
    pub fn of_checkpoint(device: &Device, checkpoint: &ImageCheckpoint, dtype: DataType) -> Result<Self> {
        Self::of_parts(repeatable(device)?, checkpoint.config(), &checkpoint.parts(), dtype)
    }

    /// [`CudaImageEncoder::of_checkpoint`] with every linear layer dense: what a 2:4 encoder is compared with.
    ///
    /// # Errors
    /// Those of [`CudaImageEncoder::of_checkpoint`].
    pub fn dense_of_checkpoint(device: &Device, checkpoint: &ImageCheckpoint, dtype: DataType) -> Result<Self> {
        Self::of_parts(repeatable(device)?, checkpoint.config(), &checkpoint.parts().dense(), dtype)
    }

    /// The encoder that [`ImageEncoder::random`](super::super::ImageEncoder::random) makes of the same arguments, on
    /// the context's device. A context that measures chooses the fastest GEMMs.
    ///
    /// # Errors
    /// Those of [`TransformerConfig::validate`] and of [`CudaImageEncoder::of_checkpoint`].
    pub fn random(
        context: LayerContext,
        config: &TransformerConfig,
        weights: ImageWeights,
        dtype: DataType,
        seed: u64,
    ) -> Result<Self> {
        Self::of_parts(context, config, &RandomParts { config, weights, seed }, dtype)
    }

    fn of_parts(
        context: LayerContext,
        config: &TransformerConfig,
        parts: &(impl StoredLinears<f32> + StoredLinears<bf16> + StoredLinears<f16>),
        dtype: DataType,
    ) -> Result<Self> {
        match dtype {
            DataType::F32 => Self::build::<f32>(context, config, parts),
            DataType::BF16 => Self::build::<bf16>(context, config, parts),
            DataType::F16 => Self::build::<f16>(context, config, parts),
            other => Err(no_dtype(other)),
        }
    }

    fn build<T: KernelElement>(
        context: LayerContext,
        config: &TransformerConfig,
        parts: &impl StoredLinears<T>,
    ) -> Result<Self> {
        config.validate()?;
        let width = config.width;
        if width > MOST_WIDTH {
            let what = format!("a width of {width}, but at most {MOST_WIDTH}");
            let remedy = "run the model on the CPU";
            return Err(Error::Unsupported { engine: "CUDA inference", what, remedy });
        }
        if config.feed_forward.gated {
            gate(config.feed_forward.activation)?;
        }
        let build = Build { context: &context, config, parts, marker: std::marker::PhantomData };
        let layers = (0..config.layers).map(|layer| build.layer(layer)).collect::<Result<_>>()?;
        let end = match config.output {
            ModelOutput::Hidden { .. } | ModelOutput::Vocabulary { .. } => {
                CudaEnd::Norm(Box::new(build.norm("norm", width)?))
            }
            ModelOutput::Neck { channels } => CudaEnd::Neck(Box::new(build.neck(channels)?)),
        };
        let patches = build.matrix(&parts.vector("patch.weight", width * config.image()?.patch_len())?)?;
        let table = DeviceBuffer::from_host(&context, &position_table(config, parts)?)?;
        Ok(CudaImageEncoder { patches, table, layers, end, config: config.clone(), dtype: T::DTYPE, context })
    }
}

/// What parts of an encoder are made of.
struct Build<'a, T, P> {
    context: &'a LayerContext,
    config: &'a TransformerConfig,
    parts: &'a P,
    marker: std::marker::PhantomData<T>,
}

impl<T: KernelElement, P: StoredLinears<T>> Build<'_, T, P> {
    /// Values in the type to compute in.
    fn matrix(&self, values: &[f32]) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer::from_host(self.context, &narrowed::<T>(values))?)
    }

    /// Values in f32.
    fn vector(&self, name: &str, len: usize) -> Result<DeviceBuffer> {
        Ok(DeviceBuffer::from_host(self.context, &self.parts.vector(name, len)?)?)
    }

    fn norm(&self, name: &str, width: usize) -> Result<CudaNorm> {
        let of = |part: &str| self.vector(&format!("{name}.{part}"), width);
        Ok(CudaNorm { gain: of("weight")?, bias: Some(of("bias")?) })
    }

    fn layer(&self, layer: usize) -> Result<CudaImageLayer> {
        let (width, head_dim) = (self.config.width, self.config.attention.head_dim);
        let feed_forward = self.config.feed_forward.hidden;
        let at = |part: &str| format!("blocks.{layer}.{part}");
        let linear = |name: &str, shape: (usize, usize), activation: Activation| -> Result<(CudaLinear, bool)> {
            let name = at(name);
            let linear = self
                .parts
                .stored_linear(&name, shape)
                .and_then(|parts| CudaLinear::before_activation(self.context, parts, shape, activation));
            linear.map_err(|error| match error {
                named @ (Error::InLayer { .. } | Error::Checkpoint(_)) => named,
                other => other.in_layer(name),
            })
        };
        let identity = Activation::Identity;
        let relative = || -> Result<[DeviceBuffer; 2]> {
            let [rows, columns] = self.config.span(layer).map(|span| (2 * span - 1) * head_dim);
            let [of_rows, of_columns] = RelativePositions::NAMES;
            Ok([self.vector(&at(of_rows), rows)?, self.vector(&at(of_columns), columns)?])
        };
        let scale = |name: &str| self.config.layer_scale.then(|| self.vector(&at(name), width)).transpose();
        let qkv = self.parts.stored_linear(&at("attn.qkv"), (3 * width, width))?;
        let qkv_bias: Vec<f32> = qkv.iter().flat_map(|part| part.bias.iter().flatten().copied()).collect();
        // A gate's function is of half of the outputs.
        let function =
            if self.config.feed_forward.gated { identity } else { fused(self.config.feed_forward.activation) };
        let (up, up_activates) = linear("mlp.up", (self.config.up_width(), width), function)?;
        Ok(CudaImageLayer {
            window: self.config.window(layer),
            attention_norm: self.norm(&at("attn.norm"), width)?,
            qkv: CudaLinear::new(self.context, qkv, (3 * width, width)).map_err(|e| e.in_layer(at("attn.qkv")))?,
            qkv_bias: if qkv_bias.is_empty() { None } else { Some(self.matrix(&qkv_bias)?) },
            relative: self.config.attention.relative_positions.then(relative).transpose()?,
            out: linear("attn.out", (width, width), identity)?.0,
            attention_scale: scale("attn.scale")?,
            feed_forward_norm: self.norm(&at("mlp.norm"), width)?,
            up,
            up_activates: up_activates && !self.config.feed_forward.gated,
            down: linear("mlp.down", (width, feed_forward), identity)?.0,
            feed_forward_scale: scale("mlp.scale")?,
        })
    }

    fn neck(&self, channels: usize) -> Result<CudaNeck> {
        let width = self.config.width;
        Ok(CudaNeck {
            reduce: self.matrix(&self.parts.vector("neck.reduce.weight", channels * width)?)?,
            reduce_norm: self.norm("neck.reduce_norm", channels)?,
            convolution: self.matrix(&convolution_rows(self.parts, channels)?)?,
            norm: self.norm("neck.norm", channels)?,
            channels,
        })
    }
}

/// The activation that a GEMM's epilogue has.
fn fused(function: Nonlinearity) -> Activation {
    match function {
        Nonlinearity::Relu => Activation::Relu,
        Nonlinearity::Gelu => Activation::Gelu,
        Nonlinearity::Silu => Activation::Silu,
        Nonlinearity::TanhGelu | Nonlinearity::SquaredRelu => Activation::Identity,
    }
}
