//! Int4 weights, and activations quantized to int8 token by token (W4A8).
//!
//! `y = act(scale_x[token] · Σ_g scale_w[row, g] · (Σ q_x q_w) + bias)`: the sums of a group are exact, those of groups are added in f32 in order of column, fused;
//! so every engine gives the same bits. For any number of tokens the weight stays in four bits: a strip comes from memory once and stays in the second
//! cache for all tokens.
//!
//! [`super::int4`] has the same weights multiplied with floats that are not quantized.

mod layout;
#[cfg(target_arch = "x86_64")]
mod sums;

use std::ops::Range;

use super::{
    arguments::{expect_bias, expect_len},
    decode::{self, Factor},
    engine::{Cpu, Engine},
    epilogue::Epilogue,
    quantize::quantize_rows,
    strips::ROWS,
};
#[cfg(target_arch = "x86_64")]
use super::{
    decode::strips::walk,
    vector::{avx2, avx512},
};
use crate::{
    Result,
    int4::{Granularity, Int4},
};
use layout::{Packed, PackedRef};
#[cfg(target_arch = "x86_64")]
use sums::Int4Kernel;

/// A 2:4 weight of four-bit integers with scales, ready to multiply; activations are quantized to int8 for each token.
///
/// ```
/// use twofour::{Compressed, MatrixRef, int4::{Granularity, Int4}, kernel::{Epilogue, SparseWeightInt4}};
/// let w = [0.0f32, 7.0, 0.0, -3.0, 1.0, 0.0, 0.0, 0.0];
/// let q = Int4::quantize(&Compressed::from_dense(MatrixRef::new(1, 8, &w)?)?, Granularity::Row)?;
/// let (x, mut y) = ([0.0, 127.0, 0.0, 1.0, 2.0, 0.0, 0.0, 0.0], [0.0]);
/// SparseWeightInt4::pack(&q)?.linear(&x, 1, Epilogue::default(), &mut y)?;
/// assert_eq!(y, [888.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct SparseWeightInt4 {
    weight: Packed,
    cpu: Cpu,
}

impl SparseWeightInt4 {
    /// Packs for [`Engine::best`].
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`]; those of [`Engine::best`].
    pub fn pack(weight: &Int4) -> Result<Self> {
        Self::pack_for(weight, Engine::best()?)
    }

    /// Packs for one engine.
    ///
    /// # Errors
    /// [`crate::Error::TooLarge`]; [`crate::Error::Engine`] where this machine cannot run it.
    pub fn pack_for(weight: &Int4, engine: Engine) -> Result<Self> {
        Ok(Self { weight: Packed::new(weight)?, cpu: Cpu::detect(engine)? })
    }

    /// Rows of the weight.
    pub fn out_features(&self) -> usize {
        self.weight.shape.rows
    }

    /// Columns of the weight.
    pub fn in_features(&self) -> usize {
        self.weight.shape.cols
    }

    /// What shares a scale.
    pub fn granularity(&self) -> Granularity {
        self.weight.shape.granularity
    }

    /// Bytes of integers, metadata and scales.
    pub fn bytes(&self) -> usize {
        self.weight.bytes()
    }

    /// The weight in canonical form, made anew. The scales of a weight without columns, which scale nothing, are 0.
    ///
    /// # Errors
    /// Those of [`Int4::from_parts`].
    pub fn to_int4(&self) -> Result<Int4> {
        self.weight.to_int4()
    }

    /// `y = act(x · Wᵀ + bias)`: `x` is `[tokens, in_features]`, `y` is `[tokens, out_features]`, both f32; `x` is quantized to int8 for each token. A
    /// token with a NaN or an infinity gives NaN throughout.
    ///
    /// # Errors
    /// [`crate::Error::Length`] where `x`, `y` or the bias does not fit.
    pub fn linear(&self, x: &[f32], tokens: usize, epilogue: Epilogue<'_>, y: &mut [f32]) -> Result<()> {
        let (rows, cols) = (self.out_features(), self.in_features());
        expect_len("x", x, tokens, cols)?;
        expect_len("y", y, tokens, rows)?;
        expect_bias(&epilogue, rows)?;
        if y.is_empty() {
            return Ok(());
        }
        let (quantized, scales) = quantize_rows(x, tokens, cols);
        let (prepared, _) = decode::prepare_bytes(self.cpu, &quantized, cols);
        decode::product(self.cpu, self.weight.view(), &prepared, tokens).store(tokens, y, |sums, token, first, y| {
            y.iter_mut().zip(sums).for_each(|(y, sum)| *y = sum * scales[token]);
            epilogue.apply(y, first);
        });
        Ok(())
    }
}

impl Factor for PackedRef<'_> {
    type Activation = i8;
    type Sum = f32;

    fn rows(&self) -> usize {
        self.shape.rows
    }

    fn bytes(&self) -> usize {
        PackedRef::bytes(self)
    }

    fn multiply(&self, cpu: Cpu, strips: Range<usize>, x: &[i8], stride: usize, out: &mut [f32]) {
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx2,fma,f16c")]
        fn avx2(weight: PackedRef<'_>, strips: Range<usize>, x: &[i8], stride: usize, out: &mut [f32]) {
            // SAFETY: the CPU has AVX2, FMA and F16C, as this function requires; the called one has no other condition.
            unsafe { walk::<Int4Kernel<avx2::Bytes>, _>(weight, strips, x, stride, out) }
        }
        #[cfg(target_arch = "x86_64")]
        #[target_feature(enable = "avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")]
        fn avx512(weight: PackedRef<'_>, strips: Range<usize>, x: &[i8], stride: usize, out: &mut [f32]) {
            // SAFETY: the CPU has AVX-512 and VNNI, as this function requires; the called one has no other condition.
            unsafe { walk::<Int4Kernel<avx512::Bytes>, _>(weight, strips, x, stride, out) }
        }
        match cpu {
            // SAFETY: a `HasAvx2` exists only where detection found the instructions.
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx2(_) => unsafe { avx2(*self, strips, x, stride, out) },
            // SAFETY: a `HasAvx512` or a `HasAmx`, which implies it, exists only where detection found the instructions.
            #[cfg(target_arch = "x86_64")]
            Cpu::Avx512(_) | Cpu::Amx(_) => unsafe { avx512(*self, strips, x, stride, out) },
            Cpu::Scalar => reference(*self, strips, x, stride, out),
        }
    }
}

/// The plain kernel: `[strip, token, ROWS]` for some strips and activations `stride` apart.
fn reference(weight: PackedRef<'_>, strips: Range<usize>, x: &[i8], stride: usize, out: &mut [f32]) {
    let places = strips.flat_map(|strip| x.chunks_exact(stride).map(move |x| (weight.strip_of(strip), x)));
    for ((strip, x), out) in places.zip(out.chunks_exact_mut(ROWS)) {
        for (row, out) in out.iter_mut().enumerate() {
            *out = 0.0;
            let mut first = 0;
            for blocks in strip.groups() {
                let mut sum = 0;
                for group in first * 8..(first + blocks) * 8 {
                    for (position, q) in strip.kept(row, group) {
                        sum += i32::from(q) * i32::from(x[group * 4 + position]);
                    }
                }
                *out = (sum as f32).mul_add(strip.scale(row, first).to_f32(), *out);
                first += blocks;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use half::f16;
    use proptest::prelude::*;

    use super::*;
    use crate::{Compressed, Mask, MatrixRef, kernel::Activation};

    /// An int4 weight of given integers, of which each group of four keeps two columns that depend on the row and the group.
    fn weight(rows: usize, cols: usize, granularity: Granularity, q: &[i8], scales: &[f16]) -> Int4 {
        const PAIRS: [u8; 6] = [0b0011, 0b0101, 0b0110, 0b1001, 0b1010, 0b1100];
        let mask = Mask::from_fn(rows, cols, |row, col| PAIRS[(row * 7 + col / 4 * 5) % 6] >> (col % 4) & 1 == 1);
        let weight = Compressed::from_masked(MatrixRef::new(rows, cols, q).unwrap(), &mask).unwrap();
        Int4::from_parts(weight, scales[..rows * granularity.scales_per_row(cols)].to_vec(), granularity).unwrap()
    }

    /// Sums of exact products in the order that the module describes.
    fn expected(weight: &Int4, x: &[f32], token: usize, row: usize) -> f32 {
        let (cols, dense) = (weight.weight().cols(), weight.weight().to_dense());
        let (q, scales) = quantize_rows(&x[token * cols..][..cols], 1, cols);
        let width = weight.granularity().columns().unwrap_or(256);
        let mut y = 0f32;
        for first in (0..cols).step_by(width) {
            let group = first..(first + width).min(cols);
            let sum: i32 = group.map(|k| i32::from(dense[row * cols + k]) * i32::from(q[k])).sum();
            y = (sum as f32).mul_add(weight.scale(row, first).to_f32(), y);
        }
        y * scales[0]
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
            for &engine in Engine::available() {
                let packed = SparseWeightInt4::pack_for(&weight, engine).unwrap();
                if cols > 0 {
                    prop_assert_eq!(&packed.to_int4().unwrap(), &weight);
                }
                let mut y = vec![f32::NAN; tokens * rows];
                packed.linear(&x, tokens, Epilogue::default(), &mut y).unwrap();
                for (i, y) in y.iter().enumerate() {
                    let (token, row) = (i / rows, i % rows);
                    let expected = expected(&weight, &x, token, row);
                    prop_assert_eq!(*y, expected, "{} {:?} y[{}, {}]", engine, granularity, token, row);
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
                for &engine in Engine::available() {
                    let mut y = vec![0.0; 5 * rows];
                    let packed = SparseWeightInt4::pack_for(&weight, engine).unwrap();
                    packed.linear(&x, 5, Epilogue::default(), &mut y).unwrap();
                    assert!(
                        y.iter().all(|y| *y == expected(&weight, &x, 0, 0)),
                        "{engine} {granularity:?} {q} {v}: {y:?}"
                    );
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
            let packed = SparseWeightInt4::pack_for(&weight, engine).unwrap();
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
            SparseWeightInt4::pack(&weight(32, 1024, granularity, &[1; 32 * 1024], &scales)).unwrap().bytes()
        };
        let bits = |bytes: usize| bytes as f64 * 8.0 / (32.0 * 1024.0);
        assert_eq!([bits(bytes(Granularity::Row)), bits(bytes(Granularity::Group))], [3.125, 3.25]);
    }
}
