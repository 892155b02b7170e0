//! The feed-forward network of a block.

use twofour::layer::Accumulate;

use super::{BatchShape, Branch, Workspace};
use crate::{
    Error, Result,
    engine::{Buffer as _, Engine, Nonlinearity},
    linear::Linear,
    parts::parts,
};

/// `down(function(up(x)))` for `x: [tokens, width]`.
#[derive(Debug)]
pub struct FeedForward<E: Engine> {
    /// `[hidden, width]`; of a gated function `[2 hidden, width]`, the gate first.
    pub up: Linear<E>,
    /// `[width, hidden]`.
    pub down: Linear<E>,
    function: Nonlinearity,
    /// Whether the hidden layer is `function(gate) ⊙ up` (Shazeer, "GLU Variants Improve Transformer", 2020).
    is_gated: bool,
}

parts!(FeedForward<E> { up, down });

/// The hidden layer after its function.
#[derive(Debug)]
enum Activated<E: Engine> {
    Dense(E::Buffer),
    Packed {
        packed: E::PackedActivation,
        /// Tokens and features.
        shape: (usize, usize),
    },
}

/// What the backward pass of a [`FeedForward`] network reads beside its input.
#[derive(Debug)]
pub struct SavedFeedForward<E: Engine> {
    hidden: E::Buffer,
    activated: Activated<E>,
}

impl<E: Engine> FeedForward<E> {
    /// A network of these layers. With a gate the hidden layer is `function(gate) ⊙ up`.
    ///
    /// # Errors
    /// Layers whose shapes do not fit.
    pub fn new(up: Linear<E>, down: Linear<E>, function: Nonlinearity, is_gated: bool) -> Result<Self> {
        let (width, hidden) = (up.in_features(), down.in_features());
        let up_width = if is_gated { 2 * hidden } else { hidden };
        if up.out_features() != up_width || down.out_features() != width {
            let of = |linear: &Linear<E>| format!("[{}, {}]", linear.out_features(), linear.in_features());
            let found = format!("{} and {}", of(&up), of(&down));
            let expected = "[hidden, width] and [width, hidden]; with a gate [2 hidden, width] first";
            return Err(Error::Setting { what: "layers of a feed-forward block", found, expected });
        }
        Ok(FeedForward { up, down, function, is_gated })
    }

    /// Replaces the activation by squared ReLU, `max(x, 0)²`, which is pruned to 2:4 where the second layer prunes its
    /// input ([`Linear::make_input_sparse`]).
    ///
    /// # Errors
    /// [`Error::Unsupported`] for a gated function.
    pub fn use_squared_relu(&mut self) -> Result<()> {
        if self.is_gated {
            let what = "squared ReLU in place of a gated function".to_owned();
            return Err(Error::Unsupported { engine: "training", what, remedy: "use a model without gates" });
        }
        self.function = Nonlinearity::SquaredRelu;
        Ok(())
    }
}

impl<E: Engine> Branch<E> for FeedForward<E> {
    type Saved = SavedFeedForward<E>;

    fn width(&self) -> usize {
        self.up.in_features()
    }

    fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        x: &E::Buffer,
        shape: BatchShape,
    ) -> Result<(E::Buffer, SavedFeedForward<E>)> {
        let (tokens, hidden_size) = (shape.tokens(), self.down.in_features());
        let mut hidden = workspace.compute(engine, tokens * self.up.out_features())?;
        self.up.forward(engine, x, tokens, &mut hidden)?;
        let mut y = workspace.compute(engine, tokens * self.width())?;
        let activated = match (self.is_gated, self.down.prunes_input()) {
            (false, Some(rule)) if self.function == Nonlinearity::SquaredRelu => {
                let shape = (tokens, hidden_size);
                let packed = engine.pack_squared_relu(rule, &hidden, hidden_size, workspace.packed(shape))?;
                self.down.forward_packed(&packed, tokens, &mut y)?;
                Activated::Packed { packed, shape }
            }
            (is_gated, _) => {
                let mut activated = workspace.compute(engine, tokens * hidden_size)?;
                match is_gated {
                    true => engine.gated(self.function, hidden_size, &hidden, &mut activated)?,
                    false => engine.activation(self.function.into(), &hidden, &mut activated)?,
                }
                self.down.forward(engine, &activated, tokens, &mut y)?;
                Activated::Dense(activated)
            }
        };
        Ok((y, SavedFeedForward { hidden, activated }))
    }

    fn backward(
        &mut self,
        engine: &E,
        workspace: &mut Workspace<E>,
        (x, saved): (E::Buffer, SavedFeedForward<E>),
        dy: &E::Buffer,
        shape: BatchShape,
        accumulate: Accumulate,
    ) -> Result<E::Buffer> {
        let (tokens, SavedFeedForward { hidden, activated }) = (shape.tokens(), saved);
        let mut d_activated = match activated {
            Activated::Dense(activated) => {
                self.down.parameter_gradients(engine, dy, &activated, tokens, accumulate)?;
                activated
            }
            Activated::Packed { packed, shape } => {
                self.down.packed_parameter_gradients(engine, dy, &packed, tokens, accumulate)?;
                workspace.give_packed(shape, packed);
                workspace.compute(engine, tokens * self.down.in_features())?
            }
        };
        self.down.input_gradient(engine, dy, tokens, &mut d_activated)?;
        let d_hidden = match self.is_gated {
            true => {
                let mut d_hidden = workspace.compute(engine, hidden.len())?;
                engine.gated_gradient(self.function, self.down.in_features(), &hidden, &d_activated, &mut d_hidden)?;
                workspace.give([d_activated]);
                self.up.parameter_gradients(engine, &d_hidden, &x, tokens, accumulate)?;
                d_hidden
            }
            false => {
                let through = (self.function, &hidden);
                self.up.gradients_through(engine, through, &mut d_activated, (&x, tokens), accumulate)?;
                d_activated
            }
        };
        let mut dx = x;
        self.up.input_gradient(engine, &d_hidden, tokens, &mut dx)?;
        workspace.give([hidden, d_hidden]);
        Ok(dx)
    }

    fn release(_: &E, saved: SavedFeedForward<E>, workspace: &mut Workspace<E>) {
        workspace.give([saved.hidden]);
        match saved.activated {
            Activated::Dense(activated) => workspace.give([activated]),
            Activated::Packed { packed, shape } => workspace.give_packed(shape, packed),
        }
    }
}
