//! What a run learns from, and what it leaves of it.

use anyhow::Result;
use twofour_nn::{
    recipe::{Recipe, RecipeData},
    train::{Corpus, EncoderData, ImageSet, LinearProbe},
};
use twofour_transformer::engine::Engine;

use super::{
    folder::Folder,
    outcome::{self, Outcome},
};

/// What the command requires of a run's data beyond what the trainer does.
pub(super) trait RunData: RecipeData + Sized + 'static {
    /// Tokens of all samples for a model with so many inputs a sample.
    fn tokens(&self, positions: usize) -> usize;

    /// What a loss is of, in words, and of what kind the samples are.
    fn targets(&self) -> [&'static str; 2] {
        ["a token", "text"]
    }

    /// Writes the model at the end of a run.
    ///
    /// # Errors
    /// Those of writing and of the engine; a layer that is not 2:4 in what was written.
    fn leave<E: Engine>(folder: &Folder, recipe: &Recipe, trained: (&E, &Self::Model<E>)) -> Result<Outcome>;

    /// Logistic regression on the model's features, where the recipe asks for it.
    ///
    /// # Errors
    /// Those of the forward pass; features that are NaN or infinite.
    fn probe<E: Engine>(&self, _: &Recipe, _: (&E, &mut Self::Model<E>)) -> Result<Option<LinearProbe>> {
        Ok(None)
    }
}

impl RunData for Corpus {
    fn tokens(&self, _: usize) -> usize {
        self.training().len() + self.validation().len()
    }

    fn leave<E: Engine>(folder: &Folder, recipe: &Recipe, trained: (&E, &Self::Model<E>)) -> Result<Outcome> {
        outcome::write(folder, recipe, trained)
    }
}

impl RunData for EncoderData {
    fn tokens(&self, positions: usize) -> usize {
        match self {
            EncoderData::Questions(set) => (set.training().len() + set.validation().len()) * positions,
            EncoderData::MaskedText(text) => text.text().training().len() + text.text().validation().len(),
        }
    }

    fn targets(&self) -> [&'static str; 2] {
        match self {
            EncoderData::Questions(_) => ["an end of an answer", "questions"],
            EncoderData::MaskedText(_) => ["a masked token", "text"],
        }
    }

    fn leave<E: Engine>(folder: &Folder, recipe: &Recipe, trained: (&E, &Self::Model<E>)) -> Result<Outcome> {
        outcome::write_encoder(folder, recipe, trained)
    }
}

impl RunData for ImageSet {
    fn tokens(&self, positions: usize) -> usize {
        self.labels().len() * positions
    }

    fn targets(&self) -> [&'static str; 2] {
        ["an image", "images"]
    }

    fn leave<E: Engine>(folder: &Folder, _: &Recipe, trained: (&E, &Self::Model<E>)) -> Result<Outcome> {
        outcome::write_vit(folder, trained)
    }

    fn probe<E: Engine>(&self, recipe: &Recipe, trained: (&E, &mut Self::Model<E>)) -> Result<Option<LinearProbe>> {
        let (engine, model) = trained;
        if !recipe.training.linear_probe {
            return Ok(None);
        }
        Ok(Some(ImageSet::probe(self, engine, model, recipe.training.micro_batch())?))
    }
}
