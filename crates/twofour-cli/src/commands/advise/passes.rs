//! How many passes there are of a measurement.

use crate::measure::{Pass, SpeedUp, median, speed_up};

/// Passes over each piece of work at least: the interval is that of at least so many.
pub(super) const MIN_PASSES: usize = 3;

/// Passes at most: what is not known by then is too noisy.
pub(super) const MAX_PASSES: usize = 8;

/// An interval whose upper end is at most this many times the lower one needs no further pass.
const SETTLED: f64 = 1.1;

/// An interval still this wide after [`ENOUGH_PASSES`] will not become narrow enough.
const HOPELESS: f64 = 2.0;
const ENOUGH_PASSES: usize = 5;

/// The speedup of passes, once there are enough of them and it is known well enough, or there may be no more of them.
pub(super) fn settled(passes: &[Pass]) -> Option<SpeedUp> {
    let enough = passes.len() >= MIN_PASSES;
    let found = enough.then(|| speed_up(passes)).flatten()?;
    let width = found.interval.width();
    let is_hopeless = passes.len() >= ENOUGH_PASSES && width > HOPELESS;
    (width <= SETTLED || is_hopeless || passes.len() >= MAX_PASSES).then_some(found)
}

/// The medians of all rounds: of the dense baseline of that number, and of 2:4.
pub(super) fn medians(passes: &[Pass], dense: usize) -> [f64; 2] {
    let all = |of: &dyn Fn(&Pass) -> Vec<f64>| median(&mut passes.iter().flat_map(of).collect::<Vec<_>>());
    [all(&|pass| pass.dense[dense].clone()), all(&|pass| pass.sparse.clone())]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn passes_are_repeated_until_the_spread_is_small_or_enough_were_made() {
        let pass = |ratio: f64| Pass { sparse: vec![1.0; 5], dense: vec![vec![ratio; 5]] };
        assert!(settled(&[pass(1.5), pass(1.5)]).is_none());
        assert!(settled(&[pass(1.5), pass(1.5), pass(1.5)]).is_some());
        let mut noisy = vec![pass(1.2), pass(1.5), pass(1.8)];
        assert!(settled(&noisy).is_none());
        let hopeless: Vec<Pass> = [0.2, 1.5, 0.9, 1.8, 4.0].map(pass).into();
        assert!(settled(&hopeless[..4]).is_none() && settled(&hopeless).is_some());
        noisy.resize(MAX_PASSES, pass(1.5));
        let found = settled(&noisy).unwrap();
        assert_eq!(medians(&noisy, found.dense), [1.5, 1.0]);
    }
}
