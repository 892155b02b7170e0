//! The text of a run as tokens, which are kept in the run's folder.

use std::{collections::BTreeMap, fs};

use anyhow::{Context, Result};
use twofour::file::{Overwrite, PlannedTensor, Reader, StoredDType, Writer};
use twofour_nn::{model::Tokenizer, recipe::Recipe};

use super::{super::text, folder::Folder};
use crate::present::{Screen, units};

/// The tokens, beside what they were made of.
pub(super) const FILE: &str = "tokens.safetensors";

/// The only tensor in it: u32.
const TENSOR: &str = "tokens";

/// The metadata key with hashes of the tokenizer and of the text.
const KEY: &str = "twofour.tokens";

/// The metadata key with a hash of the tokens.
const SUM: &str = "twofour.tokens.sum";

/// Returns the text's tokens: its bytes, or those of a tokenizer, with the tokens that it adds around the text. Tokens
/// of the same text and tokenizer are read from the folder if it holds them all, and encoded otherwise.
///
/// # Errors
/// A tokenizer or a folder that cannot be read or written; [`crate::interrupt::Interrupted`].
pub(super) fn of(recipe: &Recipe, text: &[u8], folder: &Folder, screen: &mut Screen) -> Result<Vec<u32>> {
    let tokenizer = recipe.text_tokenizer()?;
    let Tokenizer::File(file) = &tokenizer else {
        return Ok(text.iter().map(|byte| u32::from(*byte)).collect());
    };
    let path = folder.file(FILE);
    let own = fs::read(file.path()).with_context(|| file.path().display().to_string())?;
    let key = format!("{:016x}-{:016x}", hash(own), hash(text.iter().copied()));
    let sum = |tokens: &[u32]| format!("{:016x}", hash(tokens.iter().flat_map(|token| token.to_le_bytes())));
    // What is damaged is made again.
    if let Ok(reader) = Reader::open(&path)
        && reader.metadata().get(KEY) == Some(&key)
        && let Ok(tokens) = reader.tensor(TENSOR).and_then(|view| view.to_vec::<u32>())
        && reader.metadata().get(SUM).is_none_or(|found| *found == sum(&tokens))
    {
        return Ok(tokens);
    }
    screen.line(format!("Encoding {} of text", units::bytes(text.len() as u64)))?;
    let utf8 = str::from_utf8(text).context("the text is not UTF-8")?;
    let tokens = text::encode(&tokenizer, utf8, screen)?;
    let planned = vec![PlannedTensor::new(TENSOR, StoredDType::U32, [tokens.len()])];
    let metadata = BTreeMap::from([(KEY.to_owned(), key), (SUM.to_owned(), sum(&tokens))]);
    let mut writer = Writer::create(&path, Overwrite::Yes, planned, metadata)?;
    writer.write_elements(TENSOR, &tokens)?;
    writer.finish()?;
    Ok(tokens)
}

/// FNV-1a.
fn hash(bytes: impl IntoIterator<Item = u8>) -> u64 {
    bytes.into_iter().fold(0xCBF2_9CE4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01B3))
}
