//! Without a device: what a plan chooses by itself is one of those that it may be given, on every architecture.

use proptest::prelude::*;
use twofour::int4::Granularity;
use twofour_cuda::{
    Architecture, DataType, Error,
    problem::{EpilogueKind, GemmProblem, Int4Problem, Order, XOrder},
    raw::gemm::{GemmMethod, int4},
};

/// Multiprocessors of small and large devices, and of impossible ones.
const SMS: [u32; 4] = [1, 20, 132, 1000];

fn sizes() -> impl Strategy<Value = (usize, usize, usize)> {
    let tokens = prop_oneof![1usize..=8, 1usize..=64, 1usize..=16384];
    (1usize..=32768, tokens, 1usize..=32768)
}

fn epilogues() -> impl Strategy<Value = Option<EpilogueKind>> {
    prop::option::of(prop::sample::select(&EpilogueKind::ALL))
}

proptest! {
    #[test]
    fn the_best_method_is_one_of_all(
        (features, tokens, reduction) in sizes(),
        epilogue in epilogues(),
        accumulate: bool,
        mn_major: bool,
        by_feature: bool,
    ) {
        use DataType::{BF16, E4M3, E5M2, F16, I8};
        let pairs = |element| Architecture::ALL.map(|architecture| (element, architecture));
        for (element, architecture) in [F16, BF16, E4M3, E5M2, I8].into_iter().flat_map(pairs) {
            let output = if element == F16 { F16 } else { BF16 };
            let problem = GemmProblem {
                epilogue,
                accumulate,
                x: if mn_major { XOrder::ReductionFirst } else { XOrder::TokensFirst },
                order: if by_feature { Order::FeaturesFirst } else { Order::TokensFirst },
                ..GemmProblem::plain(element, output, features, tokens, reduction)
            };
            let all = GemmMethod::all(problem, architecture);
            // Ampere has no 8-bit floats: an error of its own.
            if all.is_empty() {
                let is_float_8 = matches!(element, E4M3 | E5M2);
                prop_assert!(is_float_8 && architecture < Architecture::SM_89, "{problem:?} on {architecture}");
                continue;
            }
            for sms in SMS {
                let best = GemmMethod::best(problem, architecture, sms).unwrap();
                prop_assert!(all.contains(&best), "{best:?} for {problem:?} on {architecture}");
            }
        }
    }

    #[test]
    fn two_8_bit_floats_have_a_method(
        (features, tokens, reduction) in sizes(),
        epilogue in epilogues(),
        swapped: bool,
    ) {
        use DataType::{BF16, E4M3, E5M2};
        let (element, x_element) = if swapped { (E5M2, E4M3) } else { (E4M3, E5M2) };
        let plain = GemmProblem::plain(element, BF16, features, tokens, reduction);
        let problem = GemmProblem { x_element, epilogue, ..plain };
        for architecture in [Architecture::SM_89, Architecture::SM_90] {
            let best = GemmMethod::best(problem, architecture, 132).unwrap();
            let all = GemmMethod::all(problem, architecture);
            prop_assert!(all.contains(&best), "{best:?} for {problem:?} on {architecture}");
        }
    }

    #[test]
    fn four_bits((features, _, reduction) in sizes(), tokens in 1usize..=int4::MAX_TOKENS, by_row: bool) {
        let granularity = if by_row { Granularity::Row } else { Granularity::Group };
        let problem = Int4Problem {
            element: DataType::F16,
            output: DataType::F32,
            granularity,
            features: 16 * (features % 512 + 1),
            tokens,
            reduction: 128 * (reduction % 256 + 1),
            order: Order::TokensFirst,
            epilogue: None,
        };
        for (architecture, sms) in Architecture::ALL.into_iter().flat_map(|a| SMS.map(|m| (a, m))) {
            let best = int4::Int4Method::best(problem, architecture, sms);
            let all = int4::Int4Method::all(problem, architecture);
            prop_assert!(best.is_some_and(|best| all.contains(&best)), "{best:?} on {architecture}");
        }
    }
}

#[test]
fn problems_that_no_kernel_computes_have_no_method() {
    for (features, tokens, reduction) in [(0, 8, 64), (64, 0, 64), (64, 8, 0), (64, 1 << 31, 64)] {
        let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, features, tokens, reduction);
        for architecture in Architecture::ALL {
            assert!(
                GemmMethod::all(problem, architecture).is_empty()
                    && GemmMethod::likely(problem, architecture).is_empty()
            );
            assert!(
                matches!(GemmMethod::best(problem, architecture, 132), Err(Error::Dimension { .. })),
                "{problem:?}"
            );
        }
    }
}
