//! The tokens of a text part by part.

use std::ops::Range;

use super::Tokenizer;
use crate::{Error, Result};

/// The tokens of a text, part by part: together those of [`Tokenizer::encode`].
///
/// A tokenizer takes a hundred times as much memory as the text that it encodes, so a long text is encoded in stretches
/// that overlap. The end of one and the beginning of the next depend on where they are cut; between, in the middle of
/// what they share, both must have the same tokens at the same places, and there one follows the other. Stretches that
/// do not agree are made longer.
///
/// ```
/// use twofour_nn::text::{Encoding, Tokenizer};
/// let parts: Vec<Vec<u32>> = Encoding::new(&Tokenizer::Bytes, "2:4")?.collect::<Result<_, _>>()?;
/// assert_eq!(parts.concat(), [50, 58, 52]);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
#[derive(Debug)]
pub struct Encoding<'a> {
    tokenizer: &'a Tokenizer,
    text: &'a str,
    /// Bytes of a stretch.
    length: usize,
    framing: [Vec<u32>; 2],
    /// The stretch that is not returned yet; none at the end of the text.
    held: Option<Stretch>,
    /// Bytes of the text before the next token.
    done: usize,
}

/// A part of the text with its tokens.
#[derive(Debug)]
struct Stretch {
    bytes: Range<usize>,
    /// Each token, and the bytes of the text that it stands for.
    tokens: Vec<(u32, Range<usize>)>,
}

impl<'a> Encoding<'a> {
    /// Bytes that are encoded at once.
    const LENGTH: usize = 256 << 10;

    /// The most bytes that are encoded at once, where stretches do not agree.
    const MAX_LENGTH: usize = 64 << 20;

    /// Stretches agree where they have at least so many tokens in common.
    const COMMON: usize = 8;

    /// Begins with the first token of a text.
    ///
    /// # Errors
    /// Those of [`Tokenizer::framing`].
    pub fn new(tokenizer: &'a Tokenizer, text: &'a str) -> Result<Self> {
        let length = match tokenizer {
            Tokenizer::File(_) => Self::LENGTH,
            Tokenizer::Bytes => text.len(),
        };
        Self::in_stretches_of(length, tokenizer, text)
    }

    fn in_stretches_of(length: usize, tokenizer: &'a Tokenizer, text: &'a str) -> Result<Self> {
        let framing = if text.len() > length { tokenizer.framing()? } else { [vec![], vec![]] };
        let held = Some(Stretch { bytes: 0..0, tokens: vec![] });
        Ok(Encoding { tokenizer, text, length, framing, held, done: 0 })
    }

    /// Bytes of the text whose tokens were returned.
    pub fn bytes_done(&self) -> usize {
        self.done
    }

    fn stretch(&self, bytes: Range<usize>) -> Result<Stretch> {
        let (tokens, places) = self.tokenizer.encode_with_places(&self.text[bytes.clone()])?;
        let places = places.into_iter().map(|place| bytes.start + place.start..bytes.start + place.end);
        Ok(Stretch { tokens: tokens.into_iter().zip(places).collect(), bytes })
    }

    /// The tokens of a stretch up to where the next one takes over, and the rest of the next one.
    fn part(&mut self, mut held: Stretch) -> Result<Vec<u32>> {
        // Where the stretch began, and the first byte whose tokens are its own.
        let (origin, first) = (held.bytes.start, self.done);
        loop {
            let end = held.bytes.end;
            if end == self.text.len() {
                self.done = end;
                let own = held.tokens.iter().map(|(token, _)| *token);
                return Ok(own.chain(std::mem::take(&mut self.framing[1])).collect());
            }
            let overlap = self.length / 16;
            let next = self.text.floor_char_boundary(end - overlap.min(end - origin));
            let next = self.stretch(next..self.text.ceil_char_boundary((next + self.length).min(self.text.len())))?;
            if let Some(place) = common_place(&held, &next).filter(|place| *place > first) {
                self.done = place;
                let own = held.tokens.iter().take_while(|(_, bytes)| bytes.start < place);
                let part = own.map(|(token, _)| *token).collect();
                let tokens = next.tokens.into_iter().skip_while(|(_, bytes)| bytes.start < place).collect();
                self.held = Some(Stretch { tokens, bytes: next.bytes });
                return Ok(part);
            }
            let longer = 2 * (end - origin);
            if longer > Self::MAX_LENGTH {
                let found = format!("{} bytes from byte {origin} on that have no place to cut them", end - origin);
                let expected = "words or lines, between which the text can be cut";
                return Err(Error::Setting { what: "the text", found, expected });
            }
            let end = self.text.ceil_char_boundary((origin + longer).min(self.text.len()));
            held = self.stretch(origin..end)?;
            held.tokens.retain(|(_, bytes)| bytes.start >= first);
        }
    }
}

/// A byte between two tokens in the middle of what two stretches have in common, where they have the same tokens around
/// it.
fn common_place(one: &Stretch, next: &Stretch) -> Option<usize> {
    let margin = (one.bytes.end - next.bytes.start) / 4;
    let inner = next.bytes.start + margin..one.bytes.end - margin;
    let is_inside = |bytes: &Range<usize>| bytes.start >= inner.start && bytes.end <= inner.end;
    let of = |stretch: &Stretch| -> Vec<(u32, Range<usize>)> {
        // All of those between the first and the last: one that has another place is a difference.
        let begin = stretch.tokens.iter().position(|(_, bytes)| is_inside(bytes)).unwrap_or(stretch.tokens.len());
        stretch.tokens[begin..].iter().take_while(|(_, bytes)| is_inside(bytes)).cloned().collect()
    };
    let (ours, theirs) = (of(one), of(next));
    if ours.len() < Encoding::COMMON || ours != theirs {
        return None;
    }
    // Several tokens may stand for the bytes of one character.
    let is_border =
        |pair: &&[(u32, Range<usize>)]| pair[0].1.end <= pair[1].1.start && pair[0].1.start < pair[1].1.start;
    ours[ours.len() / 2..].windows(2).find(is_border).map(|pair| pair[1].1.start)
}

impl Iterator for Encoding<'_> {
    type Item = Result<Vec<u32>>;

    fn next(&mut self) -> Option<Self::Item> {
        let held = self.held.take()?;
        if held.bytes.end > 0 {
            return Some(self.part(held));
        }
        if self.text.len() <= self.length {
            self.done = self.text.len();
            return Some(self.tokenizer.encode_whole(self.text));
        }
        let first = self.stretch(0..self.text.ceil_char_boundary(self.length)).and_then(|first| self.part(first));
        let mut before = std::mem::take(&mut self.framing[0]);
        Some(first.map(|part| {
            before.extend(part);
            before
        }))
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn tokenizers() -> Vec<(&'static str, Tokenizer)> {
        let at = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/checkpoints");
        let read = |family: &'static str| (family, Tokenizer::read(&at.join(family).join("tokenizer.json")).unwrap());
        ["llama", "mistral", "qwen2", "qwen3", "gpt2", "bert"].map(read).into()
    }

    #[test]
    fn parts_are_the_tokens_of_the_whole_text() {
        let words =
            "Two of every four, Ünd 3,141.59 😀 don't stop\tat  borders;\n\nfn main() { let x_1 = \"2:4\"; } 東京 ";
        let text: String =
            (0..60).map(|i| format!("{}{i} ", &words[..words.floor_char_boundary(20 + 7 * i % 90)])).collect();
        for (family, tokenizer) in tokenizers() {
            let expected = tokenizer.encode_whole(&text).unwrap();
            for length in [512, 1000, 4096, text.len() - 1, text.len()] {
                let mut parts = Encoding::in_stretches_of(length, &tokenizer, &text).unwrap();
                let (mut found, mut done, mut count) = (vec![], 0, 0);
                while let Some(part) = parts.next() {
                    found.extend(part.unwrap());
                    assert!(parts.bytes_done() > done, "{family}");
                    (done, count) = (parts.bytes_done(), count + 1);
                }
                assert_eq!(found, expected, "{family} in stretches of {length}");
                assert!(done == text.len() && (count > 2 || length > 1000), "{family}: {count}");
            }
        }
    }

    #[test]
    fn a_text_without_places_to_cut_is_encoded_as_one() {
        let text = "a".repeat(3000);
        for (family, tokenizer) in tokenizers() {
            let parts = Encoding::in_stretches_of(256, &tokenizer, &text).unwrap();
            let found = parts.collect::<Result<Vec<_>>>().unwrap().concat();
            assert_eq!(found, tokenizer.encode_whole(&text).unwrap(), "{family}");
        }
    }
}
