//! The decoder as a trainer trains it.

use std::path::Path;

use twofour::{DataType, file::Overwrite, layer::Accumulate};

use super::{Gpt, Layer};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::Engine,
    linear::Linear,
    model::{IndexBatch, TrainedModel, TransformerConfig},
    parameter::Parameter,
    recipe::Recipe,
    train::Corpus,
};

impl<E: Engine> TrainedModel<E> for Gpt<E> {
    type Data = Corpus;
    type Uploaded = IndexBatch<E>;
    type Config = TransformerConfig;

    fn config_of(recipe: &Recipe) -> TransformerConfig {
        recipe.decoder()
    }

    fn from_config(engine: &E, config: &TransformerConfig, seed: u64) -> Result<Self> {
        Gpt::new(engine, config.clone(), seed)
    }

    fn from_recipe(engine: &E, recipe: &Recipe) -> Result<Self> {
        match recipe.saved_model()? {
            Some(saved) => saved.model(engine, recipe.model.context),
            None => Self::from_config(engine, &recipe.decoder(), recipe.training.seed),
        }
    }

    fn config(&self) -> &TransformerConfig {
        self.config()
    }

    fn positions(&self) -> usize {
        self.config.context()
    }

    fn prepare(&mut self, _: &E, corpus: &Corpus) -> Result<()> {
        corpus.expect_sequences_of(self.config.context())
    }

    fn expect_sparse(&self, layer: &str) -> Result<()> {
        if self.config.is_tied() && layer == "head" {
            let (first, second) = ("a head that is the embedding".to_owned(), "2:4 of the layer `head`".to_owned());
            return Err(Error::Conflict { first, second, reason: "an embedding is read dense" });
        }
        Ok(())
    }

    fn use_squared_relu(&mut self) -> Result<()> {
        self.use_squared_relu()
    }

    fn linears(&self) -> impl Iterator<Item = &Linear<E>> {
        self.linears()
    }

    fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear<E>> {
        self.linears_mut()
    }

    fn parameters(&self) -> Vec<&Parameter<E>> {
        self.parameters()
    }

    fn parameters_mut(&mut self) -> Vec<&mut Parameter<E>> {
        self.parameters_mut()
    }

    fn other_parameters_mut(&mut self) -> Vec<&mut Parameter<E>> {
        let norms = self.layers.iter_mut().flat_map(|Layer { attention, feed_forward }| {
            attention.norm.parameters_mut().chain(feed_forward.norm.parameters_mut())
        });
        self.embedding.iter_mut().chain(norms).chain(self.norm.parameters_mut()).collect()
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
        self.loss(engine, batch, shape, loss)?;
        Ok(None)
    }

    fn upload(&self, engine: &E, batch: (&[u32], &[u32]), _: BatchShape) -> Result<IndexBatch<E>> {
        IndexBatch::new(engine, batch)
    }

    fn overwrite(&self, engine: &E, batch: (&[u32], &[u32]), _: BatchShape, to: &mut IndexBatch<E>) -> Result<()> {
        to.write(engine, batch)
    }

    fn gradients_of(
        &mut self,
        engine: &E,
        batch: &IndexBatch<E>,
        shape: BatchShape,
        scaling: (f32, Accumulate),
        loss: &mut E::Buffer,
        ready: &mut dyn FnMut(Vec<&mut E::Buffer>) -> Result<()>,
    ) -> Result<()> {
        self.gradients_of(engine, (&batch.inputs, &batch.targets), shape, scaling, loss, ready)
    }

    fn save(&self, engine: &E, path: &Path, overwrite: Overwrite, dtype: DataType) -> Result<()> {
        self.save(engine, path, overwrite, dtype)
    }
}
