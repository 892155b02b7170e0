//! The fastest method for a four-bit weight.

use std::fmt;

use serde::{Deserialize, Serialize};

use super::{Dispatcher, remembered::Whole};
use crate::{
    Error, Result,
    gemm::int4::{Method, Problem},
    measure::Int4Trial,
};

/// What a kind of methods took at best.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Int4Measured {
    /// How.
    pub method: Method,
    /// The kernel's name.
    pub kernel: String,
    /// Median of device time, microseconds.
    pub us: f64,
}

/// What was measured for a problem with a four-bit weight: each kind of methods at its best, the fastest first.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Int4Choice {
    problem: Problem,
    measured: Vec<Int4Measured>,
}

impl Int4Choice {
    /// The problem.
    pub fn problem(&self) -> Problem {
        self.problem
    }

    /// The fastest, to be planned by [`Decode::with`](crate::gemm::int4::Decode::with).
    pub fn best(&self) -> &Int4Measured {
        &self.measured[0]
    }

    /// Each kind of methods at its best, the fastest first.
    pub fn measured(&self) -> &[Int4Measured] {
        &self.measured
    }
}

/// Why the choice fell as it did, in a sentence.
impl fmt::Display for Int4Choice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let best = self.best();
        write!(f, "{}, {:.1} us", best.kernel, best.us)?;
        for other in &self.measured[1..] {
            write!(f, "; {}, {:.1} us, takes {:.2} times as long", other.kernel, other.us, other.us / best.us)?;
        }
        Ok(())
    }
}

impl Whole for Int4Choice {
    type Problem = Problem;

    fn problem(&self) -> Problem {
        self.problem
    }

    fn is_whole(&self) -> bool {
        !self.measured.is_empty()
    }
}

impl Dispatcher {
    /// The fastest method for a problem with a four-bit weight: remembered, or measured with random data and then remembered. Measuring takes a second or so, more where
    /// kernels have to be compiled, and memory for the problem's tensors.
    ///
    /// # Errors
    /// [`Error::Product`], [`Error::Multiple`] and [`Error::Dimension`] for a problem that no kernel takes; those of planning and launching.
    pub fn choose_int4(&self, problem: Problem) -> Result<Int4Choice> {
        if let Some(choice) = self.0.int4.of(problem) {
            return Ok(choice);
        }
        self.choose_int4_by(&Int4Trial::random(&self.0.device, problem)?)
    }

    /// The same, measured with the tensors of a trial if it has to be.
    ///
    /// # Errors
    /// Those of [`Dispatcher::choose_int4`].
    pub fn choose_int4_by(&self, trial: &Int4Trial) -> Result<Int4Choice> {
        let problem = trial.problem();
        if let Some(choice) = self.0.int4.of(problem) {
            return Ok(choice);
        }
        let mut measured = trial.measure()?;
        if measured.is_empty() {
            return Err(Error::Dimension {
                what: "tokens",
                size: problem.tokens,
                most: crate::gemm::int4::MOST_TOKENS,
            });
        }
        measured.sort_by(|a, b| a.us.total_cmp(&b.us));
        Ok(self.0.int4.keep(Int4Choice { problem, measured }))
    }
}
