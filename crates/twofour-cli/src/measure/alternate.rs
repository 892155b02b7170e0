//! Timing contenders that take turns.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::random::Random;
use crate::interrupt;

/// A sample repeats its work until it takes about this long, so that the clock's grain does not count.
const SAMPLE: Duration = Duration::from_micros(500);

/// Rounds that are made even when the time is up: a median of fewer says little.
const LEAST_ROUNDS: usize = 5;

/// A contender that takes this many times the fastest one's time makes [`LEAST_ROUNDS`] rounds and no more: it cannot win, and the
/// time is better spent on those that can.
const HOPELESS: u32 = 4;

/// The times of one call of a contender.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) median: Duration,
    pub(crate) min: Duration,
    pub(crate) max: Duration,
    /// Samples taken.
    pub(crate) rounds: usize,
}

/// The median time of one call of each contender: see [`alternate`].
pub(crate) fn medians(contenders: &mut [&mut dyn FnMut() -> Result<()>], budget: Duration) -> Result<Vec<Duration>> {
    Ok(alternate(contenders, budget)?.into_iter().map(|times| times.median).collect())
}

/// The times of one call of each contender.
///
/// Every round runs each contender once, in an order of its own, so that whatever disturbs the machine disturbs all of them, and
/// what one leaves behind (threads asleep or on another core, the caches) meets each of the others alike. Rounds go on until
/// `budget` is used up; a contender far behind makes only the first few.
pub(crate) fn alternate(contenders: &mut [&mut dyn FnMut() -> Result<()>], budget: Duration) -> Result<Vec<Times>> {
    let mut once = Vec::with_capacity(contenders.len());
    for run in contenders.iter_mut() {
        interrupt::check()?;
        // The first call pays for page faults and cold code, the second tells the length.
        run()?;
        let begun = Instant::now();
        run()?;
        once.push(begun.elapsed().max(Duration::from_nanos(100)));
    }
    let fastest = once.iter().min().copied().unwrap_or_default();
    let repeats: Vec<u32> = once.iter().map(|t| (SAMPLE.as_nanos() / t.as_nanos()).clamp(1, 10_000) as u32).collect();
    let mut samples = vec![Vec::new(); contenders.len()];
    let mut order: Vec<usize> = (0..contenders.len()).collect();
    // The same orders in every run.
    let mut random = Random::new();
    let begun = Instant::now();
    for round in 0.. {
        if round >= LEAST_ROUNDS && begun.elapsed() >= budget {
            break;
        }
        random.shuffle(&mut order);
        for &which in &order {
            interrupt::check()?;
            if round >= LEAST_ROUNDS && once[which] > fastest * HOPELESS {
                continue;
            }
            let begun = Instant::now();
            for _ in 0..repeats[which] {
                contenders[which]()?;
            }
            samples[which].push(begun.elapsed() / repeats[which]);
        }
    }
    Ok(samples.into_iter().map(times).collect())
}

fn times(mut samples: Vec<Duration>) -> Times {
    samples.sort_unstable();
    let median = match samples.len() {
        0 => Duration::ZERO,
        n if n % 2 == 1 => samples[n / 2],
        n => (samples[n / 2 - 1] + samples[n / 2]) / 2,
    };
    let end = |sample: Option<&Duration>| sample.copied().unwrap_or_default();
    Times { median, min: end(samples.first()), max: end(samples.last()), rounds: samples.len() }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sleeper(milliseconds: u64) -> impl FnMut() -> Result<()> {
        move || {
            std::thread::sleep(Duration::from_millis(milliseconds));
            Ok(())
        }
    }

    #[test]
    fn the_slower_contender_is_told() {
        let (mut slow, mut fast) = (sleeper(3), sleeper(1));
        let times = medians(&mut [&mut slow, &mut fast], Duration::from_millis(40)).unwrap();
        assert!(times[0] > times[1] && times[1] >= Duration::from_millis(1), "{times:?}");
    }

    #[test]
    fn a_contender_far_behind_leaves_its_time_to_the_others() {
        let (mut slow, mut fast) = (sleeper(20), sleeper(1));
        let times = alternate(&mut [&mut slow, &mut fast], Duration::from_millis(200)).unwrap();
        assert_eq!(times[0].rounds, LEAST_ROUNDS);
        assert!(times[1].rounds > LEAST_ROUNDS, "{times:?}");
    }

    #[test]
    fn an_error_ends_the_measurement() {
        let mut bad = || anyhow::bail!("no");
        assert_eq!(medians(&mut [&mut bad], Duration::ZERO).unwrap_err().to_string(), "no");
    }

    #[test]
    fn the_median_is_the_middle() {
        let of = |list: &[u64]| times(list.iter().map(|&m| Duration::from_millis(m)).collect());
        let ms = |list: &[u64]| of(list).median.as_millis();
        assert_eq!([ms(&[]), ms(&[7]), ms(&[9, 1]), ms(&[100, 2, 1])], [0, 7, 5, 2]);
        let ends = of(&[3, 9, 1]);
        assert_eq!([ends.min, ends.max].map(|t| t.as_millis()), [1, 9]);
        assert_eq!(ends.rounds, 3);
    }
}
