//! One linear layer, dense against 2:4.

use std::time::Duration;

use anyhow::Result;
use clap::ValueEnum;
use half::{bf16, f16};
use serde::Serialize;
use twofour::{
    Compressed, MatrixRef,
    kernel::{DenseWeight, Epilogue, KernelElement, SparseWeight},
};

use super::{machine, medians};

/// The dtype of weights and activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum WeightDType {
    /// IEEE single.
    F32,
    /// Brain floating point.
    #[default]
    Bf16,
    /// IEEE half.
    F16,
}

/// What a layer takes, dense and 2:4.
#[derive(Debug, Clone, Copy, Serialize)]
pub(crate) struct LayerTiming {
    /// Median time of the dense product, in microseconds.
    pub(crate) dense_us: f64,
    /// Median time of the 2:4 product, in microseconds.
    pub(crate) sparse_us: f64,
    /// Bytes of the dense weight.
    pub(crate) dense_bytes: usize,
    /// Bytes of the 2:4 weight: values and metadata.
    pub(crate) sparse_bytes: usize,
}

impl LayerTiming {
    /// How many times faster the 2:4 product is.
    pub(crate) fn speed_up(&self) -> f64 {
        self.dense_us / self.sparse_us
    }
}

/// Memory that all copies of a weight take at most.
const MOST_BYTES: usize = 2 << 30;

/// Where the cache's size is unknown, it is taken for this.
const ASSUMED_CACHE: u64 = 64 << 20;

/// Measures `y = x · Wᵀ` for a random weight `[out, inputs]` with this project's own dense and 2:4 kernels, in turns, for about
/// `budget`. So many copies of the weight take turns too that none is still in a cache when its turn comes, as in a model.
pub(crate) fn layer(
    out: usize,
    inputs: usize,
    tokens: usize,
    dtype: WeightDType,
    budget: Duration,
) -> Result<LayerTiming> {
    match dtype {
        WeightDType::F32 => of::<f32>(out, inputs, tokens, budget),
        WeightDType::Bf16 => of::<bf16>(out, inputs, tokens, budget),
        WeightDType::F16 => of::<f16>(out, inputs, tokens, budget),
    }
}

fn of<T: KernelElement>(out: usize, inputs: usize, tokens: usize, budget: Duration) -> Result<LayerTiming> {
    let mut random = Random(0x2545_F491_4F6C_DD1D);
    let weight: Vec<T> = (0..out * inputs).map(|_| T::from_f32(random.next())).collect();
    let x: Vec<T> = (0..tokens * inputs).map(|_| T::from_f32(random.next())).collect();
    let matrix = MatrixRef::new(out, inputs, &weight)?;
    let dense = DenseWeight::pack(matrix)?;
    let sparse = SparseWeight::pack(Compressed::from_pruned(matrix)?)?;
    let (dense_bytes, sparse_bytes) = (dense.bytes(), sparse.bytes());
    let cache = machine::machine()?.last_level_cache_bytes.unwrap_or(ASSUMED_CACHE) as usize;
    let copies = |bytes: usize| (3 * cache / bytes.max(1) + 1).min(MOST_BYTES / bytes.max(1)).max(1);
    let dense = vec![dense; copies(dense_bytes)];
    let sparse = vec![sparse; copies(sparse_bytes)];
    let (mut y, mut y_sparse) = (vec![T::ZERO; tokens * out], vec![T::ZERO; tokens * out]);
    let (mut dense_turns, mut sparse_turns) = (dense.iter().cycle(), sparse.iter().cycle());
    let mut run_dense = || match dense_turns.next() {
        Some(weight) => Ok(weight.linear(&x, tokens, Epilogue::default(), &mut y)?),
        None => Ok(()),
    };
    let mut run_sparse = || match sparse_turns.next() {
        Some(weight) => Ok(weight.linear(&x, tokens, Epilogue::default(), &mut y_sparse)?),
        None => Ok(()),
    };
    let times = medians(&mut [&mut run_dense, &mut run_sparse], budget)?;
    let us = |time: Duration| time.as_secs_f64() * 1e6;
    Ok(LayerTiming { dense_us: us(times[0]), sparse_us: us(times[1]), dense_bytes, sparse_bytes })
}

/// Numbers between -1 and 1 without a pattern (xorshift64*, Vigna 2016).
struct Random(u64);

impl Random {
    fn next(&mut self) -> f32 {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let bits = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 40;
        bits as f32 / (1u64 << 23) as f32 - 1.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_products_are_timed_and_weighed() {
        let timing = layer(64, 128, 2, WeightDType::Bf16, Duration::from_millis(5)).unwrap();
        assert_eq!((timing.dense_bytes, timing.sparse_bytes), (64 * 128 * 2, 64 * 128 * 2 * 9 / 16));
        assert!(timing.dense_us > 0.0 && timing.sparse_us > 0.0);
    }
}
