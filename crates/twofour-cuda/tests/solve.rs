//! On a device: the operations of solvers against those of the CPU, and solvers on both. Without a device the tests
//! skip; with `TWOFOUR_REQUIRE_GPU` set they fail.

mod support;

use support::device;
use twofour::{
    Axis, Error, Mask, MatrixRef, Pattern,
    calibration::{CrossProducts, DenseSide, Hessian, Statistic},
    select,
    solve::{
        Alps, AlpsState, Backend, Compensation, Cpu, METHODS, Permutation, Pruned, Pruning, Refit, Values, alps_on,
        compensated_on, method, permutation_on, refit_on,
    },
};
use twofour_cuda::{
    layer::DeviceBuffer,
    solve::{GpuBackend, InputSums},
};

fn backend() -> Option<GpuBackend> {
    device().map(|device| GpuBackend::new(&device).unwrap())
}

/// Numbers of a linear congruential generator, from -1 to 1.
fn random(count: usize, seed: u64) -> Vec<f32> {
    let mut state = seed;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1 << 23) as f32 - 1.0
    };
    (0..count).map(|_| next()).collect()
}

/// Inputs of features that neighbours share and that differ in size.
fn inputs(features: usize, tokens: usize, seed: u64) -> Vec<f32> {
    let noise = random((features + 3) * tokens, seed);
    let of_token = |token: &[f32]| -> Vec<f32> {
        let value = |j: usize| (token[j] + token[j + 1] + 0.5 * token[j + 3]) * (1.0 + (j % 5) as f32);
        (0..features).map(value).collect()
    };
    noise.chunks(features + 3).flat_map(of_token).collect()
}

fn hessian(features: usize, tokens: usize) -> Hessian {
    let mut hessian = Hessian::new(features).unwrap();
    hessian.add(&inputs(features, tokens, 77)).unwrap();
    hessian
}

/// The norm of a difference over that of what is expected.
fn apart(found: &[f32], expected: &[f32]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let norm = |values: &mut dyn Iterator<Item = f32>| values.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let difference = norm(&mut found.iter().zip(expected).map(|(a, b)| a - b));
    difference / norm(&mut expected.iter().copied()).max(1e-30)
}

fn share_of_flips(a: &Mask, b: &Mask) -> f64 {
    a.flips(b).unwrap() as f64 / a.count() as f64
}

#[test]
fn products_and_inverses_are_those_of_the_cpu() {
    let Some(gpu) = backend() else { return };
    for order in [1usize, 5, 63, 64, 65, 128, 200, 321, 700] {
        let hessian = hessian(order, 2 * order + 50);
        let scale = hessian.diagonal().iter().sum::<f32>() / order as f32;
        let square: Vec<f32> = hessian.symmetric().iter().map(|value| value / scale).collect();
        let x = random(7 * order, 3);
        let of = |backend: &dyn Backend| {
            let (square, x) = (backend.upload(square.clone()).unwrap(), backend.upload(x.clone()).unwrap());
            let mut y = backend.zeros(7 * order).unwrap();
            backend.product(&x, &square, order, &mut y).unwrap();
            let inverse = backend.inverse(&square, order, 0.1).unwrap().unwrap();
            (backend.download(y).unwrap(), backend.download(inverse).unwrap())
        };
        let ((product, inverse), (expected, inverse_there)) = (of(&gpu), of(&Cpu));
        assert!(apart(&product, &expected) < 1e-5, "{order}: {}", apart(&product, &expected));
        assert!(apart(&inverse, &inverse_there) < 1e-3, "{order}: {}", apart(&inverse, &inverse_there));
    }
}

#[test]
fn a_matrix_that_is_not_positive_definite_is_an_error_with_its_row() {
    let Some(gpu) = backend() else { return };
    for (order, bad) in [(3usize, 1usize), (64, 63), (200, 0), (200, 130)] {
        let mut square = vec![0f32; order * order];
        square.iter_mut().step_by(order + 1).for_each(|value| *value = 2.0);
        square[bad * (order + 1)] = -1.0;
        for backend in [&gpu as &dyn Backend, &Cpu] {
            let found = backend.inverse(&backend.upload(square.clone()).unwrap(), order, 0.5).unwrap();
            assert_eq!(found.err(), Some(bad), "{order} {backend:?}");
        }
    }
}

#[test]
fn masks_and_passes_are_bit_for_bit_those_of_the_cpu() {
    let Some(gpu) = backend() else { return };
    let patterns = [(2, 4), (4, 8), (1, 3), (8, 16), (33, 64)].map(|(n, m)| Pattern::new(n, m).unwrap());
    for (rows, cols) in [(1usize, 4usize), (5, 62), (130, 96), (3, 1000)] {
        let (mut fit, added) = (random(rows * cols, 5), random(rows * cols, 6));
        // Equal scores.
        fit[..cols / 2].fill(0.5);
        let [outputs, sparse] = [7, 8].map(|seed| random(rows * cols, seed));
        for pattern in patterns {
            let of = |backend: &dyn Backend| {
                let up = |values: &[f32]| backend.upload(values.to_vec()).unwrap();
                let (plain, sum) = (up(&fit), up(&added));
                let alone = backend.largest(pattern, cols, &plain, None).unwrap();
                let mask = backend.largest(pattern, cols, &plain, Some((0.3, &sum))).unwrap();
                let differ = backend.differences(&alone, &mask).unwrap();
                let mut state = AlpsState { outputs: up(&outputs), fit: plain, sparse: up(&sparse), multiplier: sum };
                backend.alps_right(&mut state, cols, 0.7, 0.2).unwrap();
                let right = backend.download(backend.copy(&state.sparse).unwrap()).unwrap();
                backend.alps_project(&mut state, cols, &mask, 0.7).unwrap();
                let mut kept = up(&outputs);
                backend.apply(&mask, cols, &mut kept).unwrap();
                let floats: Vec<Vec<f32>> =
                    [state.sparse, state.multiplier, kept].map(|values| backend.download(values).unwrap()).into();
                let masks = [&alone, &mask].map(|mask| backend.download_mask(mask, rows, cols).unwrap());
                let uploaded = backend.upload_mask(&masks[0], 0..rows).unwrap();
                assert_eq!(backend.differences(&alone, &uploaded).unwrap(), 0);
                (differ, masks, right, floats)
            };
            assert!(of(&gpu) == of(&Cpu), "{rows} x {cols}, {pattern}");
        }
    }
}

#[test]
fn values_of_the_cpu_are_refused() {
    let Some(gpu) = backend() else { return };
    let of_cpu = Cpu.upload(vec![1.0; 4]).unwrap();
    assert!(matches!(gpu.copy(&of_cpu), Err(Error::OtherBackend)));
    let (mut out, square) = (gpu.zeros(4).unwrap(), gpu.zeros(16).unwrap());
    assert!(matches!(gpu.product(&of_cpu, &square, 4, &mut out), Err(Error::OtherBackend)));
    let short: Values = gpu.zeros(3).unwrap();
    assert!(gpu.product(&short, &square, 4, &mut out).is_err());
}

#[test]
fn sums_of_inputs_are_the_statistics_of_the_cpu() {
    let Some(gpu) = backend() else { return };
    for (features, outputs) in [(96usize, 40usize), (33, 7)] {
        for side in [DenseSide::Inputs, DenseSide::Outputs(outputs)] {
            let rows = if side == DenseSide::Inputs { features } else { outputs };
            let mut sums = InputSums::new(&gpu, features, Some(side)).unwrap();
            let (mut hessian, mut cross) =
                (Hessian::new(features).unwrap(), CrossProducts::new(side, features).unwrap());
            for (seed, tokens) in [(1, 200), (2, 1), (3, 77)] {
                let (x, dense) = (inputs(features, tokens, seed), random(tokens * rows, seed + 50));
                hessian.add(&x).unwrap();
                cross.add(&dense, &x).unwrap();
                let up = |values: &[f32]| DeviceBuffer::from_host(gpu.context(), values).unwrap();
                let (x, dense) = (up(&x), up(&dense));
                sums.add(x.as_slice(), Some(dense.as_slice())).unwrap();
            }
            let (found, beside) = sums.finish().unwrap();
            assert_eq!(found.tokens(), hessian.tokens());
            assert!(apart(&found.symmetric(), &hessian.symmetric()) < 1e-5);
            let beside = beside.unwrap();
            assert_eq!(beside.dense_side(), side);
            assert!(apart(beside.sums(), cross.sums()) < 1e-5);
        }
    }
    let mut bad = InputSums::new(&gpu, 2, None).unwrap();
    bad.add(DeviceBuffer::from_host(gpu.context(), &[1.0, f32::NAN]).unwrap().as_slice(), None).unwrap();
    assert!(matches!(bad.finish(), Err(twofour_cuda::Error::Core(Error::Statistic { .. }))));
}

#[test]
fn refits_compensations_and_orders_are_those_of_the_cpu() {
    let Some(gpu) = backend() else { return };
    // More rows than take their steps together.
    for (rows, cols) in [(2100usize, 64usize), (48, 200)] {
        let (weight, hessian) = (random(rows * cols, 4), hessian(cols, 600));
        let matrix = MatrixRef::new(rows, cols, &weight).unwrap();
        let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
        let of = |backend: &dyn Backend| {
            let found = refit_on(backend, matrix, &mask, None, &hessian, &Refit::default()).unwrap();
            let difference: Vec<f32> = weight.iter().zip(&found).map(|(a, b)| a - b).collect();
            let difference = MatrixRef::new(rows, cols, &difference).unwrap();
            (found, backend.squared_outputs(&hessian, difference).unwrap())
        };
        let ((found, error), (expected, error_there)) = (of(&gpu), of(&Cpu));
        assert!(apart(&found, &expected) < 1e-3, "{}", apart(&found, &expected));
        assert!((error / error_there - 1.0).abs() < 1e-3, "{error} {error_there}");
        assert!((0..rows * cols).all(|i| mask.is_kept(i / cols, i % cols) || found[i].to_bits() == 0));
        let (dense, pruned) = (inputs(cols, 300, 9), inputs(cols, 300, 10));
        let mixed: Vec<f32> = dense.iter().zip(&pruned).map(|(a, b)| 0.9 * a + 0.2 * b).collect();
        let outputs = random(300 * rows, 12);
        let mut of_mixed = Hessian::new(cols).unwrap();
        of_mixed.add(&mixed).unwrap();
        for (side, beside) in [(DenseSide::Inputs, &dense), (DenseSide::Outputs(rows), &outputs)] {
            let mut cross = CrossProducts::new(side, cols).unwrap();
            cross.add(beside, &mixed).unwrap();
            let of = |backend: &dyn Backend| {
                compensated_on(backend, matrix, &of_mixed, &cross, &Compensation::default()).unwrap()
            };
            let (found, expected) = (of(&gpu), of(&Cpu));
            assert!(apart(&found, &expected) < 1e-3, "{side:?}: {}", apart(&found, &expected));
        }
        let settings = Permutation::new(Pattern::TWO_FOUR);
        let order = permutation_on(&gpu, matrix, &hessian, &[vec![0]], cols, &settings).unwrap();
        let mut sorted = order.clone();
        sorted.sort_unstable();
        assert!(sorted.into_iter().eq(0..cols));
    }
}

#[test]
fn alps_leaves_the_error_that_it_leaves_on_the_cpu_and_repeats() {
    let Some(gpu) = backend() else { return };
    // Wide and narrow ones, and one whose penalty has to be lowered.
    for (pattern, rows, cols) in [((2, 4), 64, 256), ((2, 4), 300, 96), ((4, 8), 40, 128), ((2, 4), 16, 130)] {
        let pattern = Pattern::new(pattern.0, pattern.1).unwrap();
        let (weight, hessian) = (random(rows * cols, 21), hessian(cols, 3 * cols));
        let matrix = MatrixRef::new(rows, cols, &weight).unwrap();
        let of = |backend: &dyn Backend| alps_on(backend, matrix, &hessian, &Alps::new(pattern)).unwrap();
        let (found, expected) = (of(&gpu), of(&Cpu));
        found.mask.verify(pattern, Axis::Row).unwrap();
        let (flips, errors) =
            (share_of_flips(&found.mask, &expected.mask), found.squared_error / expected.squared_error);
        assert!(flips < 0.1, "{pattern}, {rows} x {cols}: {flips} of the mask");
        assert!((errors - 1.0).abs() < 0.03, "{pattern}, {rows} x {cols}: {errors} of the error");
        let exact = hessian.squared_outputs(difference(&weight, &found.weight, &mut vec![], cols)).unwrap();
        assert!((exact / found.squared_error - 1.0).abs() < 1e-3, "{exact} {}", found.squared_error);
        assert!(found == of(&gpu), "{pattern}, {rows} x {cols}: not the same again");
    }
    // Inputs that were all zero.
    let mut silent = Hessian::new(8).unwrap();
    silent.add(&[0.0; 16]).unwrap();
    let weight = random(16, 2);
    let matrix = MatrixRef::new(2, 8, &weight).unwrap();
    let of = |backend: &dyn Backend| alps_on(backend, matrix, &silent, &Alps::new(Pattern::TWO_FOUR)).unwrap().mask;
    assert_eq!(of(&gpu), of(&Cpu));
}

/// `a - b` as a matrix in `room`.
fn difference<'a>(a: &[f32], b: &[f32], room: &'a mut Vec<f32>, cols: usize) -> MatrixRef<'a, f32> {
    room.extend(a.iter().zip(b).map(|(a, b)| a - b));
    MatrixRef::new(room.len() / cols, cols, room).unwrap()
}

#[test]
fn every_method_with_what_follows_it_prunes_on_a_gpu() {
    let Some(gpu) = backend() else { return };
    let (rows, cols) = (24, 64);
    let (a, b) = (random(rows * cols, 31), random(rows * cols, 32));
    let matrices = [&a, &b].map(|values| MatrixRef::new(rows, cols, values).unwrap());
    let statistic = Statistic::Hessian(hessian(cols, 300));
    let mut cross = CrossProducts::new(DenseSide::Inputs, cols).unwrap();
    cross.add(&inputs(cols, 300, 78), &inputs(cols, 300, 77)).unwrap();
    for name in METHODS.iter().map(|method| method.name()) {
        let pruning = Pruning { swaps: 4, compensation: 0.5, ..Pruning::new(method(name).unwrap(), Pattern::TWO_FOUR) };
        let of = |backend: &dyn Backend| -> Vec<f64> {
            let found = pruning.prune_all(backend, &matrices, Some(&statistic), Some(&cross)).unwrap();
            let error = |pruned: &Pruned| match pruned {
                Pruned::Solved(solved) => solved.squared_error,
                Pruned::Mask(_) => panic!("{name}: nothing was refitted"),
            };
            found.iter().map(error).collect()
        };
        for (found, expected) in of(&gpu).into_iter().zip(of(&Cpu)) {
            assert!((found / expected - 1.0).abs() < 0.05, "{name}: {found} {expected}");
        }
    }
}
