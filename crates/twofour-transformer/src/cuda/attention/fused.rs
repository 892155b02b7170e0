//! Attention by kernels that keep scores in registers.

use twofour_cuda::{
    DataType, Error, Result,
    arguments::{expect_pointers, product, side},
    layer::LayerContext,
};

use super::{Gradients, HeadLayout, Tensors};
use crate::AttentionShape;
use crate::cuda::raw::attention::{FusedAttention, FusedAttentionParameters, HeadStrides, backward_workspace};

/// The strides of heads that have memory of their own: `[batch, heads, positions, head_dim]`.
fn apart(shape: AttentionShape, heads: usize) -> HeadStrides {
    let (positions, dim) = (shape.positions as u64, shape.head_dim as u64);
    HeadStrides { head: positions * dim, sequence: heads as u64 * positions * dim, row: shape.head_dim as u32 }
}

/// The strides of some of the `heads` heads of a token: `[batch, positions, heads, head_dim]`.
fn side_by_side(shape: AttentionShape, heads: usize) -> Result<HeadStrides> {
    let row = side("elements of a token", product(heads, shape.head_dim)?)?;
    Ok(HeadStrides { head: shape.head_dim as u64, sequence: shape.positions as u64 * u64::from(row), row })
}

/// Returns the parameters that both passes have.
fn parameters(shape: AttentionShape, at: &Tensors) -> Result<FusedAttentionParameters> {
    let AttentionShape { heads, kv_heads, .. } = shape;
    let (queries, keys, results) = match at.layout {
        HeadLayout::Apart => (apart(shape, heads), apart(shape, kv_heads), apart(shape, heads)),
        HeadLayout::Projected => {
            let all = side_by_side(shape, shape.projected_heads()?)?;
            (all, all, side_by_side(shape, heads)?)
        }
    };
    Ok(FusedAttentionParameters {
        q: at.q,
        k: at.k,
        v: at.v,
        queries,
        keys,
        results,
        batch: shape.batch as u32,
        positions: shape.positions as u32,
        heads: heads as u32,
        kv_heads: kv_heads as u32,
        causal: u32::from(shape.causal),
        scale: shape.scale(),
        window: shape.window(),
        soft_cap: shape.soft_cap(),
        ..FusedAttentionParameters::default()
    })
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

/// Bytes of workspace of the backward pass.
fn workspace(shape: AttentionShape) -> Result<usize> {
    let heads = product(shape.batch, shape.heads)?;
    backward_workspace(heads, shape.positions).ok_or(Error::TooLarge { rows: heads, cols: shape.positions })
}

/// Loads the kernels of both passes, and allocates their workspace.
pub(super) fn prepare(context: &LayerContext, shape: AttentionShape, dtype: DataType) -> Result<()> {
    FusedAttention::of(context, dtype, shape.head_dim, shape.scores.has_options())?;
    context.work().parts([workspace(shape)?])?;
    Ok(())
}

/// Launches attention.
pub(super) fn forward(context: &LayerContext, shape: AttentionShape, dtype: DataType, at: &Tensors) -> Result<()> {
    let kernels = FusedAttention::of(context, dtype, shape.head_dim, shape.scores.has_options())?;
    expect_aligned(at)?;
    let parameters = FusedAttentionParameters { to_out: at.out, to_lse: at.lse, ..parameters(shape, at)? };
    // SAFETY: the tensors have been found to be as long as the shape requires and to be aligned, and the stream is of
    // their device.
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
    let kernels = FusedAttention::of(context, dtype, shape.head_dim, shape.scores.has_options())?;
    expect_aligned(at)?;
    expect_pointers(&[
        ("the output gradient", to.dout, 16),
        ("the gradient of the queries", to.dq, 16),
        ("the gradient of the keys", to.dk, 16),
        ("the gradient of the values", to.dv, 16),
    ])?;
    let mut work = context.work();
    let [delta] = work.parts([workspace(shape)?])?;
    let parameters = FusedAttentionParameters {
        out: at.out,
        dout: to.dout,
        lse: at.lse,
        delta,
        to_delta: delta,
        dq: to.dq,
        dk: to.dk,
        dv: to.dv,
        ..parameters(shape, at)?
    };
    // SAFETY: the tensors have been found to be as long as the shape requires and to be aligned, the workspace is as
    // large as the kernels require, and the stream is of their device.
    unsafe { kernels.backward(context.raw(), &parameters) }
}
