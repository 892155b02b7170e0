//! A trainable parameter: f32 master weight, copy in the compute type, gradient and moments.

use twofour::{DataType, layer::Accumulate};

use crate::{
    Result,
    engine::{Engine, Kept, Kind, OptimizerStep, ParameterState},
};

/// A parameter of a model.
#[derive(Debug)]
pub struct Parameter<E: Engine> {
    name: String,
    shape: Vec<usize>,
    master: E::Buffer,
    /// The copy in the compute type, where that is not f32 and something computes with it.
    copy: Option<E::Buffer>,
    training: Option<Training<E>>,
}

/// What training adds to a parameter.
#[derive(Debug)]
struct Training<E: Engine> {
    gradient: E::Buffer,
    /// Absent where the parameter itself does not train.
    first: Option<E::Buffer>,
    /// Absent with an optimizer that has none.
    second: Option<E::Buffer>,
}

impl<E: Engine> Parameter<E> {
    /// A parameter with these values. `computes` says whether GEMMs or lookups read it, in the compute type; norms read
    /// the master.
    ///
    /// # Errors
    /// Not enough memory; values that do not fit the shape.
    pub fn new(engine: &E, name: &str, shape: &[usize], values: &[f32], computes: bool) -> Result<Self> {
        let mut master = engine.zeros(Kind::Wide, shape.iter().product())?;
        engine.write(&mut master, values)?;
        let mut parameter =
            Parameter { name: name.to_owned(), shape: shape.to_vec(), master, copy: None, training: None };
        if computes {
            parameter.add_copy(engine)?;
        }
        Ok(parameter)
    }

    /// The full name, as files have it.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The shape.
    pub fn shape(&self) -> &[usize] {
        &self.shape
    }

    /// The master weight.
    pub fn master(&self) -> &E::Buffer {
        &self.master
    }

    /// What GEMMs and lookups read: the copy in the compute type, or the master where that is f32.
    pub fn compute(&self) -> &E::Buffer {
        self.copy.as_ref().unwrap_or(&self.master)
    }

    /// Makes the copy in the compute type, where that is not f32.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn add_copy(&mut self, engine: &E) -> Result<()> {
        if engine.compute_type() != DataType::F32 && self.copy.is_none() {
            let mut copy = engine.zeros(Kind::Compute, self.shape.iter().product())?;
            engine.round(&self.master, &mut copy)?;
            self.copy = Some(copy);
        }
        Ok(())
    }

    /// Drops the copy: a 2:4 layer computes with its packed weight.
    pub fn drop_copy(&mut self) {
        self.copy = None;
    }

    /// Overwrites the values.
    ///
    /// # Errors
    /// Another length.
    pub fn write(&mut self, engine: &E, values: &[f32]) -> Result<()> {
        engine.write(&mut self.master, values)?;
        match &mut self.copy {
            Some(copy) => engine.round(&self.master, copy),
            None => Ok(()),
        }
    }

    /// Zeros in the values where a mask, as [`Kept::Mask`] has it, prunes.
    ///
    /// # Errors
    /// A mask that does not fit.
    pub fn mask_in_place(&mut self, engine: &E, mask: &E::Buffer, cols: usize) -> Result<()> {
        engine.mask_in_place(mask, cols, &mut self.master)?;
        match &mut self.copy {
            Some(copy) => engine.prune(Kept::Mask(mask), &self.master, cols, copy),
            None => Ok(()),
        }
    }

    /// Allocates gradient and moments, all zero.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn begin_training(&mut self, engine: &E) -> Result<()> {
        let zeros = || engine.zeros(Kind::Wide, self.shape.iter().product());
        self.training = Some(Training { gradient: zeros()?, first: Some(zeros()?), second: Some(zeros()?) });
        Ok(())
    }

    /// Allocates a gradient alone, all zero: no optimizer changes the parameter.
    ///
    /// # Errors
    /// Not enough memory.
    pub fn begin_gradient(&mut self, engine: &E) -> Result<()> {
        let gradient = engine.zeros(Kind::Wide, self.shape.iter().product())?;
        self.training = Some(Training { gradient, first: None, second: None });
        Ok(())
    }

    /// The gradient, where the parameter trains.
    pub fn gradient(&self) -> Option<&E::Buffer> {
        self.training.as_ref().map(|training| &training.gradient)
    }

    /// The gradient for writing, where the parameter trains.
    pub fn gradient_mut(&mut self) -> Option<&mut E::Buffer> {
        self.training.as_mut().map(|training| &mut training.gradient)
    }

    /// The master weight, and the gradient for writing, where the parameter trains.
    pub fn master_and_gradient(&mut self) -> (&E::Buffer, Option<&mut E::Buffer>) {
        (&self.master, self.training.as_mut().map(|training| &mut training.gradient))
    }

    /// First and second moment, where the parameter trains; with gradient descent the momentum alone.
    pub fn moments(&self) -> Option<Vec<&E::Buffer>> {
        self.training.as_ref().map(|training| training.first.iter().chain(&training.second).collect())
    }

    /// [`Parameter::moments`] for writing.
    pub fn moments_mut(&mut self) -> Option<Vec<&mut E::Buffer>> {
        let Training { first, second, .. } = self.training.as_mut()?;
        Some(first.iter_mut().chain(second).collect())
    }

    /// Frees the second moment, which gradient descent does not have.
    pub fn drop_second_moment(&mut self) {
        if let Some(training) = &mut self.training {
            training.second = None;
        }
    }

    /// Writes or adds the gradient by `write(gradient, accumulate)`, if the parameter trains.
    ///
    /// # Errors
    /// Those of `write`.
    pub fn record<X>(
        &mut self,
        accumulate: Accumulate,
        write: impl FnOnce(&mut E::Buffer, Accumulate) -> Result<(), X>,
    ) -> Result<(), X> {
        self.gradient_mut().map_or(Ok(()), |gradient| write(gradient, accumulate))
    }

    /// An optimizer step of several parameters without masks, unless the guard skips it. Returns what
    /// [`StepOperations::step`](crate::engine::StepOperations::step) does.
    ///
    /// # Errors
    /// Those of the step.
    pub fn update_together(
        parameters: &mut [&mut Self],
        engine: &E,
        step: &OptimizerStep,
        guard: &E::StepGuard,
    ) -> Result<f64> {
        let states = parameters.iter_mut().filter_map(|parameter| parameter.state(None)).collect();
        engine.step(step, states, Some(guard))
    }

    /// An optimizer step, unless the guard skips it; nothing if the parameter does not train. Returns what
    /// [`StepOperations::step`](crate::engine::StepOperations::step) does.
    ///
    /// # Errors
    /// Those of the step.
    pub fn update(
        &mut self,
        engine: &E,
        step: &OptimizerStep,
        sparse: Option<&E::SparseLinear>,
        guard: &E::StepGuard,
    ) -> Result<f64> {
        engine.step(step, self.state(sparse).into_iter().collect(), Some(guard))
    }

    /// What an optimizer reads and writes, if the parameter trains.
    fn state<'a>(
        &'a mut self,
        sparse: Option<&'a E::SparseLinear>,
    ) -> Option<ParameterState<'a, E::Buffer, E::SparseLinear>> {
        let Training { gradient, first, second } = self.training.as_mut()?;
        let (master, copy, first) = (&mut self.master, self.copy.as_mut(), first.as_mut()?);
        Some(ParameterState { master, gradient, first, second: second.as_mut(), copy, sparse })
    }
}
