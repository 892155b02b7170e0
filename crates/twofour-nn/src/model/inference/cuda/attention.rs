//! Attention over whole sequences, without a cache: of texts, and of the tokens of images.

use twofour::DataType;
use twofour_cuda::layer::DeviceBuffer;
use twofour_transformer::cuda::{ImageAttention, ImageAttentionTensors, SplitHeadsMut, image_attention};

use super::{
    hidden::first,
    stack::{CudaLayer, CudaStack},
};
use crate::{Result, model::config::ImageInput};

/// Most bytes of queries, keys, values and results by heads; at least those of one sequence.
const MAX_HEADS: usize = 512 << 20;

/// Room for queries, keys, values and results by heads.
#[derive(Debug)]
pub(in crate::model) struct FullAttention {
    apart: [DeviceBuffer; 4],
    lse: DeviceBuffer,
}

/// Attention of a layer over so many sequences of equal length.
fn shape(stack: &CudaStack, layer: &CudaLayer, index: usize, (sequences, tokens): (usize, usize)) -> ImageAttention {
    let config = &stack.config;
    ImageAttention {
        images: sequences,
        tokens,
        grid: config.image().map_or([1, tokens], ImageInput::grid),
        window: config.window(index),
        heads: config.attention.heads,
        head_dim: config.attention.head_dim,
        relative: layer.relative.is_some(),
    }
}

/// Sequences that a layer's attention computes together.
fn together(stack: &CudaStack, layer: &CudaLayer, index: usize, (sequences, tokens): (usize, usize)) -> Result<usize> {
    let bytes = 4 * shape(stack, layer, index, (1, tokens)).heads_len(stack.dtype)? * stack.dtype.bytes();
    Ok((MAX_HEADS / bytes.max(1)).clamp(1, sequences.max(1)))
}

/// Runs of sequences of equal length: how many, and their length.
fn runs(lengths: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    lengths.chunk_by(|a, b| a == b).map(|run| (run.len(), run[0]))
}

impl FullAttention {
    /// Room for sequences of these lengths.
    pub(in crate::model) fn new(stack: &CudaStack, lengths: &[usize]) -> Result<Self> {
        let (mut heads, mut lse) = (0, 0);
        for run in runs(lengths) {
            for (index, layer) in stack.layers.iter().enumerate() {
                let most = (together(stack, layer, index, run)?, run.1);
                let shape = shape(stack, layer, index, most);
                (heads, lse) = (heads.max(shape.heads_len(stack.dtype)?), lse.max(shape.lse_len()?));
            }
        }
        let apart = || DeviceBuffer::zeros(&stack.context, stack.dtype, heads);
        Ok(FullAttention {
            apart: [apart()?, apart()?, apart()?, apart()?],
            lse: DeviceBuffer::zeros(&stack.context, DataType::F32, lse)?,
        })
    }

    /// Launches the attention of a layer, of `qkv` to `o`, for sequences that follow each other.
    pub(in crate::model) fn launch(
        &mut self,
        (stack, index): (&CudaStack, usize),
        lengths: &[usize],
        qkv: &DeviceBuffer,
        o: &mut DeviceBuffer,
    ) -> Result<()> {
        let (layer, width, mut token) = (&stack.layers[index], stack.config.width, 0);
        for (sequences, tokens) in runs(lengths) {
            let together = together(stack, layer, index, (sequences, tokens))?;
            for begin in (0..sequences).step_by(together) {
                let count = together.min(sequences - begin);
                let shape = shape(stack, layer, index, (count, tokens));
                let (len, rows) = (shape.heads_len(stack.dtype)?, token..token + count * tokens);
                let [q, k, v, out] = &mut self.apart;
                let mut merged = o.as_slice_mut();
                let tensors = ImageAttentionTensors {
                    fused: qkv.as_slice().part(rows.start * 3 * width..rows.end * 3 * width)?,
                    bias: layer.qkv_bias.as_ref().map(DeviceBuffer::as_slice),
                    relative: layer.relative.as_ref().map(|[rows, columns]| [rows.as_slice(), columns.as_slice()]),
                    apart: SplitHeadsMut { q: first(q, len)?, k: first(k, len)?, v: first(v, len)? },
                    out: first(out, len)?,
                    lse: first(&mut self.lse, shape.lse_len()?)?,
                    merged: merged.part(rows.start * width..rows.end * width)?,
                };
                image_attention(&stack.context, shape, tensors)?;
                token = rows.end;
            }
        }
        Ok(())
    }
}
