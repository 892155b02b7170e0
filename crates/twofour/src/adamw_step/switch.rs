//! The switch from dense to sparse training.

use std::collections::VecDeque;

use super::ChangeMean;
use crate::{Error, Result};

/// Decides when variances have settled: where the mean of `Z`, the size of a step's change of the masked parameters'
/// variances, over the last steps is below a threshold. The window need not be full.
#[derive(Debug, Clone, PartialEq)]
pub struct PhaseSwitch {
    mean: ChangeMean,
    window: usize,
    bounds: Option<[u64; 2]>,
    changes: VecDeque<f64>,
    steps: u64,
    switched_at: Option<u64>,
}

impl PhaseSwitch {
    /// A switch before the first step.
    ///
    /// `window` is the number of steps whose `Z` count, `1 / (1 - β₂)` in the paper and at least 1. With `bounds` of
    /// `[earliest, latest]` the switch happens after step `earliest`, and at the latest after `latest`.
    ///
    /// # Errors
    /// [`Error::SwitchBounds`] where `earliest` is above `latest`.
    pub fn new(mean: ChangeMean, window: usize, bounds: Option<[u64; 2]>) -> Result<Self> {
        match bounds {
            Some([earliest, latest]) if earliest > latest => Err(Error::SwitchBounds { earliest, latest }),
            _ => {
                Ok(Self { mean, window: window.max(1), bounds, changes: VecDeque::new(), steps: 0, switched_at: None })
            }
        }
    }

    /// The same switch after `steps` steps, for training that is resumed: `changes` are the last values of `Z`.
    #[must_use]
    pub fn resumed(mut self, steps: u64, switched_at: Option<u64>, changes: impl IntoIterator<Item = f64>) -> Self {
        (self.steps, self.switched_at) = (steps, switched_at);
        self.changes.clear();
        changes.into_iter().for_each(|z| self.note(z));
        self
    }

    /// Counts a step of the optimizer.
    pub fn advance(&mut self) {
        self.steps += 1;
    }

    /// Takes note of the changes of this step, summed by [`update`](super::update) over parameters of so many elements
    /// together, and returns whether training switches now.
    pub fn observe(&mut self, sum: f64, elements: usize, threshold: f64) -> bool {
        if self.switched_at.is_some() || elements == 0 {
            return false;
        }
        let mean = sum / elements as f64;
        self.note(match self.mean {
            ChangeMean::Arithmetic => mean,
            ChangeMean::Geometric => mean.exp(),
        });
        let settled = self.changes.iter().sum::<f64>() / (self.changes.len() as f64) < threshold;
        let switches = match self.bounds {
            None => settled,
            Some([earliest, latest]) => self.steps > latest || settled && self.steps > earliest,
        };
        if switches {
            self.switched_at = Some(self.steps);
        }
        switches
    }

    fn note(&mut self, z: f64) {
        if self.changes.len() == self.window {
            self.changes.pop_front();
        }
        self.changes.push_back(z);
    }

    /// Steps so far.
    pub fn steps(&self) -> u64 {
        self.steps
    }

    /// The step after which training switched.
    pub fn switched_at(&self) -> Option<u64> {
        self.switched_at
    }

    /// The last values of `Z`, oldest first.
    pub fn changes(&self) -> impl Iterator<Item = f64> + '_ {
        self.changes.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The step after which a switch whose `Z` are `changes` switches.
    fn switched(mut switch: PhaseSwitch, changes: &[f64], threshold: f64) -> Option<u64> {
        for z in changes {
            switch.advance();
            let now = switch.observe(10.0 * z, 10, threshold);
            assert_eq!(now, switch.switched_at() == Some(switch.steps()));
        }
        switch.switched_at()
    }

    #[test]
    fn it_happens_where_the_mean_over_the_window_is_small() {
        let of = |window, bounds| PhaseSwitch::new(ChangeMean::Arithmetic, window, bounds).unwrap();
        let falling: Vec<f64> = (0..10).map(|i| f64::from(10 - i)).collect();
        // Means of three: from step 3 on 9, 8, ...: below 6.5 first after step 6.
        assert_eq!(switched(of(3, None), &falling, 6.5), Some(6));
        assert_eq!(switched(of(3, None), &falling, 1.0), None);
        assert_eq!(switched(of(0, None), &falling, 1.5), Some(10));
        assert_eq!(switched(of(3, Some([7, 9])), &falling, 6.5), Some(8));
        assert_eq!(switched(of(3, Some([0, 2])), &falling, 0.0), Some(3));
        assert!(matches!(
            PhaseSwitch::new(ChangeMean::Arithmetic, 3, Some([5, 4])),
            Err(Error::SwitchBounds { earliest: 5, latest: 4 })
        ));
    }

    #[test]
    fn the_geometric_mean_is_of_logarithms() {
        let mut switch = PhaseSwitch::new(ChangeMean::Geometric, 1, None).unwrap();
        switch.advance();
        assert!(!switch.observe(4.0 * 0.01f64.ln(), 4, 0.0099) && !switch.observe(0.0, 0, 9.9));
        assert!((switch.changes().next().unwrap() - 0.01).abs() < 1e-12);
    }

    #[test]
    fn resuming_changes_nothing() {
        let mut whole = PhaseSwitch::new(ChangeMean::Arithmetic, 3, None).unwrap();
        let mut resumed = whole.clone();
        for (i, z) in [5.0, 4.0, 3.0, 2.0, 1.0].into_iter().enumerate() {
            if i == 3 {
                let blank = PhaseSwitch::new(ChangeMean::Arithmetic, 3, None).unwrap();
                resumed = blank.resumed(resumed.steps(), resumed.switched_at(), resumed.changes().collect::<Vec<_>>());
            }
            for switch in [&mut whole, &mut resumed] {
                switch.advance();
                switch.observe(z, 1, 2.5);
            }
        }
        assert_eq!((whole.switched_at(), &whole), (Some(5), &resumed));
    }
}
