//! Attention by kernels that keep scores in registers.

use super::{AttentionShape, Gradients, HeadLayout, Tensors};
use crate::{
    DataType, Result, arguments::expect_pointers, layer::LayerContext, raw::attention::FusedAttentionParameters,
};

/// Returns the parameters that both passes have.
fn parameters(shape: AttentionShape, at: &Tensors) -> FusedAttentionParameters {
    let (heads, positions, dim) = (shape.heads as u64, shape.positions as u64, shape.head_dim as u64);
    let (out_row, out_head) = match at.layout {
        HeadLayout::Apart => (dim, positions * dim),
        HeadLayout::Merged => (heads * dim, dim),
    };
    FusedAttentionParameters {
        q: at.q,
        k: at.k,
        v: at.v,
        batch: shape.batch as u32,
        positions: shape.positions as u32,
        heads: shape.heads as u32,
        kv_heads: shape.kv_heads as u32,
        causal: u32::from(shape.causal),
        scale: shape.scale(),
        out_row: out_row as u32,
        out_head,
        out_sequence: heads * positions * dim,
        ..FusedAttentionParameters::default()
    }
}

/// Returns whether addresses are aligned as the kernels require.
pub(super) fn is_aligned(at: &Tensors) -> bool {
    (at.q | at.k | at.v | at.out).is_multiple_of(16)
}

fn expect_aligned(at: &Tensors) -> Result<()> {
    expect_pointers(&[
        ("the queries", at.q, 16),
        ("the keys", at.k, 16),
        ("the values", at.v, 16),
        ("the result", at.out, 16),
    ])
}

/// Loads the kernels of both passes, and allocates their workspace.
pub(super) fn prepare(context: &LayerContext, shape: AttentionShape, dtype: DataType) -> Result<()> {
    context.fused_attention(dtype, shape.head_dim)?;
    context.work().parts([4 * shape.lse_len()?])?;
    Ok(())
}

/// Launches attention.
pub(super) fn forward(context: &LayerContext, shape: AttentionShape, dtype: DataType, at: &Tensors) -> Result<()> {
    let kernels = context.fused_attention(dtype, shape.head_dim)?;
    expect_aligned(at)?;
    let parameters = FusedAttentionParameters { to_out: at.out, to_lse: at.lse, ..parameters(shape, at) };
    // SAFETY: the tensors have been found to be as long as the shape requires and to be aligned, and the stream is of their device.
    unsafe { kernels.forward(context.raw(), &parameters) }
}

/// Launches the gradients.
pub(super) fn backward(
    context: &LayerContext,
    shape: AttentionShape,
    dtype: DataType,
    at: &Tensors,
    to: &Gradients,
) -> Result<()> {
    let kernels = context.fused_attention(dtype, shape.head_dim)?;
    expect_aligned(at)?;
    expect_pointers(&[
        ("the output gradient", to.dout, 16),
        ("the gradient of the queries", to.dq, 16),
        ("the gradient of the keys", to.dk, 16),
        ("the gradient of the values", to.dv, 16),
    ])?;
    let mut work = context.work();
    let [delta] = work.parts([4 * shape.lse_len()?])?;
    let parameters = FusedAttentionParameters {
        out: at.out,
        dout: to.dout,
        lse: at.lse,
        delta,
        to_delta: delta,
        dq: to.dq,
        dk: to.dk,
        dv: to.dv,
        ..parameters(shape, at)
    };
    // SAFETY: the tensors have been found to be as long as the shape requires and to be aligned, the workspace has room for a number for each query, and the stream is
    // of their device.
    unsafe { kernels.backward(context.raw(), &parameters) }
}
