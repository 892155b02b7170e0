//! New tokens of sequences whose keys and values are cached.

use twofour_cuda::layer::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use twofour_transformer::{
    ScoreOptions,
    cuda::{
        Rotary,
        decode::{CachedAttention, CachedTokens, HeadNorms, TokenEmbedding, embed_tokens},
        scale_in_place, soft_cap_in_place,
    },
};

use super::{CudaInference, hidden::first, work::Work};
use crate::{Error, Result};

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

impl CudaInference {
    /// Launches new tokens' way through all layers; what is left is [`CudaInference::head`].
    pub(super) fn run(&self, work: &mut Work, step: Step<'_>, caches: Caches<'_>) -> Result<()> {
        let (config, context) = (&self.stack.config, &self.stack.context);
        let batch = step.attention.shape().batch;
        let (tokens, width) = (batch * step.count, config.width);
        let embedding = TokenEmbedding {
            batch,
            count: step.count,
            vocabulary: config.vocabulary(),
            width,
            context: if self.learned.is_some() { config.context() } else { 0 },
        };
        let table = self.embedding.as_ref().or_else(|| self.head.dense_values());
        let table = table.ok_or_else(|| Error::Unsupported {
            engine: "CUDA inference",
            what: "a head that is the embedding and not dense".into(),
            remedy: "keep the embedding dense",
        })?;
        let tables = (table.as_slice(), self.learned.as_ref().map(DeviceBuffer::as_slice));
        embed_tokens(context, embedding, (step.ids, step.positions), tables, first(work.stream(), tokens * width)?)?;
        if let Some(scale) = self.embedding_scale {
            scale_in_place(context, scale, first(work.stream(), tokens * width)?)?;
        }
        let mut caches = caches.into_iter();
        work.layers(&self.stack, tokens, false, &mut |index, qkv, o| {
            let Some([keys, values]) = caches.next() else { return Ok(()) };
            let layer = &self.stack.layers[index];
            let norms = layer.head_norms.as_ref().map(|[query, key]| HeadNorms {
                query: query.as_slice(),
                key: key.as_slice(),
                epsilon: config.norm.epsilon,
            });
            let window = config.window(index);
            let attended = CachedTokens {
                qkv: qkv.as_slice().part(0..tokens * config.qkv_width())?,
                positions: step.positions,
                rotary: step.rotary[1].filter(|_| window.is_some()).or(step.rotary[0]),
                norms,
                scores: ScoreOptions { window, scale: config.attention.scale, soft_cap: config.attention.soft_cap },
                sinks: layer.sinks.as_ref().map(DeviceBuffer::as_slice),
                keys,
                values,
                out: first(o, tokens * config.query_width())?,
            };
            Ok(step.attention.run(step.count, attended)?)
        })
    }

    /// Launches the last norm and the head for the last of every `every` tokens: logits `[tokens / every, vocabulary]`.
    pub(super) fn head(
        &self,
        work: &mut Work,
        (tokens, every): (usize, usize),
        logits: DeviceSliceMut<'_>,
    ) -> Result<()> {
        work.finish(&self.stack, &self.norm, self.head.takes_integers(), (tokens, every))?;
        self.scores(work, 0..tokens / every.max(1), logits)
    }

    /// Launches the head for some of the tokens that the last norm has normalized, and the bound of their scores, where
    /// the model has one.
    pub(super) fn scores(
        &self,
        work: &Work,
        rows: std::ops::Range<usize>,
        mut logits: DeviceSliceMut<'_>,
    ) -> Result<()> {
        work.scores(&self.stack, &self.head, rows, logits.reborrow())?;
        match self.stack.config.logit_soft_cap() {
            Some(cap) => Ok(soft_cap_in_place(&self.stack.context, cap, logits)?),
            None => Ok(()),
        }
    }
}
