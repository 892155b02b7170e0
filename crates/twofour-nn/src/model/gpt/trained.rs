//! The decoder as a trainer trains it.

use std::path::Path;

use twofour::{DataType, file::Overwrite, layer::Accumulate};

use super::{Gpt, Layer};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::Engine,
    linear::{LayerForm, Linear},
    model::{IndexBatch, ModelPart, TrainedModel, TransformerConfig},
    parameter::Parameter,
};

impl<E: Engine> TrainedModel<E> for Gpt<E> {
    type Uploaded = IndexBatch<E>;
    type Config = TransformerConfig;

    fn from_config(engine: &E, config: &TransformerConfig, seed: u64) -> Result<Self> {
        Gpt::new(engine, config.clone(), seed)
    }

    fn config(&self) -> &TransformerConfig {
        self.config()
    }

    fn positions(&self) -> usize {
        self.config.context()
    }

    fn prepare(&mut self, layers: &[String], form: LayerForm) -> Result<()> {
        if form == LayerForm::TwoOfFourInput {
            return self.use_squared_relu();
        }
        if self.config.is_tied() && layers.iter().any(|layer| layer == "head") {
            let (first, second) = ("a head that is the embedding".to_owned(), "2:4 of the layer `head`".to_owned());
            return Err(Error::Conflict { first, second, reason: "an embedding is read dense" });
        }
        Ok(())
    }

    fn visit<'a>(&'a self, see: &mut dyn FnMut(ModelPart<&'a Parameter<E>, &'a Linear<E>>)) {
        self.embedding.iter().for_each(|table| see(ModelPart::Parameter(table)));
        for Layer { attention, feed_forward } in &self.layers {
            let norms = attention.norm.parameters().chain(feed_forward.norm.parameters());
            norms.for_each(|norm| see(ModelPart::Parameter(norm)));
        }
        self.norm.parameters().for_each(|norm| see(ModelPart::Parameter(norm)));
        Gpt::linears(self).for_each(|linear| see(ModelPart::Linear(linear)));
    }

    fn visit_mut<'a>(&'a mut self, see: &mut dyn FnMut(ModelPart<&'a mut Parameter<E>, &'a mut Linear<E>>)) {
        self.embedding.iter_mut().for_each(|table| see(ModelPart::Parameter(table)));
        for Layer { attention, feed_forward } in &mut self.layers {
            for norm in attention.norm.parameters_mut().chain(feed_forward.norm.parameters_mut()) {
                see(ModelPart::Parameter(norm));
            }
            for linear in [&mut attention.qkv, &mut attention.out, &mut feed_forward.up, &mut feed_forward.down] {
                see(ModelPart::Linear(linear));
            }
        }
        self.norm.parameters_mut().for_each(|norm| see(ModelPart::Parameter(norm)));
        see(ModelPart::Linear(&mut self.head));
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

    fn upload(&self, engine: &E, batch: (&[u32], &[u32]), _: BatchShape, to: &mut Option<IndexBatch<E>>) -> Result<()> {
        IndexBatch::upload(engine, batch, to)
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
