//! How weights are pruned, and what calibration that requires.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use twofour::{Pattern, file::Quantization, int4::Granularity};

use super::super::quantize::{Integer, granularity};
use crate::exit::Usage;

/// How weights are pruned.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
pub(super) enum Method {
    /// Keep the largest absolute values
    #[default]
    Magnitude,
    /// Keep the largest |w| times the norm of the input feature; requires --calibration
    Wanda,
    /// Keep the largest shares of row and column, times the root of the norm; requires --calibration
    Ria,
    /// Keep what matters most to the layer's outputs and adjust it; requires --calibration
    Sparsegpt,
}

impl Method {
    /// The name on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Method::Magnitude => "magnitude",
            Method::Wanda => "wanda",
            Method::Ria => "ria",
            Method::Sparsegpt => "sparsegpt",
        }
    }
}

/// What a calibrated method runs the model on.
#[derive(Debug, Clone, Args)]
pub(super) struct CalibrationOptions {
    /// A text file; the model runs on pieces of it, block by block
    #[arg(long, value_name = "TEXT")]
    calibration: Option<PathBuf>,

    /// How many pieces of the text, from random places
    #[arg(long, value_name = "N", default_value_t = 128, value_parser = clap::value_parser!(u32).range(1..), requires = "calibration")]
    samples: u32,

    /// Tokens of a piece, with those that a BERT reads around it [default: 512, or the model's context where that is shorter]
    #[arg(long, value_name = "L", value_parser = clap::value_parser!(u32).range(1..), requires = "calibration")]
    length: Option<u32>,

    /// What the places depend on
    #[arg(long, default_value_t = 0, requires = "calibration")]
    seed: u64,
}

/// Rounding to integers in the solver's pass.
#[derive(Debug, Clone, Args)]
pub(super) struct JointOptions {
    /// Also round kept weights to these integers, in the same pass; with --method sparsegpt. The output is compressed
    #[arg(long, value_enum, value_name = "DTYPE")]
    quantize: Option<Integer>,

    /// Columns that share a scale: 128, 64, or `row` for all [default: row for int8, 128 for int4]
    #[arg(long, value_name = "COLUMNS", value_parser = granularity, requires = "quantize")]
    group: Option<Granularity>,
}

impl JointOptions {
    /// Returns the integers, where there are any.
    pub(super) fn quantization(&self, method: Method, pattern: Pattern) -> Result<Option<Quantization>, Usage> {
        let Some(integer) = self.quantize else { return Ok(None) };
        if method != Method::Sparsegpt {
            return Err(Usage(format!(
                "--quantize is for --method sparsegpt, which adjusts weights for their rounding; after --method {} run twofour quantize",
                method.name()
            )));
        }
        if pattern != Pattern::TWO_FOUR {
            return Err(Usage(format!("--quantize writes compressed weights, which are 2:4, not {pattern}")));
        }
        Ok(Some(integer.with(self.group)))
    }
}

/// A text and how it is cut.
#[derive(Debug, Clone)]
pub(super) struct Sampling {
    pub(super) text: PathBuf,
    pub(super) samples: usize,
    pub(super) length: Option<usize>,
    pub(super) seed: u64,
}

impl CalibrationOptions {
    /// Returns what the method runs on, or `None` for one that needs nothing.
    pub(super) fn sampling(&self, method: Method) -> Result<Option<Sampling>, Usage> {
        match (&self.calibration, method) {
            (None, Method::Magnitude) => Ok(None),
            (Some(_), Method::Magnitude) => Err(Usage(
                "--calibration has no effect on --method magnitude; choose wanda, ria or sparsegpt".to_owned(),
            )),
            (None, method) => Err(Usage(format!(
                "--method {} requires --calibration TEXT, a text file to run the model on",
                method.name()
            ))),
            (Some(text), _) => Ok(Some(Sampling {
                text: text.clone(),
                samples: self.samples as usize,
                length: self.length.map(|length| length as usize),
                seed: self.seed,
            })),
        }
    }
}

impl Sampling {
    /// The pieces of a text's tokens, from places that depend on the seed alone. `framing` stands before and after each piece, as it does around `tokens`.
    pub(super) fn pieces(
        &self,
        tokens: &[u32],
        framing: &[Vec<u32>; 2],
        context: usize,
    ) -> Result<Vec<Vec<u32>>, Usage> {
        let [before, after] = framing;
        let tokens = tokens.strip_prefix(before.as_slice()).unwrap_or(tokens);
        let tokens = tokens.strip_suffix(after.as_slice()).unwrap_or(tokens);
        let length = self.length.unwrap_or(512.min(context));
        if length > context {
            return Err(Usage(format!("--length {length}: the model's context is {context} tokens")));
        }
        let frame = before.len() + after.len();
        let Some(inner) = length.checked_sub(frame).filter(|inner| *inner > 0) else {
            return Err(Usage(format!(
                "--length {length}: {frame} tokens stand around each text; give a larger number"
            )));
        };
        let Some(last) = tokens.len().checked_sub(inner) else {
            return Err(Usage(format!(
                "{}: {} tokens are fewer than the {length} of one piece; give a longer text or a smaller --length",
                self.text.display(),
                tokens.len()
            )));
        };
        let piece = |i: usize| {
            let start = (mixed(self.seed ^ mixed(i as u64)) % (last as u64 + 1)) as usize;
            [before, &tokens[start..start + inner], after].concat()
        };
        Ok((0..self.samples).map(piece).collect())
    }
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
    use super::*;

    #[test]
    fn pieces_depend_on_the_seed_alone_and_cover_the_text() {
        let sampling = |seed| Sampling { text: PathBuf::from("t"), samples: 200, length: Some(10), seed };
        let (tokens, none): (Vec<u32>, _) = ((0..50).collect(), [vec![], vec![]]);
        let pieces = sampling(1).pieces(&tokens, &none, 64).unwrap();
        assert_eq!(pieces, sampling(1).pieces(&tokens, &none, 64).unwrap());
        assert_ne!(pieces, sampling(2).pieces(&tokens, &none, 64).unwrap());
        let starts: std::collections::BTreeSet<u32> = pieces.iter().map(|piece| piece[0]).collect();
        assert!(starts.len() > 35 && starts.contains(&0) && starts.contains(&40), "{starts:?}");
        assert!(pieces.iter().all(|piece| piece.len() == 10 && piece.is_sorted()));
        assert!(sampling(1).pieces(&tokens[..9], &none, 64).is_err() && sampling(1).pieces(&tokens, &none, 9).is_err());
    }

    #[test]
    fn pieces_of_encoders_are_framed_and_hold_no_frame_inside() {
        let sampling = Sampling { text: PathBuf::from("t"), samples: 50, length: Some(6), seed: 0 };
        let tokens: Vec<u32> = [101].into_iter().chain(0..20).chain([102]).collect();
        let framing = [vec![101], vec![102]];
        for piece in sampling.pieces(&tokens, &framing, 16).unwrap() {
            assert!(piece.len() == 6 && piece[0] == 101 && piece[5] == 102, "{piece:?}");
            assert!(piece[1..5].iter().all(|token| *token < 20), "{piece:?}");
        }
        assert!(Sampling { length: Some(2), ..sampling }.pieces(&tokens, &framing, 16).is_err());
    }
}
