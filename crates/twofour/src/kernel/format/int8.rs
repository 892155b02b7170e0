//! 8-bit integers with a scale for each row, and activations quantized token by token. A line is the four values of two
//! groups of a row, row after row.
//!
//! `y = act(scale_x[token] · scale_w[row] · Σ q_x q_w + bias)`: symmetric quantization, `scale = amax / 127`, rounding
//! to nearest even (as torch's dynamic int8 linear with per-channel weights). The integer sums are exact and the same
//! on every engine.

use std::{borrow::Cow, ops::Deref};

use super::{Block, DenseFormat, Format, Weight, blocks};
use crate::{
    Compressed, Error, MatrixRef, Result,
    kernel::{
        DenseWeight, Engine, SparseWeight, SparseWeightRef,
        aligned::{Aligned, CACHE_LINE},
        arguments::{Sums, expect_bias, expect_len},
        dense::{Dense, Rows},
        engine::Cpu,
        epilogue::Epilogue,
        few,
        packed::Packed,
        quantize::quantize_rows,
        strips::{ROWS, Shape, Strip, Strips},
        tile,
        vector::{Vector, parts},
    },
};

/// Products are at most 128 * 255 (with the offset of unsigned activations) and must not overflow 31 bits in any order.
const MAX_INPUTS: usize = i32::MAX as usize / (128 * 255);

/// The longest register, to which the activations of any engine are completed.
const LONGEST: usize = 64;

/// How far ahead of its reading a dense row is fetched, in bytes.
const DENSE_AHEAD: usize = 1024;

/// A compressed weight of 8-bit integers with a scale for each row.
pub type SparseWeightI8 = SparseWeight<i8>;

/// The same in borrowed memory.
pub type SparseWeightI8Ref<'a> = SparseWeightRef<'a, i8>;

/// A dense weight of 8-bit integers with a scale for each row.
pub type DenseWeightI8 = DenseWeight<i8>;

/// What weights of 8-bit integers keep beside their values.
#[derive(Debug, Clone)]
pub struct RowScales<'a> {
    /// One a row.
    scales: Cow<'a, [f32]>,
    /// The sum of each row's values.
    sums: Cow<'a, [i32]>,
}

// SAFETY: `sums` reads the strips' lines and eight activations for each.
unsafe impl Format for i8 {
    type Value = i8;
    type Stored = i8;
    type Activation = i8;
    type Sum = i32;
    type Grouping = ();
    type Beside<'a> = RowScales<'a>;
    const GROUPS: usize = 2;
    const LINE_BYTES: usize = 4 * ROWS;
    const BYTES: bool = true;
    const TOKENS: usize = 4;

    #[inline(always)]
    fn value(row: usize, group: usize, which: usize) -> usize {
        row * 4 + group * 2 + which
    }

    /// Value `8 (2q + h) + b` of a line has its position at bit `8b + 2q` of the 64-bit half `h`.
    #[inline(always)]
    fn code(row: usize, group: usize, which: usize) -> (usize, u32) {
        let place = Self::value(row, group, which);
        let (quad, byte) = (place / 8, place % 8);
        let bit = quad % 2 * 64 + byte * 8 + quad / 2 * 2;
        (bit / 32, (bit % 32) as u32)
    }

    #[inline(always)]
    fn get(line: &[i8], value: usize) -> i8 {
        line[value]
    }

    #[inline(always)]
    fn put(line: &mut [i8], value: usize, kept: i8) {
        line[value] = kept;
    }

    fn bytes_beside(beside: &RowScales<'_>) -> usize {
        size_of_val::<[f32]>(&beside.scales)
    }

    fn borrow<'a>(beside: &'a RowScales<'_>) -> RowScales<'a> {
        RowScales { scales: Cow::Borrowed(&beside.scales), sums: Cow::Borrowed(&beside.sums) }
    }

    /// Sums have `V::OFFSET` times the row's sum still in them.
    #[allow(clippy::needless_range_loop, reason = "the index is of registers and of memory")]
    #[inline(always)]
    unsafe fn sums<V: Vector, const S: usize, const N: usize>(
        strips: [Strip<'_, i8>; S],
        x: *const i8,
        stride: usize,
        out: [[*mut i32; N]; S],
    ) {
        // SAFETY: `block + CACHE_LINE + i * LINE_BYTES` is the start of the strip's line `first + i`, which exists; a
        // token has eight activations for each line; `out` has ROWS sums, which the parts cover. Prefetching may point
        // anywhere.
        unsafe {
            let x: [_; N] = std::array::from_fn(|n| x.add(n * stride));
            let mut sums = [[V::zero_sum_rows(); N]; S];
            let start = strips.map(|strip| strip.as_ptr());
            for Block { start: block, first, count } in blocks::<i8>(strips[0].lines()) {
                for strip in start {
                    V::prefetch(strip.wrapping_add(block + V::AHEAD));
                }
                for i in 0..count {
                    let mut eight = [V::eight(x[0].add(8 * (first + i))); N];
                    for n in 1..N {
                        eight[n] = V::eight(x[n].add(8 * (first + i)));
                    }
                    for s in 0..S {
                        let codes = start[s].add(block).cast::<u32>().add(i * i8::CODE_WORDS);
                        let values = start[s].add(block + CACHE_LINE + i * i8::LINE_BYTES).cast::<i8>();
                        V::prefetch(values.cast::<u8>().wrapping_add(V::AHEAD));
                        for part in 0..parts::<V>() {
                            let places = V::places(codes, part);
                            let w = V::load_bytes(values.add(4 * part * V::LANES));
                            for n in 0..N {
                                sums[s][n][part] = V::dot(V::pick_bytes(eight[n], places), w, sums[s][n][part]);
                            }
                        }
                    }
                }
            }
            for s in 0..S {
                for n in 0..N {
                    for part in 0..parts::<V>() {
                        V::store_sums(sums[s][n][part], out[s][n].add(part * V::LANES));
                    }
                }
            }
        }
    }
}

// SAFETY: `dots` reads the given rows and whole registers of activations, to which they are completed.
unsafe impl DenseFormat for i8 {
    #[inline(always)]
    fn completed(cols: usize) -> usize {
        cols.next_multiple_of(LONGEST)
    }

    #[inline(always)]
    fn dense_tokens<V: Vector>() -> usize {
        V::DENSE_TOKENS[1]
    }

    #[inline(always)]
    unsafe fn dots<V: Vector, const R: usize, const N: usize>(
        weight: Rows<'_, i8>,
        rows: [usize; R],
        x: [*const i8; N],
    ) -> [[i32; N]; R] {
        let register = 4 * V::LANES;
        // SAFETY: registers are loaded from each multiple of their length below `cols - cols % register`; a last,
        // incomplete one is read from a copy, and those of activations are complete. Prefetching may point anywhere.
        unsafe {
            let values = rows.map(|row| weight.values.as_ptr().add(row * weight.cols));
            let mut sums = [[V::zero_sums(); N]; R];
            let full = weight.cols / register;
            for i in 0..full {
                let mut activations = [V::load_bytes(x[0].add(register * i)); N];
                for n in 1..N {
                    activations[n] = V::load_bytes(x[n].add(register * i));
                }
                for r in 0..R {
                    let values = values[r].add(register * i);
                    V::prefetch(values.cast::<u8>().wrapping_add(DENSE_AHEAD));
                    let w = V::load_bytes(values);
                    for n in 0..N {
                        sums[r][n] = V::dot(activations[n], w, sums[r][n]);
                    }
                }
            }
            let tail = weight.cols % register;
            if tail > 0 {
                for r in 0..R {
                    let mut last = [0i8; LONGEST];
                    std::ptr::copy_nonoverlapping(values[r].add(register * full), last.as_mut_ptr(), tail);
                    let w = V::load_bytes(last.as_ptr());
                    for n in 0..N {
                        sums[r][n] = V::dot(V::load_bytes(x[n].add(register * full)), w, sums[r][n]);
                    }
                }
            }
            let mut out = [[0; N]; R];
            for r in 0..R {
                for n in 0..N {
                    out[r][n] = V::total(sums[r][n]);
                }
            }
            out
        }
    }
}

/// Activations, `[tokens, features]`, as an engine wants them: each token completed to whole registers with what stands
/// for zero, and what the sums have too much for each unit of the row's sum of weights.
pub(super) fn prepare(cpu: Cpu, x: &[i8], features: usize) -> (Vec<i8>, i32) {
    if features == 0 {
        // No products: no offset.
        return (Vec::new(), 0);
    }
    let offset = cpu.offset();
    let stride = features.next_multiple_of(LONGEST);
    // Adding 128 to a byte flips its top bit.
    let shift = |v: i8| (i32::from(v) + offset) as i8;
    let mut out = vec![shift(0); x.len() / features * stride];
    for (x, out) in x.chunks_exact(features).zip(out.chunks_exact_mut(stride)) {
        for (x, out) in x.iter().zip(out) {
            *out = shift(*x);
        }
    }
    (out, offset)
}

/// The sum of a row's values.
fn sum(row: &[i8]) -> i32 {
    row.iter().map(|v| i32::from(*v)).sum()
}

impl<'a> RowScales<'a> {
    fn new<'v>(
        in_features: usize,
        scales: Vec<f32>,
        rows: impl ExactSizeIterator<Item = &'v [i8]>,
    ) -> Result<RowScales<'static>> {
        expect_inputs(in_features)?;
        expect_len("scales", &scales, 1, rows.len())?;
        Ok(RowScales { scales: scales.into(), sums: rows.map(sum).collect() })
    }

    /// `y = act(x · Wᵀ + bias)`, where `product` gives for int8 activations the sums, and what they have too much
    /// for each unit of the row's sum of weights.
    fn linear(
        &self,
        in_features: usize,
        x: &[f32],
        tokens: usize,
        epilogue: Epilogue<'_>,
        y: &mut [f32],
        product: impl FnOnce(&[i8]) -> (Sums<i32>, i32),
    ) -> Result<()> {
        let out_features = self.scales.len();
        expect_len("x", x, tokens, in_features)?;
        expect_len("y", y, tokens, out_features)?;
        expect_bias(&epilogue, out_features)?;
        if y.is_empty() {
            return Ok(());
        }
        let (quantized, scales) = quantize_rows(x, tokens, in_features);
        let (sums, offset) = product(&quantized);
        sums.store(tokens, y, |sums, token, first, y| {
            let rows = self.sums[first..].iter().zip(&self.scales[first..]);
            for ((y, sum), (row_sum, scale)) in y.iter_mut().zip(sums).zip(rows) {
                let product = sum.wrapping_sub(offset.wrapping_mul(*row_sum));
                *y = product as f32 * scales[token] * scale;
            }
            epilogue.apply(y, first);
        });
        Ok(())
    }
}

fn expect_inputs(in_features: usize) -> Result<()> {
    if in_features > MAX_INPUTS {
        return Err(Error::TooManyInputs { found: in_features, limit: MAX_INPUTS });
    }
    Ok(())
}

/// Packs a compressed weight of 8-bit integers into borrowed memory of [`packed_bytes`](crate::kernel::packed_bytes)
/// bytes, and returns the sum of each row's values.
///
/// # Errors
/// [`Error::Length`], [`Error::Unaligned`] ([`PACKED_ALIGNMENT`](crate::kernel::PACKED_ALIGNMENT)).
pub fn pack_i8(weight: &Compressed<i8>, bytes: &mut [u8]) -> Result<Vec<i32>> {
    // Groups and rows past the weight's hold zeros.
    bytes.fill(0);
    let shape = Shape { rows: weight.rows(), cols: weight.cols(), grouping: () };
    Strips::<i8, _>::over(shape, bytes)?.pack_again(weight)?;
    Ok((0..weight.rows()).map(|row| sum(weight.values_row(row))).collect())
}

impl SparseWeightI8 {
    /// Packs for [`Engine::best`]; `scales` has a value for each row.
    ///
    /// # Errors
    /// [`Error::Length`] where the scales do not fit, [`Error::TooManyInputs`] where the sums could overflow, and those
    /// of [`Engine::best`].
    pub fn with_scales(weight: Compressed<i8>, scales: Vec<f32>) -> Result<Self> {
        Self::with_scales_for(weight, scales, Engine::best()?)
    }

    /// Packs for one engine.
    ///
    /// # Errors
    /// Those of [`SparseWeightI8::with_scales`].
    pub fn with_scales_for(weight: Compressed<i8>, scales: Vec<f32>, engine: Engine) -> Result<Self> {
        let rows = (0..weight.rows()).map(|row| weight.values_row(row));
        let beside = RowScales::new(weight.cols(), scales, rows)?;
        Ok(Packed { weight: Strips::pack(&weight, ())?, beside, cpu: Cpu::detect(engine)? })
    }
}

impl<'a> SparseWeightI8Ref<'a> {
    /// The weight in memory that [`pack_i8`] filled, with the sums that it returned and a scale for each row, to be
    /// multiplied by [`Engine::best`].
    ///
    /// # Errors
    /// [`Error::Length`] for memory, scales or sums of another length, [`Error::Unaligned`], [`Error::TooManyInputs`]
    /// where the sums could overflow; those of [`Engine::best`].
    pub fn with_sums(
        (out_features, in_features): (usize, usize),
        bytes: &'a [u8],
        scales: &'a [f32],
        sums: &'a [i32],
    ) -> Result<Self> {
        expect_inputs(in_features)?;
        expect_len("scales", scales, 1, out_features)?;
        expect_len("sums", sums, 1, out_features)?;
        let shape = Shape { rows: out_features, cols: in_features, grouping: () };
        let beside = RowScales { scales: Cow::Borrowed(scales), sums: Cow::Borrowed(sums) };
        Ok(Packed { weight: Strips::over(shape, bytes)?, beside, cpu: Cpu::detect(Engine::best()?)? })
    }
}

impl<B: Deref<Target = [u8]>> Packed<'_, i8, B> {
    /// The scale of each row.
    pub fn scales(&self) -> &[f32] {
        &self.beside.scales
    }

    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`, both f32; `x` is
    /// quantized to int8 token by token. A token with a NaN or an infinity gives NaN throughout.
    ///
    /// # Errors
    /// [`Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[f32], tokens: usize, epilogue: Epilogue<'_>, y: &mut [f32]) -> Result<()> {
        self.beside.linear(self.in_features(), x, tokens, epilogue, y, |x| self.sums(x, tokens))
    }

    /// `y = x · Wᵀ` of integers, exact: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Scales play no
    /// part.
    ///
    /// # Errors
    /// [`Error::Length`] where `x` or `y` does not fit.
    pub fn product(&self, x: &[i8], tokens: usize, y: &mut [i32]) -> Result<()> {
        expect_len("x", x, tokens, self.in_features())?;
        expect_len("y", y, tokens, self.out_features())?;
        if y.is_empty() {
            return Ok(());
        }
        if !x.contains(&i8::MIN) {
            self.add_product(x, tokens, y, |_, product| product);
            return Ok(());
        }
        // Kernels take what quantization makes, -127 to 127: -128 is -127 and -1.
        let part = |of: fn(i8) -> i8| x.iter().map(|v| of(*v)).collect::<Vec<i8>>();
        self.add_product(&part(|v| v.max(-127)), tokens, y, |_, product| product);
        self.add_product(&part(|v| -i8::from(v == i8::MIN)), tokens, y, i32::wrapping_add);
        Ok(())
    }

    /// Replaces `y` by `combine(y, x · Wᵀ)`, for `x` of -127 to 127.
    fn add_product(&self, x: &[i8], tokens: usize, y: &mut [i32], combine: fn(i32, i32) -> i32) {
        let (sums, offset) = self.sums(x, tokens);
        let row_sums = &*self.beside.sums;
        sums.store(tokens, y, |sums, _, first, y| {
            for ((y, sum), row_sum) in y.iter_mut().zip(sums).zip(&row_sums[first..]) {
                *y = combine(*y, sum.wrapping_sub(offset.wrapping_mul(*row_sum)));
            }
        });
    }

    /// The sums of a GEMM, and what they have too much for each unit of the row's sum of weights.
    fn sums(&self, x: &[i8], tokens: usize) -> (Sums<i32>, i32) {
        if let Some(sums) = tile::bytes(self.cpu, Weight::Sparse(self.weight.view()), x, tokens) {
            return (sums, 0);
        }
        let (x, offset) = prepare(self.cpu, x, self.in_features());
        (few::strips::multiply(self.cpu, self.weight.view(), &x, tokens), offset)
    }
}

impl DenseWeightI8 {
    /// Packs for [`Engine::best`]; `scales` has a value for each row.
    ///
    /// # Errors
    /// Those of [`SparseWeightI8::with_scales`].
    pub fn with_scales(matrix: MatrixRef<'_, i8>, scales: Vec<f32>) -> Result<Self> {
        Self::with_scales_for(matrix, scales, Engine::best()?)
    }

    /// Packs for one engine.
    ///
    /// # Errors
    /// Those of [`SparseWeightI8::with_scales`].
    pub fn with_scales_for(matrix: MatrixRef<'_, i8>, scales: Vec<f32>, engine: Engine) -> Result<Self> {
        let rows = (0..matrix.rows()).map(|row| matrix.row(row));
        let beside = RowScales::new(matrix.cols(), scales, rows)?;
        let (values, cpu) = (Aligned::copy_of(matrix.data())?, Cpu::detect(engine)?);
        Ok(Dense { rows: matrix.rows(), cols: matrix.cols(), values, beside, cpu })
    }

    /// The integers of a row, and their scale.
    ///
    /// # Panics
    /// Where the weight has no such row.
    pub fn row(&self, row: usize) -> (&[i8], f32) {
        (&self.values[row * self.cols..][..self.cols], self.beside.scales[row])
    }

    /// As [`SparseWeightI8::linear`].
    ///
    /// # Errors
    /// [`Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[f32], tokens: usize, epilogue: Epilogue<'_>, y: &mut [f32]) -> Result<()> {
        self.beside.linear(self.cols, x, tokens, epilogue, y, |x| {
            if let Some(sums) = tile::bytes(self.cpu, Weight::Dense(self.rows()), x, tokens) {
                return (sums, 0);
            }
            let (x, offset) = prepare(self.cpu, x, self.cols);
            (few::rows::multiply::<i8>(self.cpu, self.rows(), &x, tokens), offset)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernel::packed_bytes;
    use proptest::prelude::*;

    fn adversarial() -> impl Strategy<Value = i8> {
        prop_oneof![3 => any::<i8>(), 1 => Just(0), 1 => Just(-128), 1 => Just(127)]
    }

    /// Inputs: below the first, or one of the others. Tokens: below the first, or between the others. Miri is slow.
    const SIZES: ([usize; 3], [usize; 3]) =
        if cfg!(miri) { ([24, 40, 70], [3, 15, 18]) } else { ([300, 512, 1100], [7, 15, 50]) };

    #[test]
    fn borrowed_memory_multiplies_exactly_and_as_owned_does() {
        // Miri is slow.
        let large = if cfg!(miri) { (17, 40, 2) } else { (33, 128, 20) };
        for (out, inn, tokens) in [large, (20, 52, 3), (1, 4, 1), (0, 8, 1), (5, 0, 2)] {
            let w: Vec<i8> = (0..out * inn).map(|i| (i * 37 % 256) as u8 as i8).collect();
            let compressed = Compressed::from_pruned(MatrixRef::new(out, inn, &w).unwrap()).unwrap();
            let scales: Vec<f32> = (0..out).map(|o| 0.25 + o as f32).collect();
            let mut memory = Aligned::<u8>::zeroed(packed_bytes::<i8>(out, inn).unwrap());
            let sums = pack_i8(&compressed, &mut memory).unwrap();
            let borrowed = SparseWeightI8Ref::with_sums((out, inn), &memory, &scales, &sums).unwrap();
            assert_eq!(borrowed.to_compressed(), compressed);
            let x: Vec<i8> = (0..tokens * inn).map(|i| (i * 91 % 256) as u8 as i8).collect();
            let mut y = vec![0i32; tokens * out];
            borrowed.product(&x, tokens, &mut y).unwrap();
            let dense = compressed.to_dense();
            for (i, y) in y.iter().enumerate() {
                let (token, row) = (i / out, i % out);
                let exact: i32 =
                    (0..inn).map(|k| i32::from(x[token * inn + k]) * i32::from(dense[row * inn + k])).sum();
                assert_eq!(*y, exact, "y[{token}, {row}] of {out} x {inn}");
            }
            let x: Vec<f32> = x.iter().map(|v| f32::from(*v) / 7.0).collect();
            let (mut a, mut b) = (vec![f32::NAN; tokens * out], vec![f32::NAN; tokens * out]);
            borrowed.linear(&x, tokens, Epilogue::default(), &mut a).unwrap();
            let owned = SparseWeightI8::with_scales(compressed, scales.clone()).unwrap();
            owned.linear(&x, tokens, Epilogue::default(), &mut b).unwrap();
            assert_eq!(a, b);
            let short = SparseWeightI8Ref::with_sums((out + 16, inn + 4), &memory, &scales, &sums);
            assert!(matches!(short, Err(Error::Length { .. })));
        }
    }

    proptest! {
        #[test]
        fn every_engine_gives_the_same_exact_sums(
            (out, inn, tokens, w, x) in (0usize..20, prop_oneof![4 => 0..SIZES.0[0], 1 => Just(SIZES.0[1]), 1 => Just(SIZES.0[2])], prop_oneof![4 => 0..SIZES.1[0], 1 => SIZES.1[1]..SIZES.1[2]]).prop_flat_map(|(o, i, t)| {
                let x = prop_oneof![4 => -1f32..1.0, 1 => Just(0.0), 1 => Just(1.0), 1 => Just(-1.0)];
                (Just(o), Just(i), Just(t), proptest::collection::vec(adversarial(), o * i), proptest::collection::vec(x, t * i))
            })
        ) {
            let matrix = MatrixRef::new(out, inn, &w).unwrap();
            let scales: Vec<f32> = (0..out).map(|o| 0.5 + o as f32).collect();
            let compressed = Compressed::from_pruned(matrix).unwrap();
            let pruned = compressed.to_dense();
            for &engine in Engine::available() {
                let sparse = SparseWeightI8::with_scales_for(compressed.clone(), scales.clone(), engine).unwrap();
                let dense = DenseWeightI8::with_scales_for(matrix, scales.clone(), engine).unwrap();
                let (mut a, mut b) = (vec![f32::NAN; tokens * out], vec![f32::NAN; tokens * out]);
                sparse.linear(&x, tokens, Epilogue::default(), &mut a).unwrap();
                dense.linear(&x, tokens, Epilogue::default(), &mut b).unwrap();
                for t in 0..tokens {
                    let (q, scale) = quantize_rows(&x[t * inn..][..inn], 1, inn);
                    let scale = scale[0];
                    for o in 0..out {
                        let exact = |w: &[i8]| {
                            let sum: i64 = w[o * inn..][..inn].iter().zip(&q).map(|(w, q)| i64::from(*w) * i64::from(*q)).sum();
                            sum as i32 as f32 * scale * scales[o]
                        };
                        prop_assert_eq!(a[t * out + o], exact(&pruned), "{} 2:4 y[{}, {}]", engine, t, o);
                        prop_assert_eq!(b[t * out + o], exact(&w), "{} dense y[{}, {}]", engine, t, o);
                    }
                }
            }
        }
    }

    #[test]
    fn what_is_not_finite_is_not_hidden() {
        let w = vec![1i8, 1, 0, 0];
        for &engine in Engine::available() {
            let dense = DenseWeightI8::with_scales_for(MatrixRef::new(1, 4, &w).unwrap(), vec![1.0], engine).unwrap();
            let mut y = [0.0; 3];
            let x = [1.0, 1.0, 0.0, f32::NAN, f32::INFINITY, 0.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0];
            dense.linear(&x, 3, Epilogue::default(), &mut y).unwrap();
            assert!(y[0].is_nan() && y[1].is_nan() && (y[2] - 4.0).abs() < 1e-5, "{y:?}");
        }
        let wide = vec![0i8; MAX_INPUTS + 1];
        let error = DenseWeightI8::with_scales(MatrixRef::new(1, wide.len(), &wide).unwrap(), vec![1.0]).unwrap_err();
        assert!(matches!(error, Error::TooManyInputs { .. }), "{error}");
    }
}
