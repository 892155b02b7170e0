//! Normalization with its parameters.

use twofour::layer::Accumulate;

use super::Workspace;
use crate::{
    Error, Result,
    engine::{self, Engine, Kind, NormGradients, NormInput, NormParameters},
    parameter::Parameter,
    parts::parts,
};

/// Layer normalization, with gain and bias, or root-mean-square normalization, with a gain alone: `[width]` each.
#[derive(Debug)]
pub struct Norm<E: Engine> {
    gain: Parameter<E>,
    bias: Option<Parameter<E>>,
    epsilon: f32,
    width: usize,
}

parts!(Norm<E> { gain, bias });

/// What the backward pass of a [`Norm`] reads beside its input.
#[derive(Debug)]
pub struct NormStatistics<E: Engine> {
    /// The mean of each row, where the norm is layer normalization.
    mean: Option<E::Buffer>,
    rstd: E::Buffer,
}

/// A tensor, its norm, and the norm's statistics: what the layers behind a norm read, and its backward pass.
#[derive(Debug)]
pub struct Normalized<E: Engine> {
    /// What was normalized, `[tokens, width]`.
    pub x: E::Buffer,
    /// The norm's output.
    pub y: E::Buffer,
    /// What the backward pass needs beside `x`.
    pub statistics: NormStatistics<E>,
}

impl<E: Engine> Norm<E> {
    /// The norm with these parameters: layer normalization where there is a bias. `epsilon` is added to the variance or
    /// to the mean square.
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
        self.normalize(engine, workspace, NormInput::Tensor(x), tokens)
    }

    /// Adds `x` `[tokens, width]` to `sum`, a residual addition, and normalizes the sum.
    ///
    /// # Errors
    /// Operands that do not fit; not enough memory.
    pub fn forward_sum(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        x: &E::Buffer,
        sum: &mut E::Buffer,
        tokens: usize,
    ) -> Result<(E::Buffer, NormStatistics<E>)> {
        self.normalize(engine, workspace, NormInput::Sum(x, sum), tokens)
    }

    fn normalize(
        &self,
        engine: &E,
        workspace: &mut Workspace<E>,
        input: NormInput<'_, E::Buffer>,
        tokens: usize,
    ) -> Result<(E::Buffer, NormStatistics<E>)> {
        let mut y = workspace.compute(engine, tokens * self.width)?;
        let mut rstd = workspace.take(engine, Kind::Wide, tokens)?;
        let mut mean = self.bias.is_some().then(|| workspace.take(engine, Kind::Wide, tokens)).transpose()?;
        let bias = self.bias.as_ref().map(Parameter::master);
        let norm = NormParameters { gain: self.gain.master(), bias, epsilon: self.epsilon };
        let statistics = engine::NormStatistics { mean: mean.as_mut(), rstd: &mut rstd };
        engine.norm(norm, input, &mut y, statistics)?;
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
        // The operation writes both gradients: those of a norm that is frozen go nowhere.
        let width = self.gain.shape().iter().product();
        let nowhere = |gradient: Option<&E::Buffer>| match gradient {
            Some(_) => Ok(None),
            None => engine.zeros(Kind::Wide, width).map(Some),
        };
        let mut unused = nowhere(self.gain.gradient())?;
        let mut unused_bias = self.bias.as_ref().map(|bias| nowhere(bias.gradient())).transpose()?.flatten();
        let (gain, d_gain) = self.gain.master_and_gradient();
        let Some(d_gain) = d_gain.or(unused.as_mut()) else { return Ok(()) };
        let (bias, d_bias) = match &mut self.bias {
            Some(bias) => {
                let (bias, d_bias) = bias.master_and_gradient();
                (Some(bias), d_bias.or(unused_bias.as_mut()))
            }
            None => (None, None),
        };
        let norm = NormParameters { gain, bias, epsilon: self.epsilon };
        let saved = (x, engine::NormStatistics { mean: statistics.mean.as_ref(), rstd: &statistics.rstd });
        let gradients = NormGradients { gain: d_gain, bias: d_bias };
        Ok(engine.norm_gradient(norm, saved, dy, dx, accumulate, gradients)?)
    }
}

impl<E: Engine> Normalized<E> {
    /// The norm of `x` `[tokens, width]`.
    ///
    /// # Errors
    /// Those of [`Norm::forward`].
    pub fn new(engine: &E, workspace: &mut Workspace<E>, norm: &Norm<E>, x: E::Buffer, tokens: usize) -> Result<Self> {
        let (y, statistics) = norm.forward(engine, workspace, &x, tokens)?;
        Ok(Normalized { x, y, statistics })
    }

    /// The norm of `x + sum`, which overwrites `sum`.
    ///
    /// # Errors
    /// Those of [`Norm::forward_sum`].
    pub fn of_sum(
        engine: &E,
        workspace: &mut Workspace<E>,
        norm: &Norm<E>,
        (x, mut sum): (&E::Buffer, E::Buffer),
        tokens: usize,
    ) -> Result<Self> {
        let (y, statistics) = norm.forward_sum(engine, workspace, x, &mut sum, tokens)?;
        Ok(Normalized { x: sum, y, statistics })
    }

    /// The buffers, to give them back.
    pub fn into_buffers(self) -> impl Iterator<Item = E::Buffer> {
        [self.x, self.y].into_iter().chain(self.statistics.into_buffers())
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
