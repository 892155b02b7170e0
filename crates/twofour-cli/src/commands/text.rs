//! Text that a command reads and encodes whole.

use std::path::Path;

use anyhow::Result;
use twofour_nn::{
    model::Tokenizer,
    text::{Encoding, TextFile},
};

use crate::{interrupt, present::Screen};

/// The most bytes of a text that is read whole.
const MOST: u64 = 1 << 30;

/// The text of a file or a stream.
///
/// # Errors
/// Those of [`TextFile::open`] and [`TextFile::text`], with [`interrupt::Interrupted`] among them.
pub(crate) fn read(path: &Path) -> Result<String> {
    Ok(TextFile::open(path, &interrupt::requested)?.text(MOST, &interrupt::requested)?)
}

/// The tokens of a text as [`Tokenizer::encode`] has them, with progress.
///
/// # Errors
/// Those of [`Encoding`]; [`interrupt::Interrupted`].
pub(crate) fn encode(tokenizer: &Tokenizer, text: &str, screen: &Screen) -> Result<Vec<u32>> {
    let (mut tokens, mut progress) = (vec![], screen.progress());
    let mut parts = Encoding::new(tokenizer, text)?;
    while let Some(part) = parts.next() {
        interrupt::check()?;
        tokens.extend(part?);
        progress.bytes("encoding the text", parts.bytes_done() as u64, text.len() as u64);
    }
    Ok(tokens)
}
