//! Levels of sparsity over the epochs of a run.

use std::fmt;

/// How a level changes over epochs (or steps: whatever is counted).
pub trait Schedule {
    /// Returns the level of an epoch for a parameter that was prepared with `base`, its target.
    fn level(&self, base: f64, epoch: u64) -> f64;
}

/// The target from the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct ConstantSchedule;

impl Schedule for ConstantSchedule {
    fn level(&self, base: f64, _epoch: u64) -> f64 {
        base
    }
}

/// Dense before an epoch, the target from then on: train, prune once, train on.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct OneShotSchedule {
    /// The first sparse epoch.
    pub epoch: u64,
}

impl Schedule for OneShotSchedule {
    fn level(&self, base: f64, epoch: u64) -> f64 {
        if epoch < self.epoch { 0.0 } else { base }
    }
}

/// Equal steps up to the target: prune, train on, prune more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct IterativeSchedule {
    /// The epoch of the first step; dense before it.
    pub start: u64,
    /// Epochs from one step to the next; 0 counts as 1.
    pub every: u64,
    /// Steps to the target; 0 counts as 1.
    pub times: u64,
}

impl Schedule for IterativeSchedule {
    fn level(&self, base: f64, epoch: u64) -> f64 {
        let Some(passed) = epoch.checked_sub(self.start) else { return 0.0 };
        let times = self.times.max(1);
        let done = (passed / self.every.max(1)).saturating_add(1).min(times);
        base * done as f64 / times as f64
    }
}

/// A function of the epoch times the target (torch's `LambdaSL`).
pub struct LambdaSchedule<F>(pub F);

impl<F> fmt::Debug for LambdaSchedule<F> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("LambdaSchedule").finish_non_exhaustive()
    }
}

impl<F: Fn(u64) -> f64> Schedule for LambdaSchedule<F> {
    fn level(&self, base: f64, epoch: u64) -> f64 {
        base * (self.0)(epoch)
    }
}

/// Fast at first, slower towards the target: `s = s_f + (s_0 - s_f) · (1 - (t - t_0) / (n · Δt))³`, between `s_0` and
/// `s_f` (Zhu and Gupta, "To prune, or not to prune", 2017; torch's `CubicSL`).
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CubicSchedule {
    /// `s_0`: the level at the start.
    pub start_level: f64,
    /// `t_0`: the epoch of the start.
    pub start: u64,
    /// `Δt`: epochs between two prunings; 0 counts as 1.
    pub every: u64,
    /// `n`: prunings to the target; 0 counts as 1.
    pub times: u64,
    /// Whether levels before the start are 0; else they are `s_0`.
    pub zero_before: bool,
}

impl Schedule for CubicSchedule {
    fn level(&self, base: f64, epoch: u64) -> f64 {
        if epoch < self.start {
            return if self.zero_before { 0.0 } else { self.start_level.min(base) };
        }
        let span = self.every.max(1) as f64 * self.times.max(1) as f64;
        let rest = (1.0 - (epoch - self.start) as f64 / span).max(0.0);
        base + (self.start_level - base) * rest.powi(3)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The numbers of torch's own tests: targets 0.8 and 0.4, from 0.1 at epoch 3, five times two epochs.
    #[test]
    fn cubic_levels_are_torchs() {
        let cubic = CubicSchedule { start_level: 0.1, start: 3, every: 2, times: 5, zero_before: true };
        let levels = |base| (0..16).map(|epoch| cubic.level(base, epoch)).collect::<Vec<f64>>();
        let (high, low) = (levels(0.8), levels(0.4));
        for levels in [&high, &low] {
            assert!(levels[..3] == [0.0; 3] && (levels[3] - 0.1).abs() < 1e-12, "{levels:?}");
        }
        assert!((high[4] - 0.2897).abs() < 1e-12 && (low[4] - 0.1813).abs() < 1e-12, "{} {}", high[4], low[4]);
        assert!(high.is_sorted() && high[13..] == [0.8; 3] && low[13..] == [0.4; 3], "{high:?} {low:?}");
        let at_once = CubicSchedule { zero_before: false, ..cubic };
        assert_eq!(at_once.level(0.8, 0), 0.1);
    }

    #[test]
    fn steps_end_at_the_target() {
        let iterative = IterativeSchedule { start: 2, every: 3, times: 4 };
        let levels: Vec<f64> = (0..14).map(|epoch| iterative.level(0.8, epoch)).collect();
        let expected = [0, 0, 1, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4].map(|done| 0.8 * f64::from(done) / 4.0);
        assert_eq!(levels, expected);
        assert_eq!([4, 5].map(|epoch| OneShotSchedule { epoch: 5 }.level(0.7, epoch)), [0.0, 0.7]);
        assert_eq!(ConstantSchedule.level(0.7, 0), 0.7);
        assert_eq!(LambdaSchedule(|epoch| epoch as f64 * 0.1).level(0.5, 4), 0.5 * (4.0 * 0.1));
        assert_eq!(IterativeSchedule { start: 0, every: 0, times: 0 }.level(0.5, u64::MAX), 0.5);
    }
}
