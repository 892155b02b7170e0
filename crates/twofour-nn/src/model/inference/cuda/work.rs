//! One pass of tokens through the layers of a model.

use std::ops::Range;

use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, DeviceSlice, DeviceSliceMut};
use twofour_transformer::cuda::{add_in_place, convert, decode::Normalized, scale_rows};

use super::{
    CudaLinear,
    experts::{ExpertsWork, at_once},
    feed_forward::{FeedForward, HiddenWork},
    hidden::{Hidden, first},
    linear::Input,
    norm::{CudaNorm, Rows},
    stack::{Around, CudaStack},
};
use crate::{Result, model::config::NormPlace};

/// The tensors between the layers, for a number of tokens.
#[derive(Debug)]
pub(in crate::model) struct Work {
    tokens: usize,
    x: DeviceBuffer,
    h: Hidden,
    qkv: DeviceBuffer,
    o: DeviceBuffer,
    /// The output of the last block, which the next norm adds to `x`.
    delta: DeviceBuffer,
    /// Zeros in f32, and the output of a block behind its own norm, where blocks have one.
    normalized: Option<[DeviceBuffer; 2]>,
    hidden: HiddenWork,
    experts: Option<ExpertsWork>,
}

/// Launches the attention of the layer of that number: of queries, keys and values to their results.
pub(in crate::model) type Attend<'a> = dyn FnMut(usize, &DeviceBuffer, &mut DeviceBuffer) -> Result<()> + 'a;

impl Work {
    /// Tensors for up to `tokens` tokens; and whether what follows the last norm reads integers.
    pub(in crate::model) fn new(stack: &CudaStack, tokens: usize, head_takes_integers: bool) -> Result<Self> {
        let (config, context, dtype) = (&stack.config, &stack.context, stack.dtype);
        let width = config.width;
        let zeros = |width: usize| DeviceBuffer::zeros(context, dtype, tokens * width);
        let stream = || DeviceBuffer::zeros(context, DataType::F32, tokens * width);
        let h = head_takes_integers || stack.quantizes();
        Ok(Work {
            tokens,
            x: stream()?,
            h: Hidden::new(context, dtype, (tokens, width), h)?,
            qkv: zeros(config.qkv_width())?,
            o: zeros(config.query_width())?,
            delta: zeros(width)?,
            normalized: match config.norm.place {
                NormPlace::Around => Some([stream()?, zeros(width)?]),
                NormPlace::Before | NormPlace::After | NormPlace::Parallel => None,
            },
            hidden: HiddenWork::new(stack, at_once(tokens))?,
            experts: None,
        })
    }

    /// How many tokens fit.
    pub(in crate::model) fn tokens(&self) -> usize {
        self.tokens
    }

    /// The residual stream, f32 `[tokens, width]`.
    pub(in crate::model) fn stream(&mut self) -> &mut DeviceBuffer {
        &mut self.x
    }

    /// What the first norm adds to the residual stream, `[tokens, width]`.
    pub(in crate::model) fn added(&mut self) -> &mut DeviceBuffer {
        &mut self.delta
    }

    /// Launches the way of so many tokens of the residual stream through all layers; the output of the last block is
    /// left for the next norm. `adds` says whether there is something to add to the stream before the first norm.
    /// Launches of a layer without experts: norm, GEMM, attention, GEMM, norm, GEMM, the hidden layer's function where
    /// the GEMM does not apply it, GEMM.
    pub(in crate::model) fn layers(
        &mut self,
        stack: &CudaStack,
        tokens: usize,
        adds: bool,
        attend: &mut Attend<'_>,
    ) -> Result<()> {
        let (config, context, width) = (&stack.config, &stack.context, stack.config.width);
        for (index, layer) in stack.layers.iter().enumerate() {
            let adds = adds || index > 0;
            self.normalize(stack, &layer.around_attention.norm, layer.qkv.takes_integers(), (tokens, 1), adds)?;
            let input = self.h.input(&layer.qkv, (tokens, width))?;
            layer.qkv.forward(context, input, tokens, first(&mut self.qkv, tokens * config.qkv_width())?)?;
            attend(index, &self.qkv, &mut self.o)?;
            // An int8 layer quantizes its input itself.
            let o = Input::Floats(self.o.as_slice().part(0..tokens * config.query_width())?);
            layer.out.forward(context, o, tokens, first(&mut self.delta, tokens * width)?)?;
            self.finish_block(stack, &layer.around_attention, tokens)?;
            let (norm, takes_integers) = (&layer.around_feed_forward.norm, layer.feed_forward.takes_integers());
            self.normalize(stack, norm, takes_integers, (tokens, 1), true)?;
            let out = first(&mut self.delta, tokens * width)?;
            match &layer.feed_forward {
                FeedForward::Dense(layer) => {
                    let input = self.h.input(&layer.up, (tokens, width))?;
                    layer.forward(stack, input, tokens, &mut self.hidden, out)?;
                }
                FeedForward::Experts(experts) => {
                    let x = (self.h.floats.as_slice().part(0..tokens * width)?, tokens);
                    experts.forward(stack, x, (&mut self.experts, &mut self.hidden), out)?;
                }
            }
            self.finish_block(stack, &layer.around_feed_forward, tokens)?;
        }
        Ok(())
    }

    /// Launches the norm of a block's output, and its multiplication by factors, where it has them.
    fn finish_block(&mut self, stack: &CudaStack, around: &Around, tokens: usize) -> Result<()> {
        let (width, context) = (stack.config.width, &stack.context);
        if let (Some(norm), Some([sums, output])) = (&around.post_norm, &mut self.normalized) {
            let len = tokens * width;
            let x = (first(sums, len)?, self.delta.as_slice().part(0..len)?);
            norm.apart(context, tokens, x, first(output, len)?)?;
            // Each layer swaps twice, so a replayed step finds the buffers where it was captured.
            std::mem::swap(&mut self.delta, output);
        }
        if let Some(factors) = &around.factors {
            let to = first(&mut self.delta, tokens * width)?;
            scale_rows(context, (tokens, width), factors.as_slice(), to)?;
        }
        Ok(())
    }

    /// Launches the addition of the last block's output, where there is one, and the norm in front of a layer, for the
    /// last of every `every` tokens.
    fn normalize(
        &mut self,
        stack: &CudaStack,
        norm: &CudaNorm,
        integers: bool,
        (tokens, every): (usize, usize),
        adds: bool,
    ) -> Result<()> {
        let (width, rows) = (stack.config.width, tokens / every.max(1));
        let to = match integers {
            true => Normalized::Integers {
                values: first(&mut self.h.integers, rows * width)?,
                scales: first(&mut self.h.scales, rows)?,
                rounded: stack.dtype,
            },
            false => Normalized::Floats(first(&mut self.h.floats, rows * width)?),
        };
        let delta = adds.then(|| self.delta.as_slice().part(0..tokens * width)).transpose()?;
        let rows = Rows { tokens, every, replaces: stack.replaces() };
        norm.launch(&stack.context, rows, (first(&mut self.x, tokens * width)?, delta), to)
    }

    /// Launches the addition of the last block's output and the norm behind the last layer, to `to`.
    pub(in crate::model) fn finish_to(
        &mut self,
        stack: &CudaStack,
        norm: &CudaNorm,
        tokens: usize,
        to: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let len = tokens * stack.config.width;
        let rows = Rows { tokens, every: 1, replaces: stack.replaces() };
        let delta = Some(self.delta.as_slice().part(0..len)?);
        norm.launch(&stack.context, rows, (first(&mut self.x, len)?, delta), Normalized::Floats(to))
    }

    /// Launches the sum of the residual stream and of the last block's output, and returns it in the type to compute
    /// in, `[tokens, width]`.
    pub(in crate::model) fn sum(&mut self, stack: &CudaStack, tokens: usize) -> Result<DeviceSlice<'_>> {
        let (len, context, h) = (tokens * stack.config.width, &stack.context, &mut self.h.floats);
        convert(context, self.x.as_slice().part(0..len)?, first(h, len)?)?;
        add_in_place(context, self.delta.as_slice().part(0..len)?, first(h, len)?)?;
        Ok(self.h.floats.as_slice().part(0..len)?)
    }

    /// Launches the addition of the last block's output and the norm behind the last layer for the last of every so
    /// many tokens, to integers where what follows reads such.
    pub(in crate::model) fn finish(
        &mut self,
        stack: &CudaStack,
        norm: &CudaNorm,
        integers: bool,
        (tokens, every): (usize, usize),
    ) -> Result<()> {
        self.normalize(stack, norm, integers, (tokens, every), true)
    }

    /// Launches a layer for some of the tokens that [`Work::finish`] normalized: of the last of every so many tokens
    /// each is one.
    pub(super) fn scores(
        &self,
        stack: &CudaStack,
        head: &CudaLinear,
        rows: Range<usize>,
        to: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let width = stack.config.width;
        let elements = rows.start * width..rows.end * width;
        let input = match head.takes_integers() {
            true => Input::Integers(
                self.h.integers.as_slice().part(elements)?,
                self.h.scales.as_slice().part(rows.clone())?,
            ),
            false => Input::Floats(self.h.floats.as_slice().part(elements)?),
        };
        head.forward(&stack.context, input, rows.len(), to)
    }
}
