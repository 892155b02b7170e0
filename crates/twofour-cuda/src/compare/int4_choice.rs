//! Choosing the fastest method for an int4 weight.

use std::fmt;

use super::{Dispatcher, Int4Trial, Measured, MeasuredChoice};
use crate::{
    Error, Result,
    problem::Int4Problem,
    raw::gemm::int4::{Int4Method, MAX_TOKENS},
};

/// The best time of one kind of methods.
pub type Int4Measured = Measured<Int4Method>;

/// The measurements of a problem with an int4 weight: the best time of each kind of methods, fastest first.
/// [`Int4Gemm::with`](crate::raw::gemm::int4::Int4Gemm::with) plans one of them.
pub type Int4Choice = MeasuredChoice<Int4Problem, Int4Method>;

impl fmt::Display for Int4Measured {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}, {:.1} us", self.kernel, self.us)
    }
}

impl Dispatcher {
    /// Returns the fastest method for a trial's problem, from the cache, or measured with the trial's tensors and then
    /// cached. Measuring takes about a second, longer where kernels must be compiled.
    ///
    /// # Errors
    /// [`Error::Dimension`] for a problem that no kernel supports; those of planning and launching.
    pub fn choose_int4_by(&self, trial: &Int4Trial) -> Result<Int4Choice> {
        let problem = trial.problem();
        let many = Error::Dimension { what: "tokens", size: problem.tokens, most: MAX_TOKENS };
        self.0.int4.of_or_by(problem, || trial.measure())?.ok_or(many)
    }
}
