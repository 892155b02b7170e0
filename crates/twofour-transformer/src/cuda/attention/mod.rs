//! Attention, causal and full, with grouped queries.

mod batched;
mod fused;
mod projected;

pub use projected::{attention_backward_projected, attention_forward_projected, attention_reads_projection};
use twofour_cuda::{
    DataType, DevicePtr, Error, Result,
    arguments::Memory,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use super::heads::{SplitHeads, SplitHeadsMut};
use crate::{AttentionShape, cuda::raw::attention::FusedAttention};

/// Queries, keys and values.
pub type AttentionInputs<'a> = SplitHeads<'a>;

/// The gradients of queries, keys and values.
pub type AttentionGradients<'a> = SplitHeadsMut<'a>;

/// How attention is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum AttentionEngine {
    /// The fastest that computes the shape.
    #[default]
    Fastest,
    /// GEMMs of cuBLASLt over the heads and a softmax kernel, with scores in memory for a part of the heads at a time.
    /// Every shape and type.
    Batched,
    /// Kernels that keep scores in registers (Dao, "FlashAttention-2", 2023): f16 and bf16, with a `head_dim` of 32, 64
    /// or 128 and tensors aligned to 16 bytes.
    Fused,
}

impl AttentionEngine {
    /// Returns whether the kernels that keep scores in registers are used.
    fn is_fused(self, shape: AttentionShape, dtype: DataType, at: &Tensors) -> bool {
        match self {
            AttentionEngine::Fastest => FusedAttention::computes(dtype, shape.head_dim) && fused::is_aligned(at),
            AttentionEngine::Batched => false,
            AttentionEngine::Fused => true,
        }
    }
}

/// How the heads of a call's tensors follow each other.
#[derive(Clone, Copy)]
enum HeadLayout {
    /// `[batch, heads, positions, head_dim]`.
    Apart,
    /// Queries, keys and values are in the fused projection, and the result is what a linear layer reads. Only the
    /// kernels that keep scores in registers read and write that.
    Projected,
}

/// The addresses of a call's tensors.
struct Tensors {
    q: DevicePtr,
    k: DevicePtr,
    v: DevicePtr,
    out: DevicePtr,
    lse: DevicePtr,
    layout: HeadLayout,
}

/// The addresses of a gradient's tensors.
struct Gradients {
    dout: DevicePtr,
    dq: DevicePtr,
    dk: DevicePtr,
    dv: DevicePtr,
}

/// Plans the GEMMs, loads the kernels and allocates the workspace of attention and its gradients, for tensors that are
/// aligned to 16 bytes.
///
/// # Errors
/// Those of [`attention_forward`]; [`Error::Capturing`] while the stream is being captured.
pub fn prepare_attention(
    context: &LayerContext,
    shape: AttentionShape,
    engine: AttentionEngine,
    dtype: DataType,
) -> Result<()> {
    shape.validate()?;
    if shape.query_len()? == 0 {
        return Ok(());
    }
    let nowhere = Tensors { q: 0, k: 0, v: 0, out: 0, lse: 0, layout: HeadLayout::Apart };
    match engine.is_fused(shape, dtype, &nowhere) {
        true => fused::prepare(context, shape, dtype),
        false => batched::prepare(context, shape, dtype),
    }
}

/// Computes `softmax(scores) v` for each head, and the log-sum-exp of each query's scores. The shape's
/// [`ScoreOptions`](crate::ScoreOptions) say what scores are.
///
/// `out` is `[batch, heads, positions, head_dim]`, of the inputs' type, and `lse` f32 `[batch, heads, positions]`.
///
/// # Errors
/// [`Error::DataType`] for other types than f32, f16 and bf16, or those that the engine computes; those of
/// [`Memory::at`] for a tensor that does not fit; [`Error::Dimension`], [`Error::Multiple`] and [`Error::Setting`] for
/// a shape that is none; [`Error::NoLibrary`] where cuBLASLt is missing, and [`Error::Vendor`] where it fails; those of
/// allocating workspace; [`Error::Driver`].
pub fn attention_forward(
    context: &LayerContext,
    shape: AttentionShape,
    engine: AttentionEngine,
    inputs: AttentionInputs<'_>,
    out: DeviceSliceMut<'_>,
    lse: DeviceSliceMut<'_>,
) -> Result<()> {
    let (tensors, dtype) = tensors(context, shape, inputs, (&out, &lse))?;
    if shape.query_len()? == 0 {
        return Ok(());
    }
    match engine.is_fused(shape, dtype, &tensors) {
        true => fused::forward(context, shape, dtype, &tensors),
        false => batched::forward(context, shape, dtype, &tensors),
    }
}

/// Returns the addresses of gradients, after checking their lengths.
fn gradients(
    context: &LayerContext,
    shape: AttentionShape,
    dtype: DataType,
    dout: DeviceSlice<'_>,
    to: &AttentionGradients<'_>,
) -> Result<Gradients> {
    Ok(Gradients {
        dout: dout.at("the output gradient", context, dtype, shape.query_len()?)?,
        dq: to.q.at("the gradient of the queries", context, dtype, shape.query_len()?)?,
        dk: to.k.at("the gradient of the keys", context, dtype, shape.key_len()?)?,
        dv: to.v.at("the gradient of the values", context, dtype, shape.key_len()?)?,
    })
}

/// Computes the gradients of queries, keys and values from `dout`, the gradient of the result. `out` and `lse` are what
/// [`attention_forward`] wrote.
///
/// # Errors
/// Those of [`attention_forward`].
pub fn attention_backward(
    context: &LayerContext,
    shape: AttentionShape,
    engine: AttentionEngine,
    inputs: AttentionInputs<'_>,
    (out, lse, dout): (DeviceSlice<'_>, DeviceSlice<'_>, DeviceSlice<'_>),
    gradients: AttentionGradients<'_>,
) -> Result<()> {
    let (tensors, dtype) = tensors(context, shape, inputs, (&out, &lse))?;
    let gradients = self::gradients(context, shape, dtype, dout, &gradients)?;
    if shape.query_len()? == 0 {
        return Ok(());
    }
    let aligned = (gradients.dout | gradients.dq | gradients.dk | gradients.dv).is_multiple_of(16);
    match engine.is_fused(shape, dtype, &tensors) && (aligned || engine == AttentionEngine::Fused) {
        true => fused::backward(context, shape, dtype, &tensors, &gradients),
        false => batched::backward(context, shape, dtype, &tensors, &gradients),
    }
}

fn tensors(
    context: &LayerContext,
    shape: AttentionShape,
    inputs: AttentionInputs<'_>,
    (out, lse): (&impl Memory, &impl Memory),
) -> Result<(Tensors, DataType)> {
    shape.validate()?;
    let dtype = inputs.q.dtype();
    if !matches!(dtype, DataType::F32 | DataType::F16 | DataType::BF16) {
        return Err(Error::DataType { operation: "attention", dtype, supported: "f32, f16, bf16" });
    }
    let tensors = Tensors {
        q: inputs.q.at("the queries", context, dtype, shape.query_len()?)?,
        k: inputs.k.at("the keys", context, dtype, shape.key_len()?)?,
        v: inputs.v.at("the values", context, dtype, shape.key_len()?)?,
        out: out.at("the result", context, dtype, shape.query_len()?)?,
        lse: lse.at("the log-sum-exps", context, DataType::F32, shape.lse_len()?)?,
        layout: HeadLayout::Apart,
    };
    Ok((tensors, dtype))
}
