//! Checks of what a product is called with, and the shared way from a product to the stored output.

use rayon::prelude::*;

use super::{Epilogue, KernelElement, strips::ROWS};
use crate::{Error, Result};

/// An error unless the buffer has `tokens * features` elements.
pub(super) fn expect_len<T>(what: &'static str, buffer: &[T], tokens: usize, features: usize) -> Result<()> {
    let expected = tokens.checked_mul(features).ok_or_else(|| Error::TooLarge { shape: vec![tokens, features] })?;
    if buffer.len() == expected { Ok(()) } else { Err(Error::Length { what, expected, found: buffer.len() }) }
}

/// An error unless there is a bias for each output feature.
pub(super) fn expect_bias(epilogue: &Epilogue<'_>, out_features: usize) -> Result<()> {
    epilogue.bias.map_or(Ok(()), |bias| expect_len("bias", bias, 1, out_features))
}

/// Widens activations to f32.
pub(super) fn widen<T: KernelElement>(x: &[T]) -> Vec<f32> {
    x.iter().map(|v| v.to_f32()).collect()
}

/// Stores sums, `[strip, token, ROWS]`, as `[tokens, out_features]` outputs: `output(sum, token, out)`.
pub(super) fn store<S: Copy + Sync, T: Send>(
    sums: &[S],
    tokens: usize,
    y: &mut [T],
    output: impl Fn(S, usize, usize) -> T + Sync,
) {
    let out_features = y.len() / tokens.max(1);
    if out_features == 0 {
        return;
    }
    y.par_chunks_mut(out_features).enumerate().for_each(|(token, y)| {
        for (strip, y) in y.chunks_mut(ROWS).enumerate() {
            let sums = &sums[(strip * tokens + token) * ROWS..][..ROWS];
            for (row, (y, sum)) in y.iter_mut().zip(sums).enumerate() {
                *y = output(*sum, token, strip * ROWS + row);
            }
        }
    });
}
