//! Checks of what a product is called with, and the shared way from a product to the stored output.

use rayon::prelude::*;

use super::{Epilogue, KernelElement};
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

/// Stores `[out_features, tokens]` products as `[tokens, out_features]` outputs, through the epilogue.
pub(super) fn store<T: KernelElement>(products: &[f32], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) {
    let out_features = y.len() / tokens.max(1);
    if out_features == 0 {
        return;
    }
    y.par_chunks_mut(out_features).enumerate().with_min_len(1).for_each(|(token, y)| {
        for (out, y) in y.iter_mut().enumerate() {
            *y = T::from_f32(epilogue.apply(products[out * tokens + token], out));
        }
    });
}
