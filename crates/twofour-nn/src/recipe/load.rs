//! A recipe's file and the text that it names.

use std::{
    fs::{self, File},
    io::{self, Read},
    path::{Path, PathBuf},
};

use super::{Mistakes, Override, Place, Recipe, Tokenizer, parse::ParsedRecipe};

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
        /// Why not.
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

/// A recipe and the text that it names.
#[derive(Debug, Clone, PartialEq)]
pub struct LoadedRecipe {
    /// The settings.
    pub recipe: Recipe,
    /// The files of `data.text`, joined.
    pub text: Vec<u8>,
}

impl LoadedRecipe {
    /// Reads a recipe's file, applies the overrides, and reads the text.
    ///
    /// # Errors
    /// A file that cannot be read, and every mistake of the recipe: those of [`Recipe::parse`], and text that is absent, empty or shorter than
    /// the context.
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
        let text = recipe.gather_text(&text_places, &mut mistakes);
        let text = mistakes.or(text).map_err(|mistakes| RecipeError::Mistakes { path: path.to_owned(), mistakes })?;
        Ok(LoadedRecipe { recipe, text })
    }
}

impl Recipe {
    /// Reads the files of `data.text` and joins them.
    ///
    /// # Errors
    /// Every file that cannot be read or is empty; text with too few bytes for the context in its training or its validation part.
    pub fn read_text(&self) -> Result<Vec<u8>, Mistakes> {
        let mut mistakes = Mistakes::default();
        let text = self.gather_text(&[], &mut mistakes);
        mistakes.or(text)
    }

    /// The text that can be read; places are those of the paths, in their order.
    fn gather_text(&self, places: &[Place], mistakes: &mut Mistakes) -> Vec<u8> {
        let mut text = Vec::new();
        for (index, path) in self.data.text.iter().enumerate() {
            let problem = match fs::read(path) {
                Ok(bytes) if bytes.is_empty() => "is empty".to_owned(),
                Ok(bytes) if self.data.tokenizer != Tokenizer::Bytes && str::from_utf8(&bytes).is_err() => {
                    "is not UTF-8, as a tokenizer requires; data.tokenizer = \"bytes\" takes any bytes".to_owned()
                }
                Ok(bytes) => {
                    text.extend_from_slice(&bytes);
                    continue;
                }
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
                    "{part} of {bytes} bytes are for {what}, which is not longer than the context of {}; give more text or a shorter context",
                    self.model.context
                );
                mistakes.add(Place::Absent, "data.text", problem);
            }
        }
    }
}
