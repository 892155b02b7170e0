//! Feed-forward blocks on a GPU.

use twofour::kernel::{Activation, KernelElement};
use twofour_cuda::layer::{DeviceBuffer, DeviceSliceMut};
use twofour_transformer::cuda::{
    ClampedGate, activation_forward, clamped_gate_forward, decode::gate_to_i8, gated_forward,
};

use super::{
    Build, CudaLinear, CudaStack, Input,
    experts::Experts,
    fused,
    hidden::{Hidden, first},
};
use crate::{
    Result,
    engine::cuda::functions::{element_function, gate},
    model::inference::parts::Parts,
};

/// The linear layers of a feed-forward block.
#[derive(Debug)]
pub(super) enum FeedForward {
    /// One pair of layers.
    Dense(Box<HiddenLayer>),
    /// A router and experts.
    Experts(Box<Experts>),
}

/// A hidden layer: what leads into it, with the gate where there is one, and what leads out of it.
#[derive(Debug)]
pub(super) struct HiddenLayer {
    pub(super) up: CudaLinear,
    /// Whether the GEMM of `up` applies the hidden layer's function.
    pub(super) up_activates: bool,
    pub(super) down: CudaLinear,
    pub(super) width: usize,
}

/// Room for the hidden layers of a number of tokens.
#[derive(Debug)]
pub(super) struct HiddenWork {
    up: DeviceBuffer,
    /// The hidden layer with its function applied, where the GEMM before it does not apply it.
    activated: Hidden,
}

impl FeedForward {
    /// The block of a layer.
    pub(super) fn build<T: KernelElement, P: Parts<T>>(build: &Build<'_, T, P>, layer: usize) -> Result<Self> {
        let (config, at) = (build.config(), format!("blocks.{layer}.mlp"));
        Ok(match config.experts(layer) {
            Some(experts) => FeedForward::Experts(Box::new(Experts::build(build, experts, &at)?)),
            None => FeedForward::Dense(Box::new(HiddenLayer::build(build, &at, config.feed_forward.hidden)?)),
        })
    }

    /// Its hidden layers.
    fn hidden_layers(&self) -> Vec<&HiddenLayer> {
        match self {
            FeedForward::Dense(layer) => vec![layer],
            FeedForward::Experts(experts) => experts.hidden_layers().collect(),
        }
    }

    /// Whether it reads integers.
    pub(super) fn takes_integers(&self) -> bool {
        matches!(self, FeedForward::Dense(layer) if layer.up.takes_integers())
    }

    /// Bytes of the linear layers' weights.
    pub(super) fn bytes(&self) -> usize {
        match self {
            FeedForward::Dense(layer) => layer.bytes(),
            FeedForward::Experts(experts) => experts.bytes(),
        }
    }
}

impl HiddenLayer {
    /// The layer of that width whose parts' names begin with `at`.
    pub(super) fn build<T: KernelElement, P: Parts<T>>(
        build: &Build<'_, T, P>,
        at: &str,
        width: usize,
    ) -> Result<Self> {
        let config = build.config();
        // A gate's function is of half of the outputs.
        let function = match config.feed_forward.gated {
            true => Activation::Identity,
            false => fused(config.feed_forward.activation),
        };
        let shape = (config.up_width_of(width), config.width);
        let (up, up_activates) = build.linear(&format!("{at}.up"), shape, function)?;
        let (down, _) = build.linear(&format!("{at}.down"), (config.width, width), Activation::Identity)?;
        Ok(HiddenLayer { up, up_activates, down, width })
    }

    /// Bytes of the weights.
    pub(super) fn bytes(&self) -> usize {
        self.up.bytes() + self.down.bytes()
    }

    /// Launches both layers, and the hidden layer's function where the GEMM before it does not apply it.
    pub(super) fn forward(
        &self,
        stack: &CudaStack,
        input: Input<'_>,
        tokens: usize,
        work: &mut HiddenWork,
        out: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (config, context, feed_forward) = (&stack.config, &stack.context, stack.config.feed_forward);
        let up = tokens * config.up_width_of(self.width);
        self.up.forward(context, input, tokens, first(&mut work.up, up)?)?;
        let (shape, len) = ((tokens, self.width), tokens * self.width);
        let (x, to) = (work.up.as_slice().part(0..up)?, &mut work.activated);
        let clamped = config.experts.as_ref().and_then(|experts| experts.clamped_gate);
        let input = match (clamped, feed_forward.gated) {
            (Some(gate), _) => {
                let gate = ClampedGate { slope: gate.slope, limit: gate.limit };
                clamped_gate_forward(context, gate, shape, x, first(&mut to.floats, len)?)?;
                Input::Floats(to.floats.as_slice().part(0..len)?)
            }
            (None, true) => {
                let gate = gate(feed_forward.activation)?;
                match self.down.takes_integers() {
                    true => {
                        let integers = (first(&mut to.integers, len)?, first(&mut to.scales, tokens)?);
                        gate_to_i8(context, gate, shape, x, integers)?;
                    }
                    false => gated_forward(context, gate, shape, x, first(&mut to.floats, len)?)?,
                }
                to.input(&self.down, shape)?
            }
            (None, false) if self.up_activates => Input::Floats(x),
            (None, false) => {
                let function = element_function(feed_forward.activation);
                activation_forward(context, function, x, first(&mut to.floats, len)?)?;
                // An int8 layer quantizes it itself.
                Input::Floats(to.floats.as_slice().part(0..len)?)
            }
        };
        self.down.forward(context, input, tokens, out)
    }
}

impl HiddenWork {
    /// Room for so many tokens of any layer.
    pub(super) fn new(stack: &CudaStack, tokens: usize) -> Result<Self> {
        let (config, context, dtype) = (&stack.config, &stack.context, stack.dtype);
        let all: Vec<&HiddenLayer> = stack.layers.iter().flat_map(|layer| layer.feed_forward.hidden_layers()).collect();
        let widest =
            |layers: &mut dyn Iterator<Item = &&HiddenLayer>| layers.map(|layer| layer.width).max().unwrap_or(0);
        let activated = widest(&mut all.iter().filter(|layer| !layer.up_activates));
        let integers = config.feed_forward.gated && all.iter().any(|layer| layer.down.takes_integers());
        Ok(HiddenWork {
            up: DeviceBuffer::zeros(context, dtype, tokens * config.up_width_of(widest(&mut all.iter())))?,
            activated: Hidden::new(context, dtype, (tokens, activated), integers)?,
        })
    }
}
