//! What was measured of a shape at a number of tokens.

use serde::Serialize;
use twofour::speedup::{Interval, Verdict};

use crate::measure::Pass;

/// A dense baseline below this share of its limit is remarked on.
const FAR: f64 = 0.7;

/// A dense baseline cannot be above its limit: the measurement of a limit that says so by this much was disturbed.
const DISTURBED: f64 = 1.2;

/// One side of a comparison.
#[derive(Debug, Clone)]
pub(super) struct Side {
    /// Median time of a GEMM.
    pub(super) us: f64,
    pub(super) contender: String,
    /// Bytes of the weight.
    pub(super) bytes: usize,
}

#[derive(Debug, Clone, Serialize)]
pub(super) struct Timing {
    pub(super) tokens: usize,
    /// Median time of the fastest dense GEMM.
    pub(super) dense_us: f64,
    /// The library or kernel of that GEMM.
    pub(super) dense_contender: String,
    /// Median time of the 2:4 GEMM.
    pub(super) sparse_us: f64,
    /// The library or kernel of that GEMM.
    pub(super) sparse_contender: String,
    pub(super) dense_bytes: usize,
    /// Values and metadata.
    pub(super) sparse_bytes: usize,
    /// Time of dense by that of 2:4, at one token at most `bandwidth_limit`; null where the machine is too noisy.
    pub(super) speed_up: Option<f64>,
    /// The speedup's 99 % confidence interval and median, likewise at most the limit at one token.
    pub(super) interval: Interval,
    /// The median as it was measured.
    pub(super) measured_speed_up: f64,
    /// Bytes of the dense weight divided by those of the 2:4 one: the speedup of a memory-bound GEMM.
    pub(super) bandwidth_limit: f64,
    /// Whether more than the limit was measured at one token.
    pub(super) capped: bool,
    /// The least time that this machine's read bandwidth and arithmetic allow for the dense GEMM, by the time it took;
    /// null at one token, and where it is above 1.2, so that the measurement of the limit was disturbed.
    pub(super) dense_share_of_limit: Option<f64>,
    /// Passes, each in a process of its own on a CPU.
    pub(super) passes: usize,
    /// Rounds of all passes.
    pub(super) rounds: usize,
    pub(super) verdict: Verdict,
}

impl Timing {
    /// From the speedup that passes show. `least_us` is the least time the dense GEMM can take on this machine, where
    /// that is known.
    pub(super) fn new(
        tokens: usize,
        [dense, sparse]: [Side; 2],
        interval: Interval,
        passes: &[Pass],
        least_us: Option<f64>,
    ) -> Self {
        let bandwidth_limit = dense.bytes as f64 / sparse.bytes as f64;
        let verdict = Verdict::of(interval);
        let capped = tokens == 1 && interval.median > bandwidth_limit;
        let shown = if tokens == 1 { interval.capped(bandwidth_limit) } else { interval };
        let share = least_us.map(|least| least / dense.us);
        Timing {
            tokens,
            dense_us: dense.us,
            dense_contender: dense.contender,
            sparse_us: sparse.us,
            sparse_contender: sparse.contender,
            dense_bytes: dense.bytes,
            sparse_bytes: sparse.bytes,
            speed_up: (verdict != Verdict::TooNoisy).then_some(shown.median),
            interval: shown,
            measured_speed_up: interval.median,
            bandwidth_limit,
            capped,
            dense_share_of_limit: share.filter(|share| tokens > 1 && *share <= DISTURBED),
            passes: passes.len(),
            rounds: passes.iter().map(|pass| pass.sparse.len()).sum(),
            verdict,
        }
    }

    /// Whether the dense baseline is far from its own limit.
    pub(super) fn dense_is_far(&self) -> bool {
        self.dense_share_of_limit.is_some_and(|share| share < FAR)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(median: f64, low: f64, high: f64) -> Interval {
        Interval { median, low, high }
    }

    fn timing(tokens: usize, of: Interval, us: f64, least_us: Option<f64>) -> Timing {
        let side = |us, bytes| Side { us, contender: "somebody".to_owned(), bytes };
        Timing::new(tokens, [side(us * of.median, 16), side(us, 9)], of, &[], least_us)
    }

    #[test]
    fn one_token_gains_the_bandwidth_limit_at_most() {
        let one = timing(1, interval(2.0, 1.9, 2.1), 10.0, None);
        assert_eq!((one.speed_up, one.capped, one.verdict), (Some(16.0 / 9.0), true, Verdict::Faster));
        assert_eq!((one.interval.low, one.interval.high, one.measured_speed_up), (16.0 / 9.0, 16.0 / 9.0, 2.0));
        // The cap makes no noise certain.
        let noisy = timing(1, interval(4.46, 1.7, 6.0), 10.0, None);
        assert_eq!((noisy.speed_up, noisy.verdict), (None, Verdict::TooNoisy));
        let within = timing(1, interval(1.7, 1.65, 1.75), 10.0, None);
        assert_eq!((within.speed_up, within.capped), (Some(1.7), false));
        // Above one token the dense baseline's arithmetic counts too.
        let two = timing(2, interval(2.0, 1.9, 2.1), 10.0, None);
        assert_eq!((two.speed_up, two.capped), (Some(2.0), false));
    }

    #[test]
    fn a_dense_baseline_far_from_its_limit_is_remarked_on_above_one_token() {
        let far = |tokens| timing(tokens, interval(1.5, 1.45, 1.55), 10.0, Some(6.0));
        assert!(far(16).dense_is_far() && !far(1).dense_is_far());
        assert_eq!(far(16).dense_share_of_limit, Some(0.4));
        let near = |least| timing(16, interval(1.5, 1.45, 1.55), 10.0, Some(least));
        assert!(!near(14.0).dense_is_far() && near(14.0).dense_share_of_limit.is_some());
        assert_eq!(near(40.0).dense_share_of_limit, None);
    }
}
