//! The way of a group of images through an encoder on a GPU.

use twofour::DataType;
use twofour_cuda::layer::{DenseLinear, DeviceBuffer, DeviceSlice, DeviceSliceMut};
use twofour_transformer::cuda::{
    ImageAttention, ImageAttentionTensors, NormKind, SplitHeadsMut, activation_forward, add_in_place, convert, copy,
    decode::{Normalized, TokenNorm, TokenNormTensors, normalize_tokens},
    gated_forward, image_attention, scale_rows,
};

use super::{CudaEnd, CudaImageEncoder, layer::CudaImageLayer, neck::NeckWork};
use crate::{
    Result,
    engine::cuda::functions::{element_function, gate},
    model::inference::cuda::{
        CudaLinear, CudaNorm,
        hidden::{Hidden, first},
        linear::Input,
    },
    model::{ImageInput, ModelOutput},
};

/// Most bytes of queries, keys, values and results by heads; at least those of one image.
const MOST_HEADS: usize = 512 << 20;

/// The tensors between the layers, for a group of images.
#[derive(Debug)]
pub(super) struct Work {
    x: DeviceBuffer,
    h: Hidden,
    qkv: DeviceBuffer,
    /// Queries, keys, values and the result by heads.
    apart: [DeviceBuffer; 4],
    lse: DeviceBuffer,
    o: DeviceBuffer,
    delta: DeviceBuffer,
    up: DeviceBuffer,
    /// The hidden layer with its function applied, where a layer's GEMM does not apply it.
    activated: DeviceBuffer,
    neck: Option<NeckWork>,
}

impl CudaImageEncoder {
    /// Attention of a layer over so many images.
    fn attention(&self, layer: &CudaImageLayer, images: usize) -> ImageAttention {
        let config = &self.config;
        ImageAttention {
            images,
            tokens: config.context(),
            grid: config.image().map_or([1, config.context()], ImageInput::grid),
            window: layer.window,
            heads: config.attention.heads,
            head_dim: config.attention.head_dim,
            relative: layer.relative.is_some(),
        }
    }

    /// Images that a layer's attention computes together, of a group of so many.
    fn together(&self, layer: &CudaImageLayer, group: usize) -> Result<usize> {
        let bytes = 4 * self.attention(layer, 1).heads_len(self.dtype)? * self.dtype.bytes();
        Ok((MOST_HEADS / bytes.max(1)).clamp(1, group))
    }
}

impl Work {
    /// Room for groups of so many images.
    pub(super) fn new(encoder: &CudaImageEncoder, group: usize) -> Result<Self> {
        let (config, context, dtype) = (&encoder.config, &encoder.context, encoder.dtype);
        let tokens = group * config.context();
        let zeros = |width: usize| DeviceBuffer::zeros(context, dtype, tokens * width);
        let (mut heads, mut lse) = (0, 0);
        for layer in &encoder.layers {
            let attention = encoder.attention(layer, encoder.together(layer, group)?);
            (heads, lse) = (heads.max(attention.heads_len(dtype)?), lse.max(attention.lse_len()?));
        }
        let apart = || DeviceBuffer::zeros(context, dtype, heads);
        let has = |of: fn(&CudaImageLayer) -> bool| encoder.layers.iter().any(of);
        let integers = has(|layer| layer.qkv.takes_integers() || layer.up.takes_integers());
        let neck = match config.output {
            ModelOutput::Neck { channels } => Some(NeckWork::new(context, dtype, (tokens, channels))?),
            ModelOutput::Hidden { .. } | ModelOutput::Vocabulary { .. } => None,
        };
        Ok(Work {
            x: DeviceBuffer::zeros(context, DataType::F32, tokens * config.width)?,
            h: Hidden::new(context, dtype, (tokens, config.width), integers)?,
            qkv: zeros(3 * config.width)?,
            apart: [apart()?, apart()?, apart()?, apart()?],
            lse: DeviceBuffer::zeros(context, DataType::F32, lse)?,
            o: zeros(config.width)?,
            delta: zeros(config.width)?,
            up: zeros(config.up_width())?,
            activated: zeros(if has(|layer| !layer.up_activates) { config.feed_forward.hidden } else { 0 })?,
            neck,
        })
    }

    /// Launches the way of so many images through the encoder.
    pub(super) fn run(
        &mut self,
        encoder: &CudaImageEncoder,
        images: usize,
        patches: DeviceSlice<'_>,
        to: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (config, context) = (&encoder.config, &encoder.context);
        let (tokens, width) = (images * config.context(), config.width);
        let of_image = config.context() * width;
        for image in 0..images {
            copy(
                context,
                encoder.table.as_slice(),
                self.x.as_slice_mut().part(image * of_image..(image + 1) * of_image)?,
            )?;
        }
        let embedding = DenseLinear { out_features: width, in_features: config.image()?.patch_len() };
        let delta = first(&mut self.delta, tokens * width)?;
        embedding.forward(context, (patches, tokens), encoder.patches.as_slice(), None, delta)?;
        for layer in &encoder.layers {
            self.layer(encoder, layer, images)?;
        }
        match &encoder.end {
            CudaEnd::Norm(norm) => self.normalize(encoder, norm, tokens, Normalized::Floats(to)),
            CudaEnd::Neck(neck) => {
                let (len, h) = (tokens * width, &mut self.h.floats);
                convert(context, self.x.as_slice().part(0..len)?, first(h, len)?)?;
                add_in_place(context, self.delta.as_slice().part(0..len)?, first(h, len)?)?;
                let Some(work) = &mut self.neck else { return Ok(()) };
                let x = self.h.floats.as_slice().part(0..tokens * width)?;
                neck.run((context, config), work, images, x, to)
            }
        }
    }

    /// Launches a layer: norm, GEMM, attention, GEMM, norm, GEMM, the function where the GEMM does not apply it, GEMM.
    fn layer(&mut self, encoder: &CudaImageEncoder, layer: &CudaImageLayer, images: usize) -> Result<()> {
        let (config, context) = (&encoder.config, &encoder.context);
        let (tokens, width) = (images * config.context(), config.width);
        self.normalize_to_h(encoder, &layer.attention_norm, layer.qkv.takes_integers(), tokens)?;
        let input = self.h.input(&layer.qkv, (tokens, width))?;
        layer.qkv.forward(context, input, tokens, first(&mut self.qkv, tokens * 3 * width)?)?;
        self.attend(encoder, layer, images)?;
        self.add_block(encoder, &layer.out, layer.attention_scale.as_ref(), (tokens, Source::Attention))?;
        self.normalize_to_h(encoder, &layer.feed_forward_norm, layer.up.takes_integers(), tokens)?;
        let input = self.h.input(&layer.up, (tokens, width))?;
        layer.up.forward(context, input, tokens, first(&mut self.up, tokens * config.up_width())?)?;
        let source = if layer.up_activates { Source::Up } else { self.activate(encoder, tokens)? };
        self.add_block(encoder, &layer.down, layer.feed_forward_scale.as_ref(), (tokens, source))
    }

    /// Launches the function of the hidden layer, and its gate.
    fn activate(&mut self, encoder: &CudaImageEncoder, tokens: usize) -> Result<Source> {
        let (config, context) = (&encoder.config, &encoder.context);
        let x = self.up.as_slice().part(0..tokens * config.up_width())?;
        let to = first(&mut self.activated, tokens * config.feed_forward.hidden)?;
        match config.feed_forward.gated {
            true => gated_forward(
                context,
                gate(config.feed_forward.activation)?,
                (tokens, config.feed_forward.hidden),
                x,
                to,
            )?,
            false => activation_forward(context, element_function(config.feed_forward.activation), x, to)?,
        }
        Ok(Source::Activated)
    }

    /// Launches attention, a part of the images at a time.
    fn attend(&mut self, encoder: &CudaImageEncoder, layer: &CudaImageLayer, images: usize) -> Result<()> {
        let (config, context) = (&encoder.config, &encoder.context);
        let (tokens, width) = (config.context(), config.width);
        let together = encoder.together(layer, images)?;
        for begin in (0..images).step_by(together) {
            let count = together.min(images - begin);
            let shape = encoder.attention(layer, count);
            let (len, rows) = (shape.heads_len(encoder.dtype)?, begin * tokens..(begin + count) * tokens);
            let [q, k, v, out] = &mut self.apart;
            let mut merged = self.o.as_slice_mut();
            let tensors = ImageAttentionTensors {
                fused: self.qkv.as_slice().part(rows.start * 3 * width..rows.end * 3 * width)?,
                bias: layer.qkv_bias.as_ref().map(DeviceBuffer::as_slice),
                relative: layer.relative.as_ref().map(|[rows, columns]| [rows.as_slice(), columns.as_slice()]),
                apart: SplitHeadsMut { q: first(q, len)?, k: first(k, len)?, v: first(v, len)? },
                out: first(out, len)?,
                lse: first(&mut self.lse, shape.lse_len()?)?,
                merged: merged.part(rows.start * width..rows.end * width)?,
            };
            image_attention(context, shape, tensors)?;
        }
        Ok(())
    }

    /// Launches a block's last layer, and layer scale. An int8 layer quantizes its input itself.
    fn add_block(
        &mut self,
        encoder: &CudaImageEncoder,
        linear: &CudaLinear,
        scale: Option<&DeviceBuffer>,
        (tokens, source): (usize, Source),
    ) -> Result<()> {
        let (config, context) = (&encoder.config, &encoder.context);
        let (from, inputs) = match source {
            Source::Attention => (&self.o, config.width),
            Source::Up => (&self.up, config.feed_forward.hidden),
            Source::Activated => (&self.activated, config.feed_forward.hidden),
        };
        let input = Input::Floats(from.as_slice().part(0..tokens * inputs)?);
        let len = tokens * config.width;
        linear.forward(context, input, tokens, first(&mut self.delta, len)?)?;
        match scale {
            Some(scale) => {
                let to = first(&mut self.delta, len)?;
                Ok(scale_rows(context, (tokens, config.width), scale.as_slice(), to)?)
            }
            None => Ok(()),
        }
    }

    /// Launches the addition of the last block's output, and the norm in front of a layer, to what it reads.
    fn normalize_to_h(
        &mut self,
        encoder: &CudaImageEncoder,
        norm: &CudaNorm,
        integers: bool,
        tokens: usize,
    ) -> Result<()> {
        let len = tokens * encoder.config.width;
        let (x, delta) = (first(&mut self.x, len)?, self.delta.as_slice().part(0..len)?);
        let to = match integers {
            true => Normalized::Integers {
                values: first(&mut self.h.integers, len)?,
                scales: first(&mut self.h.scales, tokens)?,
                rounded: encoder.dtype,
            },
            false => Normalized::Floats(first(&mut self.h.floats, len)?),
        };
        normalized(encoder, norm, tokens, (x, delta, to))
    }

    /// Launches the addition of the last block's output, and a norm.
    fn normalize(
        &mut self,
        encoder: &CudaImageEncoder,
        norm: &CudaNorm,
        tokens: usize,
        to: Normalized<'_>,
    ) -> Result<()> {
        let len = tokens * encoder.config.width;
        normalized(encoder, norm, tokens, (first(&mut self.x, len)?, self.delta.as_slice().part(0..len)?, to))
    }
}

/// What a block's last layer reads.
#[derive(Debug, Clone, Copy)]
enum Source {
    Attention,
    Up,
    Activated,
}

fn normalized(
    encoder: &CudaImageEncoder,
    norm: &CudaNorm,
    tokens: usize,
    (x, delta, to): (DeviceSliceMut<'_>, DeviceSlice<'_>, Normalized<'_>),
) -> Result<()> {
    let (width, epsilon) = (encoder.config.width, encoder.config.norm.epsilon);
    let shape = TokenNorm { kind: NormKind::Layer, tokens, width, epsilon, every: 1 };
    let bias = norm.bias.as_ref().map(DeviceBuffer::as_slice);
    let tensors = TokenNormTensors { x, delta: Some(delta), gain: norm.gain.as_slice(), bias, to };
    Ok(normalize_tokens(&encoder.context, shape, tensors)?)
}
