//! Reading a model onto a GPU.

use std::sync::Mutex;

use half::{bf16, f16};
use twofour::{DataType, file::Reader, kernel::KernelElement};
use twofour_cuda::{
    Device,
    layer::{DeviceBuffer, LayerContext},
};

use super::{CudaInference, CudaLayer, CudaLinear, CudaNorm};
use crate::{
    Error, Result,
    engine::Nonlinearity,
    model::{
        Checkpoint,
        config::{NormKind, NormPlace, Positions, TokenInput, TransformerConfig},
        file,
        inference::{gpt::OfFile, rotation::Rotations, stored::StoredLinears},
    },
};

/// Most elements of the residual stream: what the norm's kernel has.
pub(in crate::model) const MOST_WIDTH: usize = 8192;

impl CudaInference {
    /// Reads a checkpoint's weights onto a device, to compute in `dtype`: f32, f16 or bf16. It times no GEMMs to choose
    /// among them, so that texts repeat bit for bit.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for heads of another size than 32, 64, 128 and 256, a width above 8192, 2:4 weights in
    /// f32; another type; those of [`Checkpoint::expect_head`], of reading and of the device's memory.
    pub fn of_checkpoint(device: &Device, checkpoint: &Checkpoint, dtype: DataType) -> Result<Self> {
        checkpoint.expect_head()?;
        let (context, config, parts) = (repeatable(device)?, checkpoint.config(), checkpoint.parts());
        match dtype {
            DataType::F32 => Self::build::<f32>(context, config, &parts),
            DataType::BF16 => Self::build::<bf16>(context, config, &parts),
            DataType::F16 => Self::build::<f16>(context, config, &parts),
            other => Err(no_dtype(other)),
        }
    }

    /// Reads a file that [`Gpt::save`](crate::model::Gpt::save) wrote onto a device, as
    /// [`CudaInference::of_checkpoint`] does.
    ///
    /// # Errors
    /// A file that is not a model's, lacks a tensor or holds one of another shape; those of
    /// [`CudaInference::of_checkpoint`].
    pub fn from_reader(device: &Device, reader: &Reader, dtype: DataType) -> Result<Self> {
        let config = file::config_of(reader)?;
        let (context, parts) = (repeatable(device)?, OfFile { reader, config: &config });
        match dtype {
            DataType::F32 => Self::build::<f32>(context, &config, &parts),
            DataType::BF16 => Self::build::<bf16>(context, &config, &parts),
            DataType::F16 => Self::build::<f16>(context, &config, &parts),
            other => Err(no_dtype(other)),
        }
    }

    fn build<T: KernelElement>(
        context: LayerContext,
        config: &TransformerConfig,
        parts: &impl StoredLinears<T>,
    ) -> Result<Self> {
        config.validate()?;
        expect_supported(config)?;
        let (width, head_dim, tokens) = (config.width, config.attention.head_dim, config.tokens()?);
        let TokenInput { vocabulary, context: positions, .. } = *tokens;
        let vector = |name: &str, len: usize| -> Result<DeviceBuffer> {
            Ok(DeviceBuffer::from_host(&context, &parts.vector(name, len)?)?)
        };
        let norm = |name: &str| -> Result<CudaNorm> {
            let bias = match config.norm.kind {
                NormKind::Layer => Some(vector(&format!("{name}.bias"), width)?),
                NormKind::RootMeanSquare => None,
            };
            Ok(CudaNorm { gain: vector(&format!("{name}.weight"), width)?, bias })
        };
        let post_norm = |name: &str| (config.norm.place == NormPlace::Around).then(|| norm(name)).transpose();
        let linear = |name: &str, shape: (usize, usize)| -> Result<CudaLinear> {
            let linear = parts.stored_linear(name, shape).and_then(|parts| CudaLinear::new(&context, parts, shape));
            linear.map_err(|error| match error {
                named @ (Error::InLayer { .. } | Error::Checkpoint(_)) => named,
                other => other.in_layer(name),
            })
        };
        let layer = |layer: usize| -> Result<CudaLayer> {
            let at = |part: &str| format!("blocks.{layer}.{part}");
            let of_head = |part: &str| vector(&format!("{}.weight", at(part)), head_dim);
            Ok(CudaLayer {
                attention_norm: norm(&at("attn.norm"))?,
                attention_post_norm: post_norm(&at("attn.post_norm"))?,
                qkv: linear(&at("attn.qkv"), (config.qkv_width(), width))?,
                head_norms: match config.attention.head_norms {
                    true => Some([of_head("attn.query_norm")?, of_head("attn.key_norm")?]),
                    false => None,
                },
                out: linear(&at("attn.out"), (width, config.query_width()))?,
                feed_forward_norm: norm(&at("mlp.norm"))?,
                feed_forward_post_norm: post_norm(&at("mlp.post_norm"))?,
                up: linear(&at("mlp.up"), (config.up_width(), width))?,
                down: linear(&at("mlp.down"), (width, config.feed_forward.hidden))?,
            })
        };
        let table = |name: &str, shape: [usize; 2]| -> Result<DeviceBuffer> {
            Ok(DeviceBuffer::from_host(&context, &parts.table(name, shape)?)?)
        };
        let layers = (0..config.layers).map(layer).collect::<Result<_>>()?;
        let embedding = match config.is_tied() {
            true => None,
            false => Some(table("embedding.weight", [vocabulary, width])?),
        };
        let learned = match config.positions {
            Positions::Rotary(_) => None,
            Positions::Learned => Some(table("positions.weight", [positions, width])?),
        };
        // transformers multiplies in the type that the model computes in.
        let embedding_scale = tokens.scale.map(|scale| T::from_f32(scale).to_f32());
        let rotations = Rotations::of(config);
        let (norm, head) = (norm("norm")?, linear("head", (vocabulary, width))?);
        let config = config.clone();
        let (dtype, busy) = (T::DTYPE, Mutex::default());
        Ok(CudaInference {
            context,
            config,
            dtype,
            embedding,
            learned,
            layers,
            norm,
            head,
            embedding_scale,
            rotations,
            busy,
        })
    }
}

pub(in crate::model) fn repeatable(device: &Device) -> Result<LayerContext> {
    let stream = LayerContext::new(device)?.stream().clone();
    Ok(LayerContext::repeatable(device, stream))
}

pub(in crate::model) fn no_dtype(found: DataType) -> Error {
    Error::Setting { what: "the type to compute in", found: found.to_string(), expected: "f32, bf16 or f16" }
}

/// An error for a model that the kernels do not have.
pub(super) fn expect_supported(config: &TransformerConfig) -> Result<()> {
    let unsupported =
        |what: String| Err(Error::Unsupported { engine: "CUDA inference", what, remedy: "run the model on the CPU" });
    if config.norm.place == NormPlace::After {
        return unsupported("norms after blocks".into());
    }
    if config.positions == Positions::Learned && config.tokens()?.scale.is_some() {
        return unsupported("scaled embeddings with learned positions".into());
    }
    if ![32, 64, 128, 256].contains(&config.attention.head_dim) {
        return unsupported(format!(
            "heads of {} elements, but those of 32, 64, 128 and 256",
            config.attention.head_dim
        ));
    }
    if config.width > MOST_WIDTH {
        return unsupported(format!("a width of {}, but at most {MOST_WIDTH}", config.width));
    }
    if config.feed_forward.gated && config.feed_forward.activation == Nonlinearity::SquaredRelu {
        return unsupported("squared ReLU with a gate".into());
    }
    Ok(())
}
