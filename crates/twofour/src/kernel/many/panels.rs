//! Activations cut into panels of tokens, and products put back into rows.

use std::ops::Range;

use super::GROUP;
use crate::kernel::{dense::Rows, epilogue::Epilogue, format::KernelElement, scratch::Scratch, share::share_elements};

/// Lines of a panel that are packed together.
const LINES: usize = 32;

/// Tokens, and outputs, that are transposed together: a cache line of f32.
const SQUARE: usize = 16;

/// Panels of equal width but for the last: `[panel][lines, stride]`, completed with zero tokens and with zero lines to
/// a multiple of [`GROUP`].
#[derive(Debug)]
pub(super) struct Panels {
    data: Scratch<f32>,
    lines: usize,
    stride: usize,
    padded_tokens: usize,
}

/// A run of tokens.
#[derive(Debug)]
pub(super) struct Panel {
    /// Its first token.
    pub first: usize,
    /// Its tokens, a multiple of the lanes.
    pub width: usize,
}

/// Some lines of a panel.
#[derive(Debug, Clone, Copy)]
pub(super) struct Lines<'a> {
    /// `[lines, stride]`.
    pub data: &'a [f32],
    /// Tokens from one line to the next.
    pub stride: usize,
    /// The lines that will be multiplied after these, of this panel or another.
    pub next: &'a [f32],
}

/// Some lines of a panel, to be filled.
struct Part<'a> {
    /// The panel's first token.
    first: usize,
    /// Tokens from one line to the next.
    stride: usize,
    /// The first line.
    top: usize,
    /// The lines.
    lines: &'a mut [f32],
}

impl Panels {
    /// Packs `[tokens, depth]` activations into as few panels of at most `vectors` vectors as there can be.
    pub(super) fn pack<T: KernelElement>(x: &[T], tokens: usize, depth: usize, lanes: usize, vectors: usize) -> Self {
        Self::fill(tokens, depth, lanes, vectors, |Part { first, stride, top, lines }| {
            let end = (first + stride).min(tokens);
            for token in (first..first + stride).step_by(SQUARE) {
                let width = SQUARE.min(first + stride - token);
                let depth_range = top..top + lines.len() / stride;
                // Lines of a panel are far apart: transposed in a small square, they are written whole.
                let mut square = [[0.0; SQUARE]; LINES];
                for (t, token) in (token..end.min(token + width)).enumerate() {
                    let x = &x[token * depth..][depth_range.clone()];
                    square.iter_mut().zip(x).for_each(|(line, x)| line[t] = x.to_f32());
                }
                for (line, square) in lines.chunks_exact_mut(stride).zip(&square) {
                    line[token - first..][..width].copy_from_slice(&square[..width]);
                }
            }
        })
    }

    /// Packs some columns of a `[depth, columns]` matrix, each of which takes the place of a token.
    pub(super) fn of_columns(x: Rows<'_, f32>, cols: Range<usize>, lanes: usize, vectors: usize) -> Self {
        Self::fill(cols.len(), x.rows, lanes, vectors, |Part { first, stride, top, lines }| {
            let width = stride.min(cols.len() - first);
            for (line, row) in lines.chunks_exact_mut(stride).zip(top..) {
                let (values, padding) = line.split_at_mut(width);
                values.copy_from_slice(&x.values[row * x.cols + cols.start + first..][..width]);
                padding.fill(0.0);
            }
        })
    }

    /// Makes room for as few panels of at most `vectors` vectors as there can be, and fills them by parts, in parallel.
    fn fill(tokens: usize, depth: usize, lanes: usize, vectors: usize, pack: impl Fn(Part<'_>) + Sync) -> Self {
        let padded_tokens = tokens.next_multiple_of(lanes);
        let count = padded_tokens.div_ceil(lanes * vectors);
        let stride = (padded_tokens / lanes).div_ceil(count.max(1)) * lanes;
        let lines = depth.next_multiple_of(GROUP);
        let mut data = Scratch::take(count * lines * stride);
        if !data.is_empty() {
            let mut parts = Vec::with_capacity(count * depth.div_ceil(LINES));
            for (panel, data) in data.chunks_mut(lines * stride).enumerate() {
                let (data, padding) = data.split_at_mut(depth * stride);
                padding.fill(0.0);
                let part = |(i, lines)| Part { first: panel * stride, stride, top: i * LINES, lines };
                parts.extend(data.chunks_mut(LINES * stride).enumerate().map(part));
            }
            share_elements(tokens * depth, parts.into_iter(), pack);
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

    /// How many there are.
    pub(super) fn count(&self) -> usize {
        self.padded_tokens.div_ceil(self.stride.max(1))
    }

    /// The panels in order of token.
    pub(super) fn iter(&self) -> impl Iterator<Item = Panel> {
        (0..self.padded_tokens).step_by(self.stride.max(1)).map(|first| Panel { first, width: self.width(first) })
    }

    /// A panel's lines of a part of the depth, completed to a multiple of [`GROUP`].
    pub(super) fn lines(&self, panel: usize, depth: &Range<usize>) -> &[f32] {
        let depth = depth.start..depth.end.next_multiple_of(GROUP);
        &self.data[panel * self.stride * self.lines..][depth.start * self.stride..depth.end * self.stride]
    }

    fn width(&self, first: usize) -> usize {
        self.stride.min(self.padded_tokens - first)
    }
}

/// Some output features of every token: what a thread stores its products in.
#[derive(Debug)]
pub(in crate::kernel) struct ColumnBlock<'a, T> {
    first: usize,
    /// `[tokens][outs of the block]`.
    rows: Vec<&'a mut [T]>,
}

impl<T> ColumnBlock<'_, T> {
    /// A token's outputs.
    pub(in crate::kernel) fn row_mut(&mut self, token: usize) -> &mut [T] {
        self.rows[token]
    }

    /// The output features.
    pub(in crate::kernel) fn cols(&self) -> Range<usize> {
        self.first..self.first + self.rows.first().map_or(0, |row| row.len())
    }
}

/// Cuts `y`, `[tokens, outs]`, into blocks of so many outputs, the last of fewer.
pub(in crate::kernel) fn column_blocks<T>(y: &mut [T], outs: usize, block: usize) -> Vec<ColumnBlock<'_, T>> {
    let tokens = y.len() / outs;
    let mut blocks: Vec<_> =
        (0..outs).step_by(block).map(|first| ColumnBlock { first, rows: Vec::with_capacity(tokens) }).collect();
    for row in y.chunks_exact_mut(outs) {
        blocks.iter_mut().zip(row.chunks_mut(block)).for_each(|(block, part)| block.rows.push(part));
    }
    blocks
}

/// Stores products, `[panel][outs of the block, tokens of the panel]`, through the epilogue.
pub(super) fn unpack<T: KernelElement>(
    products: &[f32],
    panels: &Panels,
    epilogue: Epilogue<'_>,
    block: &mut ColumnBlock<'_, T>,
) {
    let outs = block.cols();
    for panel in panels.iter() {
        let lines = &products[outs.len() * panel.first..][..outs.len() * panel.width];
        let rows = block.rows.iter_mut().skip(panel.first).take(panel.width);
        let mut rows: Vec<_> = rows.collect();
        for (rows, token) in rows.chunks_mut(SQUARE).zip((0..).step_by(SQUARE)) {
            for (lines, out) in lines.chunks(SQUARE * panel.width).zip((0..).step_by(SQUARE)) {
                // Transposed in a small square, and stored from there.
                let mut square = [[0.0; SQUARE]; SQUARE];
                let outputs = lines.len() / panel.width;
                for (o, line) in lines.chunks_exact(panel.width).enumerate() {
                    for (row, product) in square.iter_mut().zip(&line[token..panel.width.min(token + SQUARE)]) {
                        row[o] = *product;
                    }
                }
                for (y, products) in rows.iter_mut().zip(&mut square) {
                    epilogue.apply(&mut products[..outputs], outs.start + out);
                    let y = &mut y[out..out + outputs];
                    y.iter_mut().zip(products).for_each(|(y, product)| *y = T::from_f32(*product));
                }
            }
        }
    }
}
