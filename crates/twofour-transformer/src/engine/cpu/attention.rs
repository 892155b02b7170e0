//! Attention of the CPU engine.

use super::{CpuBuffer, expect_length};
use crate::{
    Error, Result,
    cpu::{
        attention::{self, Saved},
        heads,
        rope::Table,
    },
    engine::{AttentionShape, Buffer as _},
};

/// What the backward pass of attention reads: rotated queries and keys, values, and probabilities.
#[derive(Debug)]
pub struct CpuAttention {
    q: Vec<f32>,
    k: Vec<f32>,
    v: Vec<f32>,
    p: Vec<f32>,
}

fn check(shape: AttentionShape, rotary: Option<&Table>, qkv: &CpuBuffer, merged: &CpuBuffer) -> Result<()> {
    let AttentionShape { positions, heads, kv_heads, head_dim, .. } = shape;
    if kv_heads == 0 || !heads.is_multiple_of(kv_heads) {
        let (what, found) = ("key-value heads", format!("{kv_heads} for {heads} heads"));
        return Err(Error::Setting { what, found, expected: "a divisor of the number of heads" });
    }
    if let Some((what, found, expected)) = shape.scores.fault() {
        return Err(Error::Setting { what, found, expected });
    }
    if let Some(table) = rotary.filter(|table| table.positions() < positions || table.head_dim() != head_dim) {
        let found = format!("{positions} with heads of {head_dim}");
        let expected = "within the rotary table; shorten the sequence";
        return Err(Error::Setting {
            what: "positions",
            found: format!("{found} (the table: {} with {})", table.positions(), table.head_dim()),
            expected,
        });
    }
    expect_length("queries, keys and values", shape.tokens() * shape.qkv_width(), qkv.len())?;
    expect_length("merged heads", shape.tokens() * shape.width(), merged.len())
}

pub(super) fn forward(
    shape: AttentionShape,
    qkv: &CpuBuffer,
    rotary: Option<&Table>,
    merged: &mut CpuBuffer,
) -> Result<CpuAttention> {
    check(shape, rotary, qkv, merged)?;
    let n = merged.len();
    let [mut q, mut k, mut v, mut o] = std::array::from_fn(|_| vec![0f32; n]);
    heads::split(shape, rotary, qkv.floats()?, &mut q, &mut k, &mut v);
    let mut p = vec![0f32; attention::probabilities(shape)];
    attention::forward(shape, &q, &k, &v, &mut p, &mut o);
    heads::merge(shape, &o, merged.floats_mut()?);
    Ok(CpuAttention { q, k, v, p })
}

pub(super) fn gradient(
    shape: AttentionShape,
    state: CpuAttention,
    rotary: Option<&Table>,
    d_merged: &CpuBuffer,
    d_qkv: &mut CpuBuffer,
) -> Result<()> {
    check(shape, rotary, d_qkv, d_merged)?;
    let CpuAttention { q, k, v, p } = state;
    expect_length("saved queries", d_merged.len(), q.len())?;
    let [mut d_o, mut dq, mut dk, mut dv] = std::array::from_fn(|_| vec![0f32; d_merged.len()]);
    heads::merge_backward(shape, d_merged.floats()?, &mut d_o);
    let saved = Saved { q: &q, k: &k, v: &v, p: &p, d_o: &d_o };
    attention::backward(shape, saved, &mut dq, &mut dk, &mut dv);
    heads::split_backward(shape, rotary, &dq, &dk, &dv, d_qkv.floats_mut()?);
    Ok(())
}
