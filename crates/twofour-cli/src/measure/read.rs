//! This machine's read bandwidth, as a loop reaches it that only reads.
//!
//! Integer sums, which the compiler vectorizes. The instructions' width does not matter: a core requests far fewer
//! bytes a cycle than even narrow loads can. What differs is the number of streams that the prefetchers see, and the
//! division among threads.

use std::{
    hint::black_box,
    sync::atomic::{AtomicU64, Ordering},
    time::Duration,
};

use anyhow::Result;
use serde::{Deserialize, Serialize};
use twofour::kernel::share;

use super::{alternate::alternate, memory::rotation_bytes, random::Random};

/// A cache line.
type Line = [u64; 8];

const LINE: usize = size_of::<Line>();

/// The division of a buffer among threads.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Share {
    /// Each reads one part.
    Parts,
    /// Each thread reads the next block of this many lines when it is done with one.
    Blocks(usize),
}

/// A way of reading.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Variant {
    /// Streams that one thread reads concurrently.
    streams: usize,
    share: Share,
}

const VARIANTS: [Variant; 8] = [
    Variant { streams: 1, share: Share::Parts },
    Variant { streams: 4, share: Share::Parts },
    Variant { streams: 16, share: Share::Parts },
    Variant { streams: 1, share: Share::Blocks(4096) },
    Variant { streams: 2, share: Share::Blocks(4096) },
    Variant { streams: 4, share: Share::Blocks(4096) },
    Variant { streams: 8, share: Share::Blocks(4096) },
    Variant { streams: 16, share: Share::Blocks(4096) },
];

impl Variant {
    fn name(self) -> String {
        let share = match self.share {
            Share::Parts => "a part for each thread".to_owned(),
            Share::Blocks(lines) => format!("blocks of {} KiB", (lines * LINE) >> 10),
        };
        format!("{} stream{}, {share}", self.streams, if self.streams == 1 { "" } else { "s" })
    }

    fn read(self, lines: &[Line]) -> u64 {
        let part = match self.share {
            Share::Parts => lines.len().div_ceil(rayon::current_num_threads()),
            Share::Blocks(lines) => lines,
        };
        let sum = |part: &[Line]| match self.streams {
            1 => sum::<1>(part),
            2 => sum::<2>(part),
            4 => sum::<4>(part),
            8 => sum::<8>(part),
            _ => sum::<16>(part),
        };
        let total = AtomicU64::new(0);
        share(
            lines.chunks(part.max(1)),
            || (),
            |(), part| {
                total.fetch_add(sum(part), Ordering::Relaxed);
            },
        );
        total.into_inner()
    }
}

/// Returns the sum of all words, read in `STREAMS` interleaved streams.
fn sum<const STREAMS: usize>(lines: &[Line]) -> u64 {
    let each = lines.len() / STREAMS;
    let streams: [&[Line]; STREAMS] = std::array::from_fn(|stream| &lines[stream * each..][..each]);
    let mut sums: Line = [0; 8];
    let mut add = |line: &Line| sums.iter_mut().zip(line).for_each(|(sum, word)| *sum = sum.wrapping_add(*word));
    for at in 0..each {
        streams.iter().for_each(|stream| add(&stream[at]));
    }
    lines[each * STREAMS..].iter().for_each(&mut add);
    sums.into_iter().fold(0, u64::wrapping_add)
}

/// The read bandwidth with a number of threads.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct ReadBandwidth {
    /// Threads that read.
    pub threads: usize,
    /// 10^9 bytes a second, by the median time of the best variant.
    pub gb_per_s: f64,
    /// The fastest way of reading on this machine.
    pub variant: String,
    /// Bytes of one measurement.
    pub buffer_bytes: usize,
}

/// A buffer larger than any cache, and the fastest way of reading it.
#[derive(Debug)]
pub(crate) struct Reader {
    lines: Vec<Line>,
    variant: Variant,
    at: usize,
}

impl Reader {
    /// Fills a buffer with random numbers and finds the fastest way of reading it, by measuring for about `budget`.
    pub(crate) fn new(budget: Duration) -> Result<(Self, ReadBandwidth)> {
        let mut random = Random::new();
        let count = rotation_bytes() / LINE;
        let lines: Vec<Line> = (0..count).map(|_| std::array::from_fn(|_| random.bits())).collect();
        let mut runs: Vec<_> = VARIANTS
            .iter()
            .map(|variant| {
                || {
                    black_box(variant.read(&lines));
                    Ok(())
                }
            })
            .collect();
        let mut turns: Vec<&mut dyn FnMut() -> Result<()>> = runs.iter_mut().map(|run| run as _).collect();
        let times = alternate(&mut turns, budget)?;
        let mut best = 0;
        for (which, time) in times.iter().enumerate() {
            let gb_per_s = gb_per_s(count * LINE, time.median);
            tracing::debug!(variant = VARIANTS[which].name(), gb_per_s, "read bandwidth");
            if time.median < times[best].median {
                best = which;
            }
        }
        let bandwidth = ReadBandwidth {
            threads: rayon::current_num_threads(),
            gb_per_s: gb_per_s(count * LINE, times[best].median),
            variant: VARIANTS[best].name(),
            buffer_bytes: count * LINE,
        };
        Ok((Reader { lines, variant: VARIANTS[best], at: 0 }, bandwidth))
    }

    /// Reads the next `bytes` bytes (at most the buffer) and returns the number of bytes read.
    pub(crate) fn read(&mut self, bytes: usize) -> usize {
        let count = bytes.div_ceil(LINE).min(self.lines.len());
        if self.at + count > self.lines.len() {
            self.at = 0;
        }
        black_box(self.variant.read(&self.lines[self.at..][..count]));
        self.at += count;
        count * LINE
    }
}

/// Returns 10^9 bytes a second.
pub(crate) fn gb_per_s(bytes: usize, time: Duration) -> f64 {
    bytes as f64 / time.as_secs_f64() / 1e9
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_variant_reads_every_word_once() {
        let mut random = Random::new();
        for count in [0, 1, 3, 5, 8192, 20_001] {
            let lines: Vec<Line> = (0..count).map(|_| std::array::from_fn(|_| random.bits())).collect();
            let expected = lines.iter().flatten().fold(0u64, |sum, word| sum.wrapping_add(*word));
            for variant in VARIANTS {
                assert_eq!(variant.read(&lines), expected, "{} of {count}", variant.name());
            }
        }
    }
}
