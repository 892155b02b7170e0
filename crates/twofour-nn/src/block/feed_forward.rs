//! The pre-norm feed-forward block.

use twofour::layer::{Accumulate, Activation};

use super::{LayerNorm, Workspace};
use crate::{Error, Result, engine::Engine, linear::Linear};

/// `x + down(activation(up(layer_norm(x))))` for `x: [tokens, width]`.
#[derive(Debug)]
pub struct FeedForwardBlock<E: Engine> {
    /// The norm in front.
    pub norm: LayerNorm<E>,
    /// `[hidden, width]`.
    pub up: Linear<E>,
    /// `[width, hidden]`.
    pub down: Linear<E>,
    function: HiddenFunction,
}

/// What a [`FeedForwardBlock`] applies to its hidden layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
enum HiddenFunction {
    Plain(Activation),
    /// `max(x, 0)²`, pruned to 2:4 where the second layer prunes its input.
    SquaredRelu,
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
    x: E::Buffer,
    statistics: [E::Buffer; 2],
    normalized: E::Buffer,
    hidden: E::Buffer,
    activated: Activated<E>,
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
        Ok(FeedForwardBlock { norm, up, down, function: HiddenFunction::Plain(activation) })
    }

    /// Replaces the activation by squared ReLU, `max(x, 0)²`, whose result the second layer may prune ([`Linear::make_input_sparse`]).
    pub fn use_squared_relu(&mut self) {
        self.function = HiddenFunction::SquaredRelu;
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
        let mut y = workspace.compute(engine, tokens * width)?;
        let activated = match (self.function, self.down.prunes_input()) {
            (HiddenFunction::SquaredRelu, Some(rule)) => {
                let packed = engine.pack_squared_relu(rule, &hidden, hidden_size)?;
                self.down.forward_packed(engine, &packed, tokens, &mut y)?;
                Activated::Packed(packed)
            }
            (function, _) => {
                let mut activated = workspace.compute(engine, tokens * hidden_size)?;
                match function {
                    HiddenFunction::Plain(activation) => engine.activation(activation, &hidden, &mut activated)?,
                    HiddenFunction::SquaredRelu => engine.squared_relu(&hidden, &mut activated)?,
                }
                self.down.forward(engine, &activated, tokens, &mut y)?;
                Activated::Dense(activated)
            }
        };
        engine.add(&x, &mut y)?;
        Ok((y, SavedFeedForward { tokens, x, statistics, normalized, hidden, activated }))
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
        let mut d_hidden = match activated {
            Activated::Dense(activated) => {
                self.down.parameter_gradients(engine, &dy, &activated, tokens, accumulate)?;
                activated
            }
            Activated::Packed(packed) => {
                self.down.packed_parameter_gradients(engine, &dy, &packed, tokens, accumulate)?;
                workspace.compute(engine, tokens * self.up.out_features())?
            }
        };
        self.down.input_gradient(engine, &dy, tokens, &mut d_hidden)?;
        match self.function {
            HiddenFunction::Plain(activation) => engine.activation_gradient(activation, &hidden, &mut d_hidden)?,
            HiddenFunction::SquaredRelu => engine.squared_relu_gradient(&hidden, &mut d_hidden)?,
        }
        self.up.parameter_gradients(engine, &d_hidden, &normalized, tokens, accumulate)?;
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
        workspace.give([self.x, self.normalized, self.hidden].into_iter().chain(self.statistics));
        if let Activated::Dense(activated) = self.activated {
            workspace.give([activated]);
        }
    }
}
