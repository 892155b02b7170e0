//! From text to tokens and back.

use std::{
    cell::Cell,
    ops::Range,
    panic::{AssertUnwindSafe, catch_unwind},
    path::{Path, PathBuf},
};

use super::{Encoding, SpecialTokens, TextError, TextFile};
use crate::{Error, Result};

/// Tokens of a text whose bytes are its tokens.
pub const VOCABULARY: usize = 256;

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
    /// [`TextError::Tokenizer`].
    pub fn read(path: &Path) -> Result<Self> {
        let fault = |reason: String| TextError::Tokenizer { path: path.to_owned(), reason };
        // The largest vocabularies take a tenth of it.
        const MOST: u64 = 256 << 20;
        if !path.exists() && path.with_file_name("tokenizer.model").exists() {
            let reason = "is not there, only tokenizer.model of SentencePiece is; write it with transformers: \
                          AutoTokenizer.from_pretrained(directory).save_pretrained(directory)";
            return Err(fault(reason.to_owned()).into());
        }
        // A pipe may never end, and no tokenizer comes from one.
        let kind = std::fs::metadata(path).map_err(|error| fault(error.to_string()))?;
        if !kind.is_file() {
            return Err(fault("is no regular file; a tokenizer.json is required".to_owned()).into());
        }
        let read = TextFile::open(path, &|| false).and_then(|file| file.text(MOST, &|| false));
        let text = read.map_err(|error| match error {
            Error::Text(error) => fault(error.reason()),
            other => fault(other.to_string()),
        })?;
        Self::parse(path, text.as_bytes())
    }

    /// Reads the text of a `tokenizer.json`; `path` is only named in errors.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn parse(path: &Path, text: &[u8]) -> Result<Self> {
        let fault = |reason: String| TextError::Tokenizer { path: path.to_owned(), reason };
        let mut inner = tokenizers::Tokenizer::from_bytes(text).map_err(|error| {
            let what = twofour::file::what_else(text);
            fault(what.map_or_else(|| error.to_string(), |what| format!("is {what}")))
        })?;
        inner.with_truncation(None).map_err(|error| fault(error.to_string()))?;
        inner.with_padding(None);
        Ok(Tokenizer::File(Box::new(FileTokenizer { path: path.to_owned(), inner })))
    }

    /// The tokens of a text, with those that the tokenizer adds around it, such as the one that texts begin with: all
    /// parts of an [`Encoding`].
    ///
    /// ```
    /// assert_eq!(twofour_nn::text::Tokenizer::Bytes.encode("2:4")?, [50, 58, 52]);
    /// # Ok::<(), twofour_nn::Error>(())
    /// ```
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let mut tokens = vec![];
        for part in Encoding::new(self, text)? {
            tokens.extend(part?);
        }
        Ok(tokens)
    }

    /// [`Tokenizer::encode`] at once.
    pub(crate) fn encode_whole(&self, text: &str) -> Result<Vec<u32>> {
        match self {
            Tokenizer::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::File(file) => {
                let encoding = guarded(&file.path, || file.inner.encode_fast(text, true))?;
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

    /// Whether each of the tokens of both stands for the same in the other.
    pub fn has_tokens_of(&self, other: &Tokenizer) -> bool {
        match (self, other) {
            (Tokenizer::Bytes, Tokenizer::Bytes) => true,
            (Tokenizer::File(own), Tokenizer::File(other)) => own.inner.get_vocab(true) == other.inner.get_vocab(true),
            _ => false,
        }
    }

    /// The token of a name, such as BERT's `[MASK]`; bytes have no names.
    pub fn token(&self, name: &str) -> Option<u32> {
        match self {
            Tokenizer::Bytes => None,
            Tokenizer::File(file) => file.inner.token_to_id(name),
        }
    }

    /// Whether a token is a special one, such as the end of a text; bytes have none.
    pub fn is_special(&self, token: u32) -> bool {
        match self {
            Tokenizer::Bytes => false,
            Tokenizer::File(file) => {
                file.inner.get_added_tokens_decoder().get(&token).is_some_and(|token| token.special)
            }
        }
    }

    /// The tokens of a text without those that frame it, and for each the bytes of the text that it stands for.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn encode_with_places(&self, text: &str) -> Result<(Vec<u32>, Vec<Range<usize>>)> {
        match self {
            Tokenizer::Bytes => Ok((self.encode_whole(text)?, (0..text.len()).map(|at| at..at + 1).collect())),
            Tokenizer::File(file) => {
                let encoding = guarded(&file.path, || file.inner.encode(text, false))?;
                let places = encoding.get_offsets().iter().map(|&(begin, end)| begin..end).collect();
                Ok((encoding.get_ids().to_vec(), places))
            }
        }
    }

    /// The tokens that [`Tokenizer::encode`] adds before and after a text, such as BERT's `[CLS]` and `[SEP]`.
    ///
    /// # Errors
    /// [`TextError::Tokenizer`].
    pub fn framing(&self) -> Result<[Vec<u32>; 2]> {
        let Tokenizer::File(file) = self else { return Ok([vec![], vec![]]) };
        let encoded = |frames| guarded(&file.path, || file.inner.encode_fast("a", frames));
        let (framed, plain) = (encoded(true)?, encoded(false)?);
        let (framed, plain) = (framed.get_ids(), plain.get_ids());
        let begin = framed.windows(plain.len().max(1)).position(|part| part == plain).unwrap_or(framed.len());
        let (before, rest) = framed.split_at(begin);
        Ok([before.to_vec(), rest.get(plain.len()..).unwrap_or_default().to_vec()])
    }

    /// The tokens that are no text of a model that predicts masked tokens.
    ///
    /// # Errors
    /// [`TextError::NotAnEncoders`] for a tokenizer without a mask token.
    pub fn special(&self) -> Result<SpecialTokens> {
        let mask = SpecialTokens::MASKS.iter().find_map(|name| self.token(name));
        let mask = mask.ok_or_else(|| TextError::NotAnEncoders { reason: "it has no token [MASK]".to_owned() })?;
        Ok(SpecialTokens { framing: self.framing()?, mask })
    }

    /// Begins to decode a text that continues `prompt`.
    pub fn decoder(&self, prompt: &[u32]) -> TextDecoder<'_> {
        TextDecoder { tokenizer: self, tokens: prompt.to_vec(), shown: self.text(prompt).len() }
    }

    fn text(&self, tokens: &[u32]) -> Vec<u8> {
        match self {
            Tokenizer::Bytes => tokens.iter().map(|token| *token as u8).collect(),
            Tokenizer::File(file) => {
                guarded(&file.path, || file.inner.decode(tokens, true)).unwrap_or_default().into_bytes()
            }
        }
    }
}

impl FileTokenizer {
    /// The file.
    pub fn path(&self) -> &Path {
        &self.path
    }
}

thread_local! {
    static IS_GUARDED: Cell<bool> = const { Cell::new(false) };
}

/// Returns true while this thread runs code whose panic becomes an error; the panic hook then prints nothing.
pub fn is_guarded() -> bool {
    IS_GUARDED.get()
}

/// Calls the `tokenizers` library, and turns its panics into errors: a file whose parts contradict each other may make
/// it panic.
fn guarded<R>(path: &Path, f: impl FnOnce() -> tokenizers::Result<R>) -> Result<R, TextError> {
    let fault = |reason: String| TextError::Tokenizer { path: path.to_owned(), reason };
    IS_GUARDED.set(true);
    let outcome = catch_unwind(AssertUnwindSafe(f));
    IS_GUARDED.set(false);
    match outcome {
        Ok(result) => result.map_err(|error| fault(error.to_string())),
        Err(_) => {
            Err(fault("its parts contradict each other; get the file anew from the model's publisher".to_owned()))
        }
    }
}

/// Decodes a text token by token. A character may be made of several tokens, so a token may add nothing, and the next
/// one more. Bytes that are no UTF-8 become the replacement character.
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
    pub fn push(&mut self, token: u32) -> String {
        self.tokens.push(token);
        let text = self.tokenizer.text(&self.tokens);
        let end = self.complete(&text);
        // A tokenizer's file may need the next token to tell what those before it decode to.
        if end < text.len() && matches!(self.tokenizer, Tokenizer::File(_)) {
            return String::new();
        }
        let new = String::from_utf8_lossy(text.get(self.shown..end).unwrap_or_default()).into_owned();
        self.shown = self.shown.max(end);
        if self.tokens.len() > 4 * Self::KEPT && end == text.len() {
            self.tokens.drain(..self.tokens.len() - Self::KEPT);
            self.shown = self.tokenizer.text(&self.tokens).len();
        }
        new
    }

    /// Whether the last tokens are the beginning of a character that they do not complete.
    pub fn is_incomplete(&self) -> bool {
        let text = self.tokenizer.text(&self.tokens);
        self.complete(&text) < text.len()
    }

    /// The text that was not returned yet, without an incomplete character.
    pub fn finish(self) -> String {
        let text = self.tokenizer.text(&self.tokens);
        let end = self.complete(&text);
        String::from_utf8_lossy(text.get(self.shown..end).unwrap_or_default()).into_owned()
    }

    /// Bytes of a text without an incomplete character at its end.
    fn complete(&self, text: &[u8]) -> usize {
        const REPLACEMENT: &[u8] = "\u{FFFD}".as_bytes();
        match self.tokenizer {
            Tokenizer::File(_) => {
                let mut rest = text;
                while rest.len() > self.shown && rest.ends_with(REPLACEMENT) {
                    rest = &rest[..rest.len() - REPLACEMENT.len()];
                }
                rest.len()
            }
            Tokenizer::Bytes => {
                // A character has at most four bytes.
                let last = text.len().saturating_sub(4).max(self.shown.min(text.len()));
                let is_cut = |at: &usize| {
                    str::from_utf8(&text[*at..])
                        .is_err_and(|error| error.valid_up_to() == 0 && error.error_len().is_none())
                };
                (last..text.len()).find(is_cut).unwrap_or(text.len())
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_makes_its_library_panic_is_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("tokenizer.json");
        let fixture = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints/gpt2/tokenizer.json");
        let good: serde_json::Value = serde_json::from_slice(&std::fs::read(fixture).unwrap()).unwrap();
        for (part, value) in [
            ("pre_tokenizer", serde_json::json!({"type": "FixedLength", "length": 0})),
            ("normalizer", serde_json::json!({"type": "Replace", "pattern": {"String": ""}, "content": "x"})),
        ] {
            let mut bad = good.clone();
            bad[part] = value;
            std::fs::write(&path, bad.to_string()).unwrap();
            let error = Tokenizer::read(&path).and_then(|tokenizer| tokenizer.encode("two of four")).unwrap_err();
            assert!(error.to_string().contains("tokenizer.json: its parts contradict"), "{error}");
        }
    }

    /// What a decoder returns for each token, and whether it ends inside a character.
    fn decoded(tokens: &[u32]) -> (Vec<String>, bool) {
        let mut decoder = Tokenizer::Bytes.decoder(&[]);
        let mut found: Vec<String> = tokens.iter().map(|token| decoder.push(*token)).collect();
        let is_incomplete = decoder.is_incomplete();
        found.push(decoder.finish());
        (found, is_incomplete)
    }

    #[test]
    fn bytes_are_decoded_one_by_one() {
        let text = "ö 2:4 €".repeat(40);
        let tokens = Tokenizer::Bytes.encode(&text).unwrap();
        let (prompt, rest) = tokens.split_at(5);
        let mut decoder = Tokenizer::Bytes.decoder(prompt);
        let mut found: String = rest.iter().map(|token| decoder.push(*token)).collect();
        assert!(!decoder.is_incomplete());
        found.push_str(&decoder.finish());
        assert_eq!(found, text[5..]);
    }

    #[test]
    fn a_character_that_is_cut_is_left_out_and_bytes_that_are_no_utf8_are_replaced() {
        let tokens = |bytes: &[u8]| bytes.iter().map(|byte| u32::from(*byte)).collect::<Vec<_>>();
        for cut in 1..4 {
            let text = [b"2:4 ", &"😀".as_bytes()[..cut]].concat();
            let (found, is_incomplete) = decoded(&tokens(&text));
            assert!(found.concat() == "2:4 " && is_incomplete, "{found:?}");
        }
        let (found, is_incomplete) = decoded(&tokens(&[b'a', 0xFF, b'b', 0xE2, 0x82, b'c', 0x80]));
        assert!(found.concat() == "a\u{FFFD}b\u{FFFD}c\u{FFFD}" && !is_incomplete, "{found:?}");
        // A byte that turns out to be no character's beginning is shown with the one that says so.
        assert_eq!(decoded(&tokens(&[0xE2, b'c'])).0, ["", "\u{FFFD}c", ""]);
    }
}
