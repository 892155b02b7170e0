//! The pieces of texts that a model is calibrated on.

use std::{
    ops::Range,
    path::{Path, PathBuf},
};

use anyhow::Result;
use twofour_nn::{model::Tokenizer, text::TextFile};

use super::super::text;
use crate::{exit::Usage, interrupt, present::Screen};

/// Texts and how they are cut: the pieces are of each in turn.
#[derive(Debug, Clone)]
pub(in super::super) struct Sampling {
    pub(in super::super) texts: Vec<PathBuf>,
    pub(in super::super) samples: usize,
    pub(in super::super) length: Option<usize>,
    pub(in super::super) seed: u64,
}

/// The sizes of a piece, in tokens.
#[derive(Debug, Clone, Copy)]
struct Piece {
    /// With the tokens around it.
    length: usize,
    /// Of the text.
    inner: usize,
}

/// One text, and what is cut of it.
#[derive(Debug, Clone, Copy)]
struct Text<'a> {
    path: &'a Path,
    tokenizer: &'a Tokenizer,
    piece: Piece,
}

impl Sampling {
    /// A text of at most so many bytes is encoded whole, and places are tokens. In a longer one places are bytes, and
    /// what is around them is encoded.
    const WHOLE: u64 = 1 << 20;

    /// Bytes before and after what is encoded whose tokens depend on where it was cut.
    const MARGIN: u64 = 256;

    /// Bytes that are encoded for a token, at first.
    const PER_TOKEN: u64 = 16;

    /// The most bytes that are encoded for a piece.
    const MOST: u64 = 32 << 20;

    /// The pieces of the texts, from places that depend on a text's length, the piece's number and the seed alone.
    /// `framing` stands before and after each piece.
    pub(super) fn pieces(
        &self,
        tokenizer: &Tokenizer,
        framing: &[Vec<u32>; 2],
        context: usize,
        screen: &Screen,
    ) -> Result<Vec<Vec<u32>>> {
        self.pieces_of(Self::WHOLE, tokenizer, framing, context, screen)
    }

    /// Refuses fewer pieces for tuning than there are texts.
    pub(super) fn expect_tuned(&self, samples: usize) -> Result<(), Usage> {
        let texts = self.texts.len();
        if samples < texts {
            let message = format!("--tune-samples {samples}: fewer than the {texts} texts; give at least one for each");
            return Err(Usage(message));
        }
        Ok(())
    }

    fn pieces_of(
        &self,
        whole: u64,
        tokenizer: &Tokenizer,
        framing: &[Vec<u32>; 2],
        context: usize,
        screen: &Screen,
    ) -> Result<Vec<Vec<u32>>> {
        let [before, after] = framing;
        let piece = self.piece(before.len() + after.len(), context)?;
        if self.samples < self.texts.len() {
            let (samples, texts) = (self.samples, self.texts.len());
            let message = format!("--samples {samples}: fewer than the {texts} texts; give at least one for each");
            return Err(Usage(message).into());
        }
        let mut pieces = vec![vec![]; self.samples];
        let (mut progress, mut done) = (screen.progress(), 0);
        for (first, path) in self.texts.iter().enumerate() {
            let text = Text { path, tokenizer, piece };
            let file = TextFile::open(path, &interrupt::requested)?;
            let is_whole = file.bytes() <= whole;
            let read = || text::encode(tokenizer, &file.text(whole, &interrupt::requested)?, screen);
            let tokens = is_whole.then(read).transpose()?;
            let tokens = tokens.as_deref().map(|tokens| {
                let tokens = tokens.strip_prefix(before.as_slice()).unwrap_or(tokens);
                tokens.strip_suffix(after.as_slice()).unwrap_or(tokens)
            });
            for index in (first..self.samples).step_by(self.texts.len()) {
                interrupt::check()?;
                let inner = match tokens {
                    Some(tokens) => {
                        let last = tokens.len().checked_sub(piece.inner);
                        let last = last.ok_or_else(|| text.too_short(tokens.len()))?;
                        let start = self.place(index, last as u64 + 1) as usize;
                        tokens[start..start + piece.inner].to_vec()
                    }
                    None => text.around(&file, self.place(index, file.bytes()))?,
                };
                done += 1;
                progress.steps("reading the text", done, self.samples as u64);
                pieces[index] = [before, inner.as_slice(), after].concat();
            }
        }
        Ok(pieces)
    }

    fn piece(&self, frame: usize, context: usize) -> Result<Piece, Usage> {
        let length = self.length.unwrap_or(512.min(context));
        if length > context {
            return Err(Usage(format!("--length {length}: the model's context is {context} tokens")));
        }
        match length.checked_sub(frame).filter(|inner| *inner > 0) {
            Some(inner) => Ok(Piece { length, inner }),
            None => {
                Err(Usage(format!("--length {length}: {frame} tokens stand around each text; give a larger number")))
            }
        }
    }

    /// The place of a piece, below `places`.
    fn place(&self, index: usize, places: u64) -> u64 {
        mixed(self.seed ^ mixed(index as u64)) % places
    }
}

impl Text<'_> {
    fn too_short(&self, tokens: usize) -> Usage {
        Usage(format!(
            "{}: {tokens} tokens are fewer than the {} of one piece; give a longer text or a smaller --length",
            self.path.display(),
            self.piece.length
        ))
    }

    /// The first tokens of the text from a byte on, or its last ones where it ends before.
    fn around(&self, file: &TextFile, start: u64) -> Result<Vec<u32>> {
        let (tokenizer, inner, end) = (self.tokenizer, self.piece.inner, file.bytes());
        let mut bytes = Sampling::PER_TOKEN * inner as u64;
        loop {
            let last = start.saturating_add(bytes).min(end);
            let mut found = tokens(file, tokenizer, start..last)?;
            if found.len() >= inner {
                found.truncate(inner);
                return Ok(found);
            }
            if last == end {
                let first = end.saturating_sub(bytes);
                let mut found = tokens(file, tokenizer, first..end)?;
                if found.len() >= inner {
                    return Ok(found.split_off(found.len() - inner));
                }
                if first == 0 {
                    return Err(self.too_short(found.len()).into());
                }
            }
            if bytes > Sampling::MOST {
                return Err(Usage(format!(
                    "{}: {bytes} bytes near byte {start} are fewer tokens than the {} of one piece; give a text of \
                     words or a smaller --length",
                    self.path.display(),
                    self.piece.length
                ))
                .into());
            }
            bytes *= 2;
        }
    }
}

/// The tokens of bytes of a text as they are where the whole text is encoded.
fn tokens(file: &TextFile, tokenizer: &Tokenizer, bytes: Range<u64>) -> Result<Vec<u32>> {
    let around = bytes.start.saturating_sub(Sampling::MARGIN)..file.bytes().min(bytes.end + Sampling::MARGIN);
    let (text, begin) = file.characters(around, &interrupt::requested)?;
    let (tokens, places) = tokenizer.encode_with_places(&text)?;
    let is_inside =
        |place: &Range<usize>| begin + place.start as u64 >= bytes.start && begin + place.end as u64 <= bytes.end;
    let inside = tokens.into_iter().zip(places).skip_while(|(_, place)| !is_inside(place));
    Ok(inside.take_while(|(_, place)| is_inside(place)).map(|(token, _)| token).collect())
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, OOPSLA 2014): spreads a counter over all 64 bits.
fn mixed(counter: u64) -> u64 {
    let mut z = counter.wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ z >> 30).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ z >> 27).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ z >> 31
}

#[cfg(test)]
mod tests {
    use std::{collections::BTreeSet, fs, path::Path};

    use super::*;

    fn screen() -> Screen {
        Screen::new(&crate::present::Global { quiet: true, json: false, verbose: 0, color: Default::default() })
    }

    fn sampling(folder: &tempfile::TempDir, text: &[u8], length: usize, seed: u64) -> Sampling {
        let path = folder.path().join("text.txt");
        fs::write(&path, text).unwrap();
        Sampling { texts: vec![path], samples: 200, length: Some(length), seed }
    }

    #[test]
    fn pieces_depend_on_the_seed_alone_and_cover_the_text() {
        let folder = tempfile::tempdir().unwrap();
        let (bytes, none) = ((0..50).collect::<Vec<u8>>(), [vec![], vec![]]);
        // Places are tokens, and places are bytes.
        for whole in [50, 49] {
            let of = |seed, text: &[u8], context| {
                let sampling = sampling(&folder, text, 10, seed);
                sampling.pieces_of(whole, &Tokenizer::Bytes, &none, context, &screen())
            };
            let pieces = of(1, &bytes, 64).unwrap();
            assert_eq!(pieces, of(1, &bytes, 64).unwrap());
            assert_ne!(pieces, of(2, &bytes, 64).unwrap());
            let starts: BTreeSet<u32> = pieces.iter().map(|piece| piece[0]).collect();
            assert!(starts.len() > 35 && starts.contains(&0) && starts.contains(&40), "{starts:?}");
            assert!(pieces.iter().all(|piece| piece.len() == 10 && piece.is_sorted()));
            assert!(of(1, &bytes[..9], 64).is_err() && of(1, &bytes, 9).is_err());
        }
    }

    #[test]
    fn pieces_are_of_each_text_in_turn() {
        let folder = tempfile::tempdir().unwrap();
        let (low, high) = ((0..50).collect::<Vec<u8>>(), (60..125).collect::<Vec<u8>>());
        let other = folder.path().join("other.txt");
        fs::write(&other, &high).unwrap();
        let mut sampling = sampling(&folder, &low, 10, 7);
        sampling.samples = 9;
        // Places are tokens, and places are bytes.
        for whole in [100, 40] {
            let of =
                |sampling: &Sampling| sampling.pieces_of(whole, &Tokenizer::Bytes, &[vec![], vec![]], 64, &screen());
            let alone = of(&sampling).unwrap();
            let both =
                of(&Sampling { texts: vec![sampling.texts[0].clone(), other.clone()], ..sampling.clone() }).unwrap();
            assert_eq!(both.len(), 9);
            for (index, piece) in both.iter().enumerate() {
                assert_eq!(piece[0] >= 60, index % 2 == 1, "{piece:?}");
                assert!(index % 2 == 1 || *piece == alone[index]);
            }
            let few = Sampling { texts: vec![other.clone(); 10], ..sampling.clone() };
            assert!(of(&few).unwrap_err().to_string().contains("10 texts"));
        }
    }

    #[test]
    fn pieces_of_encoders_are_framed_and_hold_no_frame_inside() {
        let folder = tempfile::tempdir().unwrap();
        let bytes: Vec<u8> = [101].into_iter().chain(0..20).chain([102]).collect();
        let framing = [vec![101], vec![102]];
        let of = |length| {
            let sampling = Sampling { samples: 50, ..sampling(&folder, &bytes, length, 0) };
            sampling.pieces_of(50, &Tokenizer::Bytes, &framing, 16, &screen())
        };
        for piece in of(6).unwrap() {
            assert!(piece.len() == 6 && piece[0] == 101 && piece[5] == 102, "{piece:?}");
            assert!(piece[1..5].iter().all(|token| *token < 20), "{piece:?}");
        }
        assert!(of(2).is_err());
    }

    #[test]
    fn pieces_of_a_long_text_are_tokens_of_the_whole_text() {
        let folder = tempfile::tempdir().unwrap();
        let at = Path::new(env!("CARGO_MANIFEST_DIR")).join("../twofour-nn/tests/fixtures/checkpoints");
        let text: String = (0..3000).map(|i| format!("two of {} Ünd {i} €, ", "every".repeat(i % 5))).collect();
        for family in ["llama", "gpt2", "bert"] {
            let tokenizer = Tokenizer::read(&at.join(family).join("tokenizer.json")).unwrap();
            let all = tokenizer.encode(&text).unwrap();
            let framing = tokenizer.framing().unwrap();
            let inner = all[framing[0].len()..all.len() - framing[1].len()].to_vec();
            let sampling = Sampling { samples: 40, ..sampling(&folder, text.as_bytes(), 24, 3) };
            let pieces = sampling.pieces_of(1000, &tokenizer, &framing, 64, &screen()).unwrap();
            let length = 24 - framing[0].len() - framing[1].len();
            for piece in pieces {
                let piece = &piece[framing[0].len()..][..length];
                assert!(inner.windows(length).any(|window| window == piece), "{family}: {piece:?}");
            }
        }
    }
}
