//! The vision transformer as a trainer trains it, and its file.

use std::{collections::BTreeMap, path::Path};

use twofour::{
    DataType,
    file::{Overwrite, Reader},
    layer::Accumulate,
};

use super::{Vit, VitConfig};
use crate::{
    Error, Result,
    block::BatchShape,
    engine::{Engine, Kind},
    linear::Linear,
    model::{
        IndexBatch, Layer, TrainedModel,
        file::{SavedParts, values},
    },
    parameter::Parameter,
    recipe::{Pooling, Recipe},
    train::ImageSet,
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
}

impl<E: Engine> TrainedModel<E> for Vit<E> {
    type Data = ImageSet;
    type Uploaded = IndexBatch<E>;
    type Config = VitConfig;

    fn config_of(recipe: &Recipe) -> VitConfig {
        VitConfig::from(&recipe.model)
    }

    fn from_config(engine: &E, config: &VitConfig, seed: u64) -> Result<Self> {
        Vit::new(engine, config, seed)
    }

    fn config(&self) -> &VitConfig {
        &self.config
    }

    fn positions(&self) -> usize {
        self.config.tokens()
    }

    fn prepare(&mut self, engine: &E, data: &ImageSet) -> Result<()> {
        let [rows, columns] = self.config.image;
        if data.shape() != [rows, columns, self.config.channels] {
            let found = format!("{:?}", data.shape());
            return Err(Error::Setting {
                what: "height, width and channels of the images",
                found,
                expected: "the model's",
            });
        }
        if let Some((position, &class)) =
            data.labels().iter().enumerate().find(|(_, class)| usize::from(**class) >= self.config.classes)
        {
            let (what, vocabulary) = ("labels", self.config.classes);
            return Err(Error::Token { what, token: class.into(), position, vocabulary });
        }
        data.expect_both_parts()?;
        let tokens = data.labels().len() * self.config.tokens();
        if tokens > MOST_TOKENS {
            let found = tokens.to_string();
            return Err(Error::Setting {
                what: "tokens of all images",
                found,
                expected: "at most 2^31; use larger patches",
            });
        }
        let mut values = Vec::with_capacity(tokens * self.config.patch_len());
        data.images().for_each(|image| self.tokens_of(image, &mut values));
        let mut images = engine.zeros(Kind::Compute, values.len())?;
        engine.write(&mut images, &values)?;
        self.images = Some(images);
        Ok(())
    }

    fn use_squared_relu(&mut self) -> Result<()> {
        self.layers.iter_mut().try_for_each(|layer| layer.feed_forward.use_squared_relu())?;
        self.config.squared_relu = true;
        Ok(())
    }

    fn linears(&self) -> impl Iterator<Item = &Linear<E>> {
        let layers = self.layers.iter().flat_map(|Layer { attention, feed_forward }| {
            [&attention.qkv, &attention.out, &feed_forward.up, &feed_forward.down]
        });
        std::iter::once(&self.patches).chain(layers).chain([&self.head])
    }

    fn linears_mut(&mut self) -> impl Iterator<Item = &mut Linear<E>> {
        let layers = self.layers.iter_mut().flat_map(|Layer { attention, feed_forward }| {
            [&mut attention.qkv, &mut attention.out, &mut feed_forward.up, &mut feed_forward.down]
        });
        std::iter::once(&mut self.patches).chain(layers).chain([&mut self.head])
    }

    fn parameters(&self) -> Vec<&Parameter<E>> {
        let mut all = vec![&self.positions];
        for Layer { attention, feed_forward } in &self.layers {
            all.extend(attention.norm.parameters());
            all.extend(feed_forward.norm.parameters());
        }
        all.extend(self.norm.parameters());
        all.extend(self.linears().flat_map(|linear| [Some(linear.weight()), linear.bias()]).flatten());
        all
    }

    fn parameters_mut(&mut self) -> Vec<&mut Parameter<E>> {
        let mut all = vec![&mut self.positions];
        let mut linears: Vec<_> = self.patches.parameters_mut().collect();
        for Layer { attention, feed_forward } in &mut self.layers {
            all.extend(attention.norm.parameters_mut());
            all.extend(feed_forward.norm.parameters_mut());
            for linear in [&mut attention.qkv, &mut attention.out, &mut feed_forward.up, &mut feed_forward.down] {
                linears.extend(linear.parameters_mut());
            }
        }
        all.extend(self.norm.parameters_mut());
        all.extend(linears);
        all.extend(self.head.parameters_mut());
        all
    }

    fn other_parameters_mut(&mut self) -> Vec<&mut Parameter<E>> {
        let norms = self.layers.iter_mut().flat_map(|Layer { attention, feed_forward }| {
            attention.norm.parameters_mut().chain(feed_forward.norm.parameters_mut())
        });
        std::iter::once(&mut self.positions).chain(norms).chain(self.norm.parameters_mut()).collect()
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
        let config = serde_json::to_string(&self.config)
            .map_err(|error| Error::State { path: path.to_owned(), reason: error.to_string() })?;
        let metadata = BTreeMap::from([(VIT_KEY.to_owned(), config)]);
        SavedParts { linears: self.linears().collect(), parameters: self.parameters(), metadata }
            .write(engine, path, overwrite, dtype)
    }
}
