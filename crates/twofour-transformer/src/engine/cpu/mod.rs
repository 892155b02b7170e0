//! f32 on the CPU, in parallel on rayon's current pool.

mod activation;
mod attention;
mod buffer;
mod layers;
mod linear;
mod memory;
mod norm;
mod sparse;
mod step;
#[cfg(test)]
mod tests;

pub use attention::CpuAttention;
pub use buffer::CpuBuffer;
use buffer::expect_length;
pub use sparse::CpuSparseLinear;
pub use step::CpuStepGuard;

use super::{Buffer as _, Engine, LinearShape};
use crate::Result;

/// The CPU. Its compute type is f32, so parameters have no copies.
#[derive(Debug, Clone, Copy, Default)]
pub struct CpuEngine;

/// Number of rows of `width` elements in a buffer.
fn rows_of(what: &'static str, buffer: &CpuBuffer, width: usize) -> Result<usize> {
    let rows = buffer.len().checked_div(width).unwrap_or(0);
    expect_length(what, rows * width, buffer.len())?;
    Ok(rows)
}

impl LinearShape {
    fn expect(&self, x: &CpuBuffer, y: &CpuBuffer, weight: &CpuBuffer) -> Result<(usize, usize, usize)> {
        let LinearShape { tokens, out_features, in_features } = *self;
        expect_length("the input of a linear layer", tokens * in_features, x.len())?;
        expect_length("the output of a linear layer", tokens * out_features, y.len())?;
        expect_length("the weight of a linear layer", out_features * in_features, weight.len())?;
        Ok((tokens, out_features, in_features))
    }
}

impl Engine for CpuEngine {
    /// On a thread of rayon's pool: from outside, each of a step's many parallel loops would wake the pool and wait for
    /// it.
    fn scope<R: Send>(work: impl FnOnce() -> R + Send) -> R {
        rayon::scope(|_| work())
    }
}
