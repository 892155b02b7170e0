//! 4-bit integers with f16 scales for rows, or for 128 or 64 of their columns.
//!
//! A block of 32 columns has the positions of an int8 block and two cache lines of integers: the lower halves of bytes
//! are lines 0 and 2 of the int8 block, the upper ones lines 1 and 3. Before the blocks of a group of columns with one
//! scale comes a header of one cache line: sixteen f16 scales, and sixteen i16 sums of the rows' integers. So what a
//! product reads is one stream for each strip.
//!
//! Two kinds of activations meet the same strips:
//!
//! - quantized to int8 token by token (W4A8): `y = act(scale_x[token] · Σ_g scale_w[row, g] · (Σ q_x q_w) + bias)`. The
//!   sums of a group are exact, those of groups are added in f32 in order of column, fused; so every engine gives the
//!   same bits. The weight stays in four bits for any number of tokens;
//! - as they are (W4A16): parts of the weight become floats, `q · scale`, in a core's own cache, and the loops of
//!   floats multiply those. The memory is read as four bits.

use std::{
    any::TypeId,
    borrow::Cow,
    marker::PhantomData,
    ops::{Deref, DerefMut, Range},
};

use half::{bf16, f16};
use rayon::prelude::*;

use super::{Format, KernelElement, int8};
use crate::{
    Compressed, DataType, Result,
    int4::{Granularity, Int4},
    kernel::{
        Engine, SparseWeight, SparseWeightRef,
        aligned::CACHE_LINE,
        arguments::{expect_bias, expect_len},
        engine::Cpu,
        epilogue::Epilogue,
        few,
        packed::Packed,
        quantize::quantize_rows,
        scratch::Scratch,
        share::{share, share_elements},
        strips::{ROWS, Shape, Strip, Strips, StripsRef},
        vector::{Has, Vector, Work, parts},
    },
};

/// Columns of a block.
const BLOCK_COLS: usize = 32;

/// Columns of a line of the int8 block.
const LINE_COLS: usize = 8;

/// Columns that a row's one scale is repeated for, so that sums of sixteen bits hold what a group sums.
const ROW_COLS: usize = 256;

/// A 2:4 weight of four-bit integers with scales, ready to multiply.
///
/// ```
/// use twofour::{Compressed, MatrixRef, int4::{Granularity, Int4}, kernel::{Epilogue, SparseWeightInt4}};
/// let w = [0.0f32, 7.0, 0.0, -3.0, 1.0, 0.0, 0.0, 0.0];
/// let q = Int4::quantize(&Compressed::from_dense(MatrixRef::new(1, 8, &w)?)?, Granularity::Row)?;
/// let (x, mut y) = ([0.0, 127.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0], [0.0]);
/// SparseWeightInt4::of(&q)?.linear(&x, 1, Epilogue::default(), &mut y)?;
/// assert_eq!(y, [888.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
pub type SparseWeightInt4 = SparseWeight<Int4>;

/// The same in borrowed memory, which [`pack_int4`] filled.
pub type SparseWeightInt4Ref<'a> = SparseWeightRef<'a, Int4>;

/// Blocks with one header, but for a strip's last.
#[inline(always)]
fn group_blocks(granularity: Granularity) -> usize {
    granularity.columns().unwrap_or(ROW_COLS) / BLOCK_COLS
}

/// Where the header of a block is in a strip.
#[inline(always)]
fn header_of(block: usize, granularity: Granularity) -> usize {
    let blocks = group_blocks(granularity);
    block / blocks * (CACHE_LINE + blocks * Int4::BLOCK_BYTES)
}

// SAFETY: `sums` reads the strips and, of each token, the activations of their blocks, to which the padded columns are
// completed.
unsafe impl Format for Int4 {
    type Value = i8;
    type Stored = u8;
    type Activation = i8;
    type Sum = f32;
    type Grouping = Granularity;
    type Beside<'a> = ();
    // A line is a whole block.
    const GROUPS: usize = BLOCK_COLS / 4;
    const LINE_BYTES: usize = 2 * CACHE_LINE;
    // The sums of groups in f32 are in the output, not in registers. More tokens than int8 has in a pass, since
    // unpacking takes longer.
    const TOKENS: usize = 8;

    fn borrow(_: &()) {}

    /// Counted in halves of bytes.
    #[inline(always)]
    fn value(row: usize, group: usize, which: usize) -> usize {
        let (line, in_line) = (group / i8::GROUPS, group % i8::GROUPS);
        2 * (line / 2 * CACHE_LINE + i8::value(row, in_line, which)) + line % 2
    }

    #[inline(always)]
    fn code(row: usize, group: usize, which: usize) -> (usize, u32) {
        let (line, in_line) = (group / i8::GROUPS, group % i8::GROUPS);
        let (word, bit) = i8::code(row, in_line, which);
        (line * i8::CODE_WORDS + word, bit)
    }

    #[inline(always)]
    fn get(line: &[u8], value: usize) -> i8 {
        // The sign of four bits: shifted to the top and back.
        ((line[value / 2] >> (value % 2 * 4) << 4) as i8) >> 4
    }

    #[inline(always)]
    fn put(line: &mut [u8], value: usize, kept: i8) {
        line[value / 2] |= (kept as u8 & 15) << (value % 2 * 4);
    }

    #[inline(always)]
    fn headers(cols: usize, granularity: Granularity) -> usize {
        // A row without columns has its scale all the same.
        cols.div_ceil(BLOCK_COLS).div_ceil(group_blocks(granularity)).max(granularity.scales_per_row(0))
    }

    #[inline(always)]
    fn block_start(block: usize, granularity: Granularity) -> usize {
        header_of(block, granularity) + CACHE_LINE + block % group_blocks(granularity) * Self::BLOCK_BYTES
    }

    // Loops over indices: LLVM leaves calls of the iterators and maps of arrays, which cost more than a line.
    #[allow(clippy::needless_range_loop)]
    #[inline(always)]
    unsafe fn sums<V: Vector, const S: usize, const N: usize>(
        strips: [Strip<'_, Self>; S],
        x: *const i8,
        stride: usize,
        out: [[*mut f32; N]; S],
    ) {
        let (all, most) = (strips[0].lines(), group_blocks(strips[0].shape().grouping));
        // SAFETY: for each group of blocks a strip has a header and `blocks` times BLOCK_BYTES, and a token has
        // BLOCK_COLS activations for each block; `out` is valid for ROWS sums each. Prefetching may point anywhere.
        unsafe {
            let (mut x, mut at) = ([x; N], [strips[0].as_ptr(); S]);
            for n in 0..N {
                x[n] = x[n].add(n * stride);
            }
            for s in 0..S {
                at[s] = strips[s].as_ptr();
                for n in 0..N {
                    out[s][n].cast::<[f32; ROWS]>().write([0.0; ROWS]);
                }
            }
            for first in (0..all).step_by(most) {
                let headers = at;
                let mut sums = [[V::zero_sum_rows(); N]; S];
                for s in 0..S {
                    V::prefetch(at[s].wrapping_add(V::AHEAD));
                    at[s] = at[s].add(CACHE_LINE);
                }
                for _ in 0..most.min(all - first) {
                    for s in 0..S {
                        V::prefetch(at[s].wrapping_add(V::AHEAD));
                    }
                    line::<V, S, N, 0>(at, x, &mut sums);
                    line::<V, S, N, 1>(at, x, &mut sums);
                    line::<V, S, N, 2>(at, x, &mut sums);
                    line::<V, S, N, 3>(at, x, &mut sums);
                    for s in 0..S {
                        at[s] = at[s].add(Self::BLOCK_BYTES);
                    }
                    for n in 0..N {
                        x[n] = x[n].add(BLOCK_COLS);
                    }
                }
                for s in 0..S {
                    for part in 0..parts::<V>() {
                        let scales = V::scales(headers[s], part);
                        for n in 0..N {
                            V::add_scaled(sums[s][n][part], scales, out[s][n].add(part * V::LANES));
                        }
                    }
                }
            }
        }
    }
}

/// Multiplies line `LINE` of the blocks at `at` with the tokens at `x`.
///
/// # Safety
/// The CPU has `V`'s instructions; a block is at each of `at`, and [`BLOCK_COLS`] activations at each of `x`.
#[allow(clippy::needless_range_loop)]
#[inline(always)]
unsafe fn line<V: Vector, const S: usize, const N: usize, const LINE: usize>(
    at: [*const u8; S],
    x: [*const i8; N],
    sums: &mut [[V::SumRows; N]; S],
) {
    // SAFETY: a block has four lines of positions and two cache lines of integers, and a token LINE_COLS activations
    // for each line; prefetching may point anywhere.
    unsafe {
        let mut eight = [V::eight(x[0].add(LINE * LINE_COLS)); N];
        for n in 1..N {
            eight[n] = V::eight(x[n].add(LINE * LINE_COLS));
        }
        for s in 0..S {
            let codes = at[s].cast::<u32>().add(LINE * i8::CODE_WORDS);
            let values = at[s].add(CACHE_LINE * (1 + LINE / 2)).cast::<i8>();
            if LINE.is_multiple_of(2) {
                V::prefetch(values.cast::<u8>().wrapping_add(V::AHEAD));
            }
            for part in 0..parts::<V>() {
                let places = V::places(codes, part);
                let bytes = V::load_bytes(values.add(4 * part * V::LANES));
                // Times 16.
                let w = if LINE.is_multiple_of(2) { V::low_nibbles(bytes) } else { V::high_nibbles(bytes) };
                for n in 0..N {
                    sums[s][n][part] = V::dot(V::pick_bytes(eight[n], places), w, sums[s][n][part]);
                }
            }
        }
    }
}

/// Fills strips that are zero before.
fn fill<B: DerefMut<Target = [u8]>>(strips: &mut Strips<Int4, B>, weight: &Int4) -> Result<()> {
    let q = weight.weight();
    strips.pack_again(q)?;
    let Shape { rows, cols, grouping, .. } = strips.shape;
    let (blocks, per_row) = (group_blocks(grouping), grouping.scales_per_row(cols));
    strips.par_strips_mut().enumerate().for_each(|(strip, bytes)| {
        for row in 0..ROWS.min(rows - strip * ROWS) {
            let integers = q.values_row(strip * ROWS + row);
            for header in 0..Int4::headers(cols, grouping) {
                let header_bytes = &mut bytes[header_of(header * blocks, grouping)..][..CACHE_LINE];
                // Headers repeat a row's one scale.
                let scale = weight.scales()[(strip * ROWS + row) * per_row + header.min(per_row - 1)];
                header_bytes[2 * row..][..2].copy_from_slice(&scale.to_le_bytes());
                // Two of four columns are kept.
                let kept = BLOCK_COLS / 2 * blocks;
                let group = header * kept..integers.len().min((header + 1) * kept);
                let sum: i16 = integers[group].iter().map(|q| i16::from(*q)).sum();
                header_bytes[CACHE_LINE / 2 + 2 * row..][..2].copy_from_slice(&sum.to_le_bytes());
            }
        }
    });
    Ok(())
}

/// Bytes of a packed four-bit weight `[out_features, in_features]`. The layout is the same for every engine of a CPU.
/// It may change between versions, so it is no file format.
///
/// # Errors
/// [`crate::Error::TooLarge`].
pub fn packed_bytes_int4(out_features: usize, in_features: usize, granularity: Granularity) -> Result<usize> {
    Shape::<Int4> { rows: out_features, cols: in_features, grouping: granularity }.bytes()
}

/// Packs a four-bit weight into borrowed memory of [`packed_bytes_int4`] bytes.
///
/// # Errors
/// [`crate::Error::Length`], [`crate::Error::TooLarge`], [`crate::Error::Unaligned`]
/// ([`PACKED_ALIGNMENT`](crate::kernel::PACKED_ALIGNMENT)).
pub fn pack_int4(weight: &Int4, bytes: &mut [u8]) -> Result<()> {
    bytes.fill(0);
    fill(&mut Strips::over(shape_of(weight), bytes)?, weight)
}

fn shape_of(weight: &Int4) -> Shape<Int4> {
    Shape { rows: weight.weight().rows(), cols: weight.weight().cols(), grouping: weight.granularity() }
}

impl SparseWeightInt4 {
    /// Packs for [`Engine::best`].
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`]; those of [`Engine::best`].
    pub fn of(weight: &Int4) -> Result<Self> {
        Self::of_for(weight, Engine::best()?)
    }

    /// Packs for one engine.
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`]; [`crate::Error::Engine`] where this machine cannot run it.
    pub fn of_for(weight: &Int4, engine: Engine) -> Result<Self> {
        let mut strips = Strips::empty(shape_of(weight))?;
        fill(&mut strips, weight)?;
        Ok(Packed { weight: strips, beside: (), cpu: Cpu::detect(engine)? })
    }
}

impl<'a> SparseWeightInt4Ref<'a> {
    /// The weight in `bytes`, to be multiplied by [`Engine::best`]. Any contents are a weight: a GEMM with memory that
    /// was never filled is sound, but its result is meaningless.
    ///
    /// # Errors
    /// [`crate::Error::Length`] for another length than [`packed_bytes_int4`], [`crate::Error::Unaligned`],
    /// [`crate::Error::TooLarge`]; those of [`Engine::best`].
    pub fn with_granularity(
        (out_features, in_features): (usize, usize),
        granularity: Granularity,
        bytes: &'a [u8],
    ) -> Result<Self> {
        let shape = Shape { rows: out_features, cols: in_features, grouping: granularity };
        Ok(Packed { weight: Strips::over(shape, bytes)?, beside: (), cpu: Cpu::detect(Engine::best()?)? })
    }
}

impl<B: Deref<Target = [u8]>> Packed<'_, Int4, B> {
    /// What shares a scale.
    pub fn granularity(&self) -> Granularity {
        self.weight.shape.grouping
    }

    /// The weight in canonical form, as a copy.
    ///
    /// # Errors
    /// Those of [`Compressed::from_parts`] and [`Int4::from_parts`], for memory that [`pack_int4`] did not fill.
    pub fn to_int4(&self) -> Result<Int4> {
        let Shape { rows, cols, grouping } = self.weight.shape;
        let (values, meta) = self.weight.canonical();
        let per_row = grouping.scales_per_row(cols);
        let scale = |i: usize| {
            let (row, group) = (i / per_row, i % per_row);
            let header = &self.weight.strip(row / ROWS).bytes()[header_of(group * group_blocks(grouping), grouping)..];
            f16::from_le_bytes([header[row % ROWS * 2], header[row % ROWS * 2 + 1]])
        };
        let scales = (0..rows * per_row).map(scale).collect();
        Int4::from_parts(Compressed::from_parts(rows, cols, values, meta)?, scales, grouping)
    }

    fn expect<T>(&self, x: &[T], tokens: usize, epilogue: &Epilogue<'_>, y: &[T]) -> Result<()> {
        expect_len("x", x, tokens, self.in_features())?;
        expect_len("y", y, tokens, self.out_features())?;
        expect_bias(epilogue, self.out_features())
    }

    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`, both f32; `x` is
    /// quantized to int8 for each token. A token with a NaN or an infinity gives NaN throughout.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[f32], tokens: usize, epilogue: Epilogue<'_>, y: &mut [f32]) -> Result<()> {
        self.expect(x, tokens, &epilogue, y)?;
        if y.is_empty() {
            return Ok(());
        }
        let (quantized, scales) = quantize_rows(x, tokens, self.in_features());
        let (prepared, _) = int8::prepare(self.cpu, &quantized, self.in_features());
        let sums = few::strips::multiply(self.cpu, self.weight.view(), &prepared, tokens);
        sums.store(tokens, y, |sums, token, first, y| {
            y.iter_mut().zip(sums).for_each(|(y, sum)| *y = sum * scales[token]);
            epilogue.apply(y, first);
        });
        Ok(())
    }

    /// The same for activations that are not quantized: `x` is `[tokens, in_features]`, `y` is `[tokens,
    /// out_features]`. Products accumulate in f32. Weights are `q · scale` exactly; bf16 with many tokens (96)
    /// multiplies them rounded to bf16.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear_floats<T: KernelElement>(
        &self,
        x: &[T],
        tokens: usize,
        epilogue: Epilogue<'_>,
        y: &mut [T],
    ) -> Result<()> {
        self.expect(x, tokens, &epilogue, y)?;
        let floats = Floats { weight: self.weight.view(), cpu: self.cpu };
        if tokens < MANY || x.is_empty() || y.is_empty() {
            floats.few(x, tokens, epilogue, y);
            return Ok(());
        }
        if TypeId::of::<T>() == TypeId::of::<bf16>() {
            return floats.many::<bf16, T>(&cast(x), tokens, epilogue, y);
        }
        floats.many::<f32, T>(&cast(x), tokens, epilogue, y)
    }
}

/// Columns that become floats at a time: of four strips they fit a core's second cache with room to spare.
const CHUNK: usize = 512;

/// Strips that become floats at a time with few tokens: as many as are walked side by side.
const SIDE_BY_SIDE: usize = 4;

/// Tokens from which rows become floats for all tokens together: from there on the loops of floats have ways of their
/// own.
const MANY: usize = 96;

/// Bytes of floats that such rows become, about.
const MANY_BYTES: usize = 8 << 20;

/// A weight that is multiplied as floats.
struct Floats<'a> {
    weight: StripsRef<'a, Int4>,
    cpu: Cpu,
}

impl Floats<'_> {
    /// Few tokens: some columns of some strips become floats, and meet all tokens.
    fn few<T: KernelElement>(&self, x: &[T], tokens: usize, epilogue: Epilogue<'_>, y: &mut [T]) {
        let shape = self.weight.shape;
        let padded = shape.cols.next_multiple_of(4);
        let x = chunks(x, shape.cols);
        // The time is that of the floats.
        let size = few::Size { rows: shape.rows, bytes: shape.strips() * (padded / 4) * f32::LINE_BYTES };
        let sums = few::product(size, &x, tokens, |strips, stride, out| self.multiply(strips, &x, stride, out));
        sums.store_floats(tokens, epilogue, y);
    }

    /// Multiplies some strips with activations as [`chunks`] stores them, `padded` columns of each token.
    fn multiply(&self, strips: Range<usize>, x: &[f32], padded: usize, out: &mut [f32]) {
        let tokens = x.len() / padded;
        let floats = |cols: usize| cols.div_ceil(BLOCK_COLS) * CACHE_LINE + cols / 4 * f32::LINE_BYTES;
        let mut memory = Scratch::<u8>::take(SIDE_BY_SIDE * floats(CHUNK.min(padded)));
        let mut sums = Scratch::<f32>::take(SIDE_BY_SIDE * tokens * ROWS);
        for (first, out) in strips.clone().step_by(SIDE_BY_SIDE).zip(out.chunks_mut(SIDE_BY_SIDE * tokens * ROWS)) {
            let count = SIDE_BY_SIDE.min(strips.end - first);
            for col in (0..padded).step_by(CHUNK) {
                let cols = CHUNK.min(padded - col);
                let blocks = col / BLOCK_COLS..(col + cols).div_ceil(BLOCK_COLS);
                let memory = &mut memory[..count * floats(cols)];
                for (i, to) in memory.chunks_mut(floats(cols)).enumerate() {
                    self.widen::<f32>(first + i, blocks.clone(), to);
                }
                let shape = Shape { rows: count * ROWS, cols, grouping: () };
                let weight: Result<StripsRef<'_, f32>> = Strips::over(shape, &*memory);
                debug_assert!(weight.is_ok());
                let Ok(weight) = weight else { continue };
                let x = &x[col * tokens..][..cols * tokens];
                if col == 0 {
                    self.cpu.run(few::strips::Walk::new(weight, 0..count, x, cols, out));
                } else {
                    let sums = &mut sums[..out.len()];
                    self.cpu.run(few::strips::Walk::new(weight, 0..count, x, cols, sums));
                    out.iter_mut().zip(&*sums).for_each(|(out, sum)| *out += sum);
                }
            }
        }
    }

    /// Many tokens: rows become floats, many at a time, for all tokens.
    fn many<W: KernelElement, T: KernelElement>(
        &self,
        x: &[W],
        tokens: usize,
        epilogue: Epilogue<'_>,
        y: &mut [T],
    ) -> Result<()> {
        let Shape { rows, cols, .. } = self.weight.shape;
        let floats = |rows: usize| Shape::<W> { rows, cols, grouping: () };
        let (strips, strip_bytes) = (self.weight.shape.strips(), floats(ROWS).strip_bytes());
        let at_once = (MANY_BYTES / strip_bytes).clamp(1, strips);
        let mut memory = Scratch::<u8>::take(at_once * strip_bytes);
        let mut products = vec![W::ZERO; tokens * (at_once * ROWS).min(rows)];
        for first in (0..strips).step_by(at_once) {
            let strips = at_once.min(strips - first);
            let (first_row, height) = (first * ROWS, (strips * ROWS).min(rows - first * ROWS));
            let memory = &mut memory[..strips * strip_bytes];
            share(
                memory.chunks_mut(strip_bytes).enumerate(),
                || (),
                |(), (i, to)| self.widen::<W>(first + i, 0..self.weight.shape.lines(), to),
            );
            let weight = SparseWeightRef::of(Strips::over(floats(height), &*memory)?, self.cpu);
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

    /// Makes floats of some blocks of a strip.
    fn widen<W: KernelElement>(&self, strip: usize, blocks: Range<usize>, to: &mut [u8]) {
        self.cpu.run(Widen::<W> { strip: self.weight.strip_of(strip), blocks, to, element: PhantomData });
    }
}

/// Blocks of a strip that become blocks of a strip of `W`, f32 or bf16: integers times the scales of their rows.
struct Widen<'a, W> {
    strip: Strip<'a, Int4>,
    blocks: Range<usize>,
    to: &'a mut [u8],
    element: PhantomData<W>,
}

impl<W: KernelElement> Work for Widen<'_, W> {
    type Output = ();

    #[inline(always)]
    fn run<V: Vector>(self, _: Has<V>) {
        const { assert!(matches!(W::DTYPE, DataType::F32 | DataType::BF16)) };
        let (granularity, bytes) = (self.strip.shape().grouping, self.strip.bytes());
        let most = group_blocks(granularity);
        let (mut block, mut to) = (self.blocks.start, self.to.chunks_mut(W::BLOCK_BYTES));
        while block < self.blocks.end {
            let group = block..self.blocks.end.min((block / most + 1) * most);
            let header = &bytes[header_of(block, granularity)..][..CACHE_LINE];
            let from = &bytes[Int4::block_start(block, granularity)..][..group.len() * Int4::BLOCK_BYTES];
            // SAFETY: there is proof of the instructions, and a header has ROWS scales, of which a part has LANES.
            let scales = unsafe {
                let mut scales = V::zero_rows();
                for part in 0..parts::<V>() {
                    scales[part] = V::load_f16(header.as_ptr().cast::<f16>().add(part * V::LANES));
                }
                scales
            };
            block = group.end;
            for (from, to) in from.as_chunks().0.iter().zip(to.by_ref().take(group.len())) {
                // SAFETY: there is proof of the instructions.
                unsafe { widen::<V, W>(from, scales, to) };
            }
        }
    }
}

/// Makes floats of a block.
///
/// # Safety
/// The CPU has `V`'s instructions.
#[inline(always)]
unsafe fn widen<V: Vector, W: KernelElement>(from: &[u8; Int4::BLOCK_BYTES], scales: V::FloatRows, to: &mut [u8]) {
    let (positions, floats) = to.split_at_mut(CACHE_LINE);
    let floats: &mut [W] = bytemuck::cast_slice_mut(floats);
    let lines = floats.len() / (2 * ROWS);
    // SAFETY: the CPU has the instructions, as this function requires. A block has sixteen words of positions and two
    // cache lines of integers, of which a part has four bytes for each lane; a line of floats, of which there are
    // `lines`, has 2 * ROWS values.
    unsafe {
        V::float_positions(from.as_ptr().cast(), positions.as_mut_ptr().cast());
        for line in 0..lines {
            let (of_int8, group) = (line / i8::GROUPS, line % i8::GROUPS);
            let bit = (16 * group + 4 * (of_int8 % 2)) as u32;
            let to = floats.as_mut_ptr().add(line * 2 * ROWS);
            for part in 0..parts::<V>() {
                let at = CACHE_LINE + of_int8 / 2 * CACHE_LINE + 4 * part * V::LANES;
                let integers = V::load_bytes(from.as_ptr().add(at).cast());
                let first = V::multiply(V::nibble(integers, bit), scales[part]);
                let second = V::multiply(V::nibble(integers, bit + 8), scales[part]);
                if W::DTYPE == DataType::BF16 {
                    V::store_pairs([first, second], to.add(2 * part * V::LANES).cast());
                } else {
                    V::store(first, to.add(part * V::LANES).cast());
                    V::store(second, to.add(ROWS + part * V::LANES).cast());
                }
            }
        }
    }
}

/// Activations `[chunk, token, columns of the chunk]` in f32, completed with zeros.
fn chunks<T: KernelElement>(x: &[T], cols: usize) -> Vec<f32> {
    let mut out = Vec::with_capacity(x.len().checked_div(cols).unwrap_or(0) * cols.next_multiple_of(4));
    for first in (0..cols).step_by(CHUNK) {
        let last = (first + CHUNK).min(cols);
        for token in x.chunks_exact(cols) {
            out.extend(token[first..last].iter().map(|v| v.to_f32()));
            out.resize(out.len().next_multiple_of(4), 0.0);
        }
    }
    out
}

/// Elements in another type: the same ones where it is the same.
fn cast<T: KernelElement, W: KernelElement>(x: &[T]) -> Cow<'_, [W]> {
    match bytemuck::try_cast_slice(x) {
        Ok(same) if TypeId::of::<T>() == TypeId::of::<W>() => Cow::Borrowed(same),
        _ => Cow::Owned(x.iter().map(|v| W::from_f32(v.to_f32())).collect()),
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use proptest::prelude::*;

    use super::*;
    use crate::{Compressed, Mask, MatrixRef, kernel::Activation};

    /// An int4 weight of given integers, of which each group of four keeps two columns that depend on the row and the
    /// group.
    fn weight(rows: usize, cols: usize, granularity: Granularity, q: &[i8], scales: &[f16]) -> Int4 {
        const PAIRS: [u8; 6] = [0b0011, 0b0101, 0b0110, 0b1001, 0b1010, 0b1100];
        let mask = Mask::from_fn(rows, cols, |row, col| PAIRS[(row * 7 + col / 4 * 5) % 6] >> (col % 4) & 1 == 1);
        let weight = Compressed::from_masked(MatrixRef::new(rows, cols, q).unwrap(), &mask).unwrap();
        Int4::from_parts(weight, scales[..rows * granularity.scales_per_row(cols)].to_vec(), granularity).unwrap()
    }

    /// `[tokens, rows]`: sums of exact products in the order that the module describes.
    fn expected(weight: &Int4, x: &[f32], tokens: usize) -> Vec<f32> {
        let (rows, cols, dense) = (weight.weight().rows(), weight.weight().cols(), weight.weight().to_dense());
        let (q, scales) = quantize_rows(x, tokens, cols);
        let width = weight.granularity().columns().unwrap_or(256);
        let one = |token: usize, row: usize| {
            let (dense, q) = (&dense[row * cols..][..cols], &q[token * cols..][..cols]);
            let mut y = 0f32;
            for first in (0..cols).step_by(width) {
                let group = first..(first + width).min(cols);
                let sum: i32 = group.map(|k| i32::from(dense[k]) * i32::from(q[k])).sum();
                y = (sum as f32).mul_add(weight.scale(row, first).to_f32(), y);
            }
            y * scales[token]
        };
        (0..tokens).flat_map(|token| (0..rows).map(move |row| (token, row))).map(|(t, r)| one(t, r)).collect()
    }

    /// Inputs at most and tokens at most; Miri is slow.
    const SIZES: (usize, usize) = if cfg!(miri) { (70, 3) } else { (600, 18) };

    proptest! {
        #[test]
        fn every_engine_gives_the_same_bits(
            (rows, cols, tokens, q, x, scales) in (0usize..70, 0..SIZES.0, 0..SIZES.1).prop_flat_map(|(r, c, t)| {
                let q = prop_oneof![3 => -8i8..8, 1 => Just(0), 1 => Just(-8), 1 => Just(7)];
                let x = prop_oneof![6 => -1f32..1.0, 1 => Just(0.0), 1 => Just(-0.0), 1 => Just(1.0), 1 => Just(-1.0)];
                let scale = prop_oneof![6 => 1e-3f32..1.0, 1 => Just(0.0), 1 => Just(6e-8), 1 => Just(60000.0), 1 => -1f32..0.0];
                let scales = proptest::collection::vec(scale.prop_map(f16::from_f32), r * c.div_ceil(64).max(1));
                (Just(r), Just(c), Just(t), proptest::collection::vec(q, r * c), proptest::collection::vec(x, t * c), scales)
            }),
            granularity in proptest::sample::select(&Granularity::ALL),
        ) {
            let weight = weight(rows, cols, granularity, &q, &scales);
            let expected = expected(&weight, &x, tokens);
            for &engine in Engine::available() {
                let packed = SparseWeightInt4::of_for(&weight, engine).unwrap();
                if cols > 0 {
                    prop_assert_eq!(&packed.to_int4().unwrap(), &weight);
                }
                let mut y = vec![f32::NAN; tokens * rows];
                packed.linear(&x, tokens, Epilogue::default(), &mut y).unwrap();
                for (i, (y, expected)) in y.iter().zip(&expected).enumerate() {
                    prop_assert_eq!(y, expected, "{} {:?} y[{}, {}]", engine, granularity, i / rows, i % rows);
                }
            }
        }
    }

    #[test]
    fn extremes_of_every_kind_are_exact() {
        let (rows, cols) = (17, 520);
        for granularity in Granularity::ALL {
            for (q, v) in [(-8, 1.0), (-8, -1.0), (7, 1.0), (7, -1.0)] {
                let scales = vec![f16::from_f32(0.37); rows * 9];
                let weight = weight(rows, cols, granularity, &vec![q; rows * cols], &scales);
                let x = vec![v; 5 * cols];
                let one = expected(&weight, &x[..cols], 1)[0];
                for &engine in Engine::available() {
                    let mut y = vec![0.0; 5 * rows];
                    let packed = SparseWeightInt4::of_for(&weight, engine).unwrap();
                    packed.linear(&x, 5, Epilogue::default(), &mut y).unwrap();
                    assert!(y.iter().all(|y| *y == one), "{engine} {granularity:?} {q} {v}: {y:?}");
                }
            }
        }
    }

    #[test]
    fn bias_activation_and_what_is_not_finite() {
        let weight = weight(20, 64, Granularity::Group, &[3; 20 * 64], &[f16::ONE; 20]);
        let mut x = vec![1.0f32; 3 * 64];
        (x[5], x[64 + 63]) = (f32::NAN, f32::INFINITY);
        let bias = vec![-1000.0; 20];
        for &engine in Engine::available() {
            let packed = SparseWeightInt4::of_for(&weight, engine).unwrap();
            let mut y = vec![0.0; 60];
            packed.linear(&x, 3, Epilogue { bias: Some(&bias), activation: Activation::Relu }, &mut y).unwrap();
            assert!(y[..40].iter().all(|y| y.is_nan()) && y[40..].iter().all(|y| *y == 0.0), "{y:?}");
            assert!(packed.linear(&x[1..], 3, Epilogue::default(), &mut y).is_err());
            assert!(packed.linear(&x, 3, Epilogue { bias: Some(&bias[1..]), ..Epilogue::default() }, &mut y).is_err());
        }
    }

    #[test]
    fn a_weight_takes_three_bits_and_its_scales() {
        let bytes = |granularity| {
            let scales = vec![f16::ONE; 32 * 16];
            SparseWeightInt4::of(&weight(32, 1024, granularity, &[1; 32 * 1024], &scales)).unwrap().bytes()
        };
        let bits = |bytes: usize| bytes as f64 * 8.0 / (32.0 * 1024.0);
        assert_eq!([bits(bytes(Granularity::Row)), bits(bytes(Granularity::Group))], [3.125, 3.25]);
    }
}

#[cfg(test)]
mod float_tests {
    use super::*;
    use crate::{
        Error, MatrixRef,
        kernel::{Activation, Aligned},
    };

    fn weight(rows: usize, cols: usize, granularity: Granularity) -> Int4 {
        let dense: Vec<f32> = (0..rows * cols).map(|i| (i * 7919 % 257) as f32 / 64.0 - 2.0).collect();
        let weight = Compressed::from_pruned(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
        Int4::quantize(&weight, granularity).unwrap()
    }

    fn packed(weight: &Int4) -> Aligned<u8> {
        let (rows, cols) = (weight.weight().rows(), weight.weight().cols());
        let mut bytes = Aligned::zeroed(packed_bytes_int4(rows, cols, weight.granularity()).unwrap());
        bytes.fill(0xA5);
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
        let borrowed = SparseWeightInt4Ref::with_granularity((rows, cols), granularity, &bytes).unwrap();
        let packed = Packed { cpu: Cpu::detect(engine).unwrap(), ..borrowed };
        assert_eq!(packed.to_int4().unwrap(), weight);
        let x: Vec<T> = (0..tokens * cols).map(|i| T::from_f32((i * 31 % 61) as f32 / 16.0 - 2.0)).collect();
        let bias: Vec<f32> = (0..rows).map(|row| row as f32 / 8.0).collect();
        let mut y = vec![T::from_f32(f32::NAN); tokens * rows];
        let epilogue = Epilogue { bias: Some(&bias), activation: Activation::Relu };
        packed.linear_floats(&x, tokens, epilogue, &mut y).unwrap();
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
        let of = |bytes: &[u8]| SparseWeightInt4Ref::with_granularity((20, 132), Granularity::Group, bytes).map(|_| ());
        assert!(matches!(of(&bytes[1..]), Err(Error::Length { .. })));
        assert!(matches!(pack_int4(&weight, &mut bytes[1..]), Err(Error::Length { .. })));
        assert!(matches!(packed_bytes_int4(usize::MAX, usize::MAX, Granularity::Row), Err(Error::TooLarge { .. })));
        bytes.fill(0xFF);
        let never = SparseWeightInt4Ref::with_granularity((20, 132), Granularity::Group, &bytes).unwrap();
        assert!(never.to_int4().is_err());
        let (x, mut y) = (vec![1.0f32; 132], vec![0.0f32; 20]);
        never.linear_floats(&x, 1, Epilogue::default(), &mut y).unwrap();
        assert!(matches!(never.linear_floats(&x[1..], 1, Epilogue::default(), &mut y), Err(Error::Length { .. })));
    }
}
