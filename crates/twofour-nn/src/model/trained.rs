//! What a trainer requires of a model.

use std::{fmt::Debug, path::Path};

use serde::{Serialize, de::DeserializeOwned};
use twofour::{DataType, file::Overwrite, layer::Accumulate};

use crate::{
    Result,
    block::BatchShape,
    engine::{Engine, OptimizerStep},
    linear::Linear,
    parameter::Parameter,
    recipe::Recipe,
};

/// A model that a [`Trainer`](crate::train::Trainer) trains: it computes losses and gradients of samples that are given by indices, its inputs, and their targets.
///
/// A sample of a decoder is a text, whose inputs are its tokens and whose targets are the tokens after them; a sample of a vision transformer is an image, whose
/// inputs are its patches and whose only target is its class. What the inputs of an encoder are depends on its task
/// ([`EncoderData`](crate::train::EncoderData)).
pub trait TrainedModel<E: Engine>: Debug + Send + Sized {
    /// What it is trained on.
    type Data;

    /// A batch in the engine's memory.
    type Uploaded: Debug + Send;

    /// Its description, which a checkpoint holds.
    type Config: Debug + Clone + PartialEq + Send + Serialize + DeserializeOwned;

    /// The description of a recipe's model.
    fn config_of(recipe: &Recipe) -> Self::Config;

    /// A model with random weights that depend on its description and the seed alone.
    ///
    /// # Errors
    /// A description of no such model; not enough memory.
    fn from_config(engine: &E, config: &Self::Config, seed: u64) -> Result<Self>;

    /// The model of a recipe: that which training starts from, or one with random weights.
    ///
    /// # Errors
    /// Those of [`TrainedModel::from_config`]; a model that cannot be read.
    fn from_recipe(engine: &E, recipe: &Recipe) -> Result<Self> {
        Self::from_config(engine, &Self::config_of(recipe), recipe.training.seed)
    }

    /// Its description.
    fn config(&self) -> &Self::Config;

    /// Inputs of a sample.
    fn positions(&self) -> usize;

    /// Makes the model ready for batches of this data: checks that they fit it, and brings to the engine's memory what their inputs stand for.
    ///
    /// # Errors
    /// Data that do not fit the model; not enough memory.
    fn prepare(&mut self, engine: &E, data: &Self::Data) -> Result<()>;

    /// Checks that a linear layer may be 2:4.
    ///
    /// # Errors
    /// [`Error::Conflict`](crate::Error::Conflict) with the reason why not.
    fn expect_sparse(&self, layer: &str) -> Result<()> {
        let _ = layer;
        Ok(())
    }

    /// Replaces the activation of all feed-forward blocks by squared ReLU, `max(x, 0)²`.
    ///
    /// # Errors
    /// [`Error::Unsupported`](crate::Error::Unsupported) for gated feed-forward blocks.
    fn use_squared_relu(&mut self) -> Result<()>;

    /// The linear layers, in the order of computation.
    fn linears(&self) -> impl Iterator<Item = &Linear<E>>;

    /// The linear layers for changing them.
    fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear<E>>;

    /// All parameters in a fixed order, those outside linear layers first.
    fn parameters(&self) -> Vec<&Parameter<E>>;

    /// The same for changing them. After a change of a 2:4 layer's weight, call [`Linear::refresh`].
    fn parameters_mut(&mut self) -> Vec<&mut Parameter<E>>;

    /// The parameters outside linear layers.
    fn other_parameters_mut(&mut self) -> Vec<&mut Parameter<E>>;

    /// Frees what passes take again from step to step: after layers have changed what they compute with, steps take other memory.
    fn clear_workspace(&mut self);

    /// Adds the sum of the losses, in nats, of all targets of a batch to `loss`. Returns how many targets were the model's first choice, where it is a classifier.
    ///
    /// # Errors
    /// Inputs or targets that do not fit the shape or do not exist.
    fn evaluate(
        &mut self,
        engine: &E,
        batch: (&[u32], &[u32]),
        shape: BatchShape,
        loss: &mut E::Buffer,
    ) -> Result<Option<usize>>;

    /// Brings a batch to the engine's memory: inputs and targets of `shape.batch` samples.
    ///
    /// # Errors
    /// Inputs or targets that do not fit the shape; not enough memory.
    fn upload(&self, engine: &E, batch: (&[u32], &[u32]), shape: BatchShape) -> Result<Self::Uploaded>;

    /// Overwrites a batch in the engine's memory by another one of the same shape.
    ///
    /// # Errors
    /// Those of [`TrainedModel::upload`]; a batch of another shape.
    fn overwrite(&self, engine: &E, batch: (&[u32], &[u32]), shape: BatchShape, to: &mut Self::Uploaded) -> Result<()>;

    /// A forward and a backward pass over a batch in the engine's memory, whose inputs and targets are known to exist: adds the sum of the losses to `loss`, and writes or
    /// adds the gradients, times `scale`, of all parameters. `ready` receives gradients as they are complete: those of all parameters, each once, in an order that
    /// depends on the configuration alone.
    ///
    /// # Errors
    /// Operands that do not fit; a model without [`TrainedModel::begin_training`]; not enough memory.
    fn gradients_of(
        &mut self,
        engine: &E,
        batch: &Self::Uploaded,
        shape: BatchShape,
        scaling: (f32, Accumulate),
        loss: &mut E::Buffer,
        ready: &mut dyn FnMut(Vec<&mut E::Buffer>) -> Result<()>,
    ) -> Result<()>;

    /// Writes the model, all of it or nothing: weights in `dtype` (F32, BF16 or F16), layers whose present masks are 2:4 compressed under them, everything else dense, what
    /// masks prune as zeros.
    ///
    /// # Errors
    /// An output that exists already unless `overwrite` allows it; another dtype; those of writing and of the engine.
    fn save(&self, engine: &E, path: &Path, overwrite: Overwrite, dtype: DataType) -> Result<()>;

    /// Allocates gradients and moments of all parameters.
    ///
    /// # Errors
    /// Not enough memory.
    fn begin_training(&mut self, engine: &E) -> Result<()> {
        self.parameters_mut().into_iter().try_for_each(|parameter| parameter.begin_training(engine))
    }

    /// An optimizer step of all parameters, by what `step(parameter)` says of each. The second argument of `step` is the linear layer's name where the
    /// parameter is its weight. Returns the sum of the changes of watched second moments.
    ///
    /// # Errors
    /// Those of [`StepOperations::adamw`](crate::engine::StepOperations::adamw) and [`StepOperations::sgd`](crate::engine::StepOperations::sgd).
    fn update(
        &mut self,
        engine: &E,
        step: impl Fn(&Parameter<E>, Option<&str>) -> OptimizerStep,
        guard: &E::StepGuard,
    ) -> Result<f64> {
        let is_vector = |parameter: &Parameter<E>| parameter.shape().len() < 2;
        let mut changes = 0.0;
        // Vectors are many and short: each of them alone would take longer than its bytes.
        let mut vectors: Vec<_> = self.parameters_mut().into_iter().filter(|parameter| is_vector(parameter)).collect();
        for alike in vectors.chunk_by_mut(|a, b| step(a, None) == step(b, None)) {
            let own = step(alike[0], None);
            changes += Parameter::update_together(alike, engine, &own, guard)?;
        }
        for parameter in self.other_parameters_mut().into_iter().filter(|parameter| !is_vector(parameter)) {
            let own = step(parameter, None);
            changes += parameter.update(engine, &own, None, guard)?;
        }
        for linear in self.linears_mut() {
            let own = step(linear.weight(), Some(linear.name()));
            changes += linear.update_weight(engine, &own, guard)?;
        }
        Ok(changes)
    }
}
