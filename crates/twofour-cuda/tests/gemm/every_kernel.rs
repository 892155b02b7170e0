//! Every kernel once, in small problems, for compute-sanitizer.

use std::collections::BTreeSet;

use half::{bf16, f16};
use twofour::{F8E4M3, F8E5M2};
use twofour_cuda::{
    Activation, DataType,
    problem::{Order, XOrder},
    raw::gemm::{GemmMethod, generic::tiled::MmaTile},
};

use crate::{
    given::{After, Case, Given, bench_for, planned},
    number::Number,
    support::hopper,
};

/// How a product is asked for.
#[derive(Debug, Clone, Copy)]
struct Way {
    output: DataType,
    x_order: XOrder,
    order: Order,
    after: After,
}

impl Way {
    fn plain(output: DataType) -> Self {
        Self { output, x_order: XOrder::TokensFirst, order: Order::TokensFirst, after: After::Nothing }
    }
}

/// Every kernel once, with two blocks to a cluster at most: for a sanitizer that makes each launch take a thousand
/// times as long.
fn kernels_once<T: Number>(way: &Way, features: usize, columns: impl Fn(&GemmMethod) -> usize) {
    let Some(bench) = bench_for(T::ELEMENT) else { return };
    let &Way { output, x_order, order, after } = way;
    let architecture = bench.device.architecture();
    let mut seen = BTreeSet::new();
    let tokens: &[usize] = if x_order == XOrder::TokensFirst { &[1, 7, 13, 27, 60, 130, 136] } else { &[136] };
    for &tokens in tokens {
        let case = |reduction| Case { x_order, order, after, ..Case::plain((features, tokens, reduction), output) };
        // Two steps of clusters, for methods of two blocks to be among them.
        let mut methods = GemmMethod::all(case(512 / T::ELEMENT.bytes()).problem(T::ELEMENT, T::ELEMENT), architecture);
        if x_order == XOrder::TokensFirst {
            methods.extend(MmaTile::all(T::ELEMENT, architecture).into_iter().map(GemmMethod::Mma));
        }
        methods.retain(|method| !matches!(method, GemmMethod::Cluster(shape) if shape.split > 2));
        for reduction in methods.iter().map(&columns).collect::<BTreeSet<_>>() {
            let given = Given::<T, T>::new(&bench, &case(reduction));
            for method in methods.iter().filter(|method| columns(method) == reduction) {
                let gemm = planned(&bench, given.problem, Some(*method));
                if seen.insert(gemm.kernel()) {
                    eprintln!("{} of {reduction} columns as {output:?}, {order:?}, {after:?}", gemm.kernel());
                    given.check_plan(&gemm);
                }
            }
        }
    }
}

/// With columns enough that buffers are filled again: `MAX_BUFFERS` of rings, `most_ahead` of a cluster's block, tiles
/// have five and those by `mma.sp` eight at most.
fn buffers_filled_again<T: Number>(output: DataType) {
    let columns = |method: &GemmMethod| {
        // Steps of 256 bytes of X's rows.
        let steps = match method {
            GemmMethod::WarpPipelines(_) => 32,
            GemmMethod::Cluster(shape) => 10 * shape.split as usize,
            // Two of a tile's.
            _ => 6,
        };
        steps * 256 / T::ELEMENT.bytes()
    };
    kernels_once::<T>(&Way::plain(output), 64, columns);
}

/// With few columns: results of all types, with an epilogue and without, and in all orders.
fn endings<T: Number>(outputs: &[DataType]) {
    let mut ways = Vec::new();
    for &output in outputs {
        let plain = Way::plain(output);
        let features_first = Way { order: Order::FeaturesFirst, ..plain };
        ways.extend([plain, features_first]);
        if output != DataType::I32 {
            let all = After::All(Activation::Relu);
            ways.extend([plain, features_first].map(|way| Way { after: all, ..way }));
            ways.push(Way { after: After::Bias, ..plain });
        }
        if [T::ELEMENT, DataType::F32].contains(&output) && T::ELEMENT.bytes() == 2 && hopper().is_some() {
            ways.extend([plain, features_first].map(|way| Way { x_order: XOrder::ReductionFirst, ..way }));
        }
    }
    for way in ways {
        kernels_once::<T>(&way, 192, |_| 512 / T::ELEMENT.bytes());
    }
}

macro_rules! each_kernel {
    ($($again:ident, $endings:ident: $type:ty, $outputs:expr;)*) => {
        $(
            #[test]
            fn $again() {
                buffers_filled_again::<$type>($outputs[0]);
            }

            #[test]
            fn $endings() {
                endings::<$type>(&$outputs);
            }
        )*
    };
}

each_kernel! {
    f16_buffers_filled_again, f16_endings: f16, [DataType::F16, DataType::F32];
    bf16_buffers_filled_again, bf16_endings: bf16, [DataType::BF16, DataType::F32];
    e4m3_buffers_filled_again, e4m3_endings: F8E4M3, [DataType::BF16, DataType::F16, DataType::F32];
    e5m2_buffers_filled_again, e5m2_endings: F8E5M2, [DataType::BF16, DataType::F16, DataType::F32];
    i8_buffers_filled_again, i8_endings: i8, [DataType::BF16, DataType::F16, DataType::I32];
}
