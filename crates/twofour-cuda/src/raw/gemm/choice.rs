//! The choice among the methods of all families, for every format of weights.

use super::family::{Method, Problem};
use crate::Architecture;

/// The methods of a format of weights, of all families.
pub(super) trait Methods: Copy {
    /// Its problems.
    type Problem: Problem;

    /// Returns the methods among which one is chosen for a problem.
    fn all(problem: Self::Problem, architecture: Architecture) -> Vec<Self>;

    /// Returns the method of the first family that prefers one.
    fn preferred(problem: Self::Problem, architecture: Architecture, sms: u32) -> Option<Self>;

    /// Returns the method, whichever its family.
    fn method(&self) -> &dyn Method<Self::Problem>;
}

/// Returns the method with the least time according to the model, or the preferred one where the model has no
/// coefficients; `None` where there is none.
pub(super) fn best<M: Methods>(problem: M::Problem, architecture: Architecture, sms: u32) -> Option<M> {
    let timed = timed::<M>(problem, architecture).into_iter().min_by(|a, b| a.1.total_cmp(&b.1));
    timed.map(|(method, _)| method).or_else(|| M::preferred(problem, architecture, sms))
}

/// Methods are measured if the model's time is at most this many times the least one; at most this many methods.
const LIKELY: f64 = 1.5;
const MAX_LIKELY: usize = 24;

/// Returns the methods that may be the fastest according to the model, or all where the model has no coefficients.
pub(super) fn likely<M: Methods>(problem: M::Problem, architecture: Architecture) -> Vec<M> {
    let timed = timed::<M>(problem, architecture);
    let mut times: Vec<f64> = timed.iter().map(|(_, time)| *time).collect();
    times.sort_by(f64::total_cmp);
    let Some(least) = times.first() else { return M::all(problem, architecture) };
    let most = (LIKELY * least).min(times[times.len().min(MAX_LIKELY) - 1]);
    timed.into_iter().filter(|(_, time)| *time <= most).map(|(method, _)| method).collect()
}

/// Returns the methods for which the model has coefficients, with their times.
fn timed<M: Methods>(problem: M::Problem, architecture: Architecture) -> Vec<(M, f64)> {
    let all = M::all(problem, architecture).into_iter();
    all.filter_map(|method| Some((method, method.method().cost(problem, architecture)?))).collect()
}
