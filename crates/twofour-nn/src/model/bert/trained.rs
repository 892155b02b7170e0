//! The encoder as a trainer trains it.

use std::{collections::BTreeMap, path::Path};

use twofour::{DataType, file::Overwrite, layer::Accumulate};

use super::{Bert, BertBatch, BertConfig, BertLayer, BertSamples, EncoderTask, inputs::expect_below};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::Engine,
    linear::Linear,
    model::{TrainedModel, file::SavedParts},
    parameter::Parameter,
    recipe::Recipe,
    train::EncoderData,
};

/// The metadata key that holds an encoder's [`BertConfig`] as JSON.
const BERT_KEY: &str = "twofour.bert";

/// Samples, unpacked from the inputs of a [`Batch`](crate::train::Batch).
struct Unpacked {
    tokens: Vec<u32>,
    types: Vec<u32>,
    places: Vec<u32>,
}

impl Unpacked {
    /// What [`EncoderData`] packed for a task.
    fn of(task: EncoderTask, inputs: &[u32], BatchShape { batch, positions }: BatchShape) -> Result<Self> {
        let each = inputs.len() / batch.max(1);
        if batch == 0 || inputs.len() != batch * each || each <= positions {
            let (what, expected) = ("inputs of an encoder's samples", batch * (positions + 1));
            return Err(Error::Length { what, expected, found: inputs.len() });
        }
        let (mut tokens, mut rest) = (vec![], vec![]);
        for sample in inputs.chunks_exact(each) {
            let (own, more) = sample.split_at(positions);
            tokens.extend_from_slice(own);
            rest.extend_from_slice(more);
        }
        Ok(match task {
            EncoderTask::Answers => Unpacked { tokens, types: rest, places: vec![] },
            EncoderTask::MaskedTokens => Unpacked { types: vec![0; tokens.len()], tokens, places: rest },
        })
    }

    fn samples<'a>(&'a self, targets: &'a [u32], shape: BatchShape) -> BertSamples<'a> {
        let Unpacked { tokens, types, places } = self;
        BertSamples { sequences: shape.batch, tokens, types, places, targets }
    }
}

impl<E: Engine> TrainedModel<E> for Bert<E> {
    type Data = EncoderData;
    type Uploaded = BertBatch<E>;
    type Config = BertConfig;

    fn config_of(recipe: &Recipe) -> BertConfig {
        recipe.encoder()
    }

    fn from_config(engine: &E, config: &BertConfig, seed: u64) -> Result<Self> {
        Bert::new(engine, config, seed)
    }

    fn from_recipe(engine: &E, recipe: &Recipe) -> Result<Self> {
        let BertConfig { task, positions, .. } = recipe.encoder();
        match recipe.saved_encoder()? {
            Some(saved) => saved.model(engine, task, positions, recipe.training.seed),
            None => Self::from_config(engine, &recipe.encoder(), recipe.training.seed),
        }
    }

    fn config(&self) -> &BertConfig {
        &self.config
    }

    fn positions(&self) -> usize {
        self.config.positions
    }

    fn prepare(&mut self, _: &E, data: &EncoderData) -> Result<()> {
        let BertConfig { ref encoder, task, positions } = self.config;
        match (task, data) {
            (EncoderTask::Answers, EncoderData::Questions(set)) => {
                if set.length() != positions {
                    let (what, found) = ("tokens of the windows of questions", set.length().to_string());
                    return Err(Error::Setting { what, found, expected: "the length that the model is trained on" });
                }
                set.training().iter().chain(set.validation()).try_for_each(|window| {
                    expect_below("tokens of questions", &window.tokens, encoder.vocabulary())?;
                    expect_below("token types", &window.types, encoder.token_types())
                })
            }
            (EncoderTask::MaskedTokens, EncoderData::MaskedText(text)) => text.expect_sequences_of(positions),
            (task, _) => Err(Error::Setting {
                what: "the data",
                found: format!("of another task than {task:?}"),
                expected: "questions for answers, or text for masked tokens",
            }),
        }
    }

    fn expect_sparse(&self, layer: &str) -> Result<()> {
        if layer == "embedding" {
            let (first, second) = ("a head that is the embedding".to_owned(), format!("2:4 of the layer `{layer}`"));
            return Err(Error::Conflict { first, second, reason: "an embedding is read dense" });
        }
        Ok(())
    }

    fn use_squared_relu(&mut self) -> Result<()> {
        Err(Error::Unsupported {
            engine: "training",
            what: "squared ReLU in an encoder".to_owned(),
            remedy: "choose another method than \"activation\"",
        })
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
        let Bert { embeddings, layers, head, .. } = self;
        let norms = layers.iter_mut().flat_map(|BertLayer { attention, feed_forward }| {
            attention.norm.parameters_mut().chain(feed_forward.norm.parameters_mut())
        });
        let of_head = head.norm_and_linears_mut().0.into_iter().flat_map(|norm| norm.parameters_mut());
        embeddings.parameters_mut().chain(norms).chain(of_head).collect()
    }

    fn clear_workspace(&mut self) {
        self.workspace.clear();
    }

    fn evaluate(
        &mut self,
        engine: &E,
        (inputs, targets): (&[u32], &[u32]),
        shape: BatchShape,
        loss: &mut E::Buffer,
    ) -> Result<Option<usize>> {
        let unpacked = Unpacked::of(self.config.task, inputs, shape)?;
        self.loss(engine, unpacked.samples(targets, shape), loss)?;
        Ok(None)
    }

    fn upload(&self, engine: &E, (inputs, targets): (&[u32], &[u32]), shape: BatchShape) -> Result<BertBatch<E>> {
        let unpacked = Unpacked::of(self.config.task, inputs, shape)?;
        BertBatch::new(engine, &self.config, unpacked.samples(targets, shape))
    }

    fn overwrite(
        &self,
        engine: &E,
        (inputs, targets): (&[u32], &[u32]),
        shape: BatchShape,
        to: &mut BertBatch<E>,
    ) -> Result<()> {
        let unpacked = Unpacked::of(self.config.task, inputs, shape)?;
        to.write(engine, &self.config, unpacked.samples(targets, shape))
    }

    fn gradients_of(
        &mut self,
        engine: &E,
        batch: &BertBatch<E>,
        shape: BatchShape,
        scaling: (f32, Accumulate),
        loss: &mut E::Buffer,
        ready: &mut dyn FnMut(Vec<&mut E::Buffer>) -> Result<()>,
    ) -> Result<()> {
        self.gradients_of(engine, batch, shape, scaling, loss, ready)
    }

    /// The file has this program's own names; [`EncoderCheckpoint::save`](crate::model::EncoderCheckpoint::save) writes a directory that transformers loads.
    fn save(&self, engine: &E, path: &Path, overwrite: Overwrite, dtype: DataType) -> Result<()> {
        let config = serde_json::to_string(&self.config)
            .map_err(|error| Error::State { path: path.to_owned(), reason: error.to_string() })?;
        let metadata = BTreeMap::from([(BERT_KEY.to_owned(), config)]);
        SavedParts { linears: self.linears().collect(), parameters: self.parameters(), metadata }
            .write(engine, path, overwrite, dtype)
    }
}
