//! Problems of any shape, alignment and order.

use std::collections::BTreeSet;

use half::{bf16, f16};
use twofour::{F8E4M3, F8E5M2};
use twofour_cuda::{
    Activation, DataType,
    problem::{Order, XOrder},
    raw::gemm::{Gemm, GemmMethod, generic::tiled::MmaTile},
};

use crate::{
    given::{After, Case, Given, bench_for},
    number::Number,
};

/// Shapes that no tile divides.
const ANY_SHAPES: [(usize, usize, usize); 9] = [
    (1, 1, 1),
    (7, 3, 30),
    (36, 17, 52),
    (65, 130, 130),
    (600, 3, 12),
    (12, 600, 600),
    (130, 17, 1000),
    (72, 264, 88),
    (200, 1, 4100),
];

/// By every method, for every output, in every order, with and without an epilogue, from aligned addresses and others,
/// stored or added.
fn any_problem<T: Number, X: Number>(outputs: &[DataType]) {
    let Some(bench) = bench_for(T::ELEMENT) else { return };
    let architecture = bench.device.architecture();
    let orders = [
        (XOrder::TokensFirst, Order::TokensFirst),
        (XOrder::TokensFirst, Order::FeaturesFirst),
        (XOrder::ReductionFirst, Order::TokensFirst),
        (XOrder::ReductionFirst, Order::FeaturesFirst),
    ];
    for (i, &shape) in ANY_SHAPES.iter().enumerate() {
        for (j, &output) in outputs.iter().enumerate() {
            for (k, (x_order, order)) in orders.into_iter().enumerate() {
                // Each shape has another of these in every order and type, so that all of them meet all orders and
                // types.
                let (before, accumulate) = ((i + k) % 2, (i / 2 + j + k / 2) % 2 == 1);
                let after = [After::Nothing, After::All(Activation::Gelu), After::Bias][(i + j + k) % 3];
                let after = if output == DataType::I32 { After::Nothing } else { after };
                let plain = Case::plain(shape, output);
                let case = Case { x_order, order, before, accumulate, after, ..plain };
                let given = Given::<T, X>::new(&bench, &case);
                let mut methods = GemmMethod::likely(given.problem, architecture);
                assert!(!methods.is_empty(), "{:?}", given.problem);
                methods.extend(MmaTile::all(T::ELEMENT, architecture).into_iter().map(GemmMethod::Mma));
                let mut kinds = BTreeSet::new();
                for method in methods {
                    // Some of each kind: two shapes of the same kernel family read and store alike.
                    let Ok(gemm) = Gemm::with(&bench.device, given.problem, method) else {
                        assert!(
                            matches!(method, GemmMethod::Mma(_)) && x_order == XOrder::ReductionFirst,
                            "{method:?}"
                        );
                        continue;
                    };
                    let kind = format!("{:?}", std::mem::discriminant(&method));
                    if kinds.insert((kind.clone(), 0)) || kinds.insert((kind, 1)) {
                        given.check_plan(&gemm);
                    }
                }
            }
        }
    }
}

macro_rules! any_problem {
    ($($name:ident: $weight:ty, $x:ty, $outputs:expr;)*) => {$(
        #[test]
        fn $name() {
            any_problem::<$weight, $x>(&$outputs);
        }
    )*};
}

any_problem! {
    any_f16_problem: f16, f16, [DataType::F16, DataType::F32];
    any_bf16_problem: bf16, bf16, [DataType::BF16, DataType::F32];
    any_e4m3_problem: F8E4M3, F8E4M3, [DataType::BF16];
    any_i8_problem: i8, i8, [DataType::F16, DataType::I32];
    e4m3_weights_with_e5m2_x: F8E4M3, F8E5M2, [DataType::BF16, DataType::F16, DataType::F32];
    e5m2_weights_with_e4m3_x: F8E5M2, F8E4M3, [DataType::BF16, DataType::F32];
}
