//! The suite that every engine of this machine must pass: each kernel against a sum in f64 over what is stored.

use half::{bf16, f16};
use proptest::{prelude::*, strategy::ValueTree};

use super::*;
use crate::{Compressed, MatrixRef};

/// Outputs, inputs and tokens at most; Miri is slow.
const SIZES: (usize, usize, usize) = if cfg!(miri) { (18, 24, 3) } else { (40, 140, 7) };

/// Shapes around every edge of the kernels, values with ties, zeros of both signs and wide ranges.
#[derive(Debug, Clone)]
struct Case {
    out: usize,
    inn: usize,
    tokens: usize,
    weight: Vec<f32>,
    x: Vec<f32>,
    bias: Option<Vec<f32>>,
    activation: Activation,
}

fn value() -> impl Strategy<Value = f32> {
    prop_oneof![3 => -2.0f32..2.0, 1 => Just(0.0), 1 => Just(-0.0), 1 => (-2i8..=2).prop_map(f32::from), 1 => -300f32..300.0]
}

fn case() -> impl Strategy<Value = Case> {
    let activation =
        prop_oneof![Just(Activation::Identity), Just(Activation::Relu), Just(Activation::Gelu), Just(Activation::Silu)];
    (
        0..SIZES.0,
        prop_oneof![0..SIZES.1, Just(if cfg!(miri) { 36 } else { 256 })],
        prop_oneof![0..SIZES.2, Just(if cfg!(miri) { 9 } else { 17 }), Just(if cfg!(miri) { 17 } else { 70 })],
        any::<bool>(),
        activation,
    )
        .prop_flat_map(|(out, inn, tokens, biased, activation)| {
            let many = |n: usize| proptest::collection::vec(value(), n);
            (
                Just((out, inn, tokens, activation)),
                many(out * inn),
                many(tokens * inn),
                many(out).prop_map(move |b| biased.then_some(b)),
            )
        })
        .prop_map(|((out, inn, tokens, activation), weight, x, bias)| Case {
            out,
            inn,
            tokens,
            weight,
            x,
            bias,
            activation,
        })
}

fn narrow<T: KernelElement>(values: &[f32]) -> Vec<T> {
    values.iter().map(|v| T::from_f32(*v)).collect()
}

/// Half the distance between neighbours at 1.
fn epsilon<T: KernelElement>() -> f64 {
    match T::DTYPE {
        crate::DataType::F32 => 2f64.powi(-24),
        crate::DataType::F16 => 2f64.powi(-11),
        _ => 2f64.powi(-8),
    }
}

/// `found` must be the value of `exact` but for rounding: of the sum, whose terms' magnitudes add up to `mass`, and of
/// the output. Every addition rounds to nearest, whether it is fused with its product (f32 arithmetic) or not
/// (`vdpbf16ps`, whose products are exact), and what `vdpbf16ps` flushes to zero is below 2^-126 a term, far below the
/// constant.
fn assert_close<T: KernelElement>(found: T, exact: f64, mass: f64, terms: usize, what: &str) {
    let found = f64::from(found.to_f32());
    let allowed = exact.abs() * 2.0 * epsilon::<T>() + 1.5 * mass * (terms as f64 + 4.0) * 2f64.powi(-23) + 1e-6;
    // An f16 output may overflow where the exact sum does not fit.
    let overflowed = T::DTYPE == crate::DataType::F16 && exact.abs() > 65000.0;
    assert!(overflowed || (found - exact).abs() <= allowed, "{what}: {found} instead of {exact}, allowed {allowed}");
}

fn check<T: KernelElement>(case: &Case, engine: Engine) {
    let (out, inn, tokens) = (case.out, case.inn, case.tokens);
    let weight: Vec<T> = narrow(&case.weight);
    let x: Vec<T> = narrow(&case.x);
    let matrix = MatrixRef::new(out, inn, &weight).unwrap();
    let compressed = Compressed::from_pruned(matrix).unwrap();
    let pruned = compressed.to_dense();
    let sparse = SparseWeight::pack_for(compressed, engine).unwrap();
    let dense = DenseWeight::pack_for(matrix, engine).unwrap();
    let epilogue = Epilogue { bias: case.bias.as_deref(), activation: case.activation };
    for (name, w) in [("2:4", &pruned), ("dense", &weight)] {
        // Poisoned, so that an output never written is seen.
        let mut y = vec![T::from_f32(f32::NAN); tokens * out];
        match name {
            "2:4" => sparse.linear(&x, tokens, epilogue, &mut y).unwrap(),
            _ => dense.linear(&x, tokens, epilogue, &mut y).unwrap(),
        }
        for t in 0..tokens {
            for o in 0..out {
                let terms = || {
                    w[o * inn..][..inn]
                        .iter()
                        .zip(&x[t * inn..][..inn])
                        .map(|(w, x)| f64::from(w.to_f32()) * f64::from(x.to_f32()))
                };
                let bias = case.bias.as_ref().map_or(0.0, |b| f64::from(b[o]));
                let mass = terms().map(f64::abs).sum::<f64>() + bias.abs();
                let exact = f64::from(case.activation.apply((terms().sum::<f64>() + bias) as f32));
                // The activations' slopes are below 1.2.
                assert_close(
                    y[t * out + o],
                    exact,
                    1.2 * mass,
                    inn,
                    &format!("{engine} {name} {} y[{t}, {o}]", T::DTYPE),
                );
            }
        }
        let dy: Vec<T> = narrow(&case.x.iter().cycle().copied().chain([1.0]).take(tokens * out).collect::<Vec<_>>());
        if dy.len() < tokens * out {
            continue; // there was no x to take it from
        }
        let mut dx = vec![T::from_f32(f32::NAN); tokens * inn];
        match name {
            "2:4" => sparse.input_gradient(&dy, tokens, &mut dx).unwrap(),
            _ => dense.input_gradient(&dy, tokens, &mut dx).unwrap(),
        }
        for t in 0..tokens {
            for i in 0..inn {
                let terms =
                    || (0..out).map(|o| f64::from(w[o * inn + i].to_f32()) * f64::from(dy[t * out + o].to_f32()));
                let mass = terms().map(f64::abs).sum::<f64>();
                assert_close(
                    dx[t * inn + i],
                    terms().sum(),
                    mass,
                    out,
                    &format!("{engine} {name} {} dx[{t}, {i}]", T::DTYPE),
                );
            }
        }
    }
}

/// Shapes whose blocks, panels and steps over the depth are all more than one, or just not.
#[test]
fn many_tokens_cross_every_edge_of_blocks_and_panels() {
    let mut runner = proptest::test_runner::TestRunner::deterministic();
    let small = [(9, 40, 17), (33, 20, 9)];
    let shapes = [
        (1, 600, 200),
        (257, 65, 9),
        (300, 64, 97),
        (33, 513, 193),
        (70, 257, 129),
        (7, 63, 8),
        (64, 128, 96),
        (35, 3, 41),
        (50, 1100, 33),
        (600, 40, 16),
        (20, 30, 530),
    ];
    let shapes: &[_] = if cfg!(miri) { &small } else { &shapes };
    for &(out, inn, tokens) in shapes {
        let case = (proptest::collection::vec(value(), out * inn), proptest::collection::vec(value(), tokens * inn))
            .new_tree(&mut runner)
            .unwrap()
            .current();
        let bias = Some((0..out).map(|i| i as f32 - 3.0).collect());
        let case = Case { out, inn, tokens, weight: case.0, x: case.1, bias, activation: Activation::Relu };
        for &engine in Engine::available() {
            check::<f32>(&case, engine);
            check::<bf16>(&case, engine);
            check::<f16>(&case, engine);
        }
    }
}

/// More tokens than are multiplied in one go.
#[test]
#[cfg_attr(miri, ignore = "takes Miri minutes")]
fn thousands_of_tokens_multiply_as_one_does() {
    let (out, inn, tokens) = (5, 36, 4200);
    let w: Vec<f32> = (0..out * inn).map(|i| ((i * 37 % 101) as f32) - 50.0).collect();
    let x: Vec<f32> = (0..tokens * inn).map(|i| ((i * 53 % 97) as f32) - 48.0).collect();
    for &engine in Engine::available() {
        let w = Compressed::from_pruned(MatrixRef::new(out, inn, &w).unwrap()).unwrap();
        let sparse = SparseWeight::pack_for(w, engine).unwrap();
        let mut y = vec![f32::NAN; tokens * out];
        sparse.linear(&x, tokens, Epilogue::default(), &mut y).unwrap();
        for (x, y) in x.chunks(inn).zip(y.chunks(out)) {
            let mut one = [0.0; 5];
            sparse.linear(x, 1, Epilogue::default(), &mut one).unwrap();
            // Sums of whole numbers below 2^24 are exact in any order.
            assert_eq!(y, one, "{engine}");
        }
    }
}

#[test]
fn a_pruned_weight_leaves_no_trace_in_the_gradient() {
    for &engine in Engine::available() {
        // Row r keeps columns r % 4 and (r + 1) % 4 of each group.
        let (out, inn) = if cfg!(miri) { (19, 20) } else { (67, 44) };
        let kept = |row: usize, col: usize| col % 4 == row % 4 || col % 4 == (row + 1) % 4;
        let w: Vec<f32> = (0..out * inn).map(|i| f32::from(kept(i / inn, i % inn))).collect();
        let w = Compressed::from_dense(MatrixRef::new(out, inn, &w).unwrap()).unwrap();
        let sparse = SparseWeight::pack_for(w, engine).unwrap();
        let counts: &[usize] = if cfg!(miri) { &[1, 9] } else { &[1, 8, 30, 100] };
        for &tokens in counts {
            // The last row's gradient is infinite.
            let dy: Vec<f32> =
                (0..tokens * out).map(|i| if i % out == out - 1 { f32::INFINITY } else { 1.0 }).collect();
            let mut dx = vec![f32::NAN; tokens * inn];
            sparse.input_gradient(&dy, tokens, &mut dx).unwrap();
            for (i, dx) in dx.iter().enumerate() {
                if kept(out - 1, i % inn) {
                    assert_eq!(*dx, f32::INFINITY, "{engine}, {tokens} tokens");
                } else {
                    assert!(dx.is_finite(), "{engine}, {tokens} tokens: {dx}");
                }
            }
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(if cfg!(miri) { 2 } else { 96 }))]
    #[test]
    fn every_engine_multiplies_as_f64_does(case in case()) {
        for &engine in Engine::available() {
            check::<f32>(&case, engine);
            check::<bf16>(&case, engine);
            check::<f16>(&case, engine);
        }
    }
}

fn pruned_leaves_no_trace<T: KernelElement>() {
    for &engine in Engine::available() {
        let widths: &[usize] = if cfg!(miri) { &[4, 36] } else { &[4, 20, 32, 64, 100] };
        let counts: &[usize] = if cfg!(miri) { &[1, 9] } else { &[1, 2, 3, 40, 130] };
        for &inn in widths {
            let w: Vec<T> = (0..inn).map(|i| T::from_f32(f32::from(i % 4 < 2))).collect();
            let compressed = Compressed::from_dense(MatrixRef::new(1, inn, &w).unwrap()).unwrap();
            let sparse = SparseWeight::pack_for(compressed, engine).unwrap();
            for &tokens in counts {
                let x = (0..tokens * inn).map(|i| if i % inn % 4 < 2 { 1.0 } else { f32::INFINITY });
                let mut x: Vec<T> = x.map(T::from_f32).collect();
                let mut y = vec![T::ZERO; tokens];
                sparse.linear(&x, tokens, Epilogue::default(), &mut y).unwrap();
                let expected = vec![T::from_f32(inn as f32 / 2.0); tokens];
                assert_eq!(y, expected, "{engine}, {inn} columns, {tokens} tokens");
                x[0] = T::from_f32(f32::NAN);
                sparse.linear(&x, tokens, Epilogue::default(), &mut y).unwrap();
                assert!(y[0].to_f32().is_nan() && y[1..].iter().all(|v| v.to_f32().is_finite()));
            }
        }
    }
}

#[test]
fn what_is_pruned_leaves_no_trace_and_what_is_kept_does() {
    pruned_leaves_no_trace::<f32>();
    pruned_leaves_no_trace::<bf16>();
    pruned_leaves_no_trace::<f16>();
}

#[test]
fn a_subnormal_bf16_counts_as_zero_from_avx512_on() {
    // 2^-130, which is subnormal in bf16, times 2^100.
    let (tiny, large) = (bf16::from_bits(8), bf16::from_f32(2f32.powi(100)));
    let (w, x) = ([tiny, bf16::ZERO, bf16::ZERO, bf16::ZERO], [large, bf16::ONE, bf16::ZERO, bf16::ZERO]);
    let matrix = MatrixRef::new(1, 4, &w).unwrap();
    for &engine in Engine::available() {
        let (mut a, mut b) = ([bf16::NAN], [bf16::NAN]);
        let sparse = SparseWeight::pack_for(Compressed::from_pruned(matrix).unwrap(), engine).unwrap();
        sparse.linear(&x, 1, Epilogue::default(), &mut a).unwrap();
        DenseWeight::pack_for(matrix, engine).unwrap().linear(&x, 1, Epilogue::default(), &mut b).unwrap();
        let expected = if engine >= Engine::Avx512 { bf16::ZERO } else { bf16::from_f32(2f32.powi(-30)) };
        assert_eq!((a, b), ([expected], [expected]), "{engine}");
    }
}

#[test]
fn without_inputs_the_product_is_zero() {
    for &engine in Engine::available() {
        let sparse =
            SparseWeight::pack_for(Compressed::<f32>::from_dense(MatrixRef::new(3, 0, &[]).unwrap()).unwrap(), engine)
                .unwrap();
        let dense = DenseWeight::<f32>::pack_for(MatrixRef::new(3, 0, &[]).unwrap(), engine).unwrap();
        let epilogue = Epilogue { bias: Some(&[1.0, 2.0, 3.0]), activation: Activation::Identity };
        for tokens in [0, 1, if cfg!(miri) { 9 } else { 50 }] {
            let (mut a, mut b) = (vec![f32::NAN; 3 * tokens], vec![f32::NAN; 3 * tokens]);
            sparse.linear(&[], tokens, epilogue, &mut a).unwrap();
            dense.linear(&[], tokens, epilogue, &mut b).unwrap();
            assert_eq!((&a, &b), (&[1.0, 2.0, 3.0].repeat(tokens), &a));
        }
    }
}

#[test]
fn buffers_that_do_not_fit_are_named() {
    let w = vec![0f32; 2 * 8];
    let sparse = SparseWeight::pack(Compressed::from_dense(MatrixRef::new(2, 8, &w).unwrap()).unwrap()).unwrap();
    let mut y = [0f32; 2];
    let error = |r: crate::Result<()>| r.unwrap_err().to_string();
    assert_eq!(error(sparse.linear(&[0.0; 7], 1, Epilogue::default(), &mut y)), "x: expected 8 elements, found 7");
    assert_eq!(error(sparse.linear(&[0.0; 16], 2, Epilogue::default(), &mut y)), "y: expected 4 elements, found 2");
    let epilogue = Epilogue { bias: Some(&[0.0; 3]), ..Epilogue::default() };
    assert_eq!(error(sparse.linear(&[0.0; 8], 1, epilogue, &mut y)), "bias: expected 2 elements, found 3");
    assert_eq!(error(sparse.input_gradient(&[0.0; 2], 1, &mut y)), "dx: expected 8 elements, found 2");
}

#[test]
fn repacking_is_packing() {
    let (rows, cols) = if cfg!(miri) { (17, 36) } else { (64, 40) };
    let w: Vec<f32> = (0..rows * cols).map(|i| ((i * 37 % 101) as f32) - 50.0).collect();
    let v: Vec<f32> = w.iter().map(|w| (w * 13.0) % 7.0).collect();
    let (w, v) = (MatrixRef::new(rows, cols, &w).unwrap(), MatrixRef::new(rows, cols, &v).unwrap());
    let mask = crate::select::magnitude(v, crate::Pattern::TWO_FOUR, crate::Axis::Row).unwrap();
    let mut sparse = SparseWeight::pack(Compressed::from_pruned(w).unwrap()).unwrap();
    sparse.repack(v, &mask).unwrap();
    assert_eq!(sparse.to_compressed(), Compressed::from_masked(v, &mask).unwrap());
}
