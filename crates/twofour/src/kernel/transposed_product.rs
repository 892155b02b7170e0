//! The dense GEMM with a transposed left factor, `c = aᵀ · b`: weight gradients, whose reduction runs over tokens.

use super::{dense::Rows, engine::Cpu, many::TransposedProduct, share};
use crate::{MatrixRef, Result, kernel::Engine};

/// `aᵀ · b` in f32: `a` is `[depth, rows]`, `b` is `[depth, cols]`, `c` is `[rows, cols]`, and as long. Each element of
/// `c` is stored once, in parallel: `store(row, first_col, products, c)` receives some elements of a row from
/// `first_col` on.
///
/// # Errors
/// [`crate::Error::Engine`] where this machine cannot run the engine.
pub(crate) fn transposed_product<C: Send>(
    engine: Engine,
    (a, b): (MatrixRef<'_, f32>, MatrixRef<'_, f32>),
    store: impl Fn(usize, usize, &mut [f32], &mut [C]) + Sync,
    c: &mut [C],
) -> Result<()> {
    let cpu = Cpu::detect(engine)?;
    let [a, b] = [a, b].map(Rows::of);
    assert!(a.rows == b.rows && c.len() == a.cols * b.cols, "factors and product must fit");
    if c.is_empty() {
        return Ok(());
    }
    if a.rows >= cpu.many().transposed {
        cpu.run(TransposedProduct { a, b, store, c });
        return Ok(());
    }
    share(
        c.chunks_mut(b.cols).enumerate(),
        || vec![0f32; b.cols],
        |sums, (row, c)| {
            sums.fill(0.0);
            // Added up in order of depth.
            for depth in 0..a.rows {
                let factor = a.values[depth * a.cols + row];
                let values = &b.values[depth * b.cols..][..b.cols];
                sums.iter_mut().zip(values).for_each(|(sum, value)| *sum += factor * value);
            }
            store(row, 0, sums, c);
        },
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Depth, rows and columns at most; Miri is slow.
    const SIZES: (usize, usize, usize) = if cfg!(miri) { (5, 18, 20) } else { (300, 90, 120) };

    /// Each element with the sum of its terms and of their magnitudes in f64; every element is stored once.
    fn check((depth, rows, cols): (usize, usize, usize), seed: u32) {
        let mut state = seed;
        let mut next = || {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            (state >> 8) as f32 / 8_388_608.0 - 1.0
        };
        let a: Vec<f32> = (0..depth * rows).map(|_| next()).collect();
        let b: Vec<f32> = (0..depth * cols).map(|_| next()).collect();
        for engine in Engine::available() {
            let factors = (MatrixRef::new(depth, rows, &a).unwrap(), MatrixRef::new(depth, cols, &b).unwrap());
            let mut c = vec![(0, f32::NAN); rows * cols];
            let store = |row: usize, first: usize, products: &mut [f32], c: &mut [(usize, f32)]| {
                assert!(products.len() == c.len() && row < rows && first + c.len() <= cols);
                for (i, (c, product)) in c.iter_mut().zip(products).enumerate() {
                    *c = (row * cols + first + i, *product);
                }
            };
            transposed_product(*engine, factors, store, &mut c).unwrap();
            for (i, (place, found)) in c.into_iter().enumerate() {
                assert_eq!(place, i, "{engine}");
                let terms = |f: fn(f64) -> f64| -> f64 {
                    (0..depth).map(|k| f(f64::from(a[k * rows + i / cols]) * f64::from(b[k * cols + i % cols]))).sum()
                };
                let allowed = terms(f64::abs) * (depth as f64 + 4.0) * 2f64.powi(-24);
                assert!((f64::from(found) - terms(|v| v)).abs() <= allowed, "{engine} {depth}x{rows}x{cols} at {i}");
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 4 } else { 64 }))]
        #[test]
        fn every_engine_agrees_with_sums_in_f64(
            depth in 0..SIZES.0, rows in 0..SIZES.1, cols in 0..SIZES.2, seed in any::<u32>()
        ) {
            check((depth, rows, cols), seed);
        }
    }

    #[test]
    #[cfg_attr(miri, ignore = "too large for Miri")]
    fn columns_beyond_one_pass_and_rows_beyond_one_block_agree() {
        check((20, 530, 1100), 1);
        check((600, 40, 70), 2);
    }
}
