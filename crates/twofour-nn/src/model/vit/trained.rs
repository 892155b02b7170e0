//! The vision transformer as a trainer trains it, and its file.

use std::{collections::BTreeMap, path::Path};

use twofour::{
    DataType,
    file::{Overwrite, Reader},
    layer::Accumulate,
};

use super::{Pooling, Vit, VitConfig};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::{Engine, Kind},
    linear::{LayerForm, Linear},
    model::{
        IndexBatch, Layer, ModelPart, ModelParts as _, TrainedModel,
        file::{SavedParts, values},
    },
    parameter::Parameter,
};

/// The metadata key that holds a vision transformer's [`VitConfig`] as JSON.
pub(in crate::model) const VIT_KEY: &str = "twofour.vit";

/// The most tokens of all images: batches name them by 32-bit numbers.
const MOST_TOKENS: usize = i32::MAX as usize;

impl<E: Engine> Vit<E> {
    /// Reads a model that [`TrainedModel::save`] wrote, as a dense model: compressed weights are decompressed into masters whose pruned elements are zero.
    ///
    /// # Errors
    /// A file that is not a model's, lacks a tensor or holds one of another shape; those of reading.
    pub fn load(engine: &E, path: impl AsRef<Path>) -> Result<Self> {
        let reader = Reader::open(path)?;
        let fault = |reason: String| twofour::Error::Format { path: reader.path().to_owned(), reason };
        let Some(text) = reader.metadata().get(VIT_KEY) else {
            let reason = format!("its metadata has no `{VIT_KEY}`, so it is no vision transformer of this program");
            return Err(fault(reason).into());
        };
        let config: VitConfig =
            serde_json::from_str(text).map_err(|error| fault(format!("metadata `{VIT_KEY}`: {error}")))?;
        config.validate()?;
        if config.layers > reader.tensors().count() {
            let reason =
                format!("metadata `{VIT_KEY}` speaks of {} layers, more than the file has tensors", config.layers);
            return Err(fault(reason).into());
        }
        Vit::build(engine, &config, |name, shape| values(&reader, name, shape))
    }

    /// The tokens of an image as the first linear layer takes them, pixels from -1 to 1: a class token of zeros where there is one, and the patches row by row,
    /// each with its values by row, column and channel.
    fn tokens_of(&self, pixels: &[u8], to: &mut Vec<f32>) {
        let VitConfig { image: [_, columns], channels, patch, .. } = self.config;
        if self.config.pooling == Pooling::Class {
            to.extend(std::iter::repeat_n(0.0, self.config.patch_len()));
        }
        for rows in pixels.chunks_exact(patch * columns * channels) {
            for left in (0..columns).step_by(patch) {
                for row in rows.chunks_exact(columns * channels) {
                    let values = &row[left * channels..(left + patch) * channels];
                    to.extend(values.iter().map(|&value| f32::from(value) / 127.5 - 1.0));
                }
            }
        }
    }

    /// Brings images to the engine's memory, `[height, width, channels]` each, one after the other: batches name their tokens by number.
    ///
    /// # Errors
    /// Images of another shape than the model's, a class that the model does not have; not enough memory.
    pub fn set_images<'a>(
        &mut self,
        engine: &E,
        shape: [usize; 3],
        images: impl Iterator<Item = &'a [u8]>,
        classes: &[u8],
    ) -> Result<()> {
        let [rows, columns] = self.config.image;
        if shape != [rows, columns, self.config.channels] {
            let found = format!("{shape:?}");
            return Err(Error::Setting {
                what: "height, width and channels of the images",
                found,
                expected: "the model's",
            });
        }
        if let Some((position, &class)) =
            classes.iter().enumerate().find(|(_, class)| usize::from(**class) >= self.config.classes)
        {
            let (what, vocabulary) = ("labels", self.config.classes);
            return Err(Error::Token { what, token: class.into(), position, vocabulary });
        }
        let tokens = classes.len() * self.config.tokens();
        if tokens > MOST_TOKENS {
            let found = tokens.to_string();
            return Err(Error::Setting {
                what: "tokens of all images",
                found,
                expected: "at most 2^31; use larger patches",
            });
        }
        let mut values = Vec::with_capacity(tokens * self.config.patch_len());
        images.for_each(|image| self.tokens_of(image, &mut values));
        let mut buffer = engine.zeros(Kind::Compute, values.len())?;
        engine.write(&mut buffer, &values)?;
        self.images = Some(buffer);
        Ok(())
    }
}

impl<E: Engine> TrainedModel<E> for Vit<E> {
    type Uploaded = IndexBatch<E>;
    type Config = VitConfig;

    fn from_config(engine: &E, config: &VitConfig, seed: u64) -> Result<Self> {
        Vit::new(engine, config, seed)
    }

    fn config(&self) -> &VitConfig {
        &self.config
    }

    fn positions(&self) -> usize {
        self.config.tokens()
    }

    fn prepare(&mut self, _: &[String], form: LayerForm) -> Result<()> {
        if form == LayerForm::TwoOfFourInput {
            self.layers.iter_mut().try_for_each(|layer| layer.feed_forward.use_squared_relu())?;
            self.config.squared_relu = true;
        }
        Ok(())
    }

    fn visit<'a>(&'a self, see: &mut dyn FnMut(ModelPart<&'a Parameter<E>, &'a Linear<E>>)) {
        see(ModelPart::Parameter(&self.positions));
        see(ModelPart::Linear(&self.patches));
        for Layer { attention, feed_forward } in &self.layers {
            let norms = attention.norm.parameters().chain(feed_forward.norm.parameters());
            norms.for_each(|norm| see(ModelPart::Parameter(norm)));
            for linear in [&attention.qkv, &attention.out, &feed_forward.up, &feed_forward.down] {
                see(ModelPart::Linear(linear));
            }
        }
        self.norm.parameters().for_each(|norm| see(ModelPart::Parameter(norm)));
        see(ModelPart::Linear(&self.head));
    }

    fn visit_mut<'a>(&'a mut self, see: &mut dyn FnMut(ModelPart<&'a mut Parameter<E>, &'a mut Linear<E>>)) {
        see(ModelPart::Parameter(&mut self.positions));
        see(ModelPart::Linear(&mut self.patches));
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
        self.loss(engine, batch, shape, loss).map(Some)
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
        let config = serde_json::to_string(&self.config)
            .map_err(|error| Error::State { path: path.to_owned(), reason: error.to_string() })?;
        let metadata = BTreeMap::from([(VIT_KEY.to_owned(), config)]);
        SavedParts { linears: self.linears().collect(), parameters: self.parameters(), metadata }
            .write(engine, path, overwrite, dtype)
    }
}
