//! From text to tokens and back.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use super::{VOCABULARY, checkpoint::CheckpointError};
use crate::Result;

/// How a model's tokens stand for text.
#[derive(Debug)]
#[non_exhaustive]
pub enum Tokenizer {
    /// Every byte is a token.
    Bytes,
    /// A `tokenizer.json`.
    File(Box<FileTokenizer>),
}

/// A tokenizer that was read from a file.
#[derive(Debug)]
pub struct FileTokenizer {
    path: PathBuf,
    inner: tokenizers::Tokenizer,
}

impl Tokenizer {
    /// Reads a `tokenizer.json`. Truncation and padding that it asks for are left out: texts are encoded whole.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`].
    pub fn read(path: &Path) -> Result<Self> {
        let fault = |reason: String| CheckpointError::Tokenizer { path: path.to_owned(), reason };
        let bytes = std::fs::read(path).map_err(|error| fault(error.to_string()))?;
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(|error| fault(error.to_string()))?;
        inner.with_truncation(None).map_err(|error| fault(error.to_string()))?;
        inner.with_padding(None);
        Ok(Tokenizer::File(Box::new(FileTokenizer { path: path.to_owned(), inner })))
    }

    /// The tokens of a text, with those that the tokenizer adds around it, such as the one that texts begin with.
    ///
    /// ```
    /// assert_eq!(twofour_nn::model::Tokenizer::Bytes.encode("2:4")?, [50, 58, 52]);
    /// # Ok::<(), twofour_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::File(file) => {
                let encoding = file.inner.encode_fast(text, true).map_err(|error| file.fault(error))?;
                Ok(encoding.get_ids().to_vec())
            }
        }
    }

    /// Number of tokens: one more than the largest.
    pub fn vocabulary(&self) -> usize {
        match self {
            Tokenizer::Bytes => VOCABULARY,
            Tokenizer::File(file) => {
                file.inner.get_vocab(true).into_values().max().map_or(0, |largest| largest as usize + 1)
            }
        }
    }

    /// The token of a name, such as BERT's `[MASK]`; bytes have no names.
    pub fn token(&self, name: &str) -> Option<u32> {
        match self {
            Tokenizer::Bytes => None,
            Tokenizer::File(file) => file.inner.token_to_id(name),
        }
    }

    /// The tokens of a text without those that frame it, and for each the bytes of the text that it stands for.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`].
    pub fn encode_with_places(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        match self {
            Tokenizer::Bytes => Ok((self.encode(text)?, (0..text.len()).map(|at| at..at + 1).collect())),
            Tokenizer::File(file) => {
                let encoding = file.inner.encode(text, false).map_err(|error| file.fault(error))?;
                let places = encoding.get_offsets().iter().map(|&(begin, end)| begin..end).collect();
                Ok((encoding.get_ids().to_vec(), places))
            }
        }
    }

    /// The tokens that [`Tokenizer::encode`] adds before and after a text, such as BERT's `[CLS]` and `[SEP]`.
    ///
    /// # Errors
    /// [`CheckpointError::Tokenizer`].
    pub fn framing(&self) -> Result<[Vec<u32>; 2]> {
        let Tokenizer::File(file) = self else { return Ok([vec![], vec![]]) };
        let encoded = |frames| file.inner.encode_fast("a", frames).map_err(|error| file.fault(error));
        let (framed, plain) = (encoded(true)?, encoded(false)?);
        let (framed, plain) = (framed.get_ids(), plain.get_ids());
        let begin = framed.windows(plain.len().max(1)).position(|part| part == plain).unwrap_or(framed.len());
        let (before, rest) = framed.split_at(begin);
        Ok([before.to_vec(), rest.get(plain.len()..).unwrap_or_default().to_vec()])
    }

    /// Begins to decode a text that continues `prompt`.
    pub fn decoder(&self, prompt: &[u32]) -> TextDecoder<'_> {
        TextDecoder { tokenizer: self, tokens: prompt.to_vec(), shown: self.text(prompt).len() }
    }

    fn text(&self, tokens: &[u32]) -> Vec<u8> {
        match self {
            Tokenizer::Bytes => tokens.iter().map(|token| *token as u8).collect(),
            Tokenizer::File(file) => file.inner.decode(tokens, true).unwrap_or_default().into_bytes(),
        }
    }
}

impl FileTokenizer {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }

    fn fault(&self, error: tokenizers::Error) -> CheckpointError {
        CheckpointError::Tokenizer { path: self.path.clone(), reason: error.to_string() }
    }
}

/// Decodes a text token by token. A character may be made of several tokens, so a token may add nothing, and the next one more.
#[derive(Debug)]
pub struct TextDecoder<'a> {
    tokenizer: &'a Tokenizer,
    /// The tokens that the present text is decoded from.
    tokens: Vec<u32>,
    /// Bytes of its text that were returned, or belong to the prompt.
    shown: usize,
}

impl TextDecoder<'_> {
    /// Tokens that are kept in front: what a token decodes to may depend on those just before it.
    const KEPT: usize = 16;

    /// Adds a token, and returns the text that is complete with it and was not before. Special tokens have no text.
    pub fn push(&mut self, token: u32) -> Vec<u8> {
        self.tokens.push(token);
        let text = self.tokenizer.text(&self.tokens);
        // The replacement character stands for the beginning of a character.
        if matches!(self.tokenizer, Tokenizer::File(_)) && text.ends_with("\u{FFFD}".as_bytes()) {
            return vec![];
        }
        let new = text.get(self.shown..).unwrap_or_default().to_vec();
        self.shown = text.len();
        if self.tokens.len() > 4 * Self::KEPT {
            self.tokens.drain(..self.tokens.len() - Self::KEPT);
            self.shown = self.tokenizer.text(&self.tokens).len();
        }
        new
    }

    /// What is left of an incomplete character.
    pub fn finish(self) -> Vec<u8> {
        self.tokenizer.text(&self.tokens).get(self.shown..).unwrap_or_default().to_vec()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_are_decoded_one_by_one() {
        let text = "ö 2:4 €".repeat(40);
        let tokens = Tokenizer::Bytes.encode(&text).unwrap();
        let (prompt, rest) = tokens.split_at(5);
        let mut decoder = Tokenizer::Bytes.decoder(prompt);
        let mut found: Vec<u8> = rest.iter().flat_map(|token| decoder.push(*token)).collect();
        found.extend(decoder.finish());
        assert_eq!(found, text.as_bytes()[5..]);
    }
}
