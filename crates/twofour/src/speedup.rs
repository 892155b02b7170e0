//! What a measured speedup says: whether 2:4 is faster than dense, as far as the measurement tells.

use serde::Serialize;

/// An interval wider than this is reported as a range.
const WIDE: f64 = 1.2;

/// An interval wider than this is no basis for a decision: the measurement was disturbed.
const TOO_WIDE: f64 = 2.0;

/// Differences smaller than this share are negligible to a user.
const SMALL: f64 = 0.05;

/// An interval within this share of 1 is called as fast as dense.
const EVEN: f64 = 0.1;

/// A median, and an interval that is likely to contain the true value.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Interval {
    /// The median.
    pub median: f64,
    /// The interval's lower end.
    pub low: f64,
    /// The interval's upper end.
    pub high: f64,
}

impl Interval {
    /// The upper end divided by the lower: 1.2 for a median known to about ±10 %.
    pub fn width(self) -> f64 {
        self.high / self.low
    }

    /// Clamps the interval to a limit.
    pub fn capped(self, limit: f64) -> Self {
        let cap = |value: f64| value.min(limit);
        Interval { median: cap(self.median), low: cap(self.low), high: cap(self.high) }
    }

    /// Whether it is too wide for its median to stand for it.
    pub fn is_range(self) -> bool {
        self.width() > WIDE
    }
}

/// The verdict on a speedup.
///
/// ```
/// use twofour::speedup::{Interval, Verdict};
/// assert_eq!(Verdict::of(Interval { median: 1.5, low: 1.45, high: 1.6 }), Verdict::Faster);
/// assert_eq!(Verdict::of(Interval { median: 1.5, low: 0.9, high: 1.9 }), Verdict::TooNoisy);
/// ```
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Verdict {
    /// The whole interval is above 1, and the median by more than a negligible difference.
    Faster,
    /// A negligible difference.
    AsFast,
    /// The whole interval is below 1, and the median by more than a negligible difference.
    Slower,
    /// No verdict: the machine is too noisy.
    TooNoisy,
}

impl Verdict {
    /// The verdict on a speedup as measured.
    pub fn of(interval: Interval) -> Self {
        let Interval { median, low, high } = interval;
        let width = interval.width();
        if width.is_nan() || width > TOO_WIDE {
            Verdict::TooNoisy
        } else if low > 1.0 && median > 1.0 + SMALL {
            Verdict::Faster
        } else if high < 1.0 && median < 1.0 - SMALL {
            Verdict::Slower
        } else if low >= 1.0 - EVEN && high <= 1.0 + EVEN {
            Verdict::AsFast
        } else {
            Verdict::TooNoisy
        }
    }

    /// In words.
    pub fn name(self) -> &'static str {
        match self {
            Verdict::Faster => "faster",
            Verdict::AsFast => "as fast",
            Verdict::Slower => "slower",
            Verdict::TooNoisy => "too noisy",
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
        assert_eq!(Verdict::of(interval(1.5, 1.45, 1.6)), Verdict::Faster);
        assert_eq!(Verdict::of(interval(0.8, 0.75, 0.85)), Verdict::Slower);
        assert_eq!(Verdict::of(interval(1.02, 0.97, 1.06)), Verdict::AsFast);
        // Surely faster, by an amount that is told as a range.
        assert_eq!(Verdict::of(interval(1.4, 1.22, 1.55)), Verdict::Faster);
        assert!(interval(1.4, 1.22, 1.55).is_range() && !interval(1.5, 1.45, 1.6).is_range());
        assert_eq!(Verdict::of(interval(0.7, 0.6, 0.9)), Verdict::Slower);
        // Nobody knows by how much.
        assert_eq!(Verdict::of(interval(3.0, 1.5, 4.46)), Verdict::TooNoisy);
        // Narrow enough, but on both sides of 1 by more than does not matter.
        assert_eq!(Verdict::of(interval(1.08, 0.97, 1.15)), Verdict::TooNoisy);
        assert_eq!(Verdict::of(interval(f64::NAN, f64::NAN, f64::NAN)), Verdict::TooNoisy);
    }

    #[test]
    fn a_cap_moves_only_what_is_above_it() {
        let interval = Interval { median: 1.9, low: 1.7, high: 2.2 };
        assert_eq!(interval.capped(1.78), Interval { median: 1.78, low: 1.7, high: 1.78 });
    }
}
