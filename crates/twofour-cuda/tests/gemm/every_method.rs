//! Every method, in shapes with partial tiles, several turns of a tile, and many rounds.

use half::{bf16, f16};
use twofour::{F8E4M3, F8E5M2};
use twofour_cuda::{
    Activation, DataType,
    problem::{Order, XOrder},
    raw::gemm::{GemmMethod, generic::tiled::MmaTile},
};

use crate::{
    given::{After, Case, Given, bench_for, check},
    number::Number,
    support::{bench, hopper},
};

const SHAPES: [(usize, usize, usize); 17] = [
    (64, 1, 128),
    (64, 7, 256),
    (192, 13, 2176),
    (320, 33, 1152),
    (4096, 1, 2048),
    (128, 64, 3968),
    (320, 77, 1152),
    (1088, 96, 640),
    (704, 128, 2176),
    (256, 200, 384),
    (320, 201, 128),
    (576, 131, 1024),
    (1024, 400, 512),
    (64, 1300, 640),
    (1088, 777, 128),
    (448, 27, 1408),
    // More than one panel of tiles, the last of them narrower.
    (4672, 400, 384),
];

/// Of 16-bit elements and few tokens: the last step is half a step.
const HALF_A_STEP: [(usize, usize, usize); 2] = [(320, 7, 1216), (192, 40, 64)];

/// Whether a method is for few tokens only.
fn is_for_few(method: &GemmMethod) -> bool {
    matches!(method, GemmMethod::Direct(_) | GemmMethod::WarpPipelines(_) | GemmMethod::Cluster(_))
}

/// By all methods for few tokens, or by all others, and by the one that a plan chooses.
fn products<T: Number>(outputs: &[DataType], few: bool) {
    let Some(bench) = bench_for(T::ELEMENT) else { return };
    let architecture = bench.device.architecture();
    let tiles = MmaTile::all(T::ELEMENT, architecture);
    let case = |shape, output, order, after| Case { order, after, ..Case::plain(shape, output) };
    let by_all_methods = |case: Case| {
        let mut methods = GemmMethod::all(case.problem(T::ELEMENT, T::ELEMENT), architecture);
        if case.x_order == XOrder::TokensFirst {
            methods.extend(tiles.iter().map(|tile| GemmMethod::Mma(*tile)));
        }
        methods.retain(|method| is_for_few(method) == few);
        if methods.is_empty() {
            return;
        }
        let given = Given::<T, T>::new(&bench, &case);
        for method in methods.into_iter().map(Some).chain([None]) {
            given.check(method);
        }
    };
    for &output in outputs {
        let halves = if few && T::ELEMENT.bytes() == 2 { &HALF_A_STEP[..] } else { &[] };
        for &shape in SHAPES.iter().chain(halves) {
            by_all_methods(case(shape, output, Order::TokensFirst, After::Nothing));
            by_all_methods(case(shape, output, Order::FeaturesFirst, After::Nothing));
        }
        if output == DataType::I32 {
            continue;
        }
        for &shape in SHAPES.iter().chain(halves).step_by(if few { 1 } else { 3 }) {
            for after in [After::Bias, After::BiasThen(Activation::Gelu), After::FeatureScales] {
                by_all_methods(case(shape, output, Order::TokensFirst, after));
            }
        }
        for (i, activation) in
            [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::Silu].into_iter().enumerate()
        {
            by_all_methods(case(SHAPES[2], output, Order::TokensFirst, After::All(activation)));
            by_all_methods(case(SHAPES[4 + i], output, Order::TokensFirst, After::All(activation)));
            if few {
                continue;
            }
            check::<T>(&bench, &case(SHAPES[2 + i], output, Order::FeaturesFirst, After::All(activation)));
            let method = Some(GemmMethod::Mma(tiles[i % tiles.len()]));
            check::<T>(
                &bench,
                &Case { method, ..case(SHAPES[2 + i], output, Order::FeaturesFirst, After::All(activation)) },
            );
        }
    }
}

macro_rules! products {
    ($($few:ident, $tiles:ident: $type:ty, $outputs:expr;)*) => {
        $(
            #[test]
            fn $few() {
                products::<$type>(&$outputs, true);
            }

            #[test]
            fn $tiles() {
                products::<$type>(&$outputs, false);
            }
        )*
    };
}

products! {
    f16_products_of_few_tokens, f16_products_by_tiles: f16, [DataType::F16, DataType::F32];
    bf16_products_of_few_tokens, bf16_products_by_tiles: bf16, [DataType::BF16, DataType::F32];
    e4m3_products_of_few_tokens, e4m3_products_by_tiles: F8E4M3, [DataType::BF16, DataType::F16, DataType::F32];
    e5m2_products_of_few_tokens, e5m2_products_by_tiles: F8E5M2, [DataType::BF16, DataType::F16, DataType::F32];
    i8_products_of_few_tokens, i8_products_by_tiles: i8, [DataType::BF16, DataType::F16, DataType::I32];
}

/// Every tile of the kernels that all architectures have, in a few shapes.
#[test]
fn products_by_mma() {
    let Some(bench) = bench() else { return };
    let architecture = bench.device.architecture();
    for tile in MmaTile::all(DataType::BF16, architecture) {
        let method = Some(GemmMethod::Mma(tile));
        for (features, tokens, reduction) in [(64, 1, 64), (192, 13, 128), (320, 133, 1152)] {
            for order in [Order::TokensFirst, Order::FeaturesFirst] {
                let plain = Case::plain((features, tokens, reduction), DataType::BF16);
                let case = Case { order, method, after: After::All(Activation::Relu), ..plain };
                check::<bf16>(&bench, &case);
            }
        }
    }
}

/// As the gradient of a weight: X is [reduction, tokens], and the reduction any number.
fn products_across<T: Number>() {
    let Some(bench) = hopper() else { return };
    for (features, tokens, reduction) in
        [(64, 8, 64), (64, 200, 1), (192, 264, 100), (256, 64, 13), (320, 776, 1000), (1024, 512, 456), (128, 1304, 64)]
    {
        for order in [Order::TokensFirst, Order::FeaturesFirst] {
            for output in [T::ELEMENT, DataType::F32] {
                let x_order = XOrder::ReductionFirst;
                let case = Case { x_order, order, ..Case::plain((features, tokens, reduction), output) };
                let given = Given::<T, T>::new(&bench, &case);
                for method in
                    GemmMethod::all(given.problem, bench.device.architecture()).into_iter().map(Some).chain([None])
                {
                    given.check(method);
                }
            }
        }
    }
}

#[test]
fn f16_products_across() {
    products_across::<f16>();
}

#[test]
fn bf16_products_across() {
    products_across::<bf16>();
}

#[test]
fn a_long_product_with_many_rounds_of_tiles() {
    let Some(bench) = hopper() else { return };
    check::<bf16>(&bench, &Case::plain((4096, 13008, 64), DataType::BF16));
}

/// A block has several tiles one after the other, each of more steps than there are buffers, and not of a multiple of
/// them.
fn every_tile_takes_several_turns(order: Order, after: After) {
    let Some(bench) = hopper() else { return };
    let case = Case { order, after, ..Case::plain((4672, 3300, 448), DataType::BF16) };
    let given = Given::<bf16, bf16>::new(&bench, &case);
    for method in GemmMethod::all(given.problem, bench.device.architecture()) {
        given.check(Some(method));
    }
}

// A test each: racecheck takes minutes for one.
#[test]
fn every_tile_takes_several_turns_tokens_first() {
    every_tile_takes_several_turns(Order::TokensFirst, After::Nothing);
}

#[test]
fn every_tile_takes_several_turns_features_first() {
    every_tile_takes_several_turns(Order::FeaturesFirst, After::Nothing);
}

#[test]
fn every_tile_takes_several_turns_tokens_first_with_an_activation() {
    every_tile_takes_several_turns(Order::TokensFirst, After::All(Activation::Relu));
}

#[test]
fn every_tile_takes_several_turns_features_first_with_an_activation() {
    every_tile_takes_several_turns(Order::FeaturesFirst, After::All(Activation::Relu));
}

/// As many features as a vocabulary has words.
#[test]
fn a_vocabulary() {
    let Some(bench) = bench() else { return };
    for tokens in [1, 3, 130] {
        check::<bf16>(&bench, &Case::plain((50257, tokens, 64), DataType::BF16));
    }
}
