//! Embeddings of sentences.

use std::path::Path;

use twofour::{file::StoredElement, kernel::KernelElement};

use super::{Encoder, EncoderInput, modules::Modules};
use crate::{
    Error, Result,
    model::{Checkpoint, EncoderCheckpoint, Inference, Tokenizer, file, language::of_file},
};

/// A model with its tokenizer and what makes one embedding of its hidden states: an encoder, or a decoder with or
/// without a head that scores tokens.
#[derive(Debug)]
pub struct SentenceEncoder<T: KernelElement> {
    body: Body<T>,
    tokenizer: Tokenizer,
    framing: [Vec<u32>; 2],
    modules: Modules,
}

#[derive(Debug)]
enum Body<T: KernelElement> {
    Encoder(Encoder<T>),
    Decoder(Inference<T>),
}

impl<T: KernelElement + StoredElement> SentenceEncoder<T> {
    /// Reads a directory with a model of transformers that this program runs, or a file of a decoder of its own; beside
    /// the former the modules that sentence-transformers keeps beside it: pooling, linear layers (`2_Dense`) and
    /// normalization, in the order of `modules.json`. Without modules the embedding is the mean of the last hidden
    /// states.
    ///
    /// # Errors
    /// Those of [`EncoderCheckpoint::open`] and [`Checkpoint::open`];
    /// [`CheckpointError`](crate::model::CheckpointError) for a module that is damaged or of another kind; those of
    /// reading and packing.
    pub fn load(directory: impl AsRef<Path>) -> Result<Self> {
        let directory = directory.as_ref();
        let (body, tokenizer, modules) = if EncoderCheckpoint::is_at(directory) {
            let checkpoint = EncoderCheckpoint::open(directory)?;
            let modules = Modules::of(checkpoint.directory(), checkpoint.config().width)?;
            (Body::Encoder(checkpoint.inference()?), checkpoint.tokenizer()?, modules)
        } else if Checkpoint::is_at(directory) {
            let checkpoint = Checkpoint::open(directory)?;
            let modules = Modules::of(checkpoint.directory(), checkpoint.config().width)?;
            (Body::Decoder(checkpoint.body()?), checkpoint.tokenizer()?, modules)
        } else {
            let reader = file::open(directory)?;
            let decoder = Inference::from_reader(&reader)?;
            let modules = Modules::mean(decoder.config().width);
            (Body::Decoder(decoder), of_file(&reader)?.0, modules)
        };
        let framing = tokenizer.framing()?;
        Ok(SentenceEncoder { body, tokenizer, framing, modules })
    }
}

impl<T: KernelElement> SentenceEncoder<T> {
    /// The longest sentence, in tokens.
    pub fn context(&self) -> usize {
        match &self.body {
            Body::Encoder(encoder) => encoder.config().context(),
            Body::Decoder(decoder) => decoder.config().context(),
        }
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
        let hidden = match &self.body {
            Body::Encoder(encoder) => encoder.forward(&[EncoderInput { tokens: &tokens, types: None }])?.concat(),
            Body::Decoder(decoder) => decoder.session().last_hidden(&tokens)?,
        };
        let embedding = self.modules.embedding(&hidden);
        let norm = embedding.iter().map(|value| value * value).sum::<f64>().sqrt();
        if !norm.is_finite() || norm == 0.0 {
            return Err(Error::NotFinite { what: "the embedding of a sentence" });
        }
        Ok(embedding.into_iter().map(|value| value / norm).collect())
    }
}
