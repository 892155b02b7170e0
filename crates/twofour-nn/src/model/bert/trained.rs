//! The encoder as a trainer trains it.

use std::{collections::BTreeMap, path::Path};

use twofour::{DataType, file::Overwrite, layer::Accumulate};

use super::{Bert, BertBatch, BertConfig, BertLayer, BertSamples, EncoderTask};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::Engine,
    linear::{LayerForm, Linear},
    model::{ModelPart, TrainedModel, file::SavedParts},
    parameter::Parameter,
};

/// The metadata key that holds an encoder's [`BertConfig`] as JSON.
const BERT_KEY: &str = "twofour.bert";

/// Samples, unpacked from the inputs of a batch.
struct Unpacked {
    tokens: Vec<u32>,
    types: Vec<u32>,
    places: Vec<u32>,
}

impl Unpacked {
    /// What is packed for a task: tokens of each sample, then their types or the places of masked ones.
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
    type Uploaded = BertBatch<E>;
    type Config = BertConfig;

    fn from_config(engine: &E, config: &BertConfig, seed: u64) -> Result<Self> {
        Bert::new(engine, config, seed)
    }

    fn config(&self) -> &BertConfig {
        &self.config
    }

    fn positions(&self) -> usize {
        self.config.positions
    }

    fn prepare(&mut self, layers: &[String], form: LayerForm) -> Result<()> {
        if form == LayerForm::TwoOfFourInput {
            return Err(Error::Unsupported {
                engine: "training",
                what: "squared ReLU in an encoder".to_owned(),
                remedy: "choose another method than \"activation\"",
            });
        }
        if let Some(layer) = layers.iter().find(|layer| *layer == "embedding") {
            let (first, second) = ("a head that is the embedding".to_owned(), format!("2:4 of the layer `{layer}`"));
            return Err(Error::Conflict { first, second, reason: "an embedding is read dense" });
        }
        Ok(())
    }

    fn visit<'a>(&'a self, see: &mut dyn FnMut(ModelPart<&'a Parameter<E>, &'a Linear<E>>)) {
        self.embeddings.parameters().for_each(|table| see(ModelPart::Parameter(table)));
        for BertLayer { attention, feed_forward } in &self.layers {
            let norms = attention.norm.parameters().chain(feed_forward.norm.parameters());
            norms.for_each(|norm| see(ModelPart::Parameter(norm)));
        }
        let of_head = self.head.norm().into_iter().flat_map(|norm| norm.parameters());
        of_head.for_each(|norm| see(ModelPart::Parameter(norm)));
        Bert::linears(self).for_each(|linear| see(ModelPart::Linear(linear)));
    }

    fn visit_mut<'a>(&'a mut self, see: &mut dyn FnMut(ModelPart<&'a mut Parameter<E>, &'a mut Linear<E>>)) {
        let Bert { embeddings, layers, head, .. } = self;
        embeddings.parameters_mut().for_each(|table| see(ModelPart::Parameter(table)));
        for BertLayer { attention, feed_forward } in layers {
            for norm in attention.norm.parameters_mut().chain(feed_forward.norm.parameters_mut()) {
                see(ModelPart::Parameter(norm));
            }
            for linear in [&mut attention.qkv, &mut attention.out, &mut feed_forward.up, &mut feed_forward.down] {
                see(ModelPart::Linear(linear));
            }
        }
        let (norm, linears) = head.norm_and_linears_mut();
        let norms = norm.into_iter().flat_map(|norm| norm.parameters_mut());
        norms.for_each(|norm| see(ModelPart::Parameter(norm)));
        linears.into_iter().for_each(|linear| see(ModelPart::Linear(linear)));
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

    fn upload(
        &self,
        engine: &E,
        (inputs, targets): (&[u32], &[u32]),
        shape: BatchShape,
        to: &mut Option<BertBatch<E>>,
    ) -> Result<()> {
        let unpacked = Unpacked::of(self.config.task, inputs, shape)?;
        let samples = unpacked.samples(targets, shape);
        match to {
            Some(batch) => batch.write(engine, &self.config, samples),
            None => {
                *to = Some(BertBatch::new(engine, &self.config, samples)?);
                Ok(())
            }
        }
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
