//! Weights of four-bit integers ([`crate::int4`]), multiplied with floats.
//!
//! `y = act(x · Wᵀ + bias)`, `W = q · scale`. There is no arithmetic on four-bit integers here: parts of the weight become floats in a core's own
//! cache, and the kernels of floats multiply those. So the memory is read as four bits, and each call computes `q · scale` anew.
//!
//! The layout is that of [`super::strips`] with a byte for each row of a line: the first value in its lower half, the second in its upper one, both
//! plus 8. After the strips come the scales in f32, sixteen for each strip and group of columns.

mod pack;
mod shape;
mod widen;

use std::{any::TypeId, borrow::Cow, ops::Range};

use half::{bf16, f16};

use super::{
    aligned::CACHE_LINE,
    arguments::{expect_bias, expect_len},
    borrowed::SparseWeightRef,
    decode::{self, Factor},
    element::KernelElement,
    engine::{Cpu, Engine},
    epilogue::Epilogue,
    scratch::Scratch,
    share::{share, share_elements},
    strips::{Order, ROWS, Strips, StripsRef},
};
use crate::{
    Compressed, Result, compressed,
    int4::{Granularity, Int4},
};
use pack::OFFSET;
pub use pack::{pack_int4, packed_bytes_int4};
use shape::{BLOCK_BYTES, BLOCK_COLS, BLOCK_LINES, Shape};
use widen::Wide;

/// Columns that become floats at a time: of four strips they fit a core's second cache with room to spare.
const CHUNK: usize = 512;

/// Strips that become floats at a time with few tokens: as many as kernels walk side by side.
const SIDE_BY_SIDE: usize = 4;

/// Tokens from which rows become floats for all tokens together: from there on the kernels of floats have ways of their own.
const MANY: usize = 96;

/// Bytes of floats that such rows become, about.
const MANY_BYTES: usize = 8 << 20;

/// A packed four-bit weight `[out_features, in_features]` in borrowed memory, which [`pack_int4`] filled.
#[derive(Debug, Clone, Copy)]
pub struct SparseWeightInt4Ref<'a> {
    shape: Shape,
    strips: &'a [u8],
    scales: &'a [u8],
    cpu: Cpu,
}

impl<'a> SparseWeightInt4Ref<'a> {
    /// The weight in `bytes`, to be multiplied by [`Engine::best`]. Any contents are a weight: a GEMM with memory that was never filled is sound, but
    /// its result is meaningless.
    ///
    /// # Errors
    /// [`crate::Error::Length`] for another length than [`packed_bytes_int4`], [`crate::Error::TooLarge`]; those of [`Engine::best`].
    pub fn new((out_features, in_features): (usize, usize), granularity: Granularity, bytes: &'a [u8]) -> Result<Self> {
        Self::new_for((out_features, in_features), granularity, bytes, Engine::best()?)
    }

    /// The same for one engine.
    ///
    /// # Errors
    /// Those of [`SparseWeightInt4Ref::new`].
    pub fn new_for(
        (rows, cols): (usize, usize),
        granularity: Granularity,
        bytes: &'a [u8],
        engine: Engine,
    ) -> Result<Self> {
        let shape = Shape { rows, cols, granularity };
        shape.expect(bytes)?;
        let (strips, scales) = bytes.split_at(bytes.len() - shape.present_bytes().1);
        Ok(Self { shape, strips, scales, cpu: Cpu::detect(engine)? })
    }

    /// The weight in canonical form, as a copy.
    ///
    /// # Errors
    /// Those of [`Compressed::from_parts`] and [`Int4::from_parts`], for memory that [`pack_int4`] did not fill.
    pub fn to_int4(&self) -> Result<Int4> {
        let Shape { rows, cols, granularity } = self.shape;
        let (groups, words) = (self.shape.lines(), compressed::meta_words_per_row(cols));
        let (mut values, mut meta) = (Vec::with_capacity(2 * rows * groups), vec![0u32; rows * words]);
        // A shape may have any number of rows without columns.
        let filled = if groups == 0 { 0 } else { rows };
        for row in 0..filled {
            let strip = self.strip(row / ROWS);
            for group in 0..groups {
                let block = &strip[group / BLOCK_LINES * BLOCK_BYTES..];
                let (line, row_of_strip) = (group % BLOCK_LINES, row % ROWS);
                let pair = block[CACHE_LINE + line * ROWS + row_of_strip];
                values.extend([pair & 15, pair >> 4].map(|q| (i32::from(q) - OFFSET) as i8));
                for which in 0..2 {
                    let (word, bit) = <f32 as Order>::code(row_of_strip, 0, which);
                    let at = (line * <f32 as Order>::CODE_WORDS + word) * size_of::<u32>();
                    let codes: u32 = bytemuck::pod_read_unaligned(&block[at..at + size_of::<u32>()]);
                    meta[row * words + group / 8] |= (codes >> bit & 3) << (group % 8 * 4 + 2 * which);
                }
            }
        }
        let per_row = self.shape.scales_per_row();
        let scale = |i: usize| {
            let (row, which) = (i / per_row, i % per_row);
            f16::from_f32(self.scales_of(row / ROWS, which)[row % ROWS])
        };
        let scales = (0..rows * per_row).map(scale).collect();
        Int4::from_parts(Compressed::from_parts(rows, cols, values, meta)?, scales, granularity)
    }

    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Products accumulate in f32. Weights are
    /// `q · scale` exactly; bf16 with many tokens (96) multiplies them rounded to bf16.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear<T: KernelElement>(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) -> Result<()> {
        let Shape { rows, cols, .. } = self.shape;
        expect_len("x", x, tokens, cols)?;
        expect_len("y", y, tokens, rows)?;
        expect_bias(&epilogue, rows)?;
        if tokens < MANY || x.is_empty() || y.is_empty() {
            decode::product(self.cpu, *self, &self.chunks_of(x), tokens).store_floats(tokens, epilogue, y);
            return Ok(());
        }
        if TypeId::of::<T>() == TypeId::of::<bf16>() {
            return self.many::<bf16, T>(&cast(x), tokens, epilogue, y);
        }
        self.many::<f32, T>(&cast(x), tokens, epilogue, y)
    }

    fn strip(&self, strip: usize) -> &'a [u8] {
        let bytes = self.shape.present_bytes().0;
        &self.strips[strip * bytes..][..bytes]
    }

    /// The scales of a strip's rows.
    fn scales_of(&self, strip: usize, which: usize) -> [f32; ROWS] {
        const BYTES: usize = ROWS * size_of::<f32>();
        let at = (strip * self.shape.scales_per_row() + which) * BYTES;
        bytemuck::pod_read_unaligned(&self.scales[at..][..BYTES])
    }

    /// Activations `[chunk, token, columns of the chunk]` in f32, completed with zeros.
    fn chunks_of<T: KernelElement>(&self, x: &[T]) -> Vec<f32> {
        let Shape { cols, .. } = self.shape;
        let mut out = Vec::with_capacity(x.len().checked_div(cols).unwrap_or(0) * self.shape.padded_cols());
        for first in (0..cols).step_by(CHUNK) {
            let last = (first + CHUNK).min(cols);
            for token in x.chunks_exact(cols) {
                out.extend(token[first..last].iter().map(|v| v.to_f32()));
                out.resize(out.len().next_multiple_of(4), 0.0);
            }
        }
        out
    }

    /// Makes floats of some blocks of a strip.
    fn widen<W: Wide>(&self, strip: usize, blocks: Range<usize>, to: &mut [u8]) {
        let (first, bytes) = (blocks.start, self.strip(strip));
        let from = bytes[first * BLOCK_BYTES..].chunks(BLOCK_BYTES);
        let group_blocks = self.shape.granularity.columns().map(|columns| columns / BLOCK_COLS);
        let mut scales = [0.0; ROWS];
        for (i, (block, to)) in blocks.zip(from.zip(to.chunks_mut(W::BLOCK_BYTES))) {
            let which = group_blocks.map_or(0, |blocks| i / blocks);
            if i == first || group_blocks.is_some_and(|blocks| i.is_multiple_of(blocks)) {
                scales = self.scales_of(strip, which);
            }
            widen::widen::<W>(self.cpu, block, &scales, to);
        }
    }

    /// Many tokens: rows become floats, many at a time, for all tokens.
    fn many<W: Wide, T: KernelElement>(
        &self,
        x: &[W],
        tokens: usize,
        epilogue: Epilogue<'_>,
        y: &mut [T],
    ) -> Result<()> {
        let Shape { rows, cols, .. } = self.shape;
        let strip_bytes = self.shape.blocks() * CACHE_LINE + self.shape.lines() * W::LINE_BYTES;
        let at_once = (MANY_BYTES / strip_bytes).clamp(1, self.shape.strips());
        let mut floats = Scratch::<u8>::take(at_once * strip_bytes);
        let mut products = vec![W::ZERO; tokens * (at_once * ROWS).min(rows)];
        for first in (0..self.shape.strips()).step_by(at_once) {
            let strips = at_once.min(self.shape.strips() - first);
            let (first_row, height) = (first * ROWS, (strips * ROWS).min(rows - first * ROWS));
            let floats = &mut floats[..strips * strip_bytes];
            share(
                floats.chunks_mut(strip_bytes).enumerate(),
                || (),
                |(), (i, to)| {
                    self.widen::<W>(first + i, 0..self.shape.blocks(), to);
                },
            );
            let weight = SparseWeightRef::of(Strips::<W, _>::over(height, cols, &*floats)?, self.cpu);
            let products = &mut products[..tokens * height];
            let bias = epilogue.bias.map(|bias| &bias[first_row..][..height]);
            weight.linear(x, tokens, Epilogue { bias, ..epilogue }, products)?;
            let rows_of_y = y.chunks_exact_mut(rows).zip(products.chunks_exact(height));
            share_elements(products.len(), rows_of_y, |(y, products)| {
                let y = &mut y[first_row..][..height];
                y.iter_mut().zip(products).for_each(|(y, product)| *y = T::from_f32(product.to_f32()));
            });
        }
        Ok(())
    }
}

/// Elements in another type: the same ones where it is the same.
fn cast<T: KernelElement, W: Wide>(x: &[T]) -> Cow<'_, [W]> {
    match bytemuck::try_cast_slice(x) {
        Ok(same) if TypeId::of::<T>() == TypeId::of::<W>() => Cow::Borrowed(same),
        _ => Cow::Owned(x.iter().map(|v| W::from_f32(v.to_f32())).collect()),
    }
}

impl Factor for SparseWeightInt4Ref<'_> {
    type Activation = f32;
    type Sum = f32;

    fn rows(&self) -> usize {
        self.shape.rows
    }

    fn bytes(&self) -> usize {
        // The time is that of the floats.
        self.shape.strips() * self.shape.lines() * <f32 as Order>::LINE_BYTES
    }

    fn multiply(&self, cpu: Cpu, strips: Range<usize>, x: &[f32], stride: usize, out: &mut [f32]) {
        let tokens = x.len() / stride;
        let floats = |cols: usize| cols.div_ceil(BLOCK_COLS) * CACHE_LINE + cols / 4 * <f32 as Order>::LINE_BYTES;
        let widest = CHUNK.min(self.shape.padded_cols());
        let mut memory = Scratch::<u8>::take(SIDE_BY_SIDE * floats(widest));
        let mut sums = Scratch::<f32>::take(SIDE_BY_SIDE * tokens * ROWS);
        for (first, out) in strips.clone().step_by(SIDE_BY_SIDE).zip(out.chunks_mut(SIDE_BY_SIDE * tokens * ROWS)) {
            let count = SIDE_BY_SIDE.min(strips.end - first);
            for col in (0..self.shape.padded_cols()).step_by(CHUNK) {
                let cols = CHUNK.min(self.shape.padded_cols() - col);
                let blocks = col / BLOCK_COLS..(col + cols).div_ceil(BLOCK_COLS);
                let memory = &mut memory[..count * floats(cols)];
                for (i, to) in memory.chunks_mut(floats(cols)).enumerate() {
                    self.widen::<f32>(first + i, blocks.clone(), to);
                }
                let weight: Result<StripsRef<'_, f32>> = Strips::over(count * ROWS, cols, &*memory);
                debug_assert!(weight.is_ok());
                let Ok(weight) = weight else { continue };
                let x = &x[col * tokens..][..cols * tokens];
                if col == 0 {
                    weight.multiply(cpu, 0..count, x, cols, out);
                } else {
                    let sums = &mut sums[..out.len()];
                    weight.multiply(cpu, 0..count, x, cols, sums);
                    out.iter_mut().zip(&*sums).for_each(|(out, sum)| *out += sum);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Error, MatrixRef, kernel::Activation};

    fn weight(rows: usize, cols: usize, granularity: Granularity) -> Int4 {
        let dense: Vec<f32> = (0..rows * cols).map(|i| (i * 7919 % 257) as f32 / 64.0 - 2.0).collect();
        let weight = Compressed::from_pruned(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
        Int4::quantize(&weight, granularity).unwrap()
    }

    fn packed(weight: &Int4) -> Vec<u8> {
        let (rows, cols) = (weight.weight().rows(), weight.weight().cols());
        let mut bytes = vec![0xA5; packed_bytes_int4(rows, cols, weight.granularity()).unwrap()];
        pack_int4(weight, &mut bytes).unwrap();
        bytes
    }

    /// Multiplies on an engine and compares with sums in f64.
    fn check<T: KernelElement>(
        (rows, cols, tokens): (usize, usize, usize),
        granularity: Granularity,
        engine: Engine,
        tolerance: f64,
    ) {
        let weight = weight(rows, cols, granularity);
        let bytes = packed(&weight);
        let packed = SparseWeightInt4Ref::new_for((rows, cols), granularity, &bytes, engine).unwrap();
        assert_eq!(packed.to_int4().unwrap(), weight);
        let x: Vec<T> = (0..tokens * cols).map(|i| T::from_f32((i * 31 % 61) as f32 / 16.0 - 2.0)).collect();
        let bias: Vec<f32> = (0..rows).map(|row| row as f32 / 8.0).collect();
        let mut y = vec![T::from_f32(f32::NAN); tokens * rows];
        let epilogue = Epilogue { bias: Some(&bias), activation: Activation::Relu };
        packed.linear(&x, tokens, epilogue, &mut y).unwrap();
        let dense = weight.dequantize().to_dense();
        let exact = |token: usize, row: usize| -> (f64, f64) {
            let products =
                (0..cols).map(|k| f64::from(x[token * cols + k].to_f32()) * f64::from(dense[row * cols + k]));
            let (sum, size) = products.fold((0.0, 0.0), |(sum, size), p| (sum + p, size + p.abs()));
            ((sum + f64::from(bias[row])).max(0.0), size + f64::from(bias[row]))
        };
        for token in 0..tokens {
            for row in 0..rows {
                let ((expected, size), found) = (exact(token, row), f64::from(y[token * rows + row].to_f32()));
                let what = format!("y[{token}, {row}] of [{rows}, {cols}], {granularity:?}, {engine:?}");
                assert!((found - expected).abs() <= tolerance * size + 1e-6, "{what}: {found} for {expected}");
            }
        }
    }

    #[test]
    fn products_are_those_of_the_dequantized_weight_on_every_engine() {
        // Few and many tokens; one chunk and several; rows and columns that complete nothing. Miri is slow.
        let shapes: &[_] = if cfg!(miri) {
            &[(17, 36, 2)]
        } else {
            &[
                (1, 4, 1),
                (17, 70, 3),
                (33, 128, 16),
                (80, 1300, 5),
                (70, 260, 100),
                (16, 2048, 97),
                (0, 8, 2),
                (5, 0, 2),
            ]
        };
        for engine in Engine::available().iter().copied() {
            for granularity in Granularity::ALL {
                for shape in shapes {
                    check::<f32>(*shape, granularity, engine, 1e-6);
                    check::<bf16>(*shape, granularity, engine, 8e-3);
                    check::<f16>(*shape, granularity, engine, 1e-3);
                }
            }
        }
    }

    #[test]
    fn memory_that_does_not_fit_or_was_never_filled_is_an_error() {
        let weight = weight(20, 132, Granularity::Group);
        let mut bytes = packed(&weight);
        let of = |bytes: &[u8]| SparseWeightInt4Ref::new((20, 132), Granularity::Group, bytes).map(|_| ());
        assert!(matches!(of(&bytes[1..]), Err(Error::Length { .. })));
        assert!(matches!(pack_int4(&weight, &mut bytes[1..]), Err(Error::Length { .. })));
        assert!(matches!(packed_bytes_int4(usize::MAX, usize::MAX, Granularity::Row), Err(Error::TooLarge { .. })));
        bytes.fill(0xFF);
        let never = SparseWeightInt4Ref::new((20, 132), Granularity::Group, &bytes).unwrap();
        assert!(never.to_int4().is_err());
        let (x, mut y) = (vec![1.0f32; 132], vec![0.0f32; 20]);
        never.linear(&x, 1, Epilogue::default(), &mut y).unwrap();
        assert!(matches!(never.linear(&x[1..], 1, Epilogue::default(), &mut y), Err(Error::Length { .. })));
    }
}
