//! The speedup of 2:4 over dense from interleaved rounds, and its confidence interval.
//!
//! Times of one round are neighbours, so what slows the machine for a while slows both sides of a ratio: the ratio is
//! taken round by round, and its median counts. Rounds of one process resemble each other more than those of another
//! one (placement of memory and threads, what else the machine does), so the interval is not computed from rounds as if
//! they were independent, but by a two-stage bootstrap: passes are drawn with replacement, and within each pass blocks
//! of consecutive rounds (Davison and Hinkley, "Bootstrap Methods and their Application", 1997, section 3.8). With
//! three passes, the interval covers at least the range of their medians.

use twofour::speedup::Interval;

use super::random::Random;

/// Resamples of the bootstrap.
const RESAMPLES: usize = 1000;

/// The part of the resamples that lies outside the interval, on each side: 99 % inside.
const TAIL: f64 = 0.005;

/// Blocks that the rounds of a pass are cut into, at most.
const BLOCKS: usize = 12;

/// The times of one pass over a piece of work, one number for each round, in any unit.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Pass {
    /// Of the 2:4 contender.
    pub sparse: Vec<f64>,
    /// Of each dense baseline, the same ones in every pass; one far behind has only the first rounds.
    pub dense: Vec<Vec<f64>>,
}

/// The result of [`speed_up`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct SpeedUp {
    /// The time of the fastest dense baseline divided by that of 2:4, with its 99 % confidence interval.
    pub interval: Interval,
    /// Which dense baseline is the fastest.
    pub dense: usize,
}

/// Returns the speedup of the 2:4 contender over the fastest dense one, or nothing where no round has both.
///
/// Every resample decides anew which dense baseline is the fastest, so that the interval covers that choice too.
pub fn speed_up(passes: &[Pass]) -> Option<SpeedUp> {
    let contenders = passes.iter().map(|pass| pass.dense.len()).min()?;
    // For each contender and pass: the medians of its blocks.
    let of_contender = |which: usize| -> Vec<Vec<f64>> {
        passes.iter().map(|pass| block_medians(&pass.dense[which], &pass.sparse)).collect()
    };
    let blocks: Vec<Vec<Vec<f64>>> = (0..contenders).map(of_contender).collect();
    if blocks.is_empty() || blocks.iter().flatten().any(Vec::is_empty) {
        return None;
    }
    let medians = blocks.iter().map(|passes| median(&mut passes.concat()));
    let (dense, least) = medians.enumerate().min_by(|a, b| a.1.total_cmp(&b.1))?;
    let mut random = Random::new();
    let mut resampled: Vec<f64> = (0..RESAMPLES).map(|_| resample(&blocks, &mut random)).collect();
    resampled.sort_by(f64::total_cmp);
    let at = |share: f64| resampled[(share * (RESAMPLES - 1) as f64).round() as usize];
    let interval =
        Interval { median: least.exp(), low: at(TAIL).min(least).exp(), high: at(1.0 - TAIL).max(least).exp() };
    Some(SpeedUp { interval, dense })
}

/// Returns logarithms of ratios, round by round, as the medians of blocks of consecutive rounds.
fn block_medians(dense: &[f64], sparse: &[f64]) -> Vec<f64> {
    let mut ratios: Vec<f64> = dense.iter().zip(sparse).map(|(dense, sparse)| (dense / sparse).ln()).collect();
    let count = ratios.len().min(BLOCKS);
    let mut medians = Vec::with_capacity(count);
    for block in (1..=count).rev() {
        let mut last = ratios.split_off(ratios.len() - ratios.len() / block);
        medians.push(median(&mut last));
    }
    medians
}

/// Returns the least median of all contenders over passes and blocks drawn with replacement, the same passes for each
/// contender.
fn resample(blocks: &[Vec<Vec<f64>>], random: &mut Random) -> f64 {
    let passes = blocks[0].len();
    let drawn: Vec<usize> = (0..passes).map(|_| random.below(passes)).collect();
    let mut values = Vec::with_capacity(passes * BLOCKS);
    let medians = blocks.iter().map(|of_contender| {
        values.clear();
        for blocks in drawn.iter().map(|&pass| &of_contender[pass]) {
            values.extend((0..blocks.len()).map(|_| blocks[random.below(blocks.len())]));
        }
        median(&mut values)
    });
    medians.fold(f64::INFINITY, f64::min)
}

/// Returns the median; 0 of nothing.
pub fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    match values.len() {
        0 => 0.0,
        n if n % 2 == 1 => values[n / 2],
        n => (values[n / 2 - 1] + values[n / 2]) / 2.0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Synthetic passes: a true time for each contender (2:4 first), and what a disturbance makes of it in a pass and
    /// round.
    fn passes(
        count: usize,
        rounds: usize,
        truth: &[f64],
        disturb: &mut dyn FnMut(usize, usize, f64) -> f64,
    ) -> Vec<Pass> {
        let pass = |pass: usize, disturb: &mut dyn FnMut(usize, usize, f64) -> f64| {
            let mut times = vec![Vec::new(); truth.len()];
            for round in 0..rounds {
                for (times, time) in times.iter_mut().zip(truth) {
                    times.push(disturb(pass, round, *time));
                }
            }
            let sparse = times.remove(0);
            Pass { sparse, dense: times }
        };
        (0..count).map(|at| pass(at, disturb)).collect()
    }

    /// From 0 to 1.
    fn unit(random: &mut Random) -> f64 {
        (random.bits() >> 11) as f64 / (1u64 << 53) as f64
    }

    fn holds(found: SpeedUp, truth: f64) -> bool {
        found.interval.low <= truth && truth <= found.interval.high
    }

    #[test]
    fn a_quiet_machine_gives_a_narrow_interval_around_the_truth() {
        let mut random = Random::new();
        let found =
            speed_up(&passes(3, 40, &[100.0, 170.0, 260.0], &mut |_, _, t| t * (1.0 + 0.02 * unit(&mut random))));
        let found = found.unwrap();
        assert_eq!(found.dense, 0);
        assert!(holds(found, 1.7) && found.interval.width() < 1.02, "{found:?}");
    }

    /// A third of all samples take up to ten times as long: the median and the interval stand it.
    #[test]
    fn interruptions_do_not_move_the_median() {
        let mut random = Random::new();
        let mut disturbed = |_, _, time: f64| {
            let slow = if unit(&mut random) < 0.33 { 1.0 + 9.0 * unit(&mut random) } else { 1.0 };
            time * slow * (1.0 + 0.02 * unit(&mut random))
        };
        let found = speed_up(&passes(4, 60, &[100.0, 150.0], &mut disturbed)).unwrap();
        assert!(holds(found, 1.5) && (found.interval.median - 1.5).abs() < 0.1, "{found:?}");
    }

    /// The machine slows down to a third over the measurement: both sides of each round's ratio alike.
    #[test]
    fn drift_cancels_out() {
        let mut random = Random::new();
        let mut drifting = |pass: usize, round: usize, time: f64| {
            time * (1.0 + (pass * 30 + round) as f64 / 45.0) * (1.0 + 0.03 * unit(&mut random))
        };
        let found = speed_up(&passes(3, 30, &[100.0, 130.0], &mut drifting)).unwrap();
        assert!(holds(found, 1.3) && found.interval.width() < 1.03, "{found:?}");
        // Medians of each side for itself would see drift only where it is not balanced; noise within rounds widens the
        // interval instead.
    }

    /// In one process of three the 2:4 GEMM takes five times as long: this must not lead to a verdict.
    #[test]
    fn passes_that_contradict_each_other_give_a_wide_interval() {
        let mut random = Random::new();
        let mut of_pass = passes(3, 100, &[100.0, 170.0], &mut |_, _, t| t * (1.0 + 0.02 * unit(&mut random)));
        of_pass[1].sparse.iter_mut().for_each(|time| *time *= 5.0);
        let found = speed_up(&of_pass).unwrap();
        assert!(found.interval.low < 0.4 && found.interval.high > 1.6, "{found:?}");
    }

    /// Rounds that come in two kinds, half and half, in runs of ten: the median may be either, and the interval says
    /// so.
    #[test]
    fn two_modes_are_both_in_the_interval() {
        let mut random = Random::new();
        let mut bimodal = |_: usize, round: usize, time: f64| {
            let slow = time < 150.0 && round % 20 < 10;
            time * if slow { 2.0 } else { 1.0 } * (1.0 + 0.02 * unit(&mut random))
        };
        let found = speed_up(&passes(3, 60, &[100.0, 170.0], &mut bimodal)).unwrap();
        assert!(found.interval.low < 0.9 && found.interval.high > 1.65, "{found:?}");
    }

    /// How often the interval holds the truth, where passes differ by 5 % (standard deviation of a uniform factor) and
    /// rounds by more.
    #[test]
    fn the_interval_holds_the_truth_nearly_always() {
        let mut random = Random::new();
        let mut held = 0;
        let all = 200;
        for _ in 0..all {
            let factors: Vec<f64> = (0..3).map(|_| 1.0 + 0.17 * (unit(&mut random) - 0.5)).collect();
            let mut noisy = |pass: usize, _: usize, time: f64| {
                let of_pass = if time < 110.0 { factors[pass] } else { 1.0 };
                time * of_pass * (1.0 + 0.2 * unit(&mut random))
            };
            held += usize::from(holds(speed_up(&passes(3, 15, &[100.0, 140.0], &mut noisy)).unwrap(), 1.4));
        }
        // Three passes are all on one side of the truth a quarter of the time; rounds' own spread makes up for a part
        // of that.
        assert!(held > all * 17 / 20, "{held} of {all}");
    }

    #[test]
    fn the_choice_between_equal_dense_baselines_is_part_of_the_interval() {
        let mut random = Random::new();
        let mut noisy = |_, _, time: f64| time * (1.0 + 0.3 * unit(&mut random));
        let one = speed_up(&passes(3, 20, &[100.0, 150.0], &mut noisy)).unwrap();
        let many = speed_up(&passes(3, 20, &[100.0, 150.0, 150.0, 150.0], &mut noisy)).unwrap();
        assert!(many.interval.low < one.interval.median, "{one:?} {many:?}");
    }

    #[test]
    fn a_kernel_with_fewer_rounds_is_still_compared() {
        let mut quiet = passes(2, 20, &[100.0, 150.0, 900.0], &mut |_, _, time| time);
        quiet.iter_mut().for_each(|pass| pass.dense[1].truncate(3));
        let found = speed_up(&quiet).unwrap();
        let Interval { median, low, high } = found.interval;
        // Up to the rounding of logarithms.
        assert!(found.dense == 0 && [median, low, high].iter().all(|value| (value - 1.5).abs() < 1e-9), "{found:?}");
    }

    #[test]
    fn without_rounds_there_is_no_speed_up() {
        assert_eq!(speed_up(&[]), None);
        assert_eq!(speed_up(&[Pass::default()]), None);
        assert_eq!(speed_up(&[Pass { sparse: vec![1.0], dense: vec![vec![]] }]), None);
    }

    #[test]
    fn blocks_hold_every_round_once() {
        for rounds in [1, 5, 12, 13, 40, 100] {
            let dense: Vec<f64> = (1..=rounds).map(f64::from).collect();
            let sparse = vec![1.0; rounds as usize];
            let medians = block_medians(&dense, &sparse);
            assert_eq!(medians.len(), (rounds as usize).min(BLOCKS));
            // Of an increasing sequence, later blocks have larger medians; they are listed from the last to the first.
            assert!(medians.windows(2).all(|pair| pair[0] > pair[1]), "{medians:?}");
        }
    }
}
