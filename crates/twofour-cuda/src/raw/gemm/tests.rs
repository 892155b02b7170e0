//! Launch configurations are arithmetic, so that a sweep over problems needs no device.

use super::{supported::TYPES, *};
use crate::{device::Launch, problem::Int4Problem};
use int4::Int4Method;
use twofour::int4::Granularity;

const ARCHITECTURES: [(u32, u32); 6] = [(8, 0), (8, 6), (8, 9), (9, 0), (10, 0), (12, 0)];
const FEATURES: [usize; 9] = [1, 16, 64, 384, 1000, 4096, 14_336, 1 << 20, supported::MAX_GEMM_DIMENSION];
const TOKENS: [usize; 15] =
    [1, 7, 8, 9, 16, 33, 64, 65, 96, 200, 1025, 2048, 16_384, 1 << 20, supported::MAX_GEMM_DIMENSION];
const REDUCTIONS: [usize; 8] = [1, 64, 384, 1024, 4096, 8192, 28_672, supported::MAX_GEMM_DIMENSION];
const SMS: [u32; 3] = [1, 14, 132];

fn problems(element: DataType, output: DataType) -> impl Iterator<Item = GemmProblem> {
    let shapes = FEATURES.into_iter().flat_map(|features| TOKENS.map(|tokens| (features, tokens)));
    let shapes = shapes.flat_map(|(features, tokens)| REDUCTIONS.map(|reduction| (features, tokens, reduction)));
    shapes.map(move |(features, tokens, reduction)| GemmProblem::plain(element, output, features, tokens, reduction))
}

/// Beyond a grid of 2^31 CTAs a plan is refused; every other problem launches by every method.
fn expect_launches(what: &str, launch: Launch, tiles_fit: bool, architecture: Architecture) {
    match launch.expect_within(architecture) {
        Ok(()) => {}
        Err(_) if !tiles_fit && launch.grid.0 > i32::MAX as u32 => {}
        Err(error) => panic!("{what}: {error}"),
    }
}

#[test]
fn every_method_of_every_problem_is_within_what_devices_launch() {
    for (major, minor) in ARCHITECTURES {
        let architecture = Architecture::of(major, minor).unwrap();
        for (element, outputs) in TYPES {
            for problem in problems(*element, outputs[0]) {
                // The least tile has 64 features and 16 tokens.
                let tiles_fit = problem.features.div_ceil(64) * problem.tokens.div_ceil(16) * 8 <= i32::MAX as usize;
                for (order, x) in
                    [(Order::TokensFirst, XOrder::TokensFirst), (Order::FeaturesFirst, XOrder::ReductionFirst)]
                {
                    let computed = GemmProblem { order, x, ..problem }.computed(architecture);
                    for method in GemmMethod::all(computed, architecture) {
                        let what = format!("{method:?} for {computed:?}");
                        for sms in SMS {
                            let (launch, by_hardware) = method.method().launches(computed, sms);
                            for launch in [launch].into_iter().chain(by_hardware) {
                                expect_launches(&what, launch, tiles_fit, architecture);
                            }
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn every_method_of_every_int4_problem_is_within_what_devices_launch() {
    let multiple = |n: usize, of: usize| n.next_multiple_of(of).min(supported::MAX_GEMM_DIMENSION / of * of);
    for (major, minor) in ARCHITECTURES {
        let architecture = Architecture::of(major, minor).unwrap();
        for plain in problems(DataType::BF16, DataType::BF16).filter(|problem| problem.tokens <= int4::MAX_TOKENS) {
            for granularity in [Granularity::Group, Granularity::Row] {
                let problem = Int4Problem {
                    element: plain.element,
                    output: plain.output,
                    granularity,
                    features: multiple(plain.features, 16),
                    tokens: plain.tokens,
                    reduction: multiple(plain.reduction, 128),
                    order: Order::TokensFirst,
                    epilogue: None,
                };
                for method in Int4Method::all(problem, architecture) {
                    let (launch, _) = method.method().launches(problem, SMS[0]);
                    expect_launches(&format!("{method:?} for {problem:?}"), launch, true, architecture);
                }
            }
        }
    }
}

/// Plans share a loaded kernel, so that two of its problems must be allowed different amounts of shared memory.
#[test]
fn problems_of_one_kernel_need_different_amounts_of_shared_memory() {
    let shared = |features, reduction| {
        let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, features, 8, reduction);
        let methods = GemmMethod::all(problem, Architecture::SM_90);
        let direct = methods.into_iter().find(|method| matches!(method, GemmMethod::Direct(_)));
        direct.map(|method| method.method().launches(problem, 132).0.shared)
    };
    assert!(shared(8192, 64) < shared(64, 8192), "{:?} {:?}", shared(8192, 64), shared(64, 8192));
}
