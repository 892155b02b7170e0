//! Interleaved timing of contenders.

use std::time::{Duration, Instant};

use anyhow::Result;

use super::random::Random;
use crate::interrupt;

/// A sample repeats its work until it takes about this long, so that the clock's resolution does not matter.
const SAMPLE: Duration = Duration::from_micros(500);

/// A first call that takes this long is not repeated to warm up: page faults and cold code are a small share of it.
const LONG: Duration = Duration::from_millis(50);

/// The fewest rounds, even when the budget is used up: a median of fewer is unreliable.
pub(super) const MIN_ROUNDS: usize = 5;

/// A rival is dropped once its fastest sample takes this many times the median of the fastest rival: it cannot win, and
/// the time is better spent on those that can. The fastest sample counts because other processes only add to a time.
const HOPELESS: u32 = 4;

/// The purpose of a contender's measurement.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stake {
    /// To be the fastest of the rivals; it may be dropped when far behind.
    Rival,
    /// For its own time; it runs in every round.
    Own,
}

/// A contender: one call of it is one unit of work.
pub(super) struct Turn<'a> {
    pub(super) stake: Stake,
    pub(super) run: &'a mut dyn FnMut() -> Result<()>,
}

/// The times of one call of a contender.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Times {
    pub(crate) median: Duration,
    pub(crate) min: Duration,
    pub(crate) max: Duration,
    /// Samples taken.
    pub(crate) rounds: usize,
}

impl Times {
    /// Returns the statistics of one contender's samples.
    pub(super) fn of(samples: &[Duration]) -> Self {
        let mut samples = samples.to_vec();
        samples.sort_unstable();
        let end = |sample: Option<&Duration>| sample.copied().unwrap_or_default();
        Times { median: median(&samples), min: end(samples.first()), max: end(samples.last()), rounds: samples.len() }
    }
}

fn median(sorted: &[Duration]) -> Duration {
    match sorted.len() {
        0 => Duration::ZERO,
        n if n % 2 == 1 => sorted[n / 2],
        n => (sorted[n / 2 - 1] + sorted[n / 2]) / 2,
    }
}

/// Returns the median time of one call of each contender, interleaved until `budget` is used up.
pub fn medians(contenders: &mut [&mut dyn FnMut() -> Result<()>], budget: Duration) -> Result<Vec<Duration>> {
    Ok(alternate(contenders, budget)?.into_iter().map(|times| times.median).collect())
}

/// Returns the times of one call of each contender, all of them rivals: see [`rounds`].
pub(super) fn alternate(contenders: &mut [&mut dyn FnMut() -> Result<()>], budget: Duration) -> Result<Vec<Times>> {
    let mut turns: Vec<Turn<'_>> =
        contenders.iter_mut().map(|run| Turn { stake: Stake::Rival, run: &mut **run }).collect();
    Ok(rounds(&mut turns, budget, MIN_ROUNDS)?.iter().map(|samples| Times::of(samples)).collect())
}

/// Returns the time of one call of each contender, round by round.
///
/// Every round runs each contender once, in shuffled order, so that disturbances of the machine, and the state that one
/// contender leaves behind (threads asleep or on another core, the caches), affect all contenders alike. Rounds
/// continue until `budget` is used up, and there are at least `least`. A rival that was dropped has the samples of the
/// first `least` rounds.
pub(super) fn rounds(turns: &mut [Turn<'_>], budget: Duration, least: usize) -> Result<Vec<Vec<Duration>>> {
    let mut repeats: Vec<u32> = Vec::with_capacity(turns.len());
    for turn in turns.iter_mut() {
        interrupt::check()?;
        // The first call pays for page faults and cold code, the second tells the length.
        let mut once = time(turn, 1)?;
        if once < LONG {
            once = time(turn, 1)?;
        }
        repeats.push((SAMPLE.as_nanos() / once.as_nanos().max(100)).clamp(1, 10_000) as u32);
    }
    let mut samples: Vec<Vec<Duration>> = vec![Vec::new(); turns.len()];
    let mut order: Vec<usize> = (0..turns.len()).collect();
    // The same orders in every run.
    let mut random = Random::new();
    let begun = Instant::now();
    for round in 0.. {
        if round >= least {
            if begun.elapsed() >= budget {
                break;
            }
            if round == least {
                let left = competing(turns, &samples);
                order.retain(|which| left[*which]);
            }
        }
        random.shuffle(&mut order);
        for &which in &order {
            interrupt::check()?;
            samples[which].push(time(&mut turns[which], repeats[which])? / repeats[which]);
        }
    }
    Ok(samples)
}

fn time(turn: &mut Turn<'_>, repeats: u32) -> Result<Duration> {
    let begun = Instant::now();
    for _ in 0..repeats {
        (turn.run)()?;
    }
    Ok(begun.elapsed())
}

/// Returns which contenders continue: all but the rivals far behind the fastest.
fn competing(turns: &[Turn<'_>], samples: &[Vec<Duration>]) -> Vec<bool> {
    let times: Vec<Times> = samples.iter().map(|samples| Times::of(samples)).collect();
    let rivals = turns.iter().zip(&times).filter(|(turn, _)| turn.stake == Stake::Rival);
    let fastest = rivals.map(|(_, times)| times.median).min().unwrap_or_default();
    let runs_on = |(turn, times): (&Turn<'_>, &Times)| turn.stake == Stake::Own || times.min <= fastest * HOPELESS;
    turns.iter().zip(&times).map(runs_on).collect()
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
    fn the_slower_kernel_is_reported() {
        let (mut slow, mut fast) = (sleeper(3), sleeper(1));
        let times = medians(&mut [&mut slow, &mut fast], Duration::from_millis(40)).unwrap();
        assert!(times[0] > times[1] && times[1] >= Duration::from_millis(1), "{times:?}");
    }

    #[test]
    fn a_kernel_far_behind_leaves_its_time_to_the_others() {
        let (mut slow, mut fast) = (sleeper(20), sleeper(1));
        let times = alternate(&mut [&mut slow, &mut fast], Duration::from_millis(200)).unwrap();
        assert_eq!(times[0].rounds, MIN_ROUNDS);
        assert!(times[1].rounds > MIN_ROUNDS, "{times:?}");
    }

    #[test]
    fn what_is_measured_for_itself_runs_in_every_round() {
        let (mut slow, mut fast, mut faster) = (sleeper(20), sleeper(3), sleeper(1));
        let own = |run| Turn { stake: Stake::Own, run };
        let mut turns = [own(&mut slow), Turn { stake: Stake::Rival, run: &mut fast }, own(&mut faster)];
        let samples = rounds(&mut turns, Duration::from_millis(200), 2).unwrap();
        assert!(samples.iter().all(|of| of.len() == samples[0].len() && of.len() > 2), "{samples:?}");
    }

    #[test]
    fn one_slow_sample_drops_no_rival() {
        let ms = |list: &[u64]| list.iter().map(|&m| Duration::from_millis(m)).collect::<Vec<_>>();
        let (mut a, mut b, mut c) = (sleeper(0), sleeper(0), sleeper(0));
        let rival = |run| Turn { stake: Stake::Rival, run };
        let turns = [rival(&mut a), rival(&mut b), rival(&mut c)];
        // Slowed by others, but once as fast as the fastest; and one that is slow each time.
        let samples = [ms(&[10, 11, 10]), ms(&[90, 12, 300]), ms(&[90, 80, 85])];
        assert_eq!(competing(&turns, &samples), [true, true, false]);
    }

    #[test]
    fn an_error_ends_the_measurement() {
        let mut bad = || anyhow::bail!("no");
        assert_eq!(medians(&mut [&mut bad], Duration::ZERO).unwrap_err().to_string(), "no");
    }

    #[test]
    fn the_median_is_the_middle() {
        let of = |list: &[u64]| Times::of(&list.iter().map(|&m| Duration::from_millis(m)).collect::<Vec<_>>());
        let ms = |list: &[u64]| of(list).median.as_millis();
        assert_eq!([ms(&[]), ms(&[7]), ms(&[9, 1]), ms(&[100, 2, 1])], [0, 7, 5, 2]);
        let ends = of(&[3, 9, 1]);
        assert_eq!([ends.min, ends.max].map(|t| t.as_millis()), [1, 9]);
        assert_eq!(ends.rounds, 3);
    }
}
