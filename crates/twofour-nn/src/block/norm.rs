//! Normalization with its parameters.

use twofour::layer::Accumulate;

use super::Workspace;
use crate::{
    Error, Result,
    engine::{Engine, Kind},
    parameter::Parameter,
};

/// Layer normalization, with gain and bias, or root-mean-square normalization, with a gain alone: `[width]` each.
#[derive(Debug)]
pub struct Norm<E: Engine> {
    gain: Parameter<E>,
    bias: Option<Parameter<E>>,
    epsilon: f32,
    width: usize,
}

/// What the backward pass of a [`Norm`] reads beside its input.
#[derive(Debug)]
pub struct NormStatistics<E: Engine> {
    /// Of layer normalization.
    mean: Option<E::Buffer>,
    rstd: E::Buffer,
}

impl<E: Engine> Norm<E> {
    /// The norm with these parameters: layer normalization where there is a bias. `epsilon` is added to the variance or to the mean square.
    ///
    /// # Errors
    /// Shapes that are not the same `[width]`.
    pub fn new(gain: Parameter<E>, bias: Option<Parameter<E>>, epsilon: f32) -> Result<Self> {
        let &[width] = gain.shape() else { return Err(shapes(&gain, bias.as_ref())) };
        match &bias {
            Some(other) if other.shape() != [width] => Err(shapes(&gain, bias.as_ref())),
            _ => Ok(Norm { gain, bias, epsilon, width }),
        }
    }

    /// Number of features.
    pub fn width(&self) -> usize {
        self.width
    }

    /// Normalizes `x` `[tokens, width]`; returns the output and what the backward pass needs.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn forward(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        x: &E::Buffer,
        tokens: usize,
    ) -> Result<(E::Buffer, NormStatistics<E>)> {
        let mut y = workspace.compute(engine, tokens * self.width)?;
        let mut rstd = workspace.take(engine, Kind::Wide, tokens)?;
        let mean = match &self.bias {
            Some(bias) => {
                let mut mean = workspace.take(engine, Kind::Wide, tokens)?;
                let parameters = [self.gain.master(), bias.master()];
                engine.layer_norm(x, parameters, self.epsilon, &mut y, [&mut mean, &mut rstd])?;
                Some(mean)
            }
            None => {
                engine.rms_norm(x, self.gain.master(), self.epsilon, &mut y, &mut rstd)?;
                None
            }
        };
        Ok((y, NormStatistics { mean, rstd }))
    }

    /// Adds the gradient for `x` to `dx`, and writes or adds those of the parameters.
    ///
    /// # Errors
    /// Operands that do not fit.
    pub fn backward(
        &mut self,
        engine: &E,
        (x, statistics): (&E::Buffer, &NormStatistics<E>),
        dy: &E::Buffer,
        dx: &mut E::Buffer,
        accumulate: Accumulate,
    ) -> Result<()> {
        let untrained = || Error::Setting {
            what: "a norm",
            found: "without gradients".to_owned(),
            expected: "a model that trains; call `begin_training` first",
        };
        let (gain, d_gain) = self.gain.master_and_gradient();
        let d_gain = d_gain.ok_or_else(untrained)?;
        match (&mut self.bias, &statistics.mean) {
            (Some(bias), Some(mean)) => {
                let d_bias = bias.gradient_mut().ok_or_else(untrained)?;
                let saved = (x, gain, [mean, &statistics.rstd]);
                engine.layer_norm_gradient(saved, dy, dx, accumulate, [d_gain, d_bias])
            }
            _ => {
                let saved = (x, gain, &statistics.rstd);
                engine.rms_norm_gradient(saved, self.epsilon, dy, dx, accumulate, d_gain)
            }
        }
    }

    pub(crate) fn parameters(&self) -> impl Iterator<Item = &Parameter<E>> {
        std::iter::once(&self.gain).chain(&self.bias)
    }

    pub(crate) fn parameters_mut(&mut self) -> impl Iterator<Item = &mut Parameter<E>> {
        std::iter::once(&mut self.gain).chain(&mut self.bias)
    }
}

impl<E: Engine> NormStatistics<E> {
    /// The buffers, to give them back.
    pub fn into_buffers(self) -> impl Iterator<Item = E::Buffer> {
        std::iter::once(self.rstd).chain(self.mean)
    }
}

fn shapes<E: Engine>(gain: &Parameter<E>, bias: Option<&Parameter<E>>) -> Error {
    let found = match bias {
        Some(bias) => format!("{:?} and {:?}", gain.shape(), bias.shape()),
        None => format!("{:?}", gain.shape()),
    };
    Error::Setting { what: "gain and bias of a norm", found, expected: "two vectors of one length, or a gain alone" }
}
