//! What a trainer requires of a model.

use std::{fmt::Debug, path::Path};

use serde::{Serialize, de::DeserializeOwned};
use twofour::{DataType, file::Overwrite, layer::Accumulate};

use super::{DistillationLoss, Objective};
use crate::{Result, block::BatchShape, engine::Engine, linear::LayerForm, parts::ModelParts};

/// A model that a trainer trains: it computes losses and gradients of samples that are given by indices, its inputs,
/// and their targets.
///
/// A sample of a decoder is a text, whose inputs are its tokens and whose targets are the tokens after them; a sample
/// of a vision transformer is an image, whose inputs are its patches and whose only target is its class. What the
/// inputs of an encoder are depends on its task.
pub trait TrainedModel<E: Engine>: ModelParts<E> + Debug + Send + Sized {
    /// A batch in the engine's memory.
    type Uploaded: Debug + Send;

    /// Its description, which a checkpoint holds.
    type Config: Debug + Clone + PartialEq + Send + Serialize + DeserializeOwned;

    /// A model with random weights that depend on its description and the seed alone.
    ///
    /// # Errors
    /// A description of no such model; not enough memory.
    fn from_config(engine: &E, config: &Self::Config, seed: u64) -> Result<Self>;

    /// Its description.
    fn config(&self) -> &Self::Config;

    /// Inputs of a sample.
    fn positions(&self) -> usize;

    /// Makes the model ready for linear layers of a form other than dense. Where inputs of layers are pruned, squared
    /// ReLU, `max(x, 0)²`, takes the place of the activation in all feed-forward blocks.
    ///
    /// # Errors
    /// [`Error::Conflict`](crate::Error::Conflict) with the reason why one of the layers cannot have the form,
    /// [`Error::Unsupported`](crate::Error::Unsupported) for feed-forward blocks that cannot have squared ReLU.
    fn prepare(&mut self, layers: &[String], form: LayerForm) -> Result<()>;

    /// Checks that it can learn from another model by a loss.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) for other classes than its own, fewer inputs of a sample, or, of
    /// hidden states, another width or number of layers; those of [`DistillationLoss::check`].
    fn expect_teacher(&self, teacher: &Self, loss: &DistillationLoss) -> Result<()>;

    /// Frees what passes take again from step to step: after layers have changed what they compute with, steps take
    /// other memory.
    fn clear_workspace(&mut self);

    /// Adds the sum of the losses, in nats, of all targets of a batch to `loss`. Returns how many targets were the
    /// model's first choice, where it is a classifier.
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

    /// Brings a batch to the engine's memory, over another one of the same shape where there is one: inputs and targets
    /// of `shape.batch` samples.
    ///
    /// # Errors
    /// Inputs or targets that do not fit the shape; a batch of another shape; not enough memory.
    fn upload(
        &self,
        engine: &E,
        batch: (&[u32], &[u32]),
        shape: BatchShape,
        to: &mut Option<Self::Uploaded>,
    ) -> Result<()>;

    /// A forward and a backward pass over a batch in the engine's memory, whose inputs and targets are known to exist:
    /// adds the sum of the losses of the objective to `loss`, and writes or adds the gradients, times `scale`, of all
    /// parameters. `ready` receives gradients as they are complete: those of all parameters, each once, in an order
    /// that depends on the configuration alone.
    ///
    /// # Errors
    /// Operands that do not fit; a model whose parameters do not train
    /// ([`begin_training`](crate::parameter::Parameter::begin_training)); not enough memory.
    fn gradients_of(
        &mut self,
        engine: &E,
        batch: (&Self::Uploaded, Objective<'_, Self>),
        shape: BatchShape,
        scaling: (f32, Accumulate),
        loss: &mut E::Buffer,
        ready: &mut dyn FnMut(Vec<&mut E::Buffer>) -> Result<()>,
    ) -> Result<()>;

    /// Writes the model, all of it or nothing: weights in `dtype` (F32, BF16 or F16), layers whose present masks are
    /// 2:4 compressed under them, everything else dense, what masks prune as zeros.
    ///
    /// # Errors
    /// An output that exists already unless `overwrite` allows it; another dtype; those of writing and of the engine.
    fn save(&self, engine: &E, path: &Path, overwrite: Overwrite, dtype: DataType) -> Result<()>;
}
