//! A recipe's file and the data that it names.

use std::{
    fs::File,
    io::{self, Read},
    path::{Path, PathBuf},
    sync::Arc,
};

use super::{Mistakes, ModelKind, Override, Place, Recipe, Tokenizer, parse::ParsedRecipe};
use crate::{
    Error,
    model::EncoderTask,
    text::TextFile,
    train::{ImageSet, QuestionSet},
};

/// A recipe's file is not larger: what is, is not a recipe.
const LARGEST_FILE: u64 = 1 << 20;

/// A recipe that cannot be used.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum RecipeError {
    /// The file cannot be read.
    #[error("{}: {source}", path.display())]
    Io {
        /// The recipe.
        path: PathBuf,
        /// What went wrong.
        #[source]
        source: io::Error,
    },
    /// The file is no recipe.
    #[error("{}: {reason}", path.display())]
    NotARecipe {
        /// The file.
        path: PathBuf,
        /// The reason.
        reason: String,
    },
    /// There are mistakes.
    #[error("{}: {mistakes}", path.display())]
    Mistakes {
        /// The recipe.
        path: PathBuf,
        /// All of them.
        mistakes: Mistakes,
    },
}

/// A recipe and the data that it names.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedRecipe {
    /// The settings.
    pub recipe: Recipe,
    /// What the model is trained on.
    pub data: LoadedData,
}

/// What a recipe's model is trained on.
#[derive(Debug, Clone, PartialEq)]
pub enum LoadedData {
    /// The files of `data.text`, joined.
    Text(Vec<u8>),
    /// The images of a `vit`.
    Images(Arc<ImageSet>),
    /// The questions of a `bert`.
    Questions(Arc<QuestionSet>),
}

impl LoadedData {
    /// Bytes of the text, of texts and questions, or of the images' pixels.
    pub fn bytes(&self) -> usize {
        match self {
            LoadedData::Text(text) => text.len(),
            LoadedData::Questions(questions) => questions.bytes(),
            LoadedData::Images(images) => images.labels().len() * images.shape().iter().product::<usize>(),
        }
    }
}

impl LoadedRecipe {
    /// Reads a recipe's file, applies the overrides, and reads the text, the questions or the images.
    ///
    /// # Errors
    /// A file that cannot be read, and every mistake of the recipe: those of [`Recipe::parse`], and text that is
    /// absent, empty or shorter than the context, questions whose answers are not where they are said to be, images or
    /// labels that are absent, damaged, or do not fit the model.
    pub fn read(path: &Path, overrides: &[Override]) -> Result<LoadedRecipe, RecipeError> {
        let io = |source| RecipeError::Io { path: path.to_owned(), source };
        let not = |reason: String| RecipeError::NotARecipe { path: path.to_owned(), reason };
        let mut bytes = Vec::new();
        File::open(path).and_then(|file| file.take(LARGEST_FILE + 1).read_to_end(&mut bytes)).map_err(io)?;
        if bytes.len() as u64 > LARGEST_FILE {
            return Err(not("larger than 1 MiB; a recipe is a short TOML file".to_owned()));
        }
        let source = String::from_utf8(bytes).map_err(|error| {
            not(format!("not UTF-8 at byte {}; a recipe is a TOML file", error.utf8_error().valid_up_to()))
        })?;
        let folder = path.parent().unwrap_or(Path::new(""));
        let ParsedRecipe { recipe, mut mistakes, text_places } = ParsedRecipe::new(&source, folder, overrides);
        let data = match recipe.model.kind {
            ModelKind::Vit => recipe.gather_images(&mut mistakes).map(|images| LoadedData::Images(Arc::new(images))),
            ModelKind::Bert if recipe.model.task != Some(EncoderTask::MaskedTokens) => recipe
                .gather_questions(&text_places, &mut mistakes)
                .map(|questions| LoadedData::Questions(Arc::new(questions))),
            _ => Some(LoadedData::Text(recipe.gather_text(&text_places, &mut mistakes))),
        };
        match (data, mistakes.or(())) {
            (Some(data), Ok(())) => Ok(LoadedRecipe { recipe, data }),
            (_, Err(mistakes)) => Err(RecipeError::Mistakes { path: path.to_owned(), mistakes }),
            (None, Ok(())) => Err(not("it names nothing to train on".to_owned())),
        }
    }
}

impl Recipe {
    /// Reads the files of `data.text` and joins them.
    ///
    /// # Errors
    /// Every file that cannot be read or is empty; text with too few bytes for the context in its training or its
    /// validation part.
    pub fn read_text(&self) -> Result<Vec<u8>, Mistakes> {
        let mut mistakes = Mistakes::default();
        let text = self.gather_text(&[], &mut mistakes);
        mistakes.or(text)
    }

    /// The images, where the recipe names them without mistakes and they can be read.
    fn gather_images(&self, mistakes: &mut Mistakes) -> Option<ImageSet> {
        let (Some(images), Some(labels)) = (&self.data.images, &self.data.labels) else { return None };
        let classes = self.model.classes.filter(|_| mistakes.is_empty())?;
        let found = match ImageSet::read(images, labels, classes, self.data.validation) {
            Ok(found) => found,
            Err(error) => {
                mistakes.add(Place::Absent, "data", error.to_string());
                return None;
            }
        };
        let expected = [self.model.image.unwrap_or(0); 2];
        let [rows, columns, channels] = found.shape();
        if [rows, columns] != expected || channels != self.model.channels.unwrap_or(1) {
            let problem = format!(
                "{}: images of {rows} x {columns} pixels of {channels} values, and the model's are of {} x {} of {}",
                images.display(),
                expected[0],
                expected[1],
                self.model.channels.unwrap_or(1)
            );
            mistakes.add(Place::Absent, "data.images", problem);
        }
        if let Err(error) = found.expect_both_parts() {
            mistakes.add(Place::Absent, "data.images", error.to_string());
        }
        Some(found)
    }

    /// The text that can be read; places are those of the paths, in their order.
    fn gather_text(&self, places: &[Place], mistakes: &mut Mistakes) -> Vec<u8> {
        let mut text = Vec::new();
        for (index, path) in self.data.text.iter().enumerate() {
            let read = TextFile::open(path, &|| false).and_then(|file| file.read(0..file.bytes(), &|| false));
            let problem = match read {
                Ok(bytes) if bytes.is_empty() => "is empty".to_owned(),
                Ok(bytes) if self.data.tokenizer != Tokenizer::Bytes && str::from_utf8(&bytes).is_err() => {
                    "is not UTF-8, as a tokenizer requires; data.tokenizer = \"bytes\" takes any bytes".to_owned()
                }
                Ok(bytes) => {
                    text.extend_from_slice(&bytes);
                    continue;
                }
                Err(Error::Text(error)) => error.reason(),
                Err(error) => error.to_string(),
            };
            let place = places.get(index).cloned().unwrap_or(Place::Absent);
            mistakes.add(place, "data.text", format!("{}: {problem}", path.display()));
        }
        // Of a recipe with other mistakes neither the context nor the share for validation is certain.
        if mistakes.is_empty() && self.data.tokenizer == Tokenizer::Bytes {
            self.check_length(text.len(), mistakes);
        }
        text
    }

    fn check_length(&self, bytes: usize, mistakes: &mut Mistakes) {
        let validation = (bytes as f64 * self.data.validation) as usize;
        for (what, part) in [("training", bytes - validation), ("validation", validation)] {
            if part <= self.model.context {
                let problem = format!(
                    "{part} of {bytes} bytes are for {what}, which is not longer than the context of {}; give more \
                     text or a shorter context",
                    self.model.context
                );
                mistakes.add(Place::Absent, "data.text", problem);
            }
        }
    }
}
