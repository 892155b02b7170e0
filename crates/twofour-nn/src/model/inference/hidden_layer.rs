//! The hidden layer of a feed-forward block, or of an expert, for inference.

use twofour::kernel::{Activation, KernelElement};

use super::{
    linear::Linear,
    parts::Parts,
    passes::{gated, narrowed, widened},
};
use crate::{Result, cpu::nonlinearity, engine::Nonlinearity, model::config::TransformerConfig};

/// A hidden layer: what leads into it, with the gate where there is one, and what leads out of it.
#[derive(Debug)]
pub(crate) struct HiddenLayer<T: KernelElement> {
    up: Linear<T>,
    pub(super) down: Linear<T>,
    pub(super) width: usize,
}

impl<T: KernelElement> HiddenLayer<T> {
    /// The layer of that width whose parts' names begin with `at`.
    pub(super) fn build(config: &TransformerConfig, parts: &impl Parts<T>, at: &str, width: usize) -> Result<Self> {
        let up = parts.linear(&format!("{at}.up"), (config.up_width_of(width), config.width))?;
        Ok(HiddenLayer { up, down: parts.linear(&format!("{at}.down"), (config.width, width))?, width })
    }

    pub(super) fn bytes(&self) -> usize {
        self.up.bytes() + self.down.bytes()
    }

    /// The hidden layer of so many tokens, with its function applied.
    pub(super) fn hidden(&self, config: &TransformerConfig, x: &[T], tokens: usize) -> Result<Vec<T>> {
        let feed_forward = config.feed_forward;
        // What the kernels have in their epilogue.
        let fused = match feed_forward.activation {
            _ if feed_forward.gated => None,
            Nonlinearity::Relu => Some(Activation::Relu),
            Nonlinearity::Gelu => Some(Activation::Gelu),
            Nonlinearity::Silu => Some(Activation::Silu),
            Nonlinearity::TanhGelu | Nonlinearity::SquaredRelu => None,
        };
        let clamped_gate = config.experts.as_ref().and_then(|experts| experts.clamped_gate);
        let h = self.up.forward(x, tokens, fused.unwrap_or(Activation::Identity))?;
        if fused.is_some() {
            return Ok(h);
        }
        if let Some(gate) = clamped_gate {
            return Ok(gate.of(self.width, &h));
        }
        if feed_forward.gated {
            return Ok(gated(feed_forward.activation, self.width, &h));
        }
        let mut h = widened(&h);
        nonlinearity::in_place(feed_forward.activation, &mut h);
        Ok(narrowed(&h))
    }
}
