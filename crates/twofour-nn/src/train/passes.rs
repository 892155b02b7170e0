//! The order in which samples are taken.

use crate::random::Stream;

/// The samples of a step that takes `batch` of them. Every pass over the samples takes each once, in an order of its
/// own, which depends on the seed and the number of the pass alone.
pub(super) fn drawn(samples: &[u32], batch: usize, seed: u64, step: u64) -> Vec<u32> {
    let count = samples.len() as u64;
    let first = step.wrapping_mul(batch as u64);
    let mut pass = None;
    let sample = |index: u64| {
        let at = first.wrapping_add(index);
        let number = at / count;
        let order = match &mut pass {
            Some((known, order)) if *known == number => order,
            pass => &mut pass.insert((number, shuffled(samples, seed, number))).1,
        };
        order[(at % count) as usize]
    };
    (0..batch as u64).map(sample).collect()
}

/// The order of a pass over some samples (Fisher and Yates).
fn shuffled(samples: &[u32], seed: u64, pass: u64) -> Vec<u32> {
    let stream = Stream::new(seed, &format!("pass {pass}"));
    let mut order = samples.to_vec();
    for at in (1..order.len()).rev() {
        order.swap(at, stream.below(at as u64, at as u64 + 1) as usize);
    }
    order
}
