//! The transformer as a trainer trains it, and its file.

use std::{collections::BTreeMap, path::Path};

use twofour::{DataType, file::Overwrite, layer::Accumulate};

use super::{Task, Transformer};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::Engine,
    linear::LayerForm,
    model::{DistillationLoss, Objective, TrainedModel, file::SavedParts},
};

impl<E: Engine, T: Task<E>> Transformer<E, T> {
    /// Writes the model, all of it or nothing: weights in `dtype` (F32, BF16 or F16), layers whose present masks are
    /// 2:4 compressed under them, everything else dense, what masks prune as zeros. The file has this program's own
    /// names.
    ///
    /// # Errors
    /// An output that exists already unless `overwrite` allows it; another dtype; those of writing and of the engine.
    pub fn save(&self, engine: &E, path: impl AsRef<Path>, overwrite: Overwrite, dtype: DataType) -> Result<()> {
        let path = path.as_ref();
        let (key, config) = T::metadata(&self.config)
            .map_err(|error| Error::State { path: path.to_owned(), reason: error.to_string() })?;
        let metadata = BTreeMap::from([(key.to_owned(), config)]);
        SavedParts { linears: self.linears().collect(), parameters: self.parameters(), metadata }
            .write(engine, path, overwrite, dtype)
    }

    /// Replaces the activation of all feed-forward blocks by squared ReLU, `max(x, 0)²`. The model's description says
    /// so from then on, and its file.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for gated feed-forward blocks, and for a model that has no description of it.
    pub fn use_squared_relu(&mut self) -> Result<()> {
        let mut config = self.config.clone();
        T::note_squared_relu(&mut config)?;
        self.layers.iter_mut().try_for_each(|layer| layer.feed_forward.branch.use_squared_relu())?;
        self.config = config;
        Ok(())
    }

    /// A batch in the engine's memory, checked.
    pub(in crate::model) fn uploaded(
        &self,
        engine: &E,
        batch: (&[u32], &[u32]),
        shape: BatchShape,
    ) -> Result<Option<T::Batch>> {
        self.task.expect_batch(&self.config, batch, shape)?;
        let mut uploaded = None;
        self.task.upload(engine, &self.config, batch, shape, &mut uploaded)?;
        Ok(uploaded)
    }

    /// Adds the sum of the cross-entropies, in nats, of all targets of a batch to `loss`. Returns how many targets were
    /// the model's first choice, where it is a classifier.
    ///
    /// # Errors
    /// Inputs or targets that do not fit the shape or do not exist.
    pub fn evaluate(
        &mut self,
        engine: &E,
        (inputs, targets): (&[u32], &[u32]),
        shape: BatchShape,
        loss: &mut E::Buffer,
    ) -> Result<Option<usize>> {
        let batch = self.uploaded(engine, (inputs, targets), shape)?;
        batch.map_or(Ok(None), |batch| self.loss_of(engine, (&batch, targets), shape, loss))
    }
}

impl<E: Engine, T: Task<E>> TrainedModel<E> for Transformer<E, T> {
    type Uploaded = T::Batch;
    type Config = T::Config;

    fn from_config(engine: &E, config: &T::Config, seed: u64) -> Result<Self> {
        Transformer::new(engine, config.clone(), seed)
    }

    fn config(&self) -> &T::Config {
        &self.config
    }

    fn positions(&self) -> usize {
        T::positions(&self.config)
    }

    fn prepare(&mut self, layers: &[String], form: LayerForm) -> Result<()> {
        if form == LayerForm::TwoOfFourInput {
            return self.use_squared_relu();
        }
        let table = self.task.table().and_then(|table| table.name().strip_suffix(".weight"));
        let Some(layer) = layers.iter().find(|layer| Some(layer.as_str()) == table) else { return Ok(()) };
        let (first, second) = ("a head that is the embedding".to_owned(), format!("2:4 of the layer `{layer}`"));
        Err(Error::Conflict { first, second, reason: "an embedding is read dense" })
    }

    fn expect_teacher(&self, teacher: &Self, loss: &DistillationLoss) -> Result<()> {
        self.expect_fitting(teacher, loss)
    }

    fn clear_workspace(&mut self) {
        self.workspace.clear();
    }

    fn evaluate(
        &mut self,
        engine: &E,
        batch: (&[u32], &[u32]),
        shape: BatchShape,
        loss: &mut E::Buffer,
    ) -> Result<Option<usize>> {
        self.evaluate(engine, batch, shape, loss)
    }

    fn upload(&self, engine: &E, batch: (&[u32], &[u32]), shape: BatchShape, to: &mut Option<T::Batch>) -> Result<()> {
        self.task.upload(engine, &self.config, batch, shape, to)
    }

    fn gradients_of(
        &mut self,
        engine: &E,
        batch: (&T::Batch, Objective<'_, Self>),
        shape: BatchShape,
        scaling: (f32, Accumulate),
        loss: &mut E::Buffer,
        ready: &mut dyn FnMut(Vec<&mut E::Buffer>) -> Result<()>,
    ) -> Result<()> {
        self.gradients_of(engine, batch, shape, scaling, loss, ready)
    }

    fn save(&self, engine: &E, path: &Path, overwrite: Overwrite, dtype: DataType) -> Result<()> {
        self.save(engine, path, overwrite, dtype)
    }
}
