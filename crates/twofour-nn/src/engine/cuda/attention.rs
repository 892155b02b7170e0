//! Attention of the CUDA engine.

use std::{
    collections::HashMap,
    sync::{Arc, Mutex, PoisonError},
};

use twofour::DataType;
use twofour_cuda::{
    layer::{DeviceBuffer, LayerContext},
    transformer::{
        AttentionEngine, AttentionShape as Shape, Rotary, SplitHeads, SplitHeadsMut, attention_backward,
        attention_backward_merged, attention_forward, attention_forward_merged, attention_merges, merge_heads,
        merge_heads_gradient, split_heads, split_heads_gradient,
    },
};

use super::{CudaBuffer, Pool};
use crate::{Error, Result, cpu::rope::Table, engine::AttentionShape};

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

/// What the backward pass of attention reads beside the result: rotated queries and keys, values, and log-sum-exps.
#[derive(Debug)]
pub struct CudaAttention {
    q: DeviceBuffer,
    k: DeviceBuffer,
    v: DeviceBuffer,
    /// The heads' outputs, where they are not merged by the kernels.
    out: Option<DeviceBuffer>,
    lse: DeviceBuffer,
}

fn of(shape: AttentionShape) -> Shape {
    let AttentionShape { batch, positions, heads, kv_heads, head_dim, causal } = shape;
    Shape { batch, positions, heads, kv_heads, head_dim, causal }
}

pub(super) fn forward(
    (context, pool): (&LayerContext, &Pool),
    shape: AttentionShape,
    qkv: &CudaBuffer,
    rotary: Option<&CudaRotary>,
    merged: &mut CudaBuffer,
) -> Result<CudaAttention> {
    let tables = rotary.map(|rotary| rotary.of(context, shape)).transpose()?;
    let shape = of(shape);
    let dtype = qkv.slice().dtype();
    let take = |len: usize| pool.take(context, dtype, len);
    let mut q = take(shape.query_len()?)?;
    let [mut k, mut v] = [take(shape.key_len()?)?, take(shape.key_len()?)?];
    let mut lse = pool.take(context, DataType::F32, shape.lse_len()?)?;
    let to = SplitHeadsMut { q: q.as_slice_mut(), k: k.as_slice_mut(), v: v.as_slice_mut() };
    split_heads(context, shape, rotation(tables.as_ref()), qkv.slice(), to)?;
    let inputs = SplitHeads { q: q.as_slice(), k: k.as_slice(), v: v.as_slice() };
    let out = if attention_merges(dtype, shape.head_dim) {
        attention_forward_merged(context, shape, inputs, merged.slice_mut(), lse.as_slice_mut())?;
        None
    } else {
        let mut out = take(shape.query_len()?)?;
        let engine = AttentionEngine::Fastest;
        attention_forward(context, shape, engine, inputs, out.as_slice_mut(), lse.as_slice_mut())?;
        merge_heads(context, shape, out.as_slice(), merged.slice_mut())?;
        Some(out)
    };
    Ok(CudaAttention { q, k, v, out, lse })
}

pub(super) fn gradient(
    (context, pool): (&LayerContext, &Pool),
    shape: AttentionShape,
    (state, merged): (CudaAttention, &CudaBuffer),
    rotary: Option<&CudaRotary>,
    (d_merged, d_qkv): (&CudaBuffer, &mut CudaBuffer),
) -> Result<()> {
    let tables = rotary.map(|rotary| rotary.of(context, shape)).transpose()?;
    let shape = of(shape);
    let dtype = d_merged.slice().dtype();
    let take = |len: usize| pool.take(context, dtype, len);
    let mut dq = take(shape.query_len()?)?;
    let [mut dk, mut dv] = [take(shape.key_len()?)?, take(shape.key_len()?)?];
    let CudaAttention { q, k, v, out, lse } = state;
    let inputs = SplitHeads { q: q.as_slice(), k: k.as_slice(), v: v.as_slice() };
    let gradients = SplitHeadsMut { q: dq.as_slice_mut(), k: dk.as_slice_mut(), v: dv.as_slice_mut() };
    let d_out = match &out {
        None => {
            let saved = (merged.slice(), lse.as_slice(), d_merged.slice());
            attention_backward_merged(context, shape, inputs, saved, gradients)?;
            None
        }
        Some(out) => {
            let mut d_out = take(shape.query_len()?)?;
            merge_heads_gradient(context, shape, d_merged.slice(), d_out.as_slice_mut())?;
            let saved = (out.as_slice(), lse.as_slice(), d_out.as_slice());
            attention_backward(context, shape, AttentionEngine::Fastest, inputs, saved, gradients)?;
            Some(d_out)
        }
    };
    let gradients = SplitHeads { q: dq.as_slice(), k: dk.as_slice(), v: dv.as_slice() };
    split_heads_gradient(context, shape, rotation(tables.as_ref()), gradients, d_qkv.slice_mut())?;
    [q, k, v, lse, dq, dk, dv].into_iter().chain(out).chain(d_out).for_each(|buffer| pool.give(buffer));
    Ok(())
}
