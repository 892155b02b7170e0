//! One pass of new tokens through a model.

use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext};
use twofour_transformer::{
    ScoreOptions,
    cuda::{
        Rotary, activation_forward,
        decode::{
            CachedAttention, CachedTokens, HeadNorms, Normalized, TokenEmbedding, TokenNorm, TokenNormTensors,
            embed_tokens, gate_to_i8, normalize_tokens,
        },
        fill, gated_forward, scale_in_place, soft_cap_in_place,
    },
};

use super::{
    CudaInference, CudaLinear, CudaNorm,
    hidden::{Hidden, first},
    linear::Input,
};
use crate::{
    Error, Result,
    engine::cuda::functions::{element_function, gate},
    model::config::NormPlace,
};

/// The tensors between the layers, for a number of tokens.
#[derive(Debug)]
pub(super) struct Work {
    tokens: usize,
    x: DeviceBuffer,
    h: Hidden,
    qkv: DeviceBuffer,
    o: DeviceBuffer,
    delta: DeviceBuffer,
    /// Zeros in f32, and the output of a block behind its own norm, where blocks have one.
    normalized: Option<[DeviceBuffer; 2]>,
    up: DeviceBuffer,
    gated: Hidden,
}

/// Keys and values of each layer.
pub(super) type Caches<'a> = Vec<[DeviceSliceMut<'a>; 2]>;

/// Where new tokens go.
#[derive(Debug, Clone, Copy)]
pub(super) struct Step<'a> {
    pub(super) attention: &'a CachedAttention,
    /// New tokens of each of the attention's sequences.
    pub(super) count: usize,
    pub(super) ids: DeviceSlice<'a>,
    pub(super) positions: DeviceSlice<'a>,
    /// The rotation of layers over the whole sequence, and that of layers with a window, where it is another.
    pub(super) rotary: [Option<Rotary<'a>>; 2],
}

impl Work {
    /// Tensors for up to `tokens` tokens.
    pub(super) fn new(model: &CudaInference, tokens: usize) -> Result<Self> {
        let (config, context, dtype) = (&model.config, &model.context, model.dtype);
        let zeros = |width: usize| DeviceBuffer::zeros(context, dtype, tokens * width);
        let quantizes = |of: fn(&super::CudaLayer) -> &CudaLinear| model.layers.iter().any(|l| of(l).takes_integers());
        let h = quantizes(|l| &l.qkv) || quantizes(|l| &l.up) || model.head.takes_integers();
        Ok(Work {
            tokens,
            x: DeviceBuffer::zeros(context, DataType::F32, tokens * config.width)?,
            h: Hidden::new(context, dtype, (tokens, config.width), h)?,
            qkv: zeros(config.qkv_width())?,
            o: zeros(config.query_width())?,
            delta: zeros(config.width)?,
            normalized: match config.norm.place {
                NormPlace::Around => {
                    Some([DeviceBuffer::zeros(context, DataType::F32, tokens * config.width)?, zeros(config.width)?])
                }
                NormPlace::Before | NormPlace::After => None,
            },
            up: zeros(config.up_width())?,
            gated: Hidden::new(
                context,
                dtype,
                (tokens, config.feed_forward.hidden),
                config.feed_forward.gated && quantizes(|l| &l.down),
            )?,
        })
    }

    /// How many tokens fit.
    pub(super) fn tokens(&self) -> usize {
        self.tokens
    }

    /// Launches new tokens' way through all layers; what is left is [`Work::head`]. Launches of a step of one token:
    /// norm, GEMM, attention, GEMM, norm, GEMM, gate, GEMM.
    pub(super) fn run(&mut self, model: &CudaInference, step: Step<'_>, caches: Caches<'_>) -> Result<()> {
        let (config, context) = (&model.config, &model.context);
        let batch = step.attention.shape().batch;
        let (tokens, width) = (batch * step.count, config.width);
        let embedding = TokenEmbedding {
            batch,
            count: step.count,
            vocabulary: config.vocabulary(),
            width,
            context: if model.learned.is_some() { config.context() } else { 0 },
        };
        let table = model.embedding.as_ref().or_else(|| model.head.dense_values());
        let table = table.ok_or_else(|| Error::Unsupported {
            engine: "CUDA inference",
            what: "a head that is the embedding and not dense".into(),
            remedy: "keep the embedding dense",
        })?;
        let tables = (table.as_slice(), model.learned.as_ref().map(DeviceBuffer::as_slice));
        embed_tokens(context, embedding, (step.ids, step.positions), tables, first(&mut self.x, tokens * width)?)?;
        if let Some(scale) = model.embedding_scale {
            scale_in_place(context, scale, first(&mut self.x, tokens * width)?)?;
        }
        for (index, (layer, [keys, values])) in model.layers.iter().zip(caches).enumerate() {
            self.normalize(model, &layer.attention_norm, &layer.qkv, (tokens, 1), index > 0)?;
            let input = self.h.input(&layer.qkv, (tokens, width))?;
            layer.qkv.forward(context, input, tokens, first(&mut self.qkv, tokens * config.qkv_width())?)?;
            let norms = layer.head_norms.as_ref().map(|[query, key]| HeadNorms {
                query: query.as_slice(),
                key: key.as_slice(),
                epsilon: config.norm.epsilon,
            });
            let out_len = tokens * config.query_width();
            let attended = CachedTokens {
                qkv: self.qkv.as_slice().part(0..tokens * config.qkv_width())?,
                positions: step.positions,
                rotary: step.rotary[1].filter(|_| config.window(index).is_some()).or(step.rotary[0]),
                norms,
                scores: ScoreOptions {
                    window: config.window(index),
                    scale: config.attention.scale,
                    soft_cap: config.attention.soft_cap,
                },
                keys,
                values,
                out: first(&mut self.o, out_len)?,
            };
            step.attention.run(step.count, attended)?;
            self.output(context, &layer.out, (tokens, width))?;
            self.normalize_output(model, layer.attention_post_norm.as_ref(), tokens)?;
            self.normalize(model, &layer.feed_forward_norm, &layer.up, (tokens, 1), true)?;
            let input = self.h.input(&layer.up, (tokens, width))?;
            layer.up.forward(context, input, tokens, first(&mut self.up, tokens * config.up_width())?)?;
            self.activate(model, &layer.down, tokens)?;
            let input = match config.feed_forward.gated {
                true => self.gated.input(&layer.down, (tokens, config.feed_forward.hidden))?,
                // An int8 layer quantizes it itself.
                false => Input::Floats(self.gated.floats.as_slice().part(0..tokens * config.feed_forward.hidden)?),
            };
            layer.down.forward(context, input, tokens, first(&mut self.delta, tokens * width)?)?;
            self.normalize_output(model, layer.feed_forward_post_norm.as_ref(), tokens)?;
        }
        Ok(())
    }

    /// Launches the output projection of attention. An int8 layer quantizes its input itself.
    fn output(&mut self, context: &LayerContext, out: &CudaLinear, (tokens, width): (usize, usize)) -> Result<()> {
        let o = self.o.as_slice().part(0..tokens * (self.o.len() / self.tokens))?;
        out.forward(context, Input::Floats(o), tokens, first(&mut self.delta, tokens * width)?)
    }

    /// Launches the norm of a block's output, where it has one. The kernel normalizes a residual stream, here zeros, to
    /// which the output is added.
    fn normalize_output(&mut self, model: &CudaInference, norm: Option<&CudaNorm>, tokens: usize) -> Result<()> {
        let (Some(norm), Some([sums, output])) = (norm, &mut self.normalized) else { return Ok(()) };
        let (width, context) = (model.config.width, &model.context);
        fill(context, 0.0, first(sums, tokens * width)?)?;
        let (kind, epsilon) = (model.norm_kind(), model.config.norm.epsilon);
        let tensors = TokenNormTensors {
            x: first(sums, tokens * width)?,
            delta: Some(self.delta.as_slice().part(0..tokens * width)?),
            gain: norm.gain.as_slice(),
            bias: norm.bias.as_ref().map(DeviceBuffer::as_slice),
            to: Normalized::Floats(first(output, tokens * width)?),
        };
        normalize_tokens(context, TokenNorm { kind, tokens, width, epsilon, every: 1 }, tensors)?;
        // Each layer swaps twice, so a replayed step finds the buffers where it was captured.
        std::mem::swap(&mut self.delta, output);
        Ok(())
    }

    /// Launches the addition of the last block's output and the norm in front of a layer, for the last of every `every`
    /// tokens.
    fn normalize(
        &mut self,
        model: &CudaInference,
        norm: &CudaNorm,
        before: &CudaLinear,
        (tokens, every): (usize, usize),
        adds: bool,
    ) -> Result<()> {
        let (width, dtype) = (model.config.width, model.dtype);
        let rows = tokens / every.max(1);
        let kind = model.norm_kind();
        let shape = TokenNorm { kind, tokens, width, epsilon: model.config.norm.epsilon, every };
        let delta = match adds {
            true => Some(self.delta.as_slice().part(0..tokens * width)?),
            false => None,
        };
        let to = match before.takes_integers() {
            true => Normalized::Integers {
                values: first(&mut self.h.integers, rows * width)?,
                scales: first(&mut self.h.scales, rows)?,
                rounded: dtype,
            },
            false => Normalized::Floats(first(&mut self.h.floats, rows * width)?),
        };
        let tensors = TokenNormTensors {
            x: first(&mut self.x, tokens * width)?,
            delta,
            gain: norm.gain.as_slice(),
            bias: norm.bias.as_ref().map(DeviceBuffer::as_slice),
            to,
        };
        Ok(normalize_tokens(&model.context, shape, tensors)?)
    }

    /// Launches the function of the hidden layer.
    fn activate(&mut self, model: &CudaInference, down: &CudaLinear, tokens: usize) -> Result<()> {
        let (config, context) = (&model.config, &model.context);
        let hidden = config.feed_forward.hidden;
        let x = self.up.as_slice().part(0..tokens * config.up_width())?;
        if !config.feed_forward.gated {
            let function = element_function(config.feed_forward.activation);
            return Ok(activation_forward(context, function, x, first(&mut self.gated.floats, tokens * hidden)?)?);
        }
        let gate = gate(config.feed_forward.activation)?;
        if down.takes_integers() {
            let to = (first(&mut self.gated.integers, tokens * hidden)?, first(&mut self.gated.scales, tokens)?);
            return Ok(gate_to_i8(context, gate, (tokens, hidden), x, to)?);
        }
        Ok(gated_forward(context, gate, (tokens, hidden), x, first(&mut self.gated.floats, tokens * hidden)?)?)
    }

    /// Launches the last norm and the head for the last of every `every` tokens: logits `[tokens / every, vocabulary]`.
    pub(super) fn head(
        &mut self,
        model: &CudaInference,
        (tokens, every): (usize, usize),
        mut logits: DeviceSliceMut<'_>,
    ) -> Result<()> {
        self.normalize(model, &model.norm, &model.head, (tokens, every), true)?;
        let rows = tokens / every.max(1);
        let input = self.h.input(&model.head, (rows, model.config.width))?;
        model.head.forward(&model.context, input, rows, logits.reborrow())?;
        bounded(model, logits)
    }

    /// Launches the last norm for all tokens, before [`Work::scores`].
    pub(super) fn finish(&mut self, model: &CudaInference, tokens: usize) -> Result<()> {
        self.normalize(model, &model.norm, &model.head, (tokens, 1), true)
    }

    /// Launches the head for some of the tokens that [`Work::finish`] normalized.
    pub(super) fn scores(
        &self,
        model: &CudaInference,
        rows: std::ops::Range<usize>,
        mut logits: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let width = model.config.width;
        let elements = rows.start * width..rows.end * width;
        let input = match model.head.takes_integers() {
            true => Input::Integers(
                self.h.integers.as_slice().part(elements)?,
                self.h.scales.as_slice().part(rows.clone())?,
            ),
            false => Input::Floats(self.h.floats.as_slice().part(elements)?),
        };
        model.head.forward(&model.context, input, rows.len(), logits.reborrow())?;
        bounded(model, logits)
    }
}

/// Launches the bound of the head's scores, where the model has one.
fn bounded(model: &CudaInference, logits: DeviceSliceMut<'_>) -> Result<()> {
    match model.config.logit_soft_cap() {
        Some(cap) => Ok(soft_cap_in_place(&model.context, cap, logits)?),
        None => Ok(()),
    }
}
