//! How weights are pruned, and what calibration that requires.

use std::path::PathBuf;

use clap::{Args, ValueEnum};
use twofour::{Pattern, file::Quantization, int4::Granularity};

use super::{
    super::quantize::{Integer, granularity},
    sampling::Sampling,
};
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
    #[arg(
        long,
        value_name = "N",
        default_value_t = 128,
        value_parser = clap::value_parser!(u32).range(1..),
        requires = "calibration"
    )]
    samples: u32,

    /// Tokens of a piece, with those that a BERT reads around it [default: 512, or the model's context where that is
    /// shorter]
    #[arg(long, value_name = "L", value_parser = clap::value_parser!(u32).range(1..), requires = "calibration")]
    length: Option<u32>,

    /// Seed of the random places
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
    /// Whether weights become integers.
    pub(super) fn quantizes(&self) -> bool {
        self.quantize.is_some()
    }

    /// Returns the integers, where there are any.
    pub(super) fn quantization(&self, method: Method, pattern: Pattern) -> Result<Option<Quantization>, Usage> {
        let Some(integer) = self.quantize else { return Ok(None) };
        if method != Method::Sparsegpt {
            return Err(Usage(format!(
                "--quantize is for --method sparsegpt, which adjusts weights for their rounding; after --method {} run \
                 twofour quantize",
                method.name()
            )));
        }
        if pattern != Pattern::TWO_FOUR {
            return Err(Usage(format!("--quantize writes compressed weights, which are 2:4, not {pattern}")));
        }
        Ok(Some(integer.with(self.group)))
    }
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
