//! Models of random weights, to measure a shape without its checkpoint.

use std::sync::Mutex;

use half::f16;
use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, LayerContext, PackedLinear, RandomForm, random_buffer};
use twofour_transformer::cuda::decode::{DenseInt8Linear, WeightOnlyLinear};

use super::{
    CudaInference, CudaLinear, CudaNorm, CudaStack,
    build::expect_supported,
    feed_forward::{FeedForward, HiddenLayer},
    stack::{Around, CudaLayer},
};
use crate::{
    Error, Result,
    model::{
        config::{NormKind, Positions, TransformerConfig},
        inference::rotation::Rotations,
    },
};

/// The form of the linear layers' weights of a random model; embedding and head are dense.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum CudaRandomWeights {
    /// Dense, of the type to compute in.
    Dense,
    /// Dense 8-bit integers; activations are quantized with a scale for each token.
    DenseInt8,
    /// Dense 8-bit integers, by cuBLASLt's GEMM for any number of tokens.
    DenseInt8ByLibrary,
    /// Dense 8-bit integers with a scale for each row; activations are of the type to compute in.
    Int8WeightOnly,
    /// Dense int4 with a scale for each group of 64; activations are of the type to compute in.
    Int4WeightOnly,
    /// 2:4, of the type to compute in.
    TwoFour,
    /// 2:4 in 8-bit integers.
    TwoFourInt8,
    /// 2:4 in int4 with a scale for each group of 128.
    TwoFourInt4,
}

impl CudaInference {
    /// A model with random weights, without biases, which are made on the device. Its texts mean nothing.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a model with biases or learned positions, and those of
    /// [`CudaInference::of_checkpoint`].
    pub fn random(
        context: LayerContext,
        config: &TransformerConfig,
        form: CudaRandomWeights,
        dtype: DataType,
    ) -> Result<Self> {
        config.validate()?;
        expect_supported(config)?;
        let has_biases = config.attention.qkv_bias || config.attention.out_bias || config.feed_forward.bias;
        if config.positions == Positions::Learned {
            return Err(unsupported("learned positions"));
        }
        if let Some(what) = config.beyond_llama() {
            return Err(unsupported(what));
        }
        if has_biases || config.norm.kind == NormKind::Layer || config.attention.head_norms {
            return Err(unsupported("biases, layer normalization or norms of heads"));
        }
        let (width, vocabulary, feed_forward) = (config.width, config.vocabulary(), config.feed_forward.hidden);
        let shapes = [
            (config.qkv_width(), width),
            (width, config.query_width()),
            (config.up_width(), width),
            (width, feed_forward),
        ];
        let norm = || -> Result<CudaNorm> {
            let gain = DeviceBuffer::from_host(&context, &vec![1f32; width])?;
            Ok(CudaNorm { gain, bias: None, epsilon: config.norm.epsilon })
        };
        let around = || -> Result<Around> { Ok(Around { norm: norm()?, post_norm: None, factors: None }) };
        let layer = |_| -> Result<CudaLayer> {
            let [qkv, out, up, down] = linears(&context, form, shapes, dtype)?;
            Ok(CudaLayer {
                around_attention: around()?,
                qkv,
                qkv_bias: None,
                head_norms: None,
                relative: None,
                sinks: None,
                out,
                around_feed_forward: around()?,
                feed_forward: FeedForward::Dense(Box::new(HiddenLayer {
                    up,
                    up_activates: false,
                    down,
                    width: feed_forward,
                })),
            })
        };
        let layers = (0..config.layers).map(layer).collect::<Result<_>>()?;
        let table = |tied: bool| -> Result<Option<DeviceBuffer>> {
            if tied { Ok(None) } else { Ok(Some(random_buffer(&context, dtype, vocabulary * width)?)) }
        };
        let head = CudaLinear::dense(random_buffer(&context, dtype, vocabulary * width)?, (vocabulary, width));
        Ok(CudaInference {
            embedding: table(config.is_tied())?,
            learned: None,
            norm: norm()?,
            head,
            embedding_scale: None,
            rotations: Rotations::of(config),
            stack: CudaStack { context: context.clone(), config: config.clone(), dtype, layers },
            busy: Mutex::default(),
        })
    }
}

fn unsupported(what: &str) -> Error {
    let remedy = "measure a model of LLaMA's kind";
    Error::Unsupported { engine: "a model of random weights", what: what.into(), remedy }
}

fn linears(
    context: &LayerContext,
    form: CudaRandomWeights,
    shapes: [(usize, usize); 4],
    dtype: DataType,
) -> Result<[CudaLinear; 4]> {
    let packed = |form: RandomForm| -> Result<Vec<CudaLinear>> {
        Ok(PackedLinear::random(context, form, &shapes, dtype)?.into_iter().map(CudaLinear::packed).collect())
    };
    let each = |of: &dyn Fn((usize, usize)) -> Result<CudaLinear>| shapes.into_iter().map(of).collect::<Result<_>>();
    let all: Vec<CudaLinear> = match form {
        CudaRandomWeights::TwoFour => packed(RandomForm::Float)?,
        CudaRandomWeights::TwoFourInt8 => packed(RandomForm::Int8)?,
        CudaRandomWeights::TwoFourInt4 => packed(RandomForm::Int4)?,
        CudaRandomWeights::Dense => {
            each(&|shape| Ok(CudaLinear::dense(random_buffer(context, dtype, shape.0 * shape.1)?, shape)))?
        }
        CudaRandomWeights::DenseInt8 | CudaRandomWeights::DenseInt8ByLibrary => each(&|shape| {
            let (weight, scales) = random_int8(context, shape)?;
            let layer = DenseInt8Linear::new(context, shape, weight, scales, None)?;
            let by_library = form == CudaRandomWeights::DenseInt8ByLibrary;
            Ok(CudaLinear::dense_int8(if by_library { layer.by_library() } else { layer }, shape))
        })?,
        CudaRandomWeights::Int8WeightOnly => each(&|shape| {
            let (weight, scales) = random_int8(context, shape)?;
            Ok(CudaLinear::weight_only(WeightOnlyLinear::int8(context, shape, weight, scales)?))
        })?,
        CudaRandomWeights::Int4WeightOnly => each(&|shape| {
            let weight = random_buffer(context, DataType::I8, shape.0 * shape.1 / 2)?;
            let scales = DeviceBuffer::from_host(context, &vec![f16::from_f32(0.01); shape.0 * shape.1 / 64])?;
            Ok(CudaLinear::weight_only(WeightOnlyLinear::int4(context, shape, weight, scales)?))
        })?,
    };
    all.try_into().map_err(|_| unsupported("another number of layers"))
}

/// Random 8-bit integers, and the scales of rows.
fn random_int8(context: &LayerContext, shape: (usize, usize)) -> Result<(DeviceBuffer, DeviceBuffer)> {
    let scales = DeviceBuffer::from_host(context, &vec![0.01f32; shape.0])?;
    Ok((random_buffer(context, DataType::I8, shape.0 * shape.1)?, scales))
}
