//! Sparse stand-ins for a dense tensor inside training: **estimators**.
//!
//! | [`Estimator`] | what stands for a group of four | for |
//! |---|---|---|
//! | [`Estimator::Magnitude`] | its two largest magnitudes | weights (hard threshold) |
//! | [`Estimator::SoftThreshold`] | the same, less the third largest | weights whose mask moves without jumps (S-STE) |
//! | [`Estimator::MvueApproximate`] | two drawn at random, enlarged so that the mean is the group | neural gradients |
//! | [`Estimator::Mvue`] | the same with the least variance there is | neural gradients |
//!
//! Groups lie along rows. Numbers are computed in f32, operation by operation as IEEE 754 has them, and random ones
//! come from a counter: so a GPU gives the same bits.

mod decay;
mod mvue;
mod soft;

use rayon::prelude::*;

pub use decay::masked_decay;
pub use soft::soft_threshold_scale;

use crate::{Arithmetic, Compressed, Element, Error, MatrixRef, Result, compressed, random};

/// How a group of four is represented by two of its elements.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Estimator {
    /// The two largest magnitudes as they are; ties to the lower index, as [`crate::select::magnitude`].
    Magnitude,
    /// The two largest magnitudes, each less the third largest: `S(w) = sign(w) (|w| - t)`. It is continuous in the
    /// group, which hard thresholds are not. (Hu et al., "S-STE: Continuous Pruning Function for Efficient 2:4 Sparse
    /// Pre-training", NeurIPS 2024.)
    SoftThreshold,
    /// Two elements drawn one after the other with probabilities in proportion to their magnitudes, each divided by the
    /// probability of being among the two: unbiased, with about 6 % more variance than the best. (Chmiel et al.,
    /// "Minimum Variance Unbiased N:M Sparsity for the Neural Gradients", ICLR 2023.)
    MvueApproximate {
        /// What the random numbers depend on, with a group's place.
        seed: u64,
    },
    /// The unbiased estimator of least variance, from the same paper: an element is kept with probability `min(1, 2 |x|
    /// / Σ)`, or, where one is larger than all others together, that one always. Pairs are drawn by systematic sampling
    /// (Madow, 1949), which needs no sorting; the variance depends on the elements' own probabilities alone.
    Mvue {
        /// What the random numbers depend on, with a group's place.
        seed: u64,
    },
}

impl Estimator {
    /// Every estimator, those that draw random numbers with this seed.
    pub const fn all(seed: u64) -> [Estimator; 4] {
        [Estimator::Magnitude, Estimator::SoftThreshold, Estimator::MvueApproximate { seed }, Estimator::Mvue { seed }]
    }

    /// The name, as in `mvue-approximate`.
    pub fn name(self) -> &'static str {
        match self {
            Estimator::Magnitude => "magnitude",
            Estimator::SoftThreshold => "soft-threshold",
            Estimator::MvueApproximate { .. } => "mvue-approximate",
            Estimator::Mvue { .. } => "mvue",
        }
    }
}

/// The stand-in for a `[rows, cols]` matrix, each value multiplied by `factor` and rounded to the nearest `O`. A last,
/// incomplete group is completed with zeros. Random numbers depend on the seed, the row and the group's number in it.
///
/// # Errors
/// [`Error::NotANumber`] with the place of the first NaN; with any estimator but [`Estimator::Magnitude`],
/// [`Error::Infinite`] with that of the first infinity; those of [`Compressed::from_pruned`].
///
/// ```
/// use twofour::{MatrixRef, estimate::{Estimator, estimate}};
/// let x = [3.0f32, -1.0, 2.0, -4.0];
/// let soft = estimate::<_, f32>(MatrixRef::new(1, 4, &x)?, Estimator::SoftThreshold, 1.0)?;
/// assert_eq!(soft.to_dense(), [1.0, 0.0, 0.0, -2.0]);
/// # Ok::<(), twofour::Error>(())
/// ```
pub fn estimate<T: Element, O: Arithmetic>(
    matrix: MatrixRef<'_, T>,
    estimator: Estimator,
    factor: f32,
) -> Result<Compressed<O>> {
    let (rows, cols) = (matrix.rows(), matrix.cols());
    expect_numbers(matrix, estimator)?;
    let (values_len, meta_len) = compressed::lengths(rows, cols)?;
    let (mut values, mut meta) = (vec![O::ZERO; values_len], vec![0u32; meta_len]);
    let groups = compressed::groups_per_row(cols);
    if !values.is_empty() {
        let rows = values.par_chunks_mut(groups * 2).zip(meta.par_chunks_mut(compressed::meta_words_per_row(cols)));
        rows.enumerate().for_each(|(row, (values, meta))| {
            for (group, pair) in values.as_chunks_mut::<2>().0.iter_mut().enumerate() {
                let mut four = [0f32; 4];
                four.iter_mut().zip(&matrix.row(row)[4 * group..]).for_each(|(to, from)| *to = from.to_f32());
                let (bits, estimates) = of_group(four, estimator, row as u32, group as u32);
                let stored = estimates.map(|value| O::from_f32(value * factor));
                let (code, kept) = compressed::keep(stored, bits).expect("two are kept");
                *pair = kept;
                meta[group / 8] |= u32::from(code) << (group % 8 * 4);
            }
        });
    }
    Ok(Compressed::from_trusted_parts(rows, cols, values, meta))
}

/// Which two of a group are kept (fewer where the others are zeros), and with which values; those of the others mean
/// nothing.
fn of_group(four: [f32; 4], estimator: Estimator, row: u32, group: u32) -> (u8, [f32; 4]) {
    match estimator {
        Estimator::Magnitude => (soft::two_largest(four), four),
        Estimator::SoftThreshold => soft::threshold(four),
        Estimator::MvueApproximate { seed } => mvue::approximate(four, random::two(seed, row, group)),
        Estimator::Mvue { seed } => mvue::exact(four, random::one(seed, row, group)),
    }
}

fn expect_numbers<T: Element>(matrix: MatrixRef<'_, T>, estimator: Estimator) -> Result<()> {
    crate::select::nm::reject_nan(matrix)?;
    let rows = if matrix.cols() == 0 || estimator == Estimator::Magnitude { 0 } else { matrix.rows() };
    let infinite = |row: usize| matrix.row(row).iter().position(|v| v.to_f32().is_infinite()).map(|col| (row, col));
    match (0..rows).into_par_iter().find_map_first(infinite) {
        None => Ok(()),
        Some((row, col)) => Err(Error::Infinite { row, col }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Axis, Mask, Pattern, select};
    use half::bf16;
    use proptest::prelude::*;

    const ALL: [Estimator; 4] = Estimator::all(7);

    fn numbers() -> impl Strategy<Value = f32> {
        let special = [0.0, -0.0, 1.0, -1.0, 1e-45, 1e-38, 1e37, -1e37, 0.1];
        prop_oneof![-4f32..4.0, proptest::sample::select(special.to_vec())]
    }

    proptest! {
        #[test]
        fn estimates_are_finite_and_two_of_four(
            (cols, data) in (0usize..40).prop_flat_map(|c| (Just(c), proptest::collection::vec(numbers(), 3 * c)))
        ) {
            let matrix = MatrixRef::new(3, cols, &data).unwrap();
            for estimator in ALL {
                let found = estimate::<_, f32>(matrix, estimator, 0.001).unwrap();
                prop_assert!(Compressed::from_parts(3, cols, found.values().to_vec(), found.meta().to_vec()).is_ok());
                let dense = found.to_dense();
                for (i, (x, y)) in data.iter().zip(&dense).enumerate() {
                    prop_assert!(y.is_finite(), "{:?}: {} from {}", estimator, y, x);
                    prop_assert!(*y == 0.0 || y.signum() == x.signum(), "{:?}: {} from {}", estimator, y, x);
                    if matches!(estimator, Estimator::MvueApproximate { .. } | Estimator::Mvue { .. }) && *y != 0.0 {
                        // Never smaller than what it stands for.
                        prop_assert!(y.abs() >= x.abs() * 0.000999, "{:?}, {}: {} from {}", estimator, i, y, x);
                    }
                }
            }
            let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
            let hard = estimate::<_, f32>(matrix, Estimator::Magnitude, 1.0).unwrap();
            prop_assert_eq!(hard, Compressed::from_masked(matrix, &mask).unwrap());
        }
    }

    #[test]
    fn what_is_not_finite_is_an_error_with_its_place() {
        let with = |value| {
            let mut data = vec![1f32; 12];
            data[7] = value;
            ALL.map(|e| estimate::<_, bf16>(MatrixRef::new(2, 6, &data).unwrap(), e, 1.0).map(|_| ()))
        };
        assert!(with(f32::NAN).iter().all(|r| matches!(r, Err(Error::NotANumber { row: 1, col: 1 }))));
        let infinite = with(f32::INFINITY);
        assert!(infinite[0].is_ok());
        assert!(infinite[1..].iter().all(|r| matches!(r, Err(Error::Infinite { row: 1, col: 1 }))));
    }

    #[test]
    fn other_seeds_and_groups_draw_otherwise() {
        let x = [1f32; 4096];
        let mask = |seed| {
            let matrix = MatrixRef::new(4, 1024, &x).unwrap();
            let found = estimate::<_, f32>(matrix, Estimator::MvueApproximate { seed }, 1.0).unwrap().to_dense();
            Mask::of_nonzeros(MatrixRef::new(4, 1024, &found).unwrap())
        };
        assert_eq!(mask(1), mask(1));
        // Two masks of two in four agree by chance in a third of their groups: half of all elements differ.
        let differing = mask(1).flip_rate(&mask(2)).unwrap();
        assert!((differing - 0.5).abs() < 0.05, "{differing}");
    }
}
