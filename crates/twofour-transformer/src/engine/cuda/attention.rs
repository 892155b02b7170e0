//! Attention of the CUDA engine.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use twofour::DataType;
use twofour_cuda::layer::{DeviceBuffer, LayerContext};

use super::{CudaBuffer, Pool};
use crate::{
    Error, Result,
    cpu::rope::Table,
    cuda::{
        AttentionEngine, Rotary, SplitHeads, SplitHeadsMut, attention_backward, attention_backward_projected,
        attention_forward, attention_forward_projected, attention_reads_projection, merge_heads, merge_heads_gradient,
        rotate_projection, rotate_projection_gradient, split_heads, split_heads_gradient,
    },
    engine::AttentionShape,
};

/// Cosines and sines of one number of positions.
type Tables = Arc<[DeviceBuffer; 2]>;

/// Cosines and sines in device memory, for each number of positions that was used.
#[derive(Debug)]
pub struct CudaRotary {
    table: Table,
    on_device: Mutex<HashMap<usize, Tables>>,
}

impl CudaRotary {
    pub(super) fn new(positions: usize, frequencies: &[f64]) -> Self {
        CudaRotary { table: Table::of(0..positions, frequencies), on_device: Mutex::default() }
    }

    fn of(&self, context: &LayerContext, shape: AttentionShape) -> Result<Tables> {
        let (most, head_dim) = (self.table.positions(), self.table.head_dim());
        if shape.positions > most || shape.head_dim != head_dim {
            return Err(Error::Setting {
                what: "positions",
                found: format!(
                    "{} with heads of {} (the table: {most} with {head_dim})",
                    shape.positions, shape.head_dim
                ),
                expected: "within the rotary table; shorten the sequence",
            });
        }
        let mut on_device = self.on_device.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(tables) = on_device.get(&shape.positions) {
            return Ok(tables.clone());
        }
        let rows = (0..shape.positions).map(|position| self.table.at(position));
        let (cos, sin): (Vec<&[f32]>, Vec<&[f32]>) = rows.unzip();
        let upload = |rows: Vec<&[f32]>| DeviceBuffer::from_host(context, &rows.concat());
        let tables = Arc::new([upload(cos)?, upload(sin)?]);
        on_device.insert(shape.positions, tables.clone());
        Ok(tables)
    }
}

/// The tables as an operation takes them.
fn rotation(tables: Option<&Tables>) -> Option<Rotary<'_>> {
    tables.map(|tables| Rotary { cos: tables[0].as_slice(), sin: tables[1].as_slice() })
}

/// What the backward pass of attention reads beside the result.
#[derive(Debug)]
pub enum CudaAttention {
    /// Queries and keys, rotated, and values are in the projection.
    Projected {
        /// Log-sum-exps.
        lse: DeviceBuffer,
    },
    /// Heads were split and merged.
    Split(Box<SplitState>),
}

/// Heads with memory of their own.
#[derive(Debug)]
pub struct SplitState {
    /// Rotated.
    q: DeviceBuffer,
    /// Rotated.
    k: DeviceBuffer,
    v: DeviceBuffer,
    out: DeviceBuffer,
    lse: DeviceBuffer,
}

impl SplitState {
    fn inputs(&self) -> SplitHeads<'_> {
        SplitHeads { q: self.q.as_slice(), k: self.k.as_slice(), v: self.v.as_slice() }
    }
}

/// Attention reads the projection itself where there are kernels for that; otherwise its heads are split, and those of
/// the result merged.
pub(super) fn forward(
    (context, pool): (&LayerContext, &Pool),
    shape: AttentionShape,
    qkv: &mut CudaBuffer,
    rotary: Option<&CudaRotary>,
    merged: &mut CudaBuffer,
) -> Result<CudaAttention> {
    let tables = rotary.map(|rotary| rotary.of(context, shape)).transpose()?;
    let rotary = rotation(tables.as_ref());
    let dtype = qkv.slice().dtype();
    let mut lse = pool.take(context, DataType::F32, shape.lse_len()?)?;
    if attention_reads_projection(dtype, shape.head_dim) {
        if let Some(rotary) = rotary {
            rotate_projection(context, shape, rotary, qkv.slice_mut())?;
        }
        attention_forward_projected(context, shape, qkv.slice(), merged.slice_mut(), lse.as_slice_mut())?;
        return Ok(CudaAttention::Projected { lse });
    }
    let take = |len: usize| pool.take(context, dtype, len);
    let [mut q, mut out] = [take(shape.query_len()?)?, take(shape.query_len()?)?];
    let [mut k, mut v] = [take(shape.key_len()?)?, take(shape.key_len()?)?];
    let to = SplitHeadsMut { q: q.as_slice_mut(), k: k.as_slice_mut(), v: v.as_slice_mut() };
    split_heads(context, shape, rotary, qkv.slice(), to)?;
    let inputs = SplitHeads { q: q.as_slice(), k: k.as_slice(), v: v.as_slice() };
    let engine = AttentionEngine::Fastest;
    attention_forward(context, shape, engine, inputs, out.as_slice_mut(), lse.as_slice_mut())?;
    merge_heads(context, shape, out.as_slice(), merged.slice_mut())?;
    Ok(CudaAttention::Split(Box::new(SplitState { q, k, v, out, lse })))
}

/// Gives a state's memory back to the pool.
pub(super) fn release(pool: &Pool, state: CudaAttention) {
    let buffers = match state {
        CudaAttention::Projected { lse } => vec![lse],
        CudaAttention::Split(state) => {
            let SplitState { q, k, v, out, lse } = *state;
            vec![q, k, v, out, lse]
        }
    };
    buffers.into_iter().for_each(|buffer| pool.give(buffer));
}

pub(super) fn gradient(
    (context, pool): (&LayerContext, &Pool),
    shape: AttentionShape,
    (state, qkv, merged): (CudaAttention, &CudaBuffer, &CudaBuffer),
    rotary: Option<&CudaRotary>,
    (d_merged, d_qkv): (&CudaBuffer, &mut CudaBuffer),
) -> Result<()> {
    let tables = rotary.map(|rotary| rotary.of(context, shape)).transpose()?;
    let rotary = rotation(tables.as_ref());
    let state = match state {
        CudaAttention::Projected { lse } => {
            let saved = (merged.slice(), lse.as_slice(), d_merged.slice());
            attention_backward_projected(context, shape, qkv.slice(), saved, d_qkv.slice_mut())?;
            if let Some(rotary) = rotary {
                rotate_projection_gradient(context, shape, rotary, d_qkv.slice_mut())?;
            }
            pool.give(lse);
            return Ok(());
        }
        CudaAttention::Split(state) => state,
    };
    let dtype = d_merged.slice().dtype();
    let take = |len: usize| pool.take(context, dtype, len);
    let [mut dq, mut d_out] = [take(shape.query_len()?)?, take(shape.query_len()?)?];
    let [mut dk, mut dv] = [take(shape.key_len()?)?, take(shape.key_len()?)?];
    merge_heads_gradient(context, shape, d_merged.slice(), d_out.as_slice_mut())?;
    let saved = (state.out.as_slice(), state.lse.as_slice(), d_out.as_slice());
    let gradients = SplitHeadsMut { q: dq.as_slice_mut(), k: dk.as_slice_mut(), v: dv.as_slice_mut() };
    attention_backward(context, shape, AttentionEngine::Fastest, state.inputs(), saved, gradients)?;
    let gradients = SplitHeads { q: dq.as_slice(), k: dk.as_slice(), v: dv.as_slice() };
    split_heads_gradient(context, shape, rotary, gradients, d_qkv.slice_mut())?;
    let SplitState { q, k, v, out, lse } = *state;
    [q, k, v, out, lse, dq, dk, dv, d_out].into_iter().for_each(|buffer| pool.give(buffer));
    Ok(())
}
