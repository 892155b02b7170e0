//! Encoders on an NVIDIA GPU: BERT.

use twofour::{
    DataType,
    kernel::{Activation, KernelElement},
};
use twofour_cuda::{
    Device,
    layer::{Accumulate, DeviceBuffer, LayerContext},
};
use twofour_transformer::cuda::{
    activation_forward, add_in_place, cross_entropy_loss,
    decode::{TokenEmbedding, embed_tokens},
};

use super::{
    EncoderInput, HiddenStates,
    masked_head::{MaskedHead, masked_decoder},
    split,
};
use crate::{
    Result,
    engine::{Nonlinearity, cuda::functions::element_function},
    model::{
        EncoderCheckpoint, TransformerConfig,
        checkpoint::StoredParts,
        config::NormKind,
        families::bert::MASKED_TRANSFORM,
        float::match_float,
        inference::{
            cuda::{
                Build, CudaLinear, CudaNorm, CudaStack, FullAttention, Input, Work, fused, of_stack, repeatable, upload,
            },
            parts::Parts,
        },
    },
};

/// Tokens that go through the layers together, about; at least those of one sequence.
const TOKENS: usize = 1 << 14;

/// An encoder's weights in the memory of a GPU, in f32, f16 or bf16: dense layers for cuBLASLt, 2:4 layers in f16,
/// bf16, int8 or int4 for the 2:4 kernels; in f32 all are dense.
///
/// GEMMs and attention run in the type, the residual stream and all sums are f32. Inputs of int8 layers are quantized
/// with a scale for each token. The pooler stays out: [`Encoder::pooled`](super::Encoder::pooled) of the same
/// checkpoint makes it of the hidden states.
#[derive(Debug)]
pub struct CudaEncoder {
    stack: CudaStack,
    words: DeviceBuffer,
    positions: DeviceBuffer,
    types: DeviceBuffer,
    /// The norm behind the last layer.
    norm: CudaNorm,
}

impl CudaEncoder {
    /// Reads a checkpoint's weights onto a device, to compute in `dtype`: f32, f16 or bf16. It times no GEMMs to choose
    /// among them, so that results repeat bit for bit.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for a width above 8192; another type; those of reading and of
    /// the device's memory.
    pub fn of_checkpoint(device: &Device, checkpoint: &EncoderCheckpoint, dtype: DataType) -> Result<Self> {
        let (context, config, parts) = (repeatable(device)?, checkpoint.config(), checkpoint.parts());
        match_float!(dtype, |T| Self::build(Build::<T, _>::new(context, config, &parts)?, config))
    }

    fn build<T: KernelElement>(build: Build<'_, T, impl Parts<T>>, config: &TransformerConfig) -> Result<Self> {
        let width = config.width;
        Ok(CudaEncoder {
            words: build.table("embedding.weight", [config.vocabulary(), width])?,
            positions: build.table("positions.weight", [config.context(), width])?,
            types: build.table("types.weight", [config.token_types(), width])?,
            norm: build.last_norm()?,
            stack: build.stack()?,
        })
    }

    /// Bytes of the layers' linear weights on the device.
    pub fn weight_bytes(&self) -> usize {
        self.stack.weight_bytes()
    }

    /// The last hidden states of each sequence, as [`Encoder::forward`](super::Encoder::forward) returns them.
    ///
    /// # Errors
    /// A sequence that is empty or longer than the context, tokens or types that do not exist or of another number;
    /// those of the device.
    pub fn forward(&self, inputs: &[EncoderInput<'_>]) -> Result<Vec<Vec<f32>>> {
        inputs.iter().try_for_each(|input| input.expect_fit(self.config()))?;
        let (mut rest, mut found) = (inputs, vec![]);
        while !rest.is_empty() {
            let mut tokens = 0;
            let fit = rest.iter().take_while(|input| {
                tokens += input.tokens.len();
                tokens <= TOKENS
            });
            let (some, others) = rest.split_at(fit.count().max(1));
            found.extend(self.pass(some)?);
            rest = others;
        }
        Ok(found)
    }

    /// The hidden states of sequences that go through the layers together.
    fn pass(&self, inputs: &[EncoderInput<'_>]) -> Result<Vec<Vec<f32>>> {
        let CudaStack { context, config, .. } = &self.stack;
        let lengths: Vec<usize> = inputs.iter().map(|input| input.tokens.len()).collect();
        let (tokens, width) = (lengths.iter().sum(), config.width);
        let ids = |of: &dyn Fn(&EncoderInput<'_>) -> Vec<u32>| {
            DeviceBuffer::from_ids(context, &inputs.iter().flat_map(of).collect::<Vec<u32>>())
        };
        let words = ids(&|input| input.tokens.to_vec())?;
        let positions = ids(&|input| (0..input.tokens.len() as u32).collect())?;
        let types = ids(&|input| input.types.map_or_else(|| vec![0; input.tokens.len()], <[u32]>::to_vec))?;
        let mut work = Work::new(&self.stack, tokens, false)?;
        // A token is a sequence of its own here: positions begin anew with each text.
        let embedding = TokenEmbedding {
            batch: tokens,
            count: 1,
            vocabulary: config.vocabulary(),
            width,
            context: config.context(),
        };
        let tables = (self.words.as_slice(), Some(self.positions.as_slice()));
        let at = positions.as_slice();
        embed_tokens(context, embedding, (words.as_slice(), at), tables, work.stream().as_slice_mut())?;
        let of_types = TokenEmbedding { vocabulary: config.token_types(), context: 0, ..embedding };
        let mut added = DeviceBuffer::zeros(context, DataType::F32, tokens * width)?;
        let tables = (self.types.as_slice(), None);
        embed_tokens(context, of_types, (types.as_slice(), at), tables, added.as_slice_mut())?;
        add_in_place(context, added.as_slice(), work.stream().as_slice_mut())?;
        let mut attention = FullAttention::new(&self.stack, &lengths)?;
        work.layers(&self.stack, tokens, false, &mut |index, qkv, o| {
            attention.launch((&self.stack, index), &lengths, qkv, o)
        })?;
        work.finish(&self.stack, &self.norm, false, (tokens, 1))?;
        Ok(split(&work.stream().to_host::<f32>()?, inputs, width))
    }
}

of_stack!(CudaEncoder);

impl HiddenStates for CudaEncoder {
    fn config(&self) -> &TransformerConfig {
        self.config()
    }

    fn hidden(&self, inputs: &[EncoderInput<'_>]) -> Result<Vec<Vec<f32>>> {
        self.forward(inputs)
    }
}

/// The head that scores the vocabulary for masked tokens.
#[derive(Debug)]
pub(super) struct CudaMaskedHead {
    context: LayerContext,
    dtype: DataType,
    transform: CudaLinear,
    /// The function behind the transform, where its GEMM does not apply it.
    function: Option<Nonlinearity>,
    norm: CudaNorm,
    decoder: CudaLinear,
    vocabulary: usize,
}

impl CudaMaskedHead {
    /// The head of a checkpoint beside its encoder.
    pub(super) fn new(encoder: &CudaEncoder, parts: &StoredParts<'_>) -> Result<Self> {
        let (context, config) = (encoder.context().clone(), encoder.config());
        match_float!(encoder.dtype(), |T| Self::build(Build::<T, _>::new(context, config, parts)?, encoder, parts))
    }

    fn build<'a, T: KernelElement + twofour::file::StoredElement>(
        build: Build<'_, T, StoredParts<'a>>,
        encoder: &CudaEncoder,
        parts: &StoredParts<'a>,
    ) -> Result<Self> {
        let (config, context) = (encoder.config(), encoder.context().clone());
        let (width, function) = (config.width, config.feed_forward.activation);
        let (transform, activates) = build.linear(MASKED_TRANSFORM, (width, width), fused(function))?;
        let decoder = vec![masked_decoder::<T>(parts, config)?];
        Ok(CudaMaskedHead {
            transform,
            function: (!activates).then_some(function),
            norm: build.norm_of("head.norm", width, (NormKind::Layer, config.norm.epsilon))?,
            decoder: CudaLinear::new(&context, decoder, Activation::Identity)?.0,
            vocabulary: config.vocabulary(),
            dtype: encoder.dtype(),
            context,
        })
    }
}

impl MaskedHead for CudaMaskedHead {
    fn loss(&self, rows: &[f32], targets: &[u32]) -> Result<f64> {
        let (context, dtype, count) = (&self.context, self.dtype, targets.len());
        let zeros = |dtype: DataType, len: usize| DeviceBuffer::zeros(context, dtype, len);
        let mut x = upload(context, dtype, rows)?;
        let mut y = zeros(dtype, rows.len())?;
        self.transform.forward(context, Input::Floats(x.as_slice()), count, y.as_slice_mut())?;
        if let Some(function) = self.function {
            activation_forward(context, element_function(function), y.as_slice(), x.as_slice_mut())?;
            std::mem::swap(&mut x, &mut y);
        }
        let mut sums = zeros(DataType::F32, rows.len())?;
        self.norm.apart(context, count, (sums.as_slice_mut(), y.as_slice()), x.as_slice_mut())?;
        let mut scores = zeros(dtype, count * self.vocabulary)?;
        self.decoder.forward(context, Input::Floats(x.as_slice()), count, scores.as_slice_mut())?;
        let (targets, mut loss) = (DeviceBuffer::from_ids(context, targets)?, zeros(DataType::F32, 1)?);
        let (mut status, shape) = (DeviceBuffer::from_ids(context, &[0])?, (count, self.vocabulary));
        let (to, status) = (loss.as_slice_mut(), status.as_slice_mut());
        cross_entropy_loss(context, shape, scores.as_slice(), targets.as_slice(), to, Accumulate::Overwrite, status)?;
        Ok(loss.to_host::<f32>()?.first().copied().map_or(f64::NAN, f64::from))
    }
}
