//! The pre-norm feed-forward block.

use twofour::layer::{Accumulate, Activation};

use super::{LayerNorm, Workspace};
use crate::{Error, Result, engine::Engine, linear::Linear, parameter::Parameter};

/// `x + down(activation(up(layer_norm(x))))` for `x: [tokens, width]`.
#[derive(Debug)]
pub struct FeedForwardBlock<E: Engine> {
    /// The norm in front.
    pub norm: LayerNorm<E>,
    /// `[hidden, width]`.
    pub up: Linear<E>,
    /// `[width, hidden]`.
    pub down: Linear<E>,
    activation: Activation,
}

/// What the backward pass of a [`FeedForwardBlock`] reads.
#[derive(Debug)]
pub struct SavedFeedForward<E: Engine> {
    tokens: usize,
    x: E::Buffer,
    statistics: [E::Buffer; 2],
    normalized: E::Buffer,
    hidden: E::Buffer,
    activated: E::Buffer,
}

impl<E: Engine> FeedForwardBlock<E> {
    /// A block of these layers.
    ///
    /// # Errors
    /// Layers whose shapes do not fit.
    pub fn new(norm: LayerNorm<E>, up: Linear<E>, down: Linear<E>, activation: Activation) -> Result<Self> {
        let (width, hidden) = (norm.width(), up.out_features());
        if up.in_features() != width || (down.out_features(), down.in_features()) != (width, hidden) {
            let of = |linear: &Linear<E>| format!("[{}, {}]", linear.out_features(), linear.in_features());
            let found = format!("{} and {} for width {width}", of(&up), of(&down));
            let expected = "[hidden, width] and [width, hidden]";
            return Err(Error::Setting { what: "layers of a feed-forward block", found, expected });
        }
        Ok(FeedForwardBlock { norm, up, down, activation })
    }

    /// The block's output, and what its backward pass needs.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    pub fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        x: E::Buffer,
        tokens: usize,
    ) -> Result<(E::Buffer, SavedFeedForward<E>)> {
        let (width, hidden_size) = (self.norm.width(), self.up.out_features());
        let (normalized, statistics) = self.norm.forward(engine, workspace, &x, tokens)?;
        let mut hidden = workspace.compute(engine, tokens * hidden_size)?;
        self.up.forward(engine, &normalized, tokens, &mut hidden)?;
        let mut activated = workspace.compute(engine, tokens * hidden_size)?;
        engine.activation(self.activation, &hidden, &mut activated)?;
        let mut y = workspace.compute(engine, tokens * width)?;
        self.down.forward(engine, &activated, tokens, &mut y)?;
        engine.add(&x, &mut y)?;
        Ok((y, SavedFeedForward { tokens, x, statistics, normalized, hidden, activated }))
    }

    /// The parameters: those of the norm, then of the linear layers.
    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<E>> {
        let linears = self.up.parameters_mut().chain(self.down.parameters_mut());
        self.norm.parameters_mut().into_iter().chain(linears)
    }

    /// Turns the gradient of the output into that of the input.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    pub fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        saved: SavedFeedForward<E>,
        dy: E::Buffer,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let SavedFeedForward { tokens, x, statistics, normalized, hidden, activated } = saved;
        self.down.parameter_gradients(engine, &dy, &activated, tokens, accumulate)?;
        let mut d_hidden = activated;
        self.down.input_gradient(engine, &dy, tokens, &mut d_hidden)?;
        let input = (&normalized, tokens);
        self.up.gradients_through(engine, (self.activation, &hidden), &mut d_hidden, input, accumulate)?;
        let mut d_normalized = normalized;
        self.up.input_gradient(engine, &d_hidden, tokens, &mut d_normalized)?;
        let mut dx = dy;
        self.norm.backward(engine, (&x, &statistics), &d_normalized, &mut dx, accumulate)?;
        workspace.give([x, hidden, d_hidden, d_normalized].into_iter().chain(statistics));
        Ok(dx)
    }
}

impl<E: Engine> SavedFeedForward<E> {
    /// Gives the buffers back where there is no backward pass.
    pub fn release(self, workspace: &mut Workspace<E>) {
        workspace.give([self.x, self.normalized, self.hidden, self.activated].into_iter().chain(self.statistics));
    }
}
