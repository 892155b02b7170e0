//! The post-norm feed-forward block.

use twofour::layer::{Accumulate, Activation};

use super::SavedSum;
use crate::{
    Error, Result,
    block::{Norm, Workspace},
    engine::Engine,
    linear::Linear,
    parameter::Parameter,
};

/// `norm(x + down(activation(up(x))))` for `x: [tokens, width]`.
#[derive(Debug)]
pub struct PostNormFeedForward<E: Engine> {
    /// `[hidden, width]`.
    pub up: Linear<E>,
    /// `[width, hidden]`.
    pub down: Linear<E>,
    /// The norm behind.
    pub norm: Norm<E>,
    activation: Activation,
}

/// What the backward pass of a [`PostNormFeedForward`] reads.
#[derive(Debug)]
pub struct SavedPostNormFeedForward<E: Engine> {
    tokens: usize,
    x: E::Buffer,
    hidden: E::Buffer,
    activated: E::Buffer,
    sum: SavedSum<E>,
}

impl<E: Engine> PostNormFeedForward<E> {
    /// A block of these layers.
    ///
    /// # Errors
    /// Layers whose shapes do not fit.
    pub fn new(up: Linear<E>, down: Linear<E>, norm: Norm<E>, activation: Activation) -> Result<Self> {
        let (width, hidden) = (norm.width(), down.in_features());
        if (up.out_features(), up.in_features()) != (hidden, width) || down.out_features() != width {
            let of = |linear: &Linear<E>| format!("[{}, {}]", linear.out_features(), linear.in_features());
            let found = format!("{} and {} for width {width}", of(&up), of(&down));
            let expected = "[hidden, width] and [width, hidden]";
            return Err(Error::Setting { what: "layers of a feed-forward block", found, expected });
        }
        Ok(PostNormFeedForward { up, down, norm, activation })
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
    ) -> Result<(E::Buffer, SavedPostNormFeedForward<E>)> {
        let size = tokens * self.down.in_features();
        let mut hidden = workspace.compute(engine, size)?;
        self.up.forward(engine, &x, tokens, &mut hidden)?;
        let mut activated = workspace.compute(engine, size)?;
        engine.activation(self.activation, &hidden, &mut activated)?;
        let mut sum = workspace.compute(engine, tokens * self.norm.width())?;
        self.down.forward(engine, &activated, tokens, &mut sum)?;
        let (y, sum) = SavedSum::normalized(engine, workspace, &self.norm, (&x, sum, tokens))?;
        Ok((y, SavedPostNormFeedForward { tokens, x, hidden, activated, sum }))
    }

    /// The parameters: those of the norm, then of the linear layers.
    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<E>> {
        let linears = self.up.parameters_mut().chain(self.down.parameters_mut());
        self.norm.parameters_mut().chain(linears)
    }

    /// Turns the gradient of the output into that of the input.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    pub fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        saved: SavedPostNormFeedForward<E>,
        dy: E::Buffer,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let SavedPostNormFeedForward { tokens, x, hidden, activated, sum } = saved;
        let d_sum = sum.gradient(engine, workspace, &mut self.norm, (dy, tokens), accumulate)?;
        self.down.parameter_gradients(engine, &d_sum, &activated, tokens, accumulate)?;
        let mut d_hidden = activated;
        self.down.input_gradient(engine, &d_sum, tokens, &mut d_hidden)?;
        let through = (self.activation, &hidden);
        self.up.gradients_through(engine, through, &mut d_hidden, (&x, tokens), accumulate)?;
        let mut dx = workspace.compute(engine, tokens * self.norm.width())?;
        self.up.input_gradient(engine, &d_hidden, tokens, &mut dx)?;
        engine.add(&d_sum, &mut dx)?;
        workspace.give([x, hidden, d_hidden, d_sum]);
        Ok(dx)
    }
}

impl<E: Engine> SavedPostNormFeedForward<E> {
    /// Gives the buffers back where there is no backward pass.
    pub fn release(self, workspace: &mut Workspace<E>) {
        workspace.give([self.x, self.hidden, self.activated]);
        self.sum.release(workspace);
    }
}
