//! Timing contenders that take turns.

use std::time::{Duration, Instant};

use anyhow::Result;

use crate::interrupt;

/// A sample repeats its work until it takes about this long, so that the clock's grain does not count.
const SAMPLE: Duration = Duration::from_micros(500);

/// Rounds that are made even when the time is up: a median of fewer says little.
const LEAST_ROUNDS: usize = 5;

/// The median time of one call of each contender.
///
/// Every round runs each contender once, each round beginning with the next one, so that whatever disturbs the machine
/// disturbs all of them. Rounds go on until `budget` is used up.
pub(crate) fn medians(contenders: &mut [&mut dyn FnMut() -> Result<()>], budget: Duration) -> Result<Vec<Duration>> {
    let mut repeats = Vec::with_capacity(contenders.len());
    for run in contenders.iter_mut() {
        // The first call pays for page faults and cold code, the second tells the length.
        run()?;
        let begun = Instant::now();
        run()?;
        let once = begun.elapsed().max(Duration::from_nanos(100));
        repeats.push((SAMPLE.as_nanos() / once.as_nanos()).clamp(1, 10_000) as u32);
    }
    let mut samples = vec![Vec::new(); contenders.len()];
    let begun = Instant::now();
    for round in 0.. {
        if round >= LEAST_ROUNDS && begun.elapsed() >= budget {
            break;
        }
        for turn in 0..contenders.len() {
            interrupt::check()?;
            let which = (round + turn) % contenders.len();
            let begun = Instant::now();
            for _ in 0..repeats[which] {
                contenders[which]()?;
            }
            samples[which].push(begun.elapsed() / repeats[which]);
        }
    }
    Ok(samples.into_iter().map(median).collect())
}

fn median(mut samples: Vec<Duration>) -> Duration {
    samples.sort_unstable();
    match samples.len() {
        0 => Duration::ZERO,
        n if n % 2 == 1 => samples[n / 2],
        n => (samples[n / 2 - 1] + samples[n / 2]) / 2,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_slower_contender_is_told() {
        let mut slow = || {
            std::thread::sleep(Duration::from_millis(3));
            Ok(())
        };
        let mut fast = || {
            std::thread::sleep(Duration::from_millis(1));
            Ok(())
        };
        let times = medians(&mut [&mut slow, &mut fast], Duration::from_millis(40)).unwrap();
        assert!(times[0] > times[1] && times[1] >= Duration::from_millis(1), "{times:?}");
    }

    #[test]
    fn an_error_ends_the_measurement() {
        let mut bad = || anyhow::bail!("no");
        assert_eq!(medians(&mut [&mut bad], Duration::ZERO).unwrap_err().to_string(), "no");
    }

    #[test]
    fn the_median_is_the_middle() {
        let ms = |list: &[u64]| median(list.iter().map(|&m| Duration::from_millis(m)).collect()).as_millis();
        assert_eq!([ms(&[]), ms(&[7]), ms(&[9, 1]), ms(&[100, 2, 1])], [0, 7, 5, 2]);
    }
}
