//! The verdict on a speedup.

use serde::Serialize;

use crate::measure::Interval;

/// An interval wider than this is told as a range.
const WIDE: f64 = 1.2;

/// An interval wider than this is no basis for a decision: the measurement was disturbed.
const TOO_WIDE: f64 = 2.0;

/// Differences smaller than this share are negligible to a user.
const SMALL: f64 = 0.05;

/// An interval within this share of 1 is called as fast as dense.
const EVEN: f64 = 0.1;

/// The verdict on a speedup.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Finding {
    Faster,
    /// A negligible difference.
    AsFast,
    Slower,
    /// No verdict: the machine is too noisy.
    TooNoisy,
}

impl Finding {
    /// Whether an interval is too wide for its median to stand for it.
    pub(super) fn is_range(interval: Interval) -> bool {
        interval.width() > WIDE
    }

    /// Of a speedup as measured.
    pub(super) fn of(interval: Interval) -> Self {
        let Interval { median, low, high } = interval;
        let width = interval.width();
        if width.is_nan() || width > TOO_WIDE {
            Finding::TooNoisy
        } else if low > 1.0 && median > 1.0 + SMALL {
            Finding::Faster
        } else if high < 1.0 && median < 1.0 - SMALL {
            Finding::Slower
        } else if low >= 1.0 - EVEN && high <= 1.0 + EVEN {
            Finding::AsFast
        } else {
            Finding::TooNoisy
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn interval(median: f64, low: f64, high: f64) -> Interval {
        Interval { median, low, high }
    }

    #[test]
    fn a_verdict_needs_a_narrow_interval_on_one_side() {
        assert_eq!(Finding::of(interval(1.5, 1.45, 1.6)), Finding::Faster);
        assert_eq!(Finding::of(interval(0.8, 0.75, 0.85)), Finding::Slower);
        assert_eq!(Finding::of(interval(1.02, 0.97, 1.06)), Finding::AsFast);
        // Surely faster, by an amount that is told as a range.
        assert_eq!(Finding::of(interval(1.4, 1.22, 1.55)), Finding::Faster);
        assert!(Finding::is_range(interval(1.4, 1.22, 1.55)) && !Finding::is_range(interval(1.5, 1.45, 1.6)));
        assert_eq!(Finding::of(interval(0.7, 0.6, 0.9)), Finding::Slower);
        // Nobody knows by how much.
        assert_eq!(Finding::of(interval(3.0, 1.5, 4.46)), Finding::TooNoisy);
        // Narrow enough, but on both sides of 1 by more than does not matter.
        assert_eq!(Finding::of(interval(1.08, 0.97, 1.15)), Finding::TooNoisy);
        assert_eq!(Finding::of(interval(f64::NAN, f64::NAN, f64::NAN)), Finding::TooNoisy);
    }
}
