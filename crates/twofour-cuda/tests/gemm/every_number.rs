//! Activations of every number of a 16-bit type, by every kind of kernel: the bias is the number, and products are
//! zeros.

use std::{collections::HashSet, mem::discriminant};

use half::{bf16, f16};
use twofour_cuda::{
    Activation, DataType,
    problem::{EpilogueKind, GemmProblem},
    raw::{
        Packed,
        gemm::{Epilogue, Gemm, GemmMethod, GemmOperands, generic::tiled::MmaTile, packed_bytes},
    },
};

use crate::{
    activation::activated,
    given::bench_for,
    number::{Number, bytes_of, weight},
    support::{Bench, numbers::Random},
};

/// Numbers of 16 bits, all of which are features.
const FEATURES: usize = 1 << 16;
const REDUCTION: usize = 128;

/// How far the result of a number may be from the exact one: what rounding moves it by, and the error of the
/// activation.
fn allowed(output: DataType, given: f64, exact: f64) -> f64 {
    let (relative, least) = match output {
        DataType::F16 => (0.5f64.powi(11), 0.5f64.powi(25)),
        _ => (0.5f64.powi(8), 0.0),
    };
    // The shorter GELU is within 3.2e-5 of the exact one from -8 to 8, and below that within 1e-14. Half of erfc, of
    // which the other kernels make it, is within 7.5e-8.
    (relative + 3.5e-5) * exact.abs() + least + 1e-14 + 8e-8 * given.abs().min(10.0)
}

fn check_all<T: Number>(bench: &Bench, output: DataType, value: fn(u16) -> f64) {
    let mut random = Random(1);
    let w = weight::<T>(&mut random, FEATURES, REDUCTION);
    let bytes = packed_bytes(T::ELEMENT, FEATURES, REDUCTION);
    assert_eq!(bytes_of(w.values()).len(), bytes.values);
    let (values, meta) = (bench.up(&bytes_of(w.values())), bench.up(&T::meta(&w)));
    let bias: Vec<u16> = (0..=u16::MAX).collect();
    let bias_there = bench.up(&bias);
    for activation in [Activation::Relu, Activation::Gelu, Activation::Silu] {
        let exact: Vec<f64> = bias.iter().map(|bits| activated(activation, value(*bits))).collect();
        for tokens in [3, 16, 64, 200, 1000] {
            let plain = GemmProblem::plain(T::ELEMENT, output, FEATURES, tokens, REDUCTION);
            let x = bench.up(&vec![0u8; tokens * REDUCTION * T::ELEMENT.bytes()]);
            let problem = GemmProblem { epilogue: Some(EpilogueKind::of(false, activation)), ..plain };
            let mut kinds = HashSet::new();
            let mut methods = GemmMethod::likely(problem, bench.device.architecture());
            methods.extend(MmaTile::all(T::ELEMENT, bench.device.architecture()).into_iter().map(GemmMethod::Mma));
            methods.retain(|method| kinds.insert(discriminant(method)));
            for method in methods {
                let gemm = Gemm::with(&bench.device, problem, method).unwrap();
                let out = bench.up(&vec![0u16; tokens * FEATURES]);
                let workspace = bench.up(&vec![0u8; gemm.workspace_bytes().max(1)]);
                let operands = GemmOperands {
                    weight: Packed { values: bench.at(&values), meta: bench.at(&meta) },
                    x: bench.at(&x),
                    out: bench.at(&out),
                    workspace: bench.at(&workspace),
                };
                let epilogue = Epilogue { bias: Some(bench.at(&bias_there)), activation, ..Epilogue::default() };
                // SAFETY: all memory is allocated above, as long as the problem asks for, and lives until the stream
                // has been waited for.
                unsafe { gemm.run(bench.stream(), operands, epilogue) }.unwrap();
                let found = bench.down(&out);
                for (at, bits) in found.iter().enumerate().filter(|(at, _)| (at / FEATURES).is_multiple_of(7)) {
                    let (given, found) = (value(bias[at % FEATURES]), value(*bits));
                    let what =
                        || format!("{activation:?} of {given} is {found} by {} for {tokens} tokens", gemm.kernel());
                    if given.is_nan() {
                        assert!(found.is_nan(), "{}", what());
                    } else if given == f64::INFINITY {
                        assert!(found == given, "{}", what());
                    } else if given == f64::NEG_INFINITY {
                        // The limit, or the product of an infinity and zero.
                        assert!(found == 0.0 || activation == Activation::Silu && found.is_nan(), "{}", what());
                    } else {
                        let exact = exact[at % FEATURES];
                        assert!((found - exact).abs() <= allowed(output, given, exact), "{}, not {exact}", what());
                    }
                }
            }
        }
    }
}

#[test]
fn activations_of_every_number_f16() {
    let Some(bench) = bench_for(DataType::F16) else { return };
    check_all::<f16>(&bench, DataType::F16, |bits| f16::from_bits(bits).to_f64());
}

#[test]
fn activations_of_every_number_bf16() {
    let Some(bench) = bench_for(DataType::BF16) else { return };
    check_all::<bf16>(&bench, DataType::BF16, |bits| bf16::from_bits(bits).to_f64());
}
