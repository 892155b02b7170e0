//! A model that reads and writes text, wherever it comes from and whatever type it computes in.

use std::{ops::ControlFlow, path::Path};

use twofour::{
    DataType,
    file::{Reader, StoredElement},
    kernel::KernelElement,
};

#[cfg(feature = "cuda")]
use twofour_cuda::Device;

#[cfg(feature = "cuda")]
use super::CudaInference;
use super::{
    Checkpoint, Decoder, Inference, Replace, Sampling, Tokenizer, file, float::match_float, saved::tokenizer_beside,
};
use crate::{Error, Result};

/// A model with its tokenizer.
#[derive(Debug)]
pub struct LanguageModel {
    /// The model.
    pub decoder: Box<dyn Decoder>,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// The type that it computes in.
    pub dtype: DataType,
    /// The token that texts begin with, if the model has one.
    pub begin: Option<u32>,
    /// The tokens that end a text.
    pub end: Vec<u32>,
}

impl LanguageModel {
    /// Loads a model: a [`Checkpoint`]'s directory, a file that [`Gpt::save`](super::Gpt::save) wrote, a directory with
    /// such a file, or the file of a
    /// training run's checkpoint. It computes in the type of its weights.
    ///
    /// ```no_run
    /// let text = twofour_nn::model::LanguageModel::load("model")?.generate("two of every", 20)?;
    /// println!("{text}");
    /// # Ok::<(), twofour_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`] and of [`Inference::load`].
    pub fn load(path: impl AsRef<Path>) -> Result<Self> {
        Self::load_as(path, None)
    }

    /// [`LanguageModel::load`], to compute in f32, bf16 or f16, or else in the type of its weights.
    ///
    /// # Errors
    /// Those of [`LanguageModel::load`]; another type.
    pub fn load_as(path: impl AsRef<Path>, dtype: Option<DataType>) -> Result<Self> {
        Self::loaded(path.as_ref(), dtype, |stored, dtype| {
            match_float!(dtype, |T| Ok(Box::new(stored.inference::<T>()?)))
        })
    }

    /// [`LanguageModel::load_as`] of a [`Checkpoint`]'s directory, with other weights in place of those that `replace`
    /// returns.
    ///
    /// # Errors
    /// Those of [`LanguageModel::load_as`]; a replaced weight of another length.
    pub fn load_with(path: impl AsRef<Path>, dtype: Option<DataType>, replace: Replace<'_>) -> Result<Self> {
        let decoder = |stored: &Stored, dtype| -> Result<Box<dyn Decoder>> {
            let Stored::Checkpoint(checkpoint) = stored else {
                let (what, found) = ("a model whose weights are replaced", "a file".to_owned());
                return Err(Error::Setting { what, found, expected: "a checkpoint's directory" });
            };
            match_float!(dtype, |T| Ok(Box::new(checkpoint.inference_with::<T>(replace)?)))
        };
        Self::loaded(path.as_ref(), dtype, decoder)
    }

    /// [`LanguageModel::load_as`], onto an NVIDIA GPU: its decoder is a [`CudaInference`].
    ///
    /// # Errors
    /// Those of [`LanguageModel::load_as`] and of [`CudaInference::of_checkpoint`].
    #[cfg(feature = "cuda")]
    pub fn load_on(device: &Device, path: impl AsRef<Path>, dtype: Option<DataType>) -> Result<Self> {
        Self::loaded(path.as_ref(), dtype, |stored, dtype| {
            Ok(Box::new(match stored {
                Stored::Checkpoint(checkpoint) => CudaInference::of_checkpoint(device, checkpoint, dtype)?,
                Stored::File(reader) => CudaInference::from_reader(device, reader, dtype)?,
            }))
        })
    }

    fn loaded(
        path: &Path,
        dtype: Option<DataType>,
        decoder: impl FnOnce(&Stored, DataType) -> Result<Box<dyn Decoder>>,
    ) -> Result<Self> {
        let stored = match Checkpoint::is_at(path) {
            true => Stored::Checkpoint(Box::new(Checkpoint::open(path)?)),
            false => Stored::File(Box::new(file::open(path)?)),
        };
        let dtype = dtype.unwrap_or_else(|| file::dtype_of(stored.reader()));
        let decoder = decoder(&stored, dtype)?;
        let ((tokenizer, begin), end) = match &stored {
            Stored::Checkpoint(own) => ((own.tokenizer()?, own.begin()), own.end().to_vec()),
            Stored::File(reader) => (of_file(reader)?, vec![]),
        };
        Ok(LanguageModel { decoder, tokenizer, dtype, begin, end })
    }

    /// Continues a text by up to `count` most likely tokens, and returns what was added.
    ///
    /// # Errors
    /// Those of [`LanguageModel::prompt`] and of [`Decoder::generate`].
    pub fn generate(&self, text: &str, count: usize) -> Result<String> {
        let prompt = self.prompt(text)?;
        let (mut decoder, mut added) = (self.tokenizer.decoder(&prompt), String::new());
        self.decoder.generate(&prompt, count, Sampling { temperature: 0.0, seed: 0 }, &mut |token| {
            if self.end.contains(&token) {
                return ControlFlow::Break(());
            }
            added.push_str(&decoder.push(token));
            ControlFlow::Continue(())
        })?;
        added.push_str(&decoder.finish());
        Ok(added)
    }

    /// The tokens of a prompt; of an empty one, the token that texts begin with.
    ///
    /// # Errors
    /// [`Error::Setting`] for an empty prompt where the model has no such token; those of [`Tokenizer::encode`].
    pub fn prompt(&self, text: &str) -> Result<Vec<u32>> {
        let tokens = self.tokenizer.encode(text)?;
        match (tokens.is_empty(), self.begin) {
            (false, _) => Ok(tokens),
            (true, Some(begin)) => Ok(vec![begin]),
            (true, None) => Err(Error::Setting {
                what: "the prompt",
                found: "empty".to_owned(),
                expected: "some text: the model has no token that texts begin with",
            }),
        }
    }
}

/// Where a model is stored.
enum Stored {
    Checkpoint(Box<Checkpoint>),
    File(Box<Reader>),
}

impl Stored {
    fn reader(&self) -> &Reader {
        match self {
            Stored::Checkpoint(checkpoint) => checkpoint.reader(),
            Stored::File(reader) => reader,
        }
    }

    fn inference<T: KernelElement + StoredElement>(&self) -> Result<Inference<T>> {
        match self {
            Stored::Checkpoint(checkpoint) => checkpoint.inference(),
            Stored::File(reader) => Inference::from_reader(reader),
        }
    }
}

/// The tokenizer of a model in a file, and the token that its texts begin with.
pub(super) fn of_file(reader: &Reader) -> Result<(Tokenizer, Option<u32>)> {
    let tokenizer = tokenizer_beside(reader.path(), &file::config_of(reader)?)?;
    // A text of bytes may begin anywhere; a line's end is before most texts.
    let begin = matches!(tokenizer, Tokenizer::Bytes).then_some(b'\n'.into());
    Ok((tokenizer, begin))
}
