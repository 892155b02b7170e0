//! The pre-norm feed-forward block.

use std::sync::{Mutex, PoisonError};

use candle_core::{CpuStorage, CustomOp1, Layout, Module, Result, Shape, Tensor, bail};
use twofour::kernel::Activation;
use twofour_nn::cpu::activation;

use super::{Gradients, LayerNorm, operand, workspace::Buffer};
use crate::{
    linear::{AnyLinear, LinearOperand},
    ops::rows,
};

/// `x + down(activation(up(layer_norm(x))))`, for `x: [.., width]`, f32 on the CPU.
#[derive(Debug, Clone)]
pub struct FeedForwardBlock {
    /// The norm in front.
    pub norm: LayerNorm,
    /// `[hidden, width]`.
    pub up: AnyLinear,
    /// `[width, hidden]`.
    pub down: AnyLinear,
    /// Between the two.
    pub activation: Activation,
}

impl FeedForwardBlock {
    /// Applies the block as one operator; the gradients of its parameters go to `gradients`.
    ///
    /// # Errors
    /// Shapes that do not fit, an `x` that is not f32 on the CPU, or a layer that cannot be trained through (compressed
    /// weights give an error in the backward pass, not here).
    pub fn forward(&self, x: &Tensor, gradients: &Gradients) -> Result<Tensor> {
        let op = Operator {
            norm: self.norm.clone(),
            up: self.up.operand()?,
            down: self.down.operand()?,
            activation: self.activation,
            gradients: gradients.clone(),
            saved: Mutex::new(None),
        };
        op.check(rows::last_dim(x, Operator::NAME)?)?;
        rows::tracked_operand(x)?.apply_op1(op)
    }

    /// The same by candle's elementary operators: slow, and what the tests compare with.
    ///
    /// # Errors
    /// As [`FeedForwardBlock::forward`].
    pub fn reference(&self, x: &Tensor) -> Result<Tensor> {
        let h = self.up.forward(&self.norm.reference(x)?)?;
        let h = match self.activation {
            Activation::Identity => h,
            Activation::Relu => h.relu()?,
            Activation::Gelu => h.gelu_erf()?,
            Activation::Silu => h.silu()?,
        };
        x + self.down.forward(&h)?
    }
}

struct Operator {
    norm: LayerNorm,
    up: LinearOperand,
    down: LinearOperand,
    activation: Activation,
    gradients: Gradients,
    saved: Mutex<Option<Saved>>,
}

/// What the backward pass needs beside the input.
struct Saved {
    /// The normalised input, `[tokens, width]`.
    normalised: Buffer,
    /// What the activation is applied to, `[tokens, hidden]`.
    hidden: Buffer,
    /// The activation, `[tokens, hidden]`.
    activated: Buffer,
}

impl Operator {
    const NAME: &str = "feed-forward block";

    fn check(&self, width: usize) -> Result<()> {
        let dims = |linear: &LinearOperand| (linear.out_features(), linear.in_features());
        let (up, down, norm) = (dims(&self.up), dims(&self.down), self.norm.gain().elem_count());
        if up.1 != width || down != (width, up.0) || norm != width {
            bail!("{}: x has width {width}; the norm has {norm}, up is {up:?} and down {down:?} (out, in)", Self::NAME);
        }
        Ok(())
    }
}

impl CustomOp1 for Operator {
    fn name(&self) -> &'static str {
        Self::NAME
    }

    fn cpu_fwd(&self, x: &CpuStorage, layout: &Layout) -> Result<(CpuStorage, Shape)> {
        let x = rows::slice(x, layout, Self::NAME)?;
        let (hidden_size, width) = (self.up.out_features(), self.up.in_features());
        let tokens = x.len() / width.max(1);
        let workspace = self.gradients.workspace();

        let mut normalised = workspace.take(x.len());
        operand::normalise(&self.norm, x, &mut normalised)?;
        let mut hidden = workspace.take(tokens * hidden_size);
        self.up.forward(&normalised, tokens, Activation::Identity, &mut hidden)?;
        let mut activated = workspace.take(tokens * hidden_size);
        activation::forward(self.activation, &hidden, &mut activated);
        let mut y = vec![0f32; x.len()];
        self.down.forward(&activated, tokens, Activation::Identity, &mut y)?;
        operand::add_residual(x, &mut y);

        *self.saved.lock().unwrap_or_else(PoisonError::into_inner) = Some(Saved { normalised, hidden, activated });
        Ok((CpuStorage::F32(y), layout.shape().clone()))
    }

    fn bwd(&self, x: &Tensor, _y: &Tensor, dy: &Tensor) -> Result<Option<Tensor>> {
        let saved = self.saved.lock().unwrap_or_else(PoisonError::into_inner).take();
        let Some(Saved { normalised, hidden, activated }) = saved else {
            bail!("{}: a second backward pass through the same forward pass", Self::NAME);
        };
        let workspace = self.gradients.workspace();
        let dx = rows::with_slices(x, dy, Self::NAME, |x, dy| {
            let tokens = x.len() / self.up.in_features().max(1);
            operand::record(&self.down, dy, &activated, tokens, &self.gradients)?;
            let mut dhidden = activated;
            self.down.input_gradient(dy, tokens, &mut dhidden)?;
            activation::backward_in_place(self.activation, &hidden, &mut dhidden);
            operand::record(&self.up, &dhidden, &normalised, tokens, &self.gradients)?;
            drop(normalised);
            let mut dnormalised = workspace.take(x.len());
            self.up.input_gradient(&dhidden, tokens, &mut dnormalised)?;
            let mut dx = dy.to_vec();
            operand::normalise_backward(&self.norm, x, &dnormalised, &mut dx, &self.gradients)?;
            Ok(dx)
        })?;
        Ok(Some(Tensor::from_vec(dx, x.shape(), x.device())?))
    }
}
