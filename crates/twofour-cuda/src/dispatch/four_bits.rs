//! The fastest method for a four-bit weight.

use std::fmt;

use super::{Dispatcher, Measured, MeasuredChoice};
use crate::{
    Error, Result,
    gemm::int4::{Int4Method, Int4Problem, MOST_TOKENS},
    measure::Int4Trial,
};

/// What a kind of methods took at best.
pub type Int4Measured = Measured<Int4Method>;

/// What was measured for a problem with a four-bit weight: each kind of methods at its best, the fastest first, to be planned by
/// [`Int4Gemm::with`](crate::gemm::int4::Int4Gemm::with).
pub type Int4Choice = MeasuredChoice<Int4Problem, Int4Method>;

impl fmt::Display for Int4Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {:.1} us", self.kernel, self.us)
    }
}

impl Dispatcher {
    /// The fastest method for a problem with a four-bit weight: remembered, or measured with random data and then remembered. Measuring takes a second or so, more where
    /// kernels have to be compiled, and memory for the problem's tensors.
    ///
    /// # Errors
    /// [`Error::Product`], [`Error::Multiple`] and [`Error::Dimension`] for a problem that no kernel takes; those of planning and launching.
    pub fn choose_int4(&self, problem: Int4Problem) -> Result<Int4Choice> {
        if let Some(choice) = self.0.int4.of(problem) {
            return Ok(choice);
        }
        self.choose_int4_by(&Int4Trial::random(&self.0.device, problem)?)
    }

    /// The same, measured with the tensors of a trial if it has to be.
    ///
    /// # Errors
    /// Those of [`Dispatcher::choose_int4`].
    #[doc(hidden)]
    pub fn choose_int4_by(&self, trial: &Int4Trial) -> Result<Int4Choice> {
        let problem = trial.problem();
        let many = Error::Dimension { what: "tokens", size: problem.tokens, most: MOST_TOKENS };
        self.0.int4.of_or_by(problem, || trial.measure())?.ok_or(many)
    }
}
