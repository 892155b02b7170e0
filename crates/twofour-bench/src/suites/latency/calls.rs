//! Latency of one call of a 2:4 layer, with one thread and with several: the median, and the percentiles of slow calls.
//!
//! In a model, a layer is called after some microseconds of other work, when helping threads may have gone to sleep; a
//! kernel that is measured in a tight loop never shows this. So calls are measured back to back and with pauses.

use std::{
    fmt,
    hint::black_box,
    time::{Duration, Instant},
};

use anyhow::Result;
use half::{bf16, f16};
use rayon::ThreadPool;
use serde::Serialize;
use twofour::{
    Compressed, DataType, MatrixRef,
    kernel::{Epilogue, KernelElement, SparseWeight, SparseWeightI8, SparseWeightInt4},
};
use twofour_cli::{
    dtype::not_on_cpu,
    interrupt,
    measure::{Shape, Work, random::Random, random_int4},
    threads,
    weight_format::WeightFormat,
};

/// The length of other work between two calls.
const PAUSE: Duration = Duration::from_micros(30);

/// The length of one turn of a number of threads.
const TURN: Duration = Duration::from_millis(10);

/// The fewest timed calls of each number of threads, even when the budget is used up: a 99th percentile of fewer is
/// unreliable.
const MIN_CALLS: usize = 300;

/// The work between two calls.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "kebab-case")]
pub(crate) enum Between {
    /// Nothing.
    BackToBack,
    /// 30 µs of other work on the calling thread.
    Pauses,
}

impl Between {
    pub(crate) const ALL: [Between; 2] = [Between::BackToBack, Between::Pauses];
}

impl fmt::Display for Between {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Between::BackToBack => "back to back",
            Between::Pauses => "30 us pauses",
        })
    }
}

/// The times of one call with a number of threads.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct LatencyRow {
    pub(crate) dtype: WeightFormat,
    /// Output and input features.
    pub(crate) shape: [usize; 2],
    pub(crate) tokens: usize,
    pub(crate) between: Between,
    pub(crate) threads: usize,
    /// Calls that were timed.
    pub(crate) calls: usize,
    pub(crate) p50_us: f64,
    pub(crate) p90_us: f64,
    pub(crate) p99_us: f64,
    pub(crate) max_us: f64,
}

/// One thread against several.
#[derive(Debug)]
pub(crate) struct Latencies {
    pools: [ThreadPool; 2],
}

impl Latencies {
    /// Compares one thread with `threads`.
    ///
    /// # Errors
    /// The operating system's error where it cannot create threads.
    pub(crate) fn new(threads: usize) -> Result<Self> {
        let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().map_err(threads::refused);
        Ok(Latencies { pools: [pool(1)?, pool(threads)?] })
    }

    /// Times calls of one layer for at least `budget`, interleaving one thread and several: returns a row for each.
    ///
    /// # Errors
    /// Those of the kernels, and [`interrupt::Interrupted`].
    pub(crate) fn measure(&self, work: Work, between: Between, budget: Duration) -> Result<[LatencyRow; 2]> {
        let mut call = layer(work)?;
        let mut times = [Vec::new(), Vec::new()];
        for pool in &self.pools {
            // The first call pays for page faults, the second for waking helpers.
            pool.install(|| turn(&mut call, between, Duration::ZERO, 2))?;
        }
        let begun = Instant::now();
        while begun.elapsed() < budget || times[0].len().min(times[1].len()) < MIN_CALLS {
            for (pool, times) in self.pools.iter().zip(&mut times) {
                interrupt::check()?;
                times.extend(pool.install(|| turn(&mut call, between, TURN, 1))?);
            }
        }
        let mut rows = self.pools.iter().zip(times).map(|(pool, times)| row(work, between, pool, times));
        Ok([(); 2].map(|()| rows.next().unwrap_or_else(|| unreachable!("there are two pools"))))
    }
}

/// Calls for a while, at least so many times, and returns the time of each call.
fn turn(call: &mut Call, between: Between, length: Duration, least: usize) -> Result<Vec<Duration>> {
    let mut times = Vec::new();
    let turn = Instant::now();
    while turn.elapsed() < length || times.len() < least {
        if between == Between::Pauses {
            other_work();
        }
        let begun = Instant::now();
        call()?;
        times.push(begun.elapsed());
    }
    Ok(times)
}

/// Keeps the calling thread's core busy for [`PAUSE`].
fn other_work() {
    let begun = Instant::now();
    let mut sum = 0u64;
    while begun.elapsed() < PAUSE {
        for i in 0..64 {
            sum = black_box(sum.wrapping_mul(31).wrapping_add(i));
        }
    }
}

fn row(work: Work, between: Between, pool: &ThreadPool, mut times: Vec<Duration>) -> LatencyRow {
    times.sort_unstable();
    // The smallest time that so large a share of the calls did not exceed.
    let percentile = |share: f64| {
        let rank = ((times.len() as f64 * share).ceil() as usize).clamp(1, times.len().max(1));
        times.get(rank - 1).map_or(0.0, |time| time.as_nanos() as f64 * 1e-3)
    };
    let Work { shape: Shape { out, inputs }, dtype, tokens } = work;
    LatencyRow {
        dtype,
        shape: [out, inputs],
        tokens,
        between,
        threads: pool.current_num_threads(),
        calls: times.len(),
        p50_us: percentile(0.5),
        p90_us: percentile(0.9),
        p99_us: percentile(0.99),
        max_us: percentile(1.0),
    }
}

/// One call of a layer.
type Call = Box<dyn FnMut() -> Result<()> + Send>;

/// A random 2:4 layer and its activations.
fn layer(work: Work) -> Result<Call> {
    match work.dtype {
        WeightFormat::Plain(DataType::F32) => float_layer::<f32>(work),
        WeightFormat::Plain(DataType::BF16) => float_layer::<bf16>(work),
        WeightFormat::Plain(DataType::F16) => float_layer::<f16>(work),
        WeightFormat::Plain(DataType::I8) => int8_layer(work),
        WeightFormat::Int4 => int4_layer(work),
        other => Err(not_on_cpu(other)),
    }
}

fn float_layer<T: KernelElement>(Work { shape: Shape { out, inputs }, tokens, .. }: Work) -> Result<Call> {
    let mut random = Random::new();
    let mut floats = |count: usize| (0..count).map(|_| T::from_f32(random.float())).collect::<Vec<T>>();
    let (weight, x) = (floats(out * inputs), floats(tokens * inputs));
    let weight = SparseWeight::pack(Compressed::from_pruned(MatrixRef::new(out, inputs, &weight)?)?)?;
    let mut y = vec![T::ZERO; tokens * out];
    Ok(Box::new(move || Ok(weight.linear(&x, tokens, Epilogue::default(), &mut y)?)))
}

fn int8_layer(Work { shape: Shape { out, inputs }, tokens, .. }: Work) -> Result<Call> {
    let mut random = Random::new();
    let weight: Vec<i8> = (0..out * inputs).map(|_| (random.bits() >> 56) as i8).collect();
    let x: Vec<f32> = (0..tokens * inputs).map(|_| random.float()).collect();
    let compressed = Compressed::from_pruned(MatrixRef::new(out, inputs, &weight)?)?;
    let weight = SparseWeightI8::with_scales(compressed, vec![0.01; out])?;
    let mut y = vec![0.0; tokens * out];
    Ok(Box::new(move || Ok(weight.linear(&x, tokens, Epilogue::default(), &mut y)?)))
}

fn int4_layer(Work { shape: Shape { out, inputs }, tokens, .. }: Work) -> Result<Call> {
    let mut random = Random::new();
    let weight = SparseWeightInt4::of(&random_int4(&mut random, out, inputs)?)?;
    let x: Vec<f32> = (0..tokens * inputs).map(|_| random.float()).collect();
    let mut y = vec![0.0; tokens * out];
    Ok(Box::new(move || Ok(weight.linear(&x, tokens, Epilogue::default(), &mut y)?)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_dtype_is_timed_with_both_numbers_of_threads() {
        let latencies = Latencies::new(2).unwrap();
        for dtype in twofour_cli::dtype::ON_CPU {
            for between in Between::ALL {
                let work = Work { shape: Shape { out: 40, inputs: 64 }, dtype, tokens: 3 };
                let rows = latencies.measure(work, between, Duration::ZERO).unwrap();
                assert_eq!(rows.each_ref().map(|row| row.threads), [1, 2]);
                for row in rows {
                    assert!(row.calls >= MIN_CALLS && 0.0 < row.p50_us && row.p50_us <= row.p90_us, "{row:?}");
                    assert!(row.p90_us <= row.p99_us && row.p99_us <= row.max_us, "{row:?}");
                }
            }
        }
    }

    #[test]
    fn percentiles_are_times_that_were_measured() {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(1).build().unwrap();
        let work = Work { shape: Shape { out: 1, inputs: 1 }, dtype: DataType::F32.into(), tokens: 1 };
        let of = |count: u64| {
            let times = (1..=count).rev().map(Duration::from_micros).collect();
            let row = row(work, Between::Pauses, &pool, times);
            [row.p50_us, row.p90_us, row.p99_us, row.max_us].map(|us| us.round() as u64)
        };
        assert_eq!([of(200), of(1)], [[100, 180, 198, 200], [1, 1, 1, 1]]);
    }
}
