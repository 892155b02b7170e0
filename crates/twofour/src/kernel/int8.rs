//! Int8 weights with a scale for each row, and activations quantised token by token.
//!
//! `y = act(scale_x[token] · scale_w[row] · Σ q_x q_w + bias)`: symmetric quantisation, `scale = amax / 127`, rounding to nearest even (as torch's
//! dynamic int8 linear with per-channel weights). The integer sums are exact and the same on every engine.

use std::borrow::Cow;

#[cfg(target_arch = "x86_64")]
use super::amx;
use super::{
    aligned::Aligned,
    arguments::{Sums, expect_bias, expect_len},
    decode::{self, Factor},
    dense_block::DenseBlock,
    engine::{Cpu, Engine},
    epilogue::Epilogue,
    quantize::quantize_rows,
    strips::{self, Strips, StripsRef},
};
use crate::{Compressed, Error, MatrixRef, Result};

/// Products are at most 128 * 255 (with the offset of unsigned activations) and must not overflow 31 bits in any order.
const MAX_INPUTS: usize = i32::MAX as usize / (128 * 255);

/// A compressed int8 weight with a scale for each row, ready to multiply.
#[derive(Debug, Clone)]
pub struct SparseWeightI8 {
    weight: Strips<i8>,
    shared: Rows<'static>,
}

/// A dense int8 weight with a scale for each row: the contender.
#[derive(Debug, Clone)]
pub struct DenseWeightI8 {
    values: Aligned<i8>,
    in_features: usize,
    shared: Rows<'static>,
}

/// A compressed int8 weight in borrowed memory, with a scale and the sum of the values for each row.
#[derive(Debug, Clone)]
pub struct SparseWeightI8Ref<'a> {
    weight: StripsRef<'a, i8>,
    shared: Rows<'a>,
}

/// What int8 weights of either kind keep beside their values.
#[derive(Debug, Clone)]
struct Rows<'m> {
    cpu: Cpu,
    /// One a row.
    scales: Cow<'m, [f32]>,
    /// The sum of each row's values.
    sums: Cow<'m, [i32]>,
}

impl Rows<'_> {
    fn new<'a>(
        engine: Engine,
        in_features: usize,
        scales: Vec<f32>,
        rows: impl ExactSizeIterator<Item = &'a [i8]>,
    ) -> Result<Self> {
        if in_features > MAX_INPUTS {
            return Err(Error::TooManyInputs { found: in_features, limit: MAX_INPUTS });
        }
        expect_len("scales", &scales, 1, rows.len())?;
        let sums = rows.map(sum).collect();
        Ok(Rows { cpu: Cpu::detect(engine)?, scales: scales.into(), sums })
    }

    fn view(&self) -> Rows<'_> {
        Rows { cpu: self.cpu, scales: Cow::Borrowed(&self.scales), sums: Cow::Borrowed(&self.sums) }
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

/// Sums of a weight with few tokens, and what they have too much for each unit of the row's sum of weights.
fn few<F: Factor<Activation = i8, Sum = i32>>(
    cpu: Cpu,
    weight: F,
    x: &[i8],
    tokens: usize,
    in_features: usize,
) -> (Sums<i32>, i32) {
    let (x, offset) = decode::prepare_bytes(cpu, x, in_features);
    (decode::product(cpu, weight, &x, tokens), offset)
}

impl SparseWeightI8 {
    /// Packs for [`Engine::best`]; `scales` has a value for each row.
    ///
    /// # Errors
    /// [`Error::Length`] where the scales do not fit, [`Error::TooManyInputs`] where the sums could overflow, and those of
    /// [`Engine::best`].
    pub fn pack(weight: Compressed<i8>, scales: Vec<f32>) -> Result<Self> {
        Self::pack_for(weight, scales, Engine::best()?)
    }

    /// Packs for one engine.
    ///
    /// # Errors
    /// Those of [`SparseWeightI8::pack`].
    pub fn pack_for(weight: Compressed<i8>, scales: Vec<f32>, engine: Engine) -> Result<Self> {
        let rows = (0..weight.rows()).map(|row| weight.values_row(row));
        let shared = Rows::new(engine, weight.cols(), scales, rows)?;
        Ok(Self { weight: Strips::pack(&weight)?, shared })
    }

    /// Rows of the weight.
    pub fn out_features(&self) -> usize {
        self.weight.rows()
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.weight.cols()
    }

    /// Bytes of values, metadata and scales.
    pub fn bytes(&self) -> usize {
        self.weight.bytes() + size_of_val(self.scales())
    }

    /// The weight in canonical form, made anew, without its scales.
    pub fn to_compressed(&self) -> Compressed<i8> {
        self.weight.to_compressed()
    }

    /// The scale of each row.
    pub fn scales(&self) -> &[f32] {
        &self.shared.scales
    }

    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`, both f32; `x` is quantised to int8 token by
    /// token. A token with a NaN or an infinity gives NaN throughout.
    ///
    /// # Errors
    /// [`Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[f32], tokens: usize, epilogue: Epilogue<'_>, y: &mut [f32]) -> Result<()> {
        SparseWeightI8Ref { weight: self.weight.view(), shared: self.shared.view() }.linear(x, tokens, epilogue, y)
    }
}

/// Bytes of the packed values and metadata of an int8 weight `[out_features, in_features]`. The layout is the same for every engine of a CPU. It may
/// change between versions, so it is no file format.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn packed_bytes_i8(out_features: usize, in_features: usize) -> Result<usize> {
    strips::bytes_of::<i8>(out_features, in_features)
}

/// Packs a compressed int8 weight into borrowed memory of [`packed_bytes_i8`] bytes, and returns the sum of each row's values.
///
/// # Errors
/// [`Error::Length`], [`Error::Unaligned`] ([`super::PACKED_ALIGNMENT`]).
pub fn pack_i8(weight: &Compressed<i8>, bytes: &mut [u8]) -> Result<Vec<i32>> {
    // Groups and rows past the weight's hold zeros.
    bytes.fill(0);
    Strips::<i8, _>::over(weight.rows(), weight.cols(), bytes)?.pack_again(weight)?;
    Ok((0..weight.rows()).map(|row| sum(weight.values_row(row))).collect())
}

/// The sum of a row's values.
fn sum(row: &[i8]) -> i32 {
    row.iter().map(|v| i32::from(*v)).sum()
}

impl<'a> SparseWeightI8Ref<'a> {
    /// The weight in memory that [`pack_i8`] filled, with the sums that it returned and a scale for each row, to be multiplied by [`Engine::best`].
    ///
    /// # Errors
    /// [`Error::Length`] for memory, scales or sums of another length, [`Error::Unaligned`], [`Error::TooManyInputs`] where the sums could
    /// overflow; those of [`Engine::best`].
    pub fn new(
        (out_features, in_features): (usize, usize),
        bytes: &'a [u8],
        scales: &'a [f32],
        sums: &'a [i32],
    ) -> Result<Self> {
        if in_features > MAX_INPUTS {
            return Err(Error::TooManyInputs { found: in_features, limit: MAX_INPUTS });
        }
        expect_len("scales", scales, 1, out_features)?;
        expect_len("sums", sums, 1, out_features)?;
        let cpu = Cpu::detect(Engine::best()?)?;
        let shared = Rows { cpu, scales: Cow::Borrowed(scales), sums: Cow::Borrowed(sums) };
        Ok(Self { weight: Strips::over(out_features, in_features, bytes)?, shared })
    }

    /// The weight in canonical form, as a copy, without its scales.
    pub fn to_compressed(&self) -> Compressed<i8> {
        self.weight.to_compressed()
    }

    /// [`SparseWeightI8::linear`].
    ///
    /// # Errors
    /// [`Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[f32], tokens: usize, epilogue: Epilogue<'_>, y: &mut [f32]) -> Result<()> {
        self.shared.linear(self.weight.cols(), x, tokens, epilogue, y, |x| self.sums(x, tokens))
    }

    /// `y = x · Wᵀ` of integers, exact: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`. Scales play no part.
    ///
    /// # Errors
    /// [`Error::Length`] where `x` or `y` does not fit.
    pub fn product(&self, x: &[i8], tokens: usize, y: &mut [i32]) -> Result<()> {
        expect_len("x", x, tokens, self.weight.cols())?;
        expect_len("y", y, tokens, self.weight.rows())?;
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
        sums.store(tokens, y, |sums, _, first, y| {
            for ((y, sum), row_sum) in y.iter_mut().zip(sums).zip(&self.shared.sums[first..]) {
                *y = combine(*y, sum.wrapping_sub(offset.wrapping_mul(*row_sum)));
            }
        });
    }

    /// The sums of a GEMM, and what they have too much for each unit of the row's sum of weights.
    fn sums(&self, x: &[i8], tokens: usize) -> (Sums<i32>, i32) {
        let cpu = self.shared.cpu;
        #[cfg(target_arch = "x86_64")]
        if let Some(amx) = amx::choose(cpu, tokens) {
            return (amx::sparse(amx, self.weight, x, tokens), 0);
        }
        few(cpu, self.weight, x, tokens, self.weight.cols())
    }
}

impl DenseWeightI8 {
    /// Packs for [`Engine::best`]; `scales` has a value for each row.
    ///
    /// # Errors
    /// Those of [`SparseWeightI8::pack`].
    pub fn pack(matrix: MatrixRef<'_, i8>, scales: Vec<f32>) -> Result<Self> {
        Self::pack_for(matrix, scales, Engine::best()?)
    }

    /// Packs for one engine.
    ///
    /// # Errors
    /// Those of [`SparseWeightI8::pack`].
    pub fn pack_for(matrix: MatrixRef<'_, i8>, scales: Vec<f32>, engine: Engine) -> Result<Self> {
        let rows = (0..matrix.rows()).map(|row| matrix.row(row));
        let shared = Rows::new(engine, matrix.cols(), scales, rows)?;
        Ok(Self { values: Aligned::copy_of(matrix.data())?, in_features: matrix.cols(), shared })
    }

    /// Rows of the weight.
    pub fn out_features(&self) -> usize {
        self.shared.scales.len()
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.in_features
    }

    /// The integers of a row, and their scale.
    ///
    /// # Panics
    /// Where the weight has no such row.
    pub fn row(&self, row: usize) -> (&[i8], f32) {
        (&self.values[row * self.in_features..][..self.in_features], self.shared.scales[row])
    }

    /// Bytes of values and scales.
    pub fn bytes(&self) -> usize {
        self.values.len() + size_of_val::<[f32]>(&self.shared.scales)
    }

    /// As [`SparseWeightI8::linear`].
    ///
    /// # Errors
    /// [`Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[f32], tokens: usize, epilogue: Epilogue<'_>, y: &mut [f32]) -> Result<()> {
        let block = DenseBlock { rows: self.out_features(), values: &self.values, cols: self.in_features };
        let cpu = self.shared.cpu;
        self.shared.linear(self.in_features, x, tokens, epilogue, y, |x| {
            #[cfg(target_arch = "x86_64")]
            if let Some(amx) = amx::choose(cpu, tokens) {
                return (amx::dense(amx, block, x, tokens), 0);
            }
            few(cpu, block, x, tokens, self.in_features)
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;
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
            let mut memory = Aligned::<u8>::zeroed(packed_bytes_i8(out, inn).unwrap());
            let sums = pack_i8(&compressed, &mut memory).unwrap();
            let borrowed = SparseWeightI8Ref::new((out, inn), &memory, &scales, &sums).unwrap();
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
            let owned = SparseWeightI8::pack(compressed, scales.clone()).unwrap();
            owned.linear(&x, tokens, Epilogue::default(), &mut b).unwrap();
            assert_eq!(a, b);
            let short = SparseWeightI8Ref::new((out + 16, inn + 4), &memory, &scales, &sums);
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
                let sparse = SparseWeightI8::pack_for(compressed.clone(), scales.clone(), engine).unwrap();
                let dense = DenseWeightI8::pack_for(matrix, scales.clone(), engine).unwrap();
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
            let dense = DenseWeightI8::pack_for(MatrixRef::new(1, 4, &w).unwrap(), vec![1.0], engine).unwrap();
            let mut y = [0.0; 3];
            let x = [1.0, 1.0, 0.0, f32::NAN, f32::INFINITY, 0.0, 0.0, 0.0, 2.0, 2.0, 0.0, 0.0];
            dense.linear(&x, 3, Epilogue::default(), &mut y).unwrap();
            assert!(y[0].is_nan() && y[1].is_nan() && (y[2] - 4.0).abs() < 1e-5, "{y:?}");
        }
        let wide = vec![0i8; MAX_INPUTS + 1];
        let error = DenseWeightI8::pack(MatrixRef::new(1, wide.len(), &wide).unwrap(), vec![1.0]).unwrap_err();
        assert!(matches!(error, Error::TooManyInputs { .. }), "{error}");
    }
}
