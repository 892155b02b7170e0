//! The learning rate over the steps of a training run.

use super::{ScheduleKind, TrainingSettings};
use crate::{Error, Result};

/// A linear warm-up to the peak, then a fall to the floor. The floor is reached one step after the last step of the
/// run, and kept from there on.
///
/// ```
/// use twofour_nn::train::{Schedule, TrainingSettings};
/// let settings = TrainingSettings { steps: 110, warm_up: 10, ..Default::default() };
/// let schedule = Schedule::new(&settings)?;
/// assert_eq!(schedule.at(0), 1e-4); // a tenth of the way up
/// assert_eq!(schedule.at(9), 1e-3);
/// assert!((schedule.at(60) - 5.5e-4).abs() < 1e-12); // half-way down the cosine
/// assert!(schedule.at(109) > 1e-4); // the last step of the run
/// assert_eq!(schedule.at(110), 1e-4);
/// # Ok::<(), twofour_nn::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Schedule {
    kind: ScheduleKind,
    peak: f64,
    floor: f64,
    warm_up: u64,
    total: u64,
    /// Steps of the linear fall of [`ScheduleKind::Wsd`].
    decay: u64,
}

impl Schedule {
    /// The schedule of a run.
    ///
    /// # Errors
    /// [`Error::Setting`] unless `0 <= final_learning_rate <= learning_rate`, both finite, and the warm-up and the fall
    /// fit into the run.
    pub fn new(settings: &TrainingSettings) -> Result<Self> {
        let TrainingSettings { learning_rate: peak, final_learning_rate: floor, warm_up, steps: total, .. } = *settings;
        if !(floor >= 0.0 && floor <= peak && peak.is_finite()) {
            let found = format!("{peak}, falling to {floor}");
            return Err(Error::Setting {
                what: "learning_rate",
                found,
                expected: "finite and at least final_learning_rate",
            });
        }
        let decay = match settings.schedule {
            ScheduleKind::Cosine => total.saturating_sub(warm_up),
            ScheduleKind::Wsd => settings.decay_steps.unwrap_or(total / 5),
        };
        if warm_up.checked_add(decay).is_none_or(|both| both > total) {
            let found = format!("{warm_up} and a fall of {decay} steps in a run of {total}");
            return Err(Error::Setting {
                what: "warm_up",
                found,
                expected: "within the run; make one of them shorter",
            });
        }
        Ok(Schedule { kind: settings.schedule, peak, floor, warm_up, total, decay })
    }

    /// The learning rate of a step; the first is step 0.
    pub fn at(&self, step: u64) -> f64 {
        if step < self.warm_up {
            return self.peak * (step + 1) as f64 / self.warm_up as f64;
        }
        if step >= self.total {
            return self.floor;
        }
        let begin = self.total - self.decay;
        if step < begin {
            return self.peak;
        }
        let progress = (step - begin) as f64 / self.decay as f64;
        let left = match self.kind {
            ScheduleKind::Cosine => 0.5 * (1.0 + (std::f64::consts::PI * progress).cos()),
            ScheduleKind::Wsd => 1.0 - progress,
        };
        self.floor + (self.peak - self.floor) * left
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn settings(peak: f64, floor: f64, warm_up: u64, total: u64, schedule: ScheduleKind) -> TrainingSettings {
        TrainingSettings {
            learning_rate: peak,
            final_learning_rate: floor,
            warm_up,
            steps: total,
            schedule,
            ..Default::default()
        }
    }

    #[test]
    fn cosine_rises_falls_and_stays() {
        let of = |peak, floor, warm_up, total| {
            Schedule::new(&settings(peak, floor, warm_up, total, ScheduleKind::Cosine)).unwrap()
        };
        let schedule = of(2.0, 0.5, 4, 20);
        let rates: Vec<f64> = (0..25).map(|step| schedule.at(step)).collect();
        assert_eq!(rates[..5], [0.5, 1.0, 1.5, 2.0, 2.0]);
        assert!(rates[4..20].windows(2).all(|w| w[1] < w[0]) && rates[20..].iter().all(|r| *r == 0.5));
        assert!((rates[12] - 1.25).abs() < 1e-12);
        assert_eq!(of(1.0, 0.0, 5, 5).at(4), 1.0);
    }

    #[test]
    fn wsd_is_constant_until_it_falls() {
        let with = |decay_steps| TrainingSettings { decay_steps, ..settings(2.0, 1.0, 2, 20, ScheduleKind::Wsd) };
        let schedule = Schedule::new(&with(Some(10))).unwrap();
        assert!((2..=10).all(|step| schedule.at(step) == 2.0));
        assert_eq!((schedule.at(0), schedule.at(15), schedule.at(20)), (1.0, 1.5, 1.0));
        let fifth = Schedule::new(&with(None)).unwrap();
        assert_eq!((fifth.at(16), fifth.at(18)), (2.0, 1.5));
        assert!(Schedule::new(&with(Some(19))).is_err());
    }

    #[test]
    fn nonsense_is_refused() {
        for (peak, floor, warm_up, total) in
            [(1.0, 2.0, 0, 1), (f64::NAN, 0.0, 0, 1), (f64::INFINITY, 0.0, 0, 1), (1.0, -1.0, 0, 1), (1.0, 0.0, 3, 2)]
        {
            assert!(Schedule::new(&settings(peak, floor, warm_up, total, ScheduleKind::Cosine)).is_err());
        }
    }
}
