//! The pre-norm causal self-attention block.

use std::sync::{Arc, Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp1, D, DType, Layout, Module, Result, Shape, Tensor, bail};
use twofour::kernel::Activation;
use twofour_nn::{
    cpu::{
        attention::{self, Heads},
        heads,
        rope::Table,
    },
    engine::AttentionShape,
};

use super::{Gradients, LayerNorm, operand, workspace::Buffer};
use crate::{
    linear::{AnyLinear, LinearOperand},
    ops::{rope, rows},
};

/// `x + out(attention(qkv(layer_norm(x))))`, for `x: [batch, positions, width]`, f32 on the CPU.
///
/// Attention is causal, with `heads` heads of `width / heads` elements, scaled by the root of that; queries and keys are
/// rotated by their position (rotary embedding, base 10 000, halves paired), so the model needs no position embedding.
#[derive(Debug, Clone)]
pub struct AttentionBlock {
    /// The norm in front.
    pub norm: LayerNorm,
    /// `[3 * width, width]`: queries, keys, values.
    pub qkv: AnyLinear,
    /// `[width, width]`.
    pub out: AnyLinear,
    heads: usize,
    rotary: Arc<Table>,
}

impl AttentionBlock {
    /// A block of `heads` heads for sequences of up to `context` positions.
    ///
    /// # Errors
    /// A width that `heads` does not divide into even parts, or layers whose shapes do not fit.
    pub fn new(norm: LayerNorm, qkv: AnyLinear, out: AnyLinear, heads: usize, context: usize) -> Result<Self> {
        let width = norm.gain().elem_count();
        if heads == 0 || !width.is_multiple_of(2 * heads) {
            bail!("attention: width {width} does not divide into {heads} heads of an even number of elements");
        }
        let rotary = Arc::new(Table::new(context, width / heads / 2));
        let found = (operand::dims(&qkv)?, operand::dims(&out)?);
        if found != ((3 * width, width), (width, width)) {
            bail!(
                "attention: for width {width}, qkv must be {:?} and out {:?} (out, in); found {found:?}",
                (3 * width, width),
                (width, width)
            );
        }
        Ok(AttentionBlock { norm, qkv, out, heads, rotary })
    }

    /// Number of heads.
    pub fn heads(&self) -> usize {
        self.heads
    }

    fn shape(&self, x: &Tensor) -> Result<AttentionShape> {
        let width = self.norm.gain().elem_count();
        let (batch, positions, found) = x.dims3()?;
        if found != width {
            bail!("{}: expected width {width}, found {found}", Operator::NAME);
        }
        let context = self.rotary.positions();
        if positions > context {
            bail!("{}: {positions} positions, but the context is {context}; shorten the sequence", Operator::NAME);
        }
        let heads = self.heads;
        Ok(AttentionShape { batch, positions, heads, kv_heads: heads, head_dim: width / heads, causal: true })
    }

    /// Applies the block as one operator; the gradients of its parameters go to `gradients`.
    ///
    /// # Errors
    /// Shapes that do not fit, more positions than the context, an `x` that is not on the CPU, or compressed layers in the
    /// backward pass.
    pub fn forward(&self, x: &Tensor, gradients: &Gradients) -> Result<Tensor> {
        let op = Operator {
            shape: self.shape(x)?,
            norm: self.norm.clone(),
            qkv: self.qkv.operand()?,
            out: self.out.operand()?,
            rotary: self.rotary.clone(),
            gradients: gradients.clone(),
            saved: Mutex::new(None),
        };
        rows::tracked_operand(x)?.apply_op1(op)
    }

    /// The same by candle's elementary operators: slow, and what the tests compare with.
    ///
    /// # Errors
    /// As [`AttentionBlock::forward`].
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let AttentionShape { batch, heads, positions, head_dim: dim, .. } = self.shape(x)?;
        let qkv = self.qkv.forward(&self.norm.reference(x)?)?;
        let qkv = qkv.reshape((batch, positions, 3, heads, dim))?;
        let part = |i: usize| qkv.narrow(2, i, 1)?.squeeze(2)?.transpose(1, 2)?.contiguous();
        let (cos, sin) = rope::tensors(&self.rotary, positions)?;
        let q = candle_nn::rotary_emb::rope_slow(&part(0)?, &cos, &sin)?;
        let k = candle_nn::rotary_emb::rope_slow(&part(1)?, &cos, &sin)?;
        let mask: Vec<f32> = (0..positions * positions)
            .map(|at| if at % positions > at / positions { f32::NEG_INFINITY } else { 0.0 })
            .collect();
        let mask = Tensor::from_vec(mask, (positions, positions), x.device())?;
        let scores = (q.matmul(&k.t()?.contiguous()?)? / (dim as f64).sqrt())?.broadcast_add(&mask)?;
        let o = candle_nn::ops::softmax(&scores, D::Minus1)?.matmul(&part(2)?)?;
        let o = o.transpose(1, 2)?.contiguous()?.reshape((batch, positions, heads * dim))?;
        x.to_dtype(DType::F32)? + self.out.forward(&o)?
    }
}

struct Operator {
    shape: AttentionShape,
    norm: LayerNorm,
    qkv: LinearOperand,
    out: LinearOperand,
    rotary: Arc<Table>,
    gradients: Gradients,
    saved: Mutex<Option<Saved>>,
}

/// What the backward pass needs beside the input.
struct Saved {
    /// The normalised input, `[tokens, width]`.
    normalised: Buffer,
    /// Rotated queries and keys, and values: `[batch, head, position, dim]`.
    q: Buffer,
    k: Buffer,
    v: Buffer,
    /// Attention probabilities, `[batch, head, position, position]`.
    p: Buffer,
    /// The heads' outputs side by side, `[tokens, width]`.
    merged: Buffer,
}

impl Operator {
    const NAME: &str = "attention block";

    fn heads(&self) -> Heads {
        let AttentionShape { batch, heads, positions, head_dim, causal, .. } = self.shape;
        Heads { sequences: batch * heads, positions, dim: head_dim, causal }
    }
}

impl CustomOp1 for Operator {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, x_layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::slice(x, x_layout, Self::NAME)?;
        let (shape, workspace) = (self.shape, self.gradients.workspace());
        let (tokens, n) = (shape.tokens(), shape.tokens() * shape.width());

        let mut normalised = workspace.take(n);
        operand::normalise(&self.norm, x, &mut normalised)?;
        let mut qkv = workspace.take(3 * n);
        self.qkv.forward(&normalised, tokens, Activation::Identity, &mut qkv)?;
        let [mut q, mut k, mut v, mut o] = std::array::from_fn(|_| workspace.take(n));
        heads::split(shape, Some(&self.rotary), &qkv, &mut q, &mut k, &mut v);
        drop(qkv);
        let mut p = workspace.take(self.heads().probabilities());
        attention::forward(self.heads(), &q, &k, &v, &mut p, &mut o);
        let mut merged = workspace.take(n);
        heads::merge(shape, &o, &mut merged);
        let mut y = vec![0f32; n];
        self.out.forward(&merged, tokens, Activation::Identity, &mut y)?;
        operand::add_residual(x, &mut y);

        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(Saved { normalised, q, k, v, p, merged });
        Ok((CpuStorage::F32(y), x_layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Saved { normalised, q, k, v, p, merged }) = saved else {
            bail!("{}: a second backward pass through the same forward pass", Self::NAME);
        };
        let (shape, workspace) = (self.shape, self.gradients.workspace());
        let (tokens, n) = (shape.tokens(), shape.tokens() * shape.width());
        let dx = rows::with_slices(x, dy, Self::NAME, |x, dy| {
            operand::record(&self.out, dy, &merged, tokens, &self.gradients)?;
            let mut dmerged = merged;
            self.out.input_gradient(dy, tokens, &mut dmerged)?;
            let [mut d_o, mut dq, mut dk, mut dv] = std::array::from_fn(|_| workspace.take(n));
            heads::merge_backward(shape, &dmerged, &mut d_o);
            let saved = attention::Saved { q: &q, k: &k, v: &v, p: &p, d_o: &d_o };
            attention::backward(self.heads(), saved, &mut dq, &mut dk, &mut dv);
            let mut dqkv = workspace.take(3 * n);
            heads::split_backward(shape, Some(&self.rotary), &dq, &dk, &dv, &mut dqkv);
            operand::record(&self.qkv, &dqkv, &normalised, tokens, &self.gradients)?;
            let mut dnormalised = dmerged;
            self.qkv.input_gradient(&dqkv, tokens, &mut dnormalised)?;
            let mut dx = dy.to_vec();
            operand::normalise_backward(&self.norm, x, &dnormalised, &mut dx, &self.gradients)?;
            Ok(dx)
        })?;
        Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
    }
}
