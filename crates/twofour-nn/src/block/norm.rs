//! Layer normalization with its parameters.

use twofour::layer::Accumulate;

use super::Workspace;
use crate::{
    Error, Result,
    engine::{Engine, Kind},
    parameter::Parameter,
};

/// Layer normalization, `[width]` gain and bias.
#[derive(Debug)]
pub struct LayerNorm<E: Engine> {
    gain: Parameter<E>,
    bias: Parameter<E>,
    width: usize,
}

impl<E: Engine> LayerNorm<E> {
    /// Added to the variance.
    pub const EPSILON: f32 = 1e-5;

    /// The norm with these parameters.
    ///
    /// # Errors
    /// Shapes that are not the same `[width]`.
    pub fn new(gain: Parameter<E>, bias: Parameter<E>) -> Result<Self> {
        match (gain.shape(), bias.shape()) {
            (&[width], &[other]) if width == other => Ok(LayerNorm { gain, bias, width }),
            (gain, bias) => {
                let found = format!("{gain:?} and {bias:?}");
                Err(Error::Setting { what: "gain and bias of a norm", found, expected: "two vectors of one length" })
            }
        }
    }

    /// Number of features.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Normalizes `x` `[tokens, width]`; returns the output and the statistics for the backward pass.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        x: &E::Buffer,
        tokens: usize,
    ) -> Result<(E::Buffer, [E::Buffer; 2])> {
        let mut y = workspace.compute(engine, tokens * self.width)?;
        let mut mean = workspace.take(engine, Kind::Wide, tokens)?;
        let mut rstd = workspace.take(engine, Kind::Wide, tokens)?;
        let parameters = [self.gain.master(), self.bias.master()];
        engine.layer_norm(x, parameters, Self::EPSILON, &mut y, [&mut mean, &mut rstd])?;
        Ok((y, [mean, rstd]))
    }

    /// Adds the gradient for `x` to `dx`, and writes or adds those of the parameters.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn backward(
        &mut self,
        engine: &E,
        (x, [mean, rstd]): (&E::Buffer, &[E::Buffer; 2]),
        dy: &E::Buffer,
        dx: &mut E::Buffer,
        accumulate: Accumulate,
    ) -> Result<()> {
        let (gain, d_gain) = self.gain.master_and_gradient();
        let (Some(d_gain), Some(d_bias)) = (d_gain, self.bias.gradient_mut()) else {
            return Err(Error::Setting {
                what: "a norm",
                found: "without gradients".to_owned(),
                expected: "a model that trains; call `begin_training` first",
            });
        };
        engine.layer_norm_gradient((x, gain, [mean, rstd]), dy, dx, accumulate, [d_gain, d_bias])
    }

    pub(crate) fn parameters(&self) -> [&Parameter<E>; 2] {
        [&self.gain, &self.bias]
    }

    pub(crate) fn parameters_mut(&mut self) -> [&mut Parameter<E>; 2] {
        [&mut self.gain, &mut self.bias]
    }
}
