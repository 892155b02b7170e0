//! The fused projection of tokens, and heads.

use twofour_cuda::{
    DataType, Result,
    arguments::{Memory, expect_multiple, product, side},
    layer::{DeviceSlice, DeviceSliceMut, LayerContext},
};

use crate::cuda::raw::heads::{Heads, HeadsParameters, HeadsTask};
use crate::{AttentionShape, ScoreOptions};

/// The tables of rotary embedding, f32 `[positions, head_dim / 2]` each. Element `i` of a head is paired with element
/// `i + head_dim / 2` (Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding", 2021, with pairs as
/// in GPT-NeoX).
#[derive(Debug, Clone, Copy)]
pub struct Rotary<'a> {
    /// Cosines of the angles.
    pub cos: DeviceSlice<'a>,
    /// Sines of the angles.
    pub sin: DeviceSlice<'a>,
}

/// Queries, keys and values by heads, or their gradients, for reading.
#[derive(Debug, Clone, Copy)]
pub struct SplitHeads<'a> {
    /// `[batch, heads, positions, head_dim]`.
    pub q: DeviceSlice<'a>,
    /// `[batch, kv_heads, positions, head_dim]`.
    pub k: DeviceSlice<'a>,
    /// `[batch, kv_heads, positions, head_dim]`.
    pub v: DeviceSlice<'a>,
}

/// Queries, keys and values by heads, for writing.
#[derive(Debug)]
pub struct SplitHeadsMut<'a> {
    /// `[batch, heads, positions, head_dim]`.
    pub q: DeviceSliceMut<'a>,
    /// `[batch, kv_heads, positions, head_dim]`.
    pub k: DeviceSliceMut<'a>,
    /// `[batch, kv_heads, positions, head_dim]`.
    pub v: DeviceSliceMut<'a>,
}

/// The addresses of queries, keys and values.
type Addresses = (u64, u64, u64);

/// Splits the fused projection `[tokens, (heads + 2 · kv_heads) · head_dim]` into queries, keys and values, and rotates
/// queries and keys.
///
/// # Errors
/// [`Error::DataType`](twofour_cuda::Error::DataType) for other types than f32, f16 and bf16; those of [`Memory::at`]
/// for a tensor that does not fit; [`Error::Dimension`](twofour_cuda::Error::Dimension) and
/// [`Error::Multiple`](twofour_cuda::Error::Multiple) for a shape that is none;
/// [`Error::Driver`](twofour_cuda::Error::Driver).
pub fn split_heads(
    context: &LayerContext,
    shape: AttentionShape,
    rotary: Option<Rotary<'_>>,
    fused: DeviceSlice<'_>,
    to: SplitHeadsMut<'_>,
) -> Result<()> {
    let dtype = fused.dtype();
    let fused = fused.at("the fused projection", context, dtype, shape.fused_len()?)?;
    let apart = addresses(context, shape, dtype, (&to.q, &to.k, &to.v))?;
    run(context, shape, rotary, dtype, (fused, 0), apart)
}

/// Computes the gradient of the fused projection from those of queries, keys and values: the way back of
/// [`split_heads`], with the opposite rotation.
///
/// # Errors
/// Those of [`split_heads`].
pub fn split_heads_gradient(
    context: &LayerContext,
    shape: AttentionShape,
    rotary: Option<Rotary<'_>>,
    gradients: SplitHeads<'_>,
    dfused: DeviceSliceMut<'_>,
) -> Result<()> {
    let dtype = dfused.dtype();
    let dfused = dfused.at("the gradient of the fused projection", context, dtype, shape.fused_len()?)?;
    let apart = addresses(context, shape, dtype, (&gradients.q, &gradients.k, &gradients.v))?;
    run(context, shape, rotary, dtype, (0, dfused), apart)
}

/// Merges heads `[batch, heads, positions, head_dim]` to tokens `[tokens, heads · head_dim]`.
///
/// # Errors
/// Those of [`split_heads`].
pub fn merge_heads(
    context: &LayerContext,
    shape: AttentionShape,
    heads: DeviceSlice<'_>,
    merged: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (heads.dtype(), shape.query_len()?);
    let apart = heads.at("the heads", context, dtype, len)?;
    let merged = merged.at("the merged heads", context, dtype, len)?;
    run(context, AttentionShape { kv_heads: 0, ..shape }, None, dtype, (0, merged), (apart, 0, 0))
}

/// Computes the gradient of heads from that of the merged heads: the way back of [`merge_heads`].
///
/// # Errors
/// Those of [`split_heads`].
pub fn merge_heads_gradient(
    context: &LayerContext,
    shape: AttentionShape,
    dmerged: DeviceSlice<'_>,
    dheads: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, len) = (dmerged.dtype(), shape.query_len()?);
    let merged = dmerged.at("the gradient of merged heads", context, dtype, len)?;
    let apart = dheads.at("the gradient of the heads", context, dtype, len)?;
    run(context, AttentionShape { kv_heads: 0, ..shape }, None, dtype, (merged, 0), (apart, 0, 0))
}

/// Rotates `x` `[sequences, positions, head_dim]` by the angles of its positions: `y` of the same shape and type. The
/// gradient is [`rotate_gradient`].
///
/// # Errors
/// Those of [`split_heads`].
pub fn rotate(
    context: &LayerContext,
    (sequences, positions, head_dim): (usize, usize, usize),
    rotary: Rotary<'_>,
    x: DeviceSlice<'_>,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, shape) = (x.dtype(), one_head(sequences, positions, head_dim));
    let len = shape.query_len()?;
    let x = x.at("the input of a rotation", context, dtype, len)?;
    let y = y.at("the result of a rotation", context, dtype, len)?;
    run(context, shape, Some(rotary), dtype, (x, 0), (y, 0, 0))
}

/// Rotates the gradient of [`rotate`]'s result back: the gradient of its input.
///
/// # Errors
/// Those of [`split_heads`].
pub fn rotate_gradient(
    context: &LayerContext,
    (sequences, positions, head_dim): (usize, usize, usize),
    rotary: Rotary<'_>,
    dy: DeviceSlice<'_>,
    dx: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, shape) = (dy.dtype(), one_head(sequences, positions, head_dim));
    let len = shape.query_len()?;
    let dy = dy.at("the gradient of a rotation", context, dtype, len)?;
    let dx = dx.at("the gradient of a rotation's input", context, dtype, len)?;
    run(context, shape, Some(rotary), dtype, (0, dx), (dy, 0, 0))
}

/// Heads that are sequences of their own: splitting moves nothing.
fn one_head(batch: usize, positions: usize, head_dim: usize) -> AttentionShape {
    AttentionShape { batch, positions, heads: 1, kv_heads: 0, head_dim, causal: false, scores: ScoreOptions::default() }
}

fn addresses(
    context: &LayerContext,
    shape: AttentionShape,
    dtype: DataType,
    (q, k, v): (&impl Memory, &impl Memory, &impl Memory),
) -> Result<Addresses> {
    shape.validate()?;
    let len = shape.key_len()?;
    Ok((
        q.at("the queries", context, dtype, shape.query_len()?)?,
        k.at("the keys", context, dtype, len)?,
        v.at("the values", context, dtype, len)?,
    ))
}

/// Rotates the queries and keys of the fused projection `[tokens, (heads + 2 · kv_heads) · head_dim]` in place: what
/// [`split_heads`] does to them.
///
/// # Errors
/// Those of [`split_heads`].
pub fn rotate_projection(
    context: &LayerContext,
    shape: AttentionShape,
    rotary: Rotary<'_>,
    fused: DeviceSliceMut<'_>,
) -> Result<()> {
    rotate_in_place(context, shape, rotary, HeadsTask::RotateForth, fused)
}

/// Rotates the gradients of queries and keys in that of the fused projection back, in place: the gradient of
/// [`rotate_projection`].
///
/// # Errors
/// Those of [`split_heads`].
pub fn rotate_projection_gradient(
    context: &LayerContext,
    shape: AttentionShape,
    rotary: Rotary<'_>,
    dfused: DeviceSliceMut<'_>,
) -> Result<()> {
    rotate_in_place(context, shape, rotary, HeadsTask::RotateBack, dfused)
}

fn rotate_in_place(
    context: &LayerContext,
    shape: AttentionShape,
    rotary: Rotary<'_>,
    task: HeadsTask,
    fused: DeviceSliceMut<'_>,
) -> Result<()> {
    shape.validate()?;
    let dtype = fused.dtype();
    let to_fused = fused.at("the fused projection", context, dtype, shape.fused_len()?)?;
    let parameters = HeadsParameters { to_fused, ..parameters(context, shape, Some(rotary))? };
    // Values are not rotated.
    let count = (shape.query_len()? + shape.key_len()?) / 2;
    launch(context, dtype, task, HeadsParameters { count: count as u64, ..parameters })
}

fn run(
    context: &LayerContext,
    shape: AttentionShape,
    rotary: Option<Rotary<'_>>,
    dtype: DataType,
    (fused, to_fused): (u64, u64),
    (q, k, v): Addresses,
) -> Result<()> {
    let task = if to_fused == 0 { HeadsTask::Split } else { HeadsTask::Merge };
    let parameters = parameters(context, shape, rotary)?;
    let count = (shape.fused_len()? / 2) as u64;
    launch(context, dtype, task, HeadsParameters { fused, to_fused, q, k, v, count, ..parameters })
}

/// Returns the parameters of a shape and its tables.
fn parameters(context: &LayerContext, shape: AttentionShape, rotary: Option<Rotary<'_>>) -> Result<HeadsParameters> {
    let AttentionShape { positions, heads, kv_heads, head_dim, .. } = shape;
    expect_multiple("head_dim", head_dim, 2)?;
    let (mut cos, mut sin) = (0, 0);
    if let Some(rotary) = rotary {
        let len = product(positions, head_dim / 2)?;
        cos = rotary.cos.at("the table of cosines", context, DataType::F32, len)?;
        sin = rotary.sin.at("the table of sines", context, DataType::F32, len)?;
    }
    Ok(HeadsParameters {
        cos,
        sin,
        positions: side("positions", positions)?,
        heads: side("heads", heads)?,
        kv_heads: side("kv_heads", kv_heads)?,
        dim: side("head_dim", head_dim)?,
        ..HeadsParameters::default()
    })
}

fn launch(context: &LayerContext, dtype: DataType, task: HeadsTask, parameters: HeadsParameters) -> Result<()> {
    let kernels = Heads::of(context, dtype)?;
    if parameters.count == 0 {
        return Ok(());
    }
    // SAFETY: the slices have been found to be as long as the shape requires, and the stream is of their device.
    unsafe { kernels.run(context.raw(), task, parameters) }
}
