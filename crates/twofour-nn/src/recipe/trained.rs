//! The model that a recipe trains.

use super::Recipe;
use crate::{
    Result,
    engine::Engine,
    model::{BertConfig, TrainedModel, VitConfig},
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
