//! How weights are pruned, and what calibration that requires.

use std::path::PathBuf;

use clap::{
    Args, ValueEnum,
    builder::{PossibleValue, PossibleValuesParser},
};
use twofour::{
    Pattern,
    calibration::StatisticKind,
    file::Quantization,
    int4::Granularity,
    select::Sparsity,
    solve::{self, METHODS, Method, Pruning, Refit},
};

use super::{
    super::quantize::{Integer, granularity},
    sampling::Sampling,
};
use crate::exit::Usage;

/// How weights are pruned.
#[derive(Debug, Clone, Args)]
pub(super) struct MethodOptions {
    /// How weights are pruned [default: magnitude; with --calibration alps, or wanda for other patterns than N:M]
    #[arg(long, value_parser = methods())]
    method: Option<String>,

    /// Exchange a row's kept and pruned elements within groups, at most N times, while that lowers the layer's error;
    /// requires --calibration
    #[arg(long, value_name = "N", default_value_t = 0, requires = "calibration")]
    swaps: usize,

    /// Steps of refitting kept weights after the method, or `off` [default: 10 with --calibration]
    #[arg(long, value_name = "STEPS", value_parser = steps, requires = "calibration")]
    refit: Option<usize>,

    /// The share of the errors of earlier layers that a layer's weights make up for, from 0 to 1, or `off`: closer to
    /// the dense model on text like the calibration's, further from it on other text
    #[arg(long, value_name = "SHARE", default_value = "off", value_parser = share, requires = "calibration")]
    compensate: f64,

    /// Whether hidden features and values within heads are put in another order where a layer's error is lower in it;
    /// the layers before are stored in the same order, so that the dense model would compute what it did
    #[arg(long, value_enum, value_name = "WHEN", default_value_t, requires = "calibration")]
    permute: Permute,
}

/// When features are put in another order.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum)]
enum Permute {
    /// Where the error is lower
    #[default]
    Auto,
    /// Never
    Off,
}

/// The values of `--method`, each with its help.
fn methods() -> PossibleValuesParser {
    let value = |method: &&dyn Method| {
        let requires = method.requires() > StatisticKind::Nothing;
        let about = format!("{}{}", method.about(), if requires { "; requires --calibration" } else { "" });
        PossibleValue::new(method.name()).help(about)
    };
    PossibleValuesParser::new(METHODS.iter().map(value).collect::<Vec<_>>())
}

fn steps(text: &str) -> Result<usize, String> {
    match text {
        "off" => Ok(0),
        _ => text.parse().map_err(|_| "a number of steps, or `off`".to_owned()),
    }
}

fn share(text: &str) -> Result<f64, String> {
    let share = if text == "off" { Some(0.0) } else { text.parse().ok() };
    share.filter(|share| (0.0..=1.0).contains(share)).ok_or_else(|| "a share from 0 to 1, or `off`".to_owned())
}

impl MethodOptions {
    /// Whether features are put in another order where that makes the error smaller.
    pub(super) fn permutes(&self) -> bool {
        self.permute == Permute::Auto
    }

    /// Returns what prunes, given whether there is text to calibrate on and what kept weights are rounded to.
    pub(super) fn pruning(
        &self,
        sparsity: Sparsity,
        calibrates: bool,
        quantization: Option<Quantization>,
    ) -> Result<Pruning, Usage> {
        let default = match (calibrates, sparsity) {
            (true, Sparsity::Groups(_)) => "alps",
            (true, _) => "wanda",
            (false, _) => "magnitude",
        };
        let name = self.method.as_deref().unwrap_or(default);
        let Some(method) = solve::method(name) else { return Err(Usage(format!("no method is named `{name}`"))) };
        let refit = match (self.refit, calibrates) {
            (Some(steps), _) => steps,
            (None, true) => Refit::default().steps,
            (None, false) => 0,
        };
        let (swaps, compensation) = (self.swaps, self.compensate);
        let grid = quantization.map(Quantization::grid);
        let pruning = Pruning { swaps, refit, compensation, grid, ..Pruning::new(method, sparsity) };
        pruning.expect_pattern().map_err(|error| Usage(error.to_string()))?;
        if calibrates && pruning.requires() == StatisticKind::Nothing {
            return Err(Usage(format!(
                "--calibration has no effect on --method {name} without --refit, --swaps, --compensate and --quantize; \
                 choose another method"
            )));
        }
        if !calibrates && pruning.requires() > StatisticKind::Nothing {
            return Err(Usage(format!("--method {name} requires --calibration TEXT, a text file to run the model on")));
        }
        Ok(pruning)
    }
}

/// What a calibrated method runs the model on.
#[derive(Debug, Clone, Args)]
pub(in super::super) struct CalibrationOptions {
    /// A text file, or `self` for text that the model writes; the model runs on pieces of it, block by block. May be
    /// repeated: pieces are taken of each text in turn
    ///
    /// Give text of each kind that the model is to read: kept weights are fitted to it. `self`: the pieces are sampled
    /// at temperature 1, from where the model's chat template has a user begin, or else from the token that texts begin
    /// with. What the model did not write is left out of what is gathered.
    #[arg(long, value_name = "TEXT")]
    calibration: Vec<PathBuf>,

    /// How many pieces in all, from random places
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

/// Rounding to integers behind the method.
#[derive(Debug, Clone, Args)]
pub(super) struct JointOptions {
    /// Also round kept weights to these integers, to those that change the layer's outputs least, which are then tuned;
    /// the output is compressed
    #[arg(long, value_enum, value_name = "DTYPE", requires = "calibration")]
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
    pub(super) fn quantization(&self, sparsity: Sparsity) -> Result<Option<Quantization>, Usage> {
        let Some(integer) = self.quantize else { return Ok(None) };
        if sparsity != Pattern::TWO_FOUR.into() {
            return Err(Usage(format!("--quantize writes compressed weights, which are 2:4, not {sparsity}")));
        }
        Ok(Some(integer.with(self.group)))
    }
}

impl CalibrationOptions {
    /// Whether there is text to calibrate on.
    pub(super) fn is_given(&self) -> bool {
        !self.calibration.is_empty()
    }

    /// Returns what the method runs on, if there is text.
    pub(in super::super) fn sampling(&self) -> Option<Sampling> {
        self.is_given().then(|| Sampling {
            texts: self.calibration.clone(),
            samples: self.samples as usize,
            length: self.length.map(|length| length as usize),
            seed: self.seed,
        })
    }
}
