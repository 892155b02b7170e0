//! The pre-norm feed-forward block.

use twofour::layer::{Accumulate, Activation};

use super::{Norm, Normalized, Workspace};
use crate::{
    Error, Result,
    engine::{Buffer as _, Engine, Nonlinearity},
    linear::Linear,
    parameter::Parameter,
};

/// `x + down(function(up(norm(x))))` for `x: [tokens, width]`.
#[derive(Debug)]
pub struct FeedForwardBlock<E: Engine> {
    /// The norm in front.
    pub norm: Norm<E>,
    /// `[hidden, width]`; of a gated function `[2 hidden, width]`, the gate first.
    pub up: Linear<E>,
    /// `[width, hidden]`.
    pub down: Linear<E>,
    function: FeedForwardFunction,
}

/// What a [`FeedForwardBlock`] applies to its hidden layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum FeedForwardFunction {
    /// An activation.
    Plain(Activation),
    /// `max(x, 0)²`, pruned to 2:4 where the second layer prunes its input ([`Linear::make_input_sparse`]).
    SquaredRelu,
    /// `function(gate) ⊙ up` (Shazeer, "GLU Variants Improve Transformer", 2020).
    Gated(Nonlinearity),
}

/// The hidden layer after its function.
#[derive(Debug)]
enum Activated<E: Engine> {
    Dense(E::Buffer),
    Packed(E::PackedActivation),
}

/// What the backward pass of a [`FeedForwardBlock`] reads.
#[derive(Debug)]
pub struct SavedFeedForward<E: Engine> {
    tokens: usize,
    input: Normalized<E>,
    hidden: E::Buffer,
    activated: Activated<E>,
}

impl<E: Engine> FeedForwardBlock<E> {
    /// A block of these layers.
    ///
    /// # Errors
    /// Layers whose shapes do not fit.
    pub fn new(norm: Norm<E>, up: Linear<E>, down: Linear<E>, function: FeedForwardFunction) -> Result<Self> {
        let (width, hidden) = (norm.width(), down.in_features());
        let up_width = match function {
            FeedForwardFunction::Plain(_) | FeedForwardFunction::SquaredRelu => hidden,
            FeedForwardFunction::Gated(_) => 2 * hidden,
        };
        if (up.out_features(), up.in_features()) != (up_width, width) || down.out_features() != width {
            let of = |linear: &Linear<E>| format!("[{}, {}]", linear.out_features(), linear.in_features());
            let found = format!("{} and {} for width {width}", of(&up), of(&down));
            let expected = "[hidden, width] and [width, hidden]; with a gate [2 hidden, width] first";
            return Err(Error::Setting { what: "layers of a feed-forward block", found, expected });
        }
        Ok(FeedForwardBlock { norm, up, down, function })
    }

    /// Replaces the activation by [`FeedForwardFunction::SquaredRelu`].
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a gated function.
    pub fn use_squared_relu(&mut self) -> Result<()> {
        if let FeedForwardFunction::Gated(_) = self.function {
            let what = "squared ReLU in place of a gated function".to_owned();
            return Err(Error::Unsupported { engine: "training", what, remedy: "use a model without gates" });
        }
        self.function = FeedForwardFunction::SquaredRelu;
        Ok(())
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
        let input = Normalized::new(engine, workspace, &self.norm, x, tokens)?;
        let (mut y, saved) = self.branch(engine, workspace, input, tokens)?;
        engine.add(&saved.input.x, &mut y)?;
        Ok((y, saved))
    }

    /// The block's output with the norm that follows it, which reads it as it is added, from an input whose norm is that of [`FeedForwardBlock::norm`]; and what the
    /// backward pass needs. The bits are those of [`FeedForwardBlock::forward`] between both norms.
    ///
    /// # Errors
    /// Those of [`FeedForwardBlock::forward`].
    pub fn forward_between(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        input: Normalized<E>,
        tokens: usize,
        next: &Norm<E>,
    ) -> Result<(Normalized<E>, SavedFeedForward<E>)> {
        let (y, saved) = self.branch(engine, workspace, input, tokens)?;
        let output = Normalized::of_sum(engine, workspace, next, (&saved.input.x, y), tokens)?;
        Ok((output, saved))
    }

    /// What is added to the block's input.
    fn branch(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        input: Normalized<E>,
        tokens: usize,
    ) -> Result<(E::Buffer, SavedFeedForward<E>)> {
        let (width, hidden_size) = (self.norm.width(), self.down.in_features());
        let mut hidden = workspace.compute(engine, tokens * self.up.out_features())?;
        self.up.forward(engine, &input.y, tokens, &mut hidden)?;
        let mut y = workspace.compute(engine, tokens * width)?;
        let activated = match (self.function, self.down.prunes_input()) {
            (FeedForwardFunction::SquaredRelu, Some(rule)) => {
                let old = workspace.packed((tokens, hidden_size));
                let packed = engine.pack_squared_relu(rule, &hidden, hidden_size, old)?;
                self.down.forward_packed(engine, &packed, tokens, &mut y)?;
                Activated::Packed(packed)
            }
            (function, _) => {
                let mut activated = workspace.compute(engine, tokens * hidden_size)?;
                match function {
                    FeedForwardFunction::Plain(activation) => engine.activation(activation, &hidden, &mut activated)?,
                    FeedForwardFunction::SquaredRelu => engine.squared_relu(&hidden, &mut activated)?,
                    FeedForwardFunction::Gated(function) => {
                        engine.gated(function, hidden_size, &hidden, &mut activated)?
                    }
                }
                self.down.forward(engine, &activated, tokens, &mut y)?;
                Activated::Dense(activated)
            }
        };
        Ok((y, SavedFeedForward { tokens, input, hidden, activated }))
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
        saved: SavedFeedForward<E>,
        dy: E::Buffer,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let SavedFeedForward { tokens, input: Normalized { x, y: normalized, statistics }, hidden, activated } = saved;
        let mut d_activated = match activated {
            Activated::Dense(activated) => {
                self.down.parameter_gradients(engine, &dy, &activated, tokens, accumulate)?;
                activated
            }
            Activated::Packed(packed) => {
                let features = self.down.in_features();
                self.down.packed_parameter_gradients(engine, &dy, &packed, tokens, accumulate)?;
                workspace.give_packed((tokens, features), packed);
                workspace.compute(engine, tokens * features)?
            }
        };
        self.down.input_gradient(engine, &dy, tokens, &mut d_activated)?;
        let input = (&normalized, tokens);
        let d_hidden = match self.function {
            FeedForwardFunction::Plain(activation) => {
                self.up.gradients_through(engine, (activation, &hidden), &mut d_activated, input, accumulate)?;
                d_activated
            }
            FeedForwardFunction::SquaredRelu => {
                engine.squared_relu_gradient(&hidden, &mut d_activated)?;
                self.up.parameter_gradients(engine, &d_activated, &normalized, tokens, accumulate)?;
                d_activated
            }
            FeedForwardFunction::Gated(function) => {
                let mut d_hidden = workspace.compute(engine, tokens * self.up.out_features())?;
                engine.gated_gradient(function, self.down.in_features(), &hidden, &d_activated, &mut d_hidden)?;
                workspace.give([d_activated]);
                self.up.parameter_gradients(engine, &d_hidden, &normalized, tokens, accumulate)?;
                d_hidden
            }
        };
        let mut d_normalized = normalized;
        self.up.input_gradient(engine, &d_hidden, tokens, &mut d_normalized)?;
        let mut dx = dy;
        self.norm.backward(engine, (&x, &statistics), &d_normalized, &mut dx, accumulate)?;
        workspace.give([x, hidden, d_hidden, d_normalized].into_iter().chain(statistics.into_buffers()));
        Ok(dx)
    }
}

impl<E: Engine> SavedFeedForward<E> {
    /// Gives the buffers back where there is no backward pass.
    pub fn release(self, workspace: &mut Workspace<E>) {
        // Squared ReLU has as many outputs as inputs.
        let features = self.hidden.len().checked_div(self.tokens).unwrap_or(0);
        workspace.give([self.hidden].into_iter().chain(self.input.into_buffers()));
        match self.activated {
            Activated::Dense(activated) => workspace.give([activated]),
            Activated::Packed(packed) => workspace.give_packed((self.tokens, features), packed),
        }
    }
}
