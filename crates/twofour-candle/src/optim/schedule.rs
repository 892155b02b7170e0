//! The learning rate over the steps of a training run.

use twofour_nn::{
    recipe::{ScheduleKind, TrainingSettings},
    train::Schedule,
};

use crate::Result;

/// A linear warm-up to the peak, then half a cosine down to the floor, which is kept from there on.
///
/// ```
/// use twofour_candle::optim::CosineSchedule;
/// let schedule = CosineSchedule::new(1e-3, 1e-4, 10, 110)?;
/// assert_eq!(schedule.at(0), 1e-4); // a tenth of the way up
/// assert_eq!(schedule.at(9), 1e-3);
/// assert!((schedule.at(60) - 5.5e-4).abs() < 1e-12); // half-way down
/// assert_eq!(schedule.at(110), 1e-4);
/// # Ok::<(), twofour_candle::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct CosineSchedule(Schedule);

impl CosineSchedule {
    /// Up to `peak` over `warm_up` steps, then down to `floor` at step `total`.
    ///
    /// # Errors
    /// [`Error::Setting`](crate::Error::Setting) unless `0 <= floor <= peak`, both finite, and `warm_up <= total`.
    pub fn new(peak: f64, floor: f64, warm_up: u64, total: u64) -> Result<Self> {
        Ok(CosineSchedule(Schedule::new(&TrainingSettings {
            learning_rate: peak,
            final_learning_rate: floor,
            warm_up,
            steps: total,
            schedule: ScheduleKind::Cosine,
            ..TrainingSettings::default()
        })?))
    }

    /// The learning rate of a step; the first is step 0.
    pub fn at(&self, step: u64) -> f64 {
        self.0.at(step)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rises_falls_and_stays() {
        let schedule = CosineSchedule::new(2.0, 0.5, 4, 20).unwrap();
        let rates: Vec<f64> = (0..25).map(|step| schedule.at(step)).collect();
        assert_eq!(rates[..5], [0.5, 1.0, 1.5, 2.0, 2.0]);
        assert!(rates[4..20].windows(2).all(|w| w[1] < w[0]) && rates[20..].iter().all(|r| *r == 0.5));
        assert!((rates[12] - 1.25).abs() < 1e-12);
        assert_eq!(CosineSchedule::new(1.0, 0.0, 0, 0).unwrap().at(0), 0.0);
        assert_eq!(CosineSchedule::new(1.0, 0.0, 5, 5).unwrap().at(4), 1.0);
    }

    #[test]
    fn nonsense_is_refused() {
        for (peak, floor, warm_up, total) in
            [(1.0, 2.0, 0, 1), (f64::NAN, 0.0, 0, 1), (f64::INFINITY, 0.0, 0, 1), (1.0, -1.0, 0, 1), (1.0, 0.0, 3, 2)]
        {
            assert!(CosineSchedule::new(peak, floor, warm_up, total).is_err());
        }
    }
}
