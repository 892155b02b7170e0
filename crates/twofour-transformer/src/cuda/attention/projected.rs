//! Attention that reads the fused projection and writes merged heads, so that no pass splits or merges them.

use twofour_cuda::{
    DataType, DevicePtr, Error, Result,
    arguments::Memory,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use super::{Gradients, HeadLayout, Tensors, fused};
use crate::AttentionShape;
use crate::cuda::raw::attention::FusedAttention;

/// Returns whether the kernels that keep scores in registers compute heads of this type and size, which
/// [`attention_forward_projected`] requires.
pub fn attention_reads_projection(dtype: DataType, head_dim: usize) -> bool {
    FusedAttention::computes(dtype, head_dim)
}

/// Computes what [`attention_forward`](super::attention_forward) does by
/// [`AttentionEngine::Fused`](super::AttentionEngine::Fused), of the queries, keys and values in the fused projection
/// `qkv` `[tokens, (heads + 2 · kv_heads) · head_dim]`: what [`split_heads`](crate::cuda::split_heads) makes of it. The
/// result is `merged` `[tokens, heads · head_dim]`: what [`merge_heads`](crate::cuda::merge_heads) makes of it. Where
/// queries and keys are to be rotated, [`rotate_projection`](crate::cuda::rotate_projection) comes first.
///
/// # Errors
/// Those of [`attention_forward`](super::attention_forward); [`Error::DataType`] unless [`attention_reads_projection`].
pub fn attention_forward_projected(
    context: &LayerContext,
    shape: AttentionShape,
    qkv: DeviceSlice<'_>,
    merged: DeviceSliceMut<'_>,
    lse: DeviceSliceMut<'_>,
) -> Result<()> {
    let (tensors, dtype) = projected(context, shape, qkv, &merged, &lse)?;
    if shape.query_len()? == 0 {
        return Ok(());
    }
    fused::forward(context, shape, dtype, &tensors)
}

/// Computes the gradient of the fused projection from `dmerged`, that of the result of [`attention_forward_projected`]:
/// `dqkv` of `qkv`'s shape. `merged` and `lse` are what that wrote. Where queries and keys were rotated,
/// [`rotate_projection_gradient`](crate::cuda::rotate_projection_gradient) follows.
///
/// # Errors
/// Those of [`attention_forward_projected`].
pub fn attention_backward_projected(
    context: &LayerContext,
    shape: AttentionShape,
    qkv: DeviceSlice<'_>,
    (merged, lse, dmerged): (DeviceSlice<'_>, DeviceSlice<'_>, DeviceSlice<'_>),
    dqkv: DeviceSliceMut<'_>,
) -> Result<()> {
    let (tensors, dtype) = projected(context, shape, qkv, &merged, &lse)?;
    let dout = dmerged.at("the output gradient", context, dtype, shape.query_len()?)?;
    let dqkv = dqkv.at("the gradient of the fused projection", context, dtype, shape.fused_len()?)?;
    if shape.query_len()? == 0 {
        return Ok(());
    }
    let [dq, dk, dv] = parts_of_projection(shape, dtype, dqkv);
    fused::backward(context, shape, dtype, &tensors, &Gradients { dout, dq, dk, dv })
}

/// The addresses of a token's queries, keys and values in the fused projection.
fn parts_of_projection(shape: AttentionShape, dtype: DataType, fused: DevicePtr) -> [DevicePtr; 3] {
    let of_head = (shape.head_dim * dtype.bytes()) as u64;
    let (heads, kv_heads) = (shape.heads as u64, shape.kv_heads as u64);
    [0, heads, heads + kv_heads].map(|first| fused + first * of_head)
}

fn projected(
    context: &LayerContext,
    shape: AttentionShape,
    qkv: DeviceSlice<'_>,
    merged: &impl Memory,
    lse: &impl Memory,
) -> Result<(Tensors, DataType)> {
    shape.validate()?;
    let dtype = qkv.dtype();
    if !attention_reads_projection(dtype, shape.head_dim) {
        let supported = "f16 and bf16, with a head_dim of 32, 64 or 128";
        return Err(Error::DataType { operation: "attention of a fused projection", dtype, supported });
    }
    let fused = qkv.at("the fused projection", context, dtype, shape.fused_len()?)?;
    let [q, k, v] = parts_of_projection(shape, dtype, fused);
    let out = merged.at("the result", context, dtype, shape.query_len()?)?;
    let lse = lse.at("the log-sum-exps", context, DataType::F32, shape.lse_len()?)?;
    Ok((Tensors { q, k, v, out, lse, layout: HeadLayout::Projected }, dtype))
}
