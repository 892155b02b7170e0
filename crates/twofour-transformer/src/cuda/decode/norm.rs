//! Residual addition and normalization of a few tokens.

#[cfg(doc)]
use twofour_cuda::Error;
use twofour_cuda::{
    DataType, Result,
    arguments::{Memory, at_if, positive, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::{
    NormKind,
    raw::decode::norm::{TokenNormParameters, TokenNorms},
};

/// A normalization of tokens.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct TokenNorm {
    /// The kind.
    pub kind: NormKind,
    /// Tokens of the residual stream.
    pub tokens: usize,
    /// Elements of a token, at most 8192.
    pub width: usize,
    /// ε, added to the variance or to the mean square.
    pub epsilon: f32,
    /// The last token of how many is normalized: 1 for every token, the number of new tokens for the last of each
    /// sequence. A divisor of `tokens`.
    pub every: usize,
    /// Whether the normalized values become the residual stream, in f32, as behind the blocks of post-norm models.
    pub replaces: bool,
}

/// The destination of a normalization of `n` tokens.
#[derive(Debug)]
pub enum Normalized<'a> {
    /// f32, f16 or bf16, `[n, width]`.
    Floats(DeviceSliceMut<'a>),
    /// 8-bit integers with a scale for each token, `amax / 127`: the bytes of [`twofour::kernel::quantize`] for the
    /// values rounded to `rounded`, f32, f16 or bf16.
    Integers {
        /// i8 `[n, width]`.
        values: DeviceSliceMut<'a>,
        /// f32 `[n]`. A row of zeros has 0, a row with a NaN or an infinity NaN.
        scales: DeviceSliceMut<'a>,
        /// The type that values have before they are quantized.
        rounded: DataType,
    },
}

/// The tensors of [`normalize_tokens`].
#[derive(Debug)]
pub struct TokenNormTensors<'a> {
    /// The residual stream, f32 `[tokens, width]`.
    pub x: DeviceSliceMut<'a>,
    /// The output of a block, `[tokens, width]` of the floats' type, which is first added to the residual stream.
    pub delta: Option<DeviceSlice<'a>>,
    /// The gain, f32 `[width]`.
    pub gain: DeviceSlice<'a>,
    /// The bias, f32 `[width]`.
    pub bias: Option<DeviceSlice<'a>>,
    /// The result.
    pub to: Normalized<'a>,
}

/// Adds a block's output to the residual stream, and normalizes it: `x += delta`, `y = x̂ · gain + bias`. Where only
/// some tokens are normalized, only theirs is added. Of a norm that `replaces`, `x = x̂ · gain + bias` in the end.
///
/// # Errors
/// [`Error::DataType`] for results of another type than f32, f16 and bf16; those of [`Memory::at`] for a tensor that
/// does not fit; [`Error::Dimension`] for a width of 0 or above 8192; [`Error::Multiple`] where `every` is no divisor
/// of the tokens; [`Error::Driver`].
pub fn normalize_tokens(context: &LayerContext, norm: TokenNorm, tensors: TokenNormTensors<'_>) -> Result<()> {
    let TokenNorm { kind, tokens, width, epsilon, every, replaces } = norm;
    let TokenNormTensors { x, delta, gain, bias, to } = tensors;
    twofour_cuda::arguments::expect_multiple("tokens, by those of which the last is normalized", tokens, every.max(1))?;
    let rows = tokens / every.max(1);
    let (len, results) = (product(tokens, width)?, product(rows, width)?);
    let (dtype, y, scales) = match to {
        Normalized::Floats(y) => (y.dtype(), y.at("the result", context, y.dtype(), results)?, 0),
        Normalized::Integers { values, scales, rounded } => {
            let values = values.at("the result", context, DataType::I8, results)?;
            (rounded, values, scales.at("the scales", context, DataType::F32, rows)?)
        }
    };
    let kernels = TokenNorms::of(context, dtype)?;
    let parameters = TokenNormParameters {
        x: x.at("the residual stream", context, DataType::F32, len)?,
        delta: at_if(delta.as_ref(), "the block's output", context, dtype, len)?,
        gain: gain.at("the gain", context, DataType::F32, width)?,
        bias: at_if(bias.as_ref(), "the bias", context, DataType::F32, width)?,
        y,
        scales,
        width: positive("the width of a normalization", width)?,
        first: side("tokens", every.max(1) - 1)?,
        stride: side("tokens", every.max(1))?,
        epsilon,
        replaces: u32::from(replaces),
    };
    if rows == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.run(context.raw(), kind == NormKind::Layer, side("tokens", rows)?, &parameters) }
}
