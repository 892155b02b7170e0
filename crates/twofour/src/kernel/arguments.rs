//! Checks of what a product is called with, and the shared way from a product to the stored output.

use bytemuck::Pod;

use super::{
    epilogue::Epilogue,
    format::KernelElement,
    scratch::Scratch,
    share::{MIN_PART, share_elements},
    strips::ROWS,
};
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
pub(super) fn widened<T: KernelElement>(x: &[T]) -> Vec<f32> {
    x.iter().map(|v| v.to_f32()).collect()
}

/// Sums of products, `[strip, stride, ROWS]`.
#[derive(Debug)]
pub(in crate::kernel) struct Sums<S: Pod> {
    pub(super) values: Scratch<S>,
    /// Tokens of a strip; those past the ones asked for mean nothing.
    pub(super) stride: usize,
}

impl<S: Pod + Sync> Sums<S> {
    /// Stores them as `[tokens, out_features]`: `output(sums, token, first, y)` fills `y`, a token's outputs from
    /// `first` on.
    pub(super) fn store<T: Send>(
        &self,
        tokens: usize,
        y: &mut [T],
        output: impl Fn(&[S; ROWS], usize, usize, &mut [T]) + Sync,
    ) {
        let out_features = y.len() / tokens.max(1);
        if out_features == 0 {
            return;
        }
        let sums = self.values.as_chunks::<ROWS>().0;
        let store = |(token, y): (usize, &mut [T])| {
            for (strip, y) in y.chunks_mut(ROWS).enumerate() {
                output(&sums[strip * self.stride + token], token, strip * ROWS, y);
            }
        };
        let part = MIN_PART.div_ceil(out_features);
        let store_part = |(i, y): (usize, &mut [T])| {
            (i * part..).zip(y.chunks_mut(out_features)).for_each(store);
        };
        share_elements(y.len(), y.chunks_mut(part * out_features).enumerate(), store_part);
    }
}

impl Sums<f32> {
    /// Stores them as `[tokens, out_features]` through the epilogue.
    pub(super) fn store_floats<T: KernelElement>(&self, tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) {
        self.store(tokens, y, |sums, _, first, y| {
            let mut products = *sums;
            epilogue.apply(&mut products[..y.len()], first);
            y.iter_mut().zip(products).for_each(|(y, product)| *y = T::from_f32(product));
        });
    }
}
