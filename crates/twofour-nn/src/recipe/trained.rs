//! The model that a recipe trains.

use super::{DistillationSettings, Recipe};
use crate::{
    Result,
    engine::Engine,
    model::{BertConfig, DistillationLoss, SavedModel, TrainedModel, VitConfig},
    train::{ConfigOf, Corpus, EncoderData, ImageSet, TrainingData},
};

/// Samples whose model a recipe describes.
pub trait RecipeData: TrainingData {
    /// The description of a recipe's model.
    fn config<E: Engine>(recipe: &Recipe) -> ConfigOf<Self, E>;

    /// The model of a recipe: that which training starts from, or one with random weights.
    ///
    /// # Errors
    /// Those of [`TrainedModel::from_config`]; a model that cannot be read.
    fn model<E: Engine>(engine: &E, recipe: &Recipe) -> Result<Self::Model<E>> {
        Self::Model::from_config(engine, &Self::config::<E>(recipe), recipe.training.seed)
    }

    /// The model that a recipe's model learns from, with the loss, where the recipe names one.
    ///
    /// # Errors
    /// A model that cannot be read; not enough memory.
    fn teacher<E: Engine>(_: &E, _: &Recipe) -> Result<Option<(Self::Model<E>, DistillationLoss)>> {
        Ok(None)
    }
}

impl RecipeData for Corpus {
    fn config<E: Engine>(recipe: &Recipe) -> ConfigOf<Self, E> {
        recipe.decoder()
    }

    fn model<E: Engine>(engine: &E, recipe: &Recipe) -> Result<Self::Model<E>> {
        match recipe.saved_model()? {
            Some(saved) => saved.model(engine, recipe.model.context),
            None => Self::Model::from_config(engine, &recipe.decoder(), recipe.training.seed),
        }
    }

    fn teacher<E: Engine>(engine: &E, recipe: &Recipe) -> Result<Option<(Self::Model<E>, DistillationLoss)>> {
        let Some(DistillationSettings { teacher, loss, .. }) = &recipe.distillation else { return Ok(None) };
        Ok(Some((SavedModel::open(teacher)?.model(engine, recipe.model.context)?, *loss)))
    }
}

impl RecipeData for ImageSet {
    fn config<E: Engine>(recipe: &Recipe) -> ConfigOf<Self, E> {
        VitConfig::from(&recipe.model)
    }
}

impl RecipeData for EncoderData {
    fn config<E: Engine>(recipe: &Recipe) -> ConfigOf<Self, E> {
        recipe.encoder()
    }

    fn model<E: Engine>(engine: &E, recipe: &Recipe) -> Result<Self::Model<E>> {
        let BertConfig { task, positions, .. } = recipe.encoder();
        match recipe.saved_encoder()? {
            Some(saved) => saved.model(engine, task, positions, recipe.training.seed),
            None => Self::Model::from_config(engine, &recipe.encoder(), recipe.training.seed),
        }
    }
}
