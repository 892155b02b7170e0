//! Embeddings of sentences.

use std::path::Path;

use twofour::{DataType, file::Reader};
#[cfg(feature = "cuda")]
use twofour_cuda::Device;

#[cfg(feature = "cuda")]
use super::CudaEncoder;
use super::{EncoderInput, HiddenStates, modules::Modules};
#[cfg(feature = "cuda")]
use crate::model::CudaInference;
use crate::{
    Error, Result,
    model::{Checkpoint, EncoderCheckpoint, Inference, Tokenizer, file, float::match_float, language::of_file},
};

/// A model with its tokenizer and what makes one embedding of its hidden states: an encoder, or a decoder with or
/// without a head that scores tokens; on the CPU or on a GPU.
#[derive(Debug)]
pub struct SentenceEncoder {
    body: Box<dyn HiddenStates>,
    tokenizer: Tokenizer,
    framing: [Vec<u32>; 2],
    modules: Modules,
}

/// Where a model is stored.
enum Stored<'a> {
    Encoder(&'a EncoderCheckpoint),
    Decoder(&'a Checkpoint),
    File(&'a Reader),
}

impl SentenceEncoder {
    /// Reads a directory with a model of transformers that this program runs, or a file of a decoder of its own, to
    /// compute on the CPU in `dtype`: f32, bf16 or f16. Beside a directory are the modules that sentence-transformers
    /// keeps there: pooling, linear layers (`2_Dense`) and normalization, in the order of `modules.json`. Without
    /// modules the embedding is the mean of the last hidden states.
    ///
    /// # Errors
    /// Those of [`EncoderCheckpoint::open`] and [`Checkpoint::open`];
    /// [`CheckpointError`](crate::model::CheckpointError) for a module that is damaged or of another kind; another
    /// type; those of reading and packing.
    pub fn load(directory: impl AsRef<Path>, dtype: DataType) -> Result<Self> {
        Self::loaded(directory.as_ref(), |stored| {
            match_float!(dtype, |T| {
                Ok(match stored {
                    Stored::Encoder(checkpoint) => Box::new(checkpoint.inference::<T>()?),
                    Stored::Decoder(checkpoint) => Box::new(checkpoint.body::<T>()?),
                    Stored::File(reader) => Box::new(Inference::<T>::from_reader(reader)?),
                })
            })
        })
    }

    /// [`SentenceEncoder::load`], onto an NVIDIA GPU.
    ///
    /// # Errors
    /// Those of [`SentenceEncoder::load`], [`CudaEncoder::of_checkpoint`] and [`CudaInference::of_checkpoint`].
    #[cfg(feature = "cuda")]
    pub fn load_on(device: &Device, directory: impl AsRef<Path>, dtype: DataType) -> Result<Self> {
        Self::loaded(directory.as_ref(), |stored| {
            Ok(match stored {
                Stored::Encoder(checkpoint) => Box::new(CudaEncoder::of_checkpoint(device, checkpoint, dtype)?),
                Stored::Decoder(checkpoint) => Box::new(checkpoint.body_on(device, dtype)?),
                Stored::File(reader) => Box::new(CudaInference::from_reader(device, reader, dtype)?),
            })
        })
    }

    fn loaded(directory: &Path, body: impl FnOnce(Stored<'_>) -> Result<Box<dyn HiddenStates>>) -> Result<Self> {
        let (body, tokenizer, modules) = if EncoderCheckpoint::is_at(directory) {
            let checkpoint = EncoderCheckpoint::open(directory)?;
            let modules = Modules::of(checkpoint.directory(), checkpoint.config().width)?;
            (body(Stored::Encoder(&checkpoint))?, checkpoint.tokenizer()?, modules)
        } else if Checkpoint::is_at(directory) {
            let checkpoint = Checkpoint::open(directory)?;
            let modules = Modules::of(checkpoint.directory(), checkpoint.config().width)?;
            (body(Stored::Decoder(&checkpoint))?, checkpoint.tokenizer()?, modules)
        } else {
            let reader = file::open(directory)?;
            let body = body(Stored::File(&reader))?;
            let modules = Modules::mean(body.config().width);
            (body, of_file(&reader)?.0, modules)
        };
        let framing = tokenizer.framing()?;
        Ok(SentenceEncoder { body, tokenizer, framing, modules })
    }

    /// The longest sentence, in tokens.
    pub fn context(&self) -> usize {
        self.body.config().context()
    }

    /// The embedding of a sentence, of which at most `length` tokens are read, with those that frame it: of unit
    /// length.
    ///
    /// # Errors
    /// A length in which no token fits; [`Error::NotFinite`]; those of the products.
    pub fn embedding(&self, sentence: &str, length: usize) -> Result<Vec<f64>> {
        let [before, after] = &self.framing;
        let (mut tokens, _) = self.tokenizer.encode_with_places(sentence)?;
        let room = length.checked_sub(before.len() + after.len()).filter(|room| *room > 0);
        let room = room.ok_or_else(|| Error::Setting {
            what: "window",
            found: length.to_string(),
            expected: "more than the tokens that frame a text",
        })?;
        tokens.truncate(room);
        let tokens = [before.as_slice(), &tokens, after].concat();
        let hidden = self.body.hidden(&[EncoderInput { tokens: &tokens, types: None }])?.concat();
        let embedding = self.modules.embedding(&hidden);
        let norm = embedding.iter().map(|value| value * value).sum::<f64>().sqrt();
        if !norm.is_finite() || norm == 0.0 {
            return Err(Error::NotFinite { what: "the embedding of a sentence" });
        }
        Ok(embedding.into_iter().map(|value| value / norm).collect())
    }
}
