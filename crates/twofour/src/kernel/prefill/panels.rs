//! Activations cut into panels of tokens, and products put back into rows.

use rayon::prelude::*;

use super::{
    super::{Epilogue, KernelElement, scratch::Scratch},
    GROUP,
};

/// Lines of a panel that are packed together.
const LINES: usize = 64;

/// Tokens whose outputs are stored together: as many as divide any panel.
const TOKENS: usize = 8;

/// Outputs that are stored together: a cache line of f32.
const OUTS: usize = 16;

/// Panels of equal width but for the last: `[panel][lines, stride]`, completed with zero tokens and with zero lines to a
/// multiple of [`GROUP`].
#[derive(Debug)]
pub(super) struct Panels {
    data: Scratch<f32>,
    lines: usize,
    stride: usize,
    padded_tokens: usize,
}

/// A run of tokens.
#[derive(Debug)]
pub(super) struct Panel<'a> {
    /// `[lines, stride]`.
    pub data: &'a [f32],
    /// Its first token.
    pub first: usize,
    /// Its tokens, a multiple of the lanes.
    pub width: usize,
}

impl Panels {
    /// Packs `[tokens, depth]` activations into as few panels of at most `vectors` vectors as there can be.
    pub(super) fn pack<T: KernelElement>(x: &[T], tokens: usize, depth: usize, lanes: usize, vectors: usize) -> Self {
        let padded_tokens = tokens.next_multiple_of(lanes);
        let count = padded_tokens.div_ceil(lanes * vectors);
        let stride = (padded_tokens / lanes).div_ceil(count.max(1)) * lanes;
        let lines = depth.next_multiple_of(GROUP);
        let mut data = Scratch::take(count * lines * stride);
        if !data.is_empty() {
            data.par_chunks_mut(lines * stride).enumerate().for_each(|(panel, data)| {
                let first = panel * stride;
                let (data, padding) = data.split_at_mut(depth * stride);
                padding.fill(0.0);
                data.par_chunks_mut(LINES * stride).enumerate().for_each(|(i, lines)| {
                    let end = (first + stride).min(tokens);
                    for token in first..end {
                        let x = &x[token * depth + i * LINES..(token + 1) * depth];
                        for (line, x) in lines.chunks_exact_mut(stride).zip(x) {
                            line[token - first] = x.to_f32();
                        }
                    }
                    if end < first + stride {
                        lines.chunks_exact_mut(stride).for_each(|line| line[end - first..].fill(0.0));
                    }
                });
            });
        }
        Self { data, lines, stride, padded_tokens }
    }

    /// Tokens including those that complete the last vector.
    pub(super) fn padded_tokens(&self) -> usize {
        self.padded_tokens
    }

    /// Tokens from one line of a panel to the next.
    pub(super) fn stride(&self) -> usize {
        self.stride
    }

    /// The panels in order of token.
    pub(super) fn iter(&self) -> impl Iterator<Item = Panel<'_>> {
        (0..self.padded_tokens).step_by(self.stride.max(1)).map(|first| Panel {
            data: &self.data[first * self.lines..][..self.lines * self.stride],
            first,
            width: self.width(first),
        })
    }

    fn width(&self, first: usize) -> usize {
        self.stride.min(self.padded_tokens - first)
    }
}

/// Stores products, `[block][panel][outs of the block, tokens of the panel]`, as `[tokens, outs]`, through the epilogue.
pub(super) fn unpack<T: KernelElement>(
    products: &[f32],
    panels: &Panels,
    outs: usize,
    block: usize,
    epilogue: Epilogue<'_>,
    y: &mut [T],
) {
    y.par_chunks_mut(TOKENS * outs).enumerate().for_each(|(i, y)| {
        let token = i * TOKENS;
        let first = token / panels.stride * panels.stride;
        let width = panels.width(first);
        for (products, start) in products.chunks(block * panels.padded_tokens).zip((0..outs).step_by(block)) {
            let rows = block.min(outs - start);
            let lines = &products[rows * first..][..rows * width];
            for (lines, out) in lines.chunks(OUTS * width).zip((start..).step_by(OUTS)) {
                // Transposed in a small square, and stored from there.
                let mut square = [[0.0; OUTS]; TOKENS];
                for (o, line) in lines.chunks_exact(width).enumerate() {
                    for (row, product) in square.iter_mut().zip(&line[token - first..][..TOKENS]) {
                        row[o] = *product;
                    }
                }
                let outputs = lines.len() / width;
                for (y, row) in y.chunks_exact_mut(outs).zip(&mut square) {
                    epilogue.apply(&mut row[..outputs], out);
                    y[out..out + outputs].iter_mut().zip(row).for_each(|(y, product)| *y = T::from_f32(*product));
                }
            }
        }
    });
}
