//! On a device: products are those of a reference in f64, within what the types can hold, and nothing else is written. Without a device the tests
//! skip.

mod support;

use std::collections::BTreeSet;

use cudarc::driver::CudaSlice;
use half::{bf16, f16};
use support::{
    Bench, bench,
    compressed::Guarded,
    hopper,
    numbers::{GUARD, Random, result},
};
use twofour::{Compressed, Element as _, F8E4M3, F8E5M2, layout::sm90};
use twofour_cuda::{
    Activation, Architecture, DataType, Error,
    problem::{GemmProblem, Order, XOrder},
    raw::{
        gemm::{Epilogue, Gemm, GemmMethod, GemmOperands, mma, packed_bytes, stream},
        prune::Packed,
    },
};

/// An element type that the kernels multiply.
trait Number: twofour::Element {
    const ELEMENT: DataType;
    fn of(value: f32) -> Self;
    fn value(self) -> f64;
    fn bytes(self) -> Vec<u8>;
    fn meta(weight: &Compressed<Self>) -> Vec<u8>;
}

fn meta_16<T: twofour::Element>(weight: &Compressed<T>) -> Vec<u8> {
    sm90::encode_16(weight, sm90::TileK::K64).unwrap().iter().flat_map(|word| word.to_le_bytes()).collect()
}

fn meta_8<T: twofour::Element>(weight: &Compressed<T>) -> Vec<u8> {
    sm90::encode_8(weight, sm90::TileK::K128).unwrap().iter().flat_map(|word| word.to_le_bytes()).collect()
}

macro_rules! number {
    ($type:ty, $element:ident, $meta:ident, $of:expr, $value:expr, $bytes:expr) => {
        impl Number for $type {
            const ELEMENT: DataType = DataType::$element;
            fn of(value: f32) -> Self {
                $of(value)
            }
            fn value(self) -> f64 {
                $value(self)
            }
            fn bytes(self) -> Vec<u8> {
                $bytes(self)
            }
            fn meta(weight: &Compressed<Self>) -> Vec<u8> {
                $meta(weight)
            }
        }
    };
}

number!(f16, F16, meta_16, f16::from_f32, f16::to_f64, |v: f16| v.to_le_bytes().to_vec());
number!(bf16, BF16, meta_16, bf16::from_f32, bf16::to_f64, |v: bf16| v.to_le_bytes().to_vec());
number!(i8, I8, meta_8, |v: f32| (v * 20.0) as i8, f64::from, |v: i8| v.to_le_bytes().to_vec());
// Any bits but those of NaN and infinity will do for 8-bit floats; small exponents keep sums tame.
number!(
    F8E4M3,
    E4M3,
    meta_8,
    |v: f32| F8E4M3(if v < 0.0 { 0x80 } else { 0 } | ((v.abs() * 32.0) as u8 + 0x20) & 0x7F),
    |v: F8E4M3| f64::from(v.to_f32()),
    |v: F8E4M3| vec![v.0]
);
number!(
    F8E5M2,
    E5M2,
    meta_8,
    |v: f32| F8E5M2(if v < 0.0 { 0x80 } else { 0 } | ((v.abs() * 16.0) as u8 + 0x30) & 0x7F),
    |v: F8E5M2| f64::from(v.to_f32()),
    |v: F8E5M2| vec![v.0]
);

/// A weight with random values and codes.
fn weight<T: Number>(random: &mut Random, rows: usize, cols: usize) -> Compressed<T> {
    let values = (0..rows * cols / 2).map(|_| T::of(random.number())).collect();
    let meta = (0..rows * cols / 32).map(|_| random.codes()).collect();
    Compressed::from_parts(rows, cols, values, meta).unwrap()
}

fn bytes_of<T: Number>(values: &[T]) -> Vec<u8> {
    values.iter().flat_map(|v| v.bytes()).collect()
}

/// What an activation makes of a number.
fn activated(activation: Activation, x: f64) -> f64 {
    match activation {
        Activation::Identity => x,
        Activation::Relu => x.max(0.0),
        Activation::Gelu => 0.5 * x * (1.0 + erf(x / 2f64.sqrt())),
        Activation::Silu => x / (1.0 + (-x).exp()),
    }
}

/// The error function by its series, and by its continued fraction where that is the better one.
fn erf(x: f64) -> f64 {
    if x.abs() < 2.5 {
        let (mut term, mut sum) = (x, x);
        for n in 1..80 {
            term *= -x * x / f64::from(n);
            sum += term / f64::from(2 * n + 1);
        }
        return sum * 2.0 / std::f64::consts::PI.sqrt();
    }
    let z = x.abs();
    let fraction = (1..60).rev().fold(z, |below, n| z + f64::from(n) / 2.0 / below);
    x.signum() * (1.0 - (-z * z).exp() / fraction / std::f64::consts::PI.sqrt())
}

#[test]
fn the_references_error_function() {
    for (x, expected) in [(0.5, 0.5204998778130465), (2.0, 0.9953222650189527), (3.0, 0.9999779095030014)] {
        assert!((erf(x) - expected).abs() < 1e-13 && (erf(-x) + expected).abs() < 1e-13, "{x}");
    }
}

struct Case {
    features: usize,
    tokens: usize,
    reduction: usize,
    output: DataType,
    x_order: XOrder,
    order: Order,
    method: Option<GemmMethod>,
    activation: Option<Activation>,
    /// Elements between an aligned address and X, and results between one and the result.
    before: usize,
    accumulate: bool,
}

impl Case {
    /// The plain product of that shape.
    fn plain((features, tokens, reduction): (usize, usize, usize), output: DataType) -> Self {
        Self {
            features,
            tokens,
            reduction,
            output,
            x_order: XOrder::TokensFirst,
            order: Order::TokensFirst,
            method: None,
            activation: None,
            before: 0,
            accumulate: false,
        }
    }

    /// Of a weight and an X of those types.
    fn problem(&self, element: DataType, x_element: DataType) -> GemmProblem {
        let &Case { features, tokens, reduction, output, x_order, order, activation, accumulate, .. } = self;
        let plain = GemmProblem::plain(element, output, features, tokens, reduction);
        GemmProblem { x_element, x: x_order, order, epilogue: activation.is_some(), accumulate, ..plain }
    }
}

/// With a method, or the one that a plan chooses.
fn planned(bench: &Bench, problem: GemmProblem, method: Option<GemmMethod>) -> Gemm {
    match method {
        Some(method) => Gemm::with(&bench.device, problem, method),
        None => Gemm::new(&bench.device, problem),
    }
    .unwrap()
}

fn check<T: Number>(bench: &Bench, case: &Case) {
    Given::<T, T>::new(bench, case).check(case.method);
}

/// What a case's product is made of, on the device, and what is expected of it: made once for all methods.
struct Given<'a, T, X> {
    bench: &'a Bench,
    problem: GemmProblem,
    before: usize,
    weight: [CudaSlice<u8>; 2],
    x: CudaSlice<u8>,
    factors: [CudaSlice<f32>; 2],
    biases: [CudaSlice<u8>; 2],
    activation: Option<Activation>,
    /// Token, feature, result, and how far from it a sum in f32 may be.
    expected: Vec<(usize, usize, f64, f64)>,
    elements: std::marker::PhantomData<(T, X)>,
}

const ALPHA: f32 = 0.0625;

impl<'a, T: Number, X: Number> Given<'a, T, X> {
    fn new(bench: &'a Bench, case: &Case) -> Self {
        let &Case { features, tokens, reduction, output, x_order, activation, before, .. } = case;
        let problem = case.problem(T::ELEMENT, X::ELEMENT);
        let mut random = Random((features * 31 + tokens * 7 + reduction) as u64);
        // The weight is padded; what stands in the padding meets no X, and its results are not stored.
        let (rows, depth) = Gemm::meta_order_of(T::ELEMENT).padded(features, reduction);
        let w = weight::<T>(&mut random, rows, depth);
        let bytes = packed_bytes(T::ELEMENT, features, reduction);
        assert_eq!((bytes_of(w.values()).len(), T::meta(&w).len()), (bytes.values, bytes.meta));
        let x: Vec<X> = (0..tokens * reduction).map(|_| X::of(random.number())).collect();
        let scales =
            |random: &mut Random, n: usize| -> Vec<f32> { (0..n).map(|_| random.number() / 4.0 + 1.0).collect() };
        let (by_feature, by_token) = (scales(&mut random, features), scales(&mut random, tokens));
        let biases = |random: &mut Random, n: usize| -> Vec<f32> {
            (0..n).map(|_| bf16::from_f32(random.number()).to_f32()).collect()
        };
        let (bias, token_bias) = (biases(&mut random, features), biases(&mut random, tokens));
        let bias_bytes =
            |bias: &[f32]| -> Vec<u8> { bias.iter().flat_map(|b| result_bytes(output, f64::from(*b))).collect() };
        let x_there = match x_order {
            XOrder::TokensFirst => bytes_of(&x),
            XOrder::ReductionFirst => {
                let at = |i: usize| x[i % tokens * reduction + i / tokens];
                bytes_of(&(0..x.len()).map(at).collect::<Vec<X>>())
            }
        };
        // Numbers around X that no result may depend on: NaN in every floating-point type.
        let around = |elements: usize| vec![0xFFu8; elements * X::ELEMENT.bytes()];
        let x_there = bench.up(&[around(before), x_there, around(64)].concat());

        let dense: Vec<f64> = w.to_dense().into_iter().map(T::value).collect();
        let x: Vec<f64> = x.into_iter().map(X::value).collect();
        // Sums are in f32, and less exact for 8-bit floats on Hopper.
        let of_sums = match T::ELEMENT {
            DataType::E4M3 | DataType::E5M2 => 2e-3,
            DataType::I8 => 0.0,
            _ => 2e-6,
        };
        let mut expected = Vec::new();
        for t in 0..tokens {
            let row = &x[t * reduction..][..reduction];
            for f in 0..features {
                // All of a small result; of a large one, its edges and a sample.
                let edge = f < 2 || t < 2 || f + 2 >= features || t + 2 >= tokens;
                if features * tokens > 40_000 && !edge && !random.bits().is_multiple_of(61) {
                    continue;
                }
                let terms = dense[f * depth..][..reduction].iter().zip(row).map(|(w, x)| w * x);
                let (mut sum, mut size) = terms.fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
                let mut finishing = 0.0;
                if let Some(activation) = activation {
                    let scale = f64::from(ALPHA * by_feature[f] * by_token[t]);
                    (sum, size) = (sum * scale + f64::from(bias[f]) + f64::from(token_bias[t]), size * scale.abs());
                    sum = activated(activation, sum);
                    finishing = 4e-7 * (sum.abs() + 1.0);
                }
                expected.push((t, f, sum, size * of_sums + finishing));
            }
        }
        Self {
            bench,
            problem,
            before,
            weight: [bench.up(&bytes_of(w.values())), bench.up(&T::meta(&w))],
            x: x_there,
            factors: [bench.up(&by_feature), bench.up(&by_token)],
            biases: [bench.up(&bias_bytes(&bias)), bench.up(&bias_bytes(&token_bias))],
            activation,
            expected,
            elements: std::marker::PhantomData,
        }
    }

    fn check(&self, method: Option<GemmMethod>) {
        self.check_plan(&planned(self.bench, self.problem, method));
    }

    fn check_plan(&self, gemm: &Gemm) {
        let GemmProblem { features, tokens, output, order, accumulate, .. } = self.problem;
        let what = format!("{} for {:?}, {} before", gemm.kernel(), self.problem, self.before);
        let width = output.bytes();
        // What is there before: small whole numbers, or bits that no result has.
        let there: Vec<u8> = match accumulate {
            true => (0..features * tokens).flat_map(|i| result_bytes(output, (i % 7) as f64 - 3.0)).collect(),
            false => vec![0xFF; features * tokens * width],
        };
        let found = self.run(gemm, &there, &what);
        for &(t, f, sum, inexact) in &self.expected {
            let at = match order {
                Order::TokensFirst => t * features + f,
                Order::FeaturesFirst => f * tokens + t,
            };
            let before = if accumulate { (at % 7) as f64 - 3.0 } else { 0.0 };
            let (_, first_rounding) = result(&found[at * width..][..width], output, sum);
            let (value, rounding) = result(&found[at * width..][..width], output, sum + before);
            let allowed = rounding + inexact + if accumulate { 1.01 * first_rounding } else { 0.0 };
            assert!(
                (value - sum - before).abs() <= allowed,
                "{what}: token {t}, feature {f}: {value}, expected {sum} + {before} ± {allowed}"
            );
        }
        if accumulate {
            assert!(found == self.run(gemm, &there, &what), "{what}: not the same bits again");
        }
    }

    /// The bytes of the result, of which `there` were before.
    fn run(&self, gemm: &Gemm, there: &[u8], what: &str) -> Vec<u8> {
        let (bench, problem) = (self.bench, self.problem);
        let guard = vec![0xA5u8; GUARD + self.before * problem.output.bytes()];
        let out = bench.up(&[&guard, there, &guard].concat());
        let packed = Packed { values: bench.at(&self.weight[0]), meta: bench.at(&self.weight[1]) };
        let bytes = if self.before == 0 { gemm.workspace_bytes() } else { gemm.unaligned_workspace_bytes() };
        let workspace = Guarded::new(bench, bytes);
        let operands = GemmOperands {
            weight: packed,
            x: bench.at(&self.x) + (self.before * problem.x_element.bytes()) as u64,
            out: bench.at(&out) + guard.len() as u64,
            workspace: if bytes == 0 { 0 } else { workspace.at(bench) },
        };
        let after = self.activation.map_or(Epilogue::default(), |activation| Epilogue {
            alpha: ALPHA,
            feature_scales: Some(bench.at(&self.factors[0])),
            token_scales: Some(bench.at(&self.factors[1])),
            bias: Some(bench.at(&self.biases[0])),
            token_bias: Some(bench.at(&self.biases[1])),
            activation,
        });
        // SAFETY: all memory is allocated above and in `new`, as long as the problem asks for, and lives until the stream has been waited for.
        unsafe { gemm.run(bench.stream(), operands, after) }.unwrap();
        let found = bench.down(&out);
        workspace.found(bench, &format!("{what}: workspace"));
        let (before, rest) = found.split_at(guard.len());
        let (found, after) = rest.split_at(there.len());
        assert!(before == guard, "{what}: written before the start");
        assert!(after == guard, "{what}: written beyond the end");
        found.to_vec()
    }
}

/// The bytes of a result.
fn result_bytes(output: DataType, value: f64) -> Vec<u8> {
    match output {
        DataType::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
        DataType::BF16 => bf16::from_f64(value).to_le_bytes().to_vec(),
        DataType::F32 => (value as f32).to_le_bytes().to_vec(),
        _ => (value as i32).to_le_bytes().to_vec(),
    }
}

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
    matches!(method, GemmMethod::Direct(_) | GemmMethod::Rings(_) | GemmMethod::Streamed(_))
}

/// A device that multiplies such elements.
fn bench_for(element: DataType) -> Option<Bench> {
    let bench = bench()?;
    if matches!(element, DataType::E4M3 | DataType::E5M2) && bench.device.architecture() < Architecture::SM_89 {
        eprintln!("skipped: a GPU without 8-bit floats");
        return None;
    }
    Some(bench)
}

/// By all methods for few tokens, or by all others, and by the one that a plan chooses.
fn products<T: Number>(outputs: &[DataType], few: bool) {
    let Some(bench) = bench_for(T::ELEMENT) else { return };
    let architecture = bench.device.architecture();
    let tiles = mma::MmaTile::all(T::ELEMENT, architecture);
    let case = |shape, output, order, activation| Case { order, activation, ..Case::plain(shape, output) };
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
            by_all_methods(case(shape, output, Order::TokensFirst, None));
            by_all_methods(case(shape, output, Order::FeaturesFirst, None));
        }
        if output == DataType::I32 {
            continue;
        }
        for (i, activation) in
            [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::Silu].into_iter().enumerate()
        {
            by_all_methods(case(SHAPES[2], output, Order::TokensFirst, Some(activation)));
            by_all_methods(case(SHAPES[4 + i], output, Order::TokensFirst, Some(activation)));
            if few {
                continue;
            }
            check::<T>(&bench, &case(SHAPES[2 + i], output, Order::FeaturesFirst, Some(activation)));
            let method = Some(GemmMethod::Mma(tiles[i % tiles.len()]));
            check::<T>(&bench, &Case { method, ..case(SHAPES[2 + i], output, Order::FeaturesFirst, Some(activation)) });
        }
    }
}

/// How a product is asked for.
#[derive(Debug, Clone, Copy)]
struct Way {
    output: DataType,
    x_order: XOrder,
    order: Order,
    activation: Option<Activation>,
}

impl Way {
    fn plain(output: DataType) -> Self {
        Self { output, x_order: XOrder::TokensFirst, order: Order::TokensFirst, activation: None }
    }
}

/// Every kernel once, with two blocks to a cluster at most: for a sanitizer that makes each launch take a thousand times as long.
fn kernels_once<T: Number>(way: &Way, features: usize, columns: impl Fn(&GemmMethod) -> usize) {
    let Some(bench) = bench_for(T::ELEMENT) else { return };
    let &Way { output, x_order, order, activation } = way;
    let architecture = bench.device.architecture();
    let mut seen = BTreeSet::new();
    let tokens: &[usize] = if x_order == XOrder::TokensFirst { &[1, 7, 13, 27, 60, 130, 136] } else { &[136] };
    for &tokens in tokens {
        let case =
            |reduction| Case { x_order, order, activation, ..Case::plain((features, tokens, reduction), output) };
        // Two steps of clusters, for methods of two blocks to be among them.
        let mut methods = GemmMethod::all(case(512 / T::ELEMENT.bytes()).problem(T::ELEMENT, T::ELEMENT), architecture);
        if x_order == XOrder::TokensFirst {
            methods.extend(mma::MmaTile::all(T::ELEMENT, architecture).into_iter().map(GemmMethod::Mma));
        }
        methods.retain(|method| !matches!(method, GemmMethod::Streamed(shape) if shape.split > 2));
        for reduction in methods.iter().map(&columns).collect::<BTreeSet<_>>() {
            let given = Given::<T, T>::new(&bench, &case(reduction));
            for method in methods.iter().filter(|method| columns(method) == reduction) {
                let gemm = planned(&bench, given.problem, Some(*method));
                if seen.insert(gemm.kernel()) {
                    eprintln!("{} of {reduction} columns as {output:?}, {order:?}, {activation:?}", gemm.kernel());
                    given.check_plan(&gemm);
                }
            }
        }
    }
}

/// With columns enough that buffers are filled again: `MOST_BUFFERS` of rings, `most_ahead` of a cluster's block, tiles have five and those by `mma.sp` eight at most.
fn buffers_filled_again<T: Number>(output: DataType) {
    let columns = |method: &GemmMethod| {
        // Steps of 256 bytes of X's rows.
        let steps = match method {
            GemmMethod::Rings(_) => 32,
            GemmMethod::Streamed(shape) => 10 * shape.split as usize,
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
            ways.extend([plain, features_first].map(|way| Way { activation: Some(Activation::Relu), ..way }));
        }
        if [T::ELEMENT, DataType::F32].contains(&output) && T::ELEMENT.bytes() == 2 && hopper().is_some() {
            ways.extend([plain, features_first].map(|way| Way { x_order: XOrder::ReductionFirst, ..way }));
        }
    }
    for way in ways {
        kernels_once::<T>(&way, 192, |_| 512 / T::ELEMENT.bytes());
    }
}

macro_rules! products {
    ($($again:ident, $endings:ident, $few:ident, $tiles:ident: $type:ty, $outputs:expr;)*) => {
        $(
            #[test]
            fn $again() {
                buffers_filled_again::<$type>($outputs[0]);
            }

            #[test]
            fn $endings() {
                endings::<$type>(&$outputs);
            }

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
    f16_buffers_filled_again, f16_endings, f16_products_of_few_tokens, f16_products_by_tiles: f16, [DataType::F16, DataType::F32];
    bf16_buffers_filled_again, bf16_endings, bf16_products_of_few_tokens, bf16_products_by_tiles: bf16, [DataType::BF16, DataType::F32];
    e4m3_buffers_filled_again, e4m3_endings, e4m3_products_of_few_tokens, e4m3_products_by_tiles: F8E4M3, [DataType::BF16, DataType::F16, DataType::F32];
    e5m2_buffers_filled_again, e5m2_endings, e5m2_products_of_few_tokens, e5m2_products_by_tiles: F8E5M2, [DataType::BF16, DataType::F16, DataType::F32];
    i8_buffers_filled_again, i8_endings, i8_products_of_few_tokens, i8_products_by_tiles: i8, [DataType::BF16, DataType::F16, DataType::I32];
}

/// Every tile of the kernels that all architectures have, in a few shapes.
#[test]
fn products_by_mma() {
    let Some(bench) = bench() else { return };
    let architecture = bench.device.architecture();
    for tile in mma::MmaTile::all(DataType::BF16, architecture) {
        let method = Some(GemmMethod::Mma(tile));
        for (features, tokens, reduction) in [(64, 1, 64), (192, 13, 128), (320, 133, 1152)] {
            for order in [Order::TokensFirst, Order::FeaturesFirst] {
                let plain = Case::plain((features, tokens, reduction), DataType::BF16);
                let case = Case { order, method, activation: Some(Activation::Relu), ..plain };
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

/// A block has several tiles one after the other, each of more steps than there are buffers, and not of a multiple of them.
#[test]
fn every_tile_takes_several_turns() {
    let Some(bench) = hopper() else { return };
    for (order, activation) in [
        (Order::TokensFirst, None),
        (Order::FeaturesFirst, None),
        (Order::TokensFirst, Some(Activation::Relu)),
        (Order::FeaturesFirst, Some(Activation::Relu)),
    ] {
        let case = Case { order, activation, ..Case::plain((4672, 3300, 448), DataType::BF16) };
        let given = Given::<bf16, bf16>::new(&bench, &case);
        for method in GemmMethod::all(given.problem, bench.device.architecture()) {
            given.check(Some(method));
        }
    }
}

/// One or two, few and many tokens, captured once and replayed.
#[test]
fn calls_can_be_captured_in_a_graph() {
    let Some(bench) = hopper() else { return };
    let mut random = Random(11);
    let (features, reduction) = (512, 1408);
    let w = weight::<bf16>(&mut random, features, reduction);
    let (values, meta) = (bench.up(&bytes_of(w.values())), bench.up(&bf16::meta(&w)));
    let packed = Packed { values: bench.at(&values), meta: bench.at(&meta) };
    let streamed =
        GemmMethod::Streamed(stream::StreamShape { tile: stream::StreamTile { features: 224, tokens: 64 }, split: 2 });
    for (tokens, method) in [(2, None), (5, None), (40, None), (40, Some(streamed)), (400, None)] {
        let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, features, tokens, reduction);
        let gemm = planned(&bench, problem, method);
        let x: Vec<bf16> = (0..tokens * reduction).map(|_| bf16::from_f32(random.number())).collect();
        let x = bench.up(&bytes_of(&x));
        let outs: [CudaSlice<u8>; 2] = std::array::from_fn(|_| bench.poisoned(features * tokens * 2, 0xFFu8));
        let places = [bench.at(&outs[0]), bench.at(&outs[1])];
        let x_place = bench.at(&x);
        let run = |out| {
            let operands = GemmOperands { weight: packed, x: x_place, out, workspace: 0 };
            // SAFETY: all memory is allocated above, as long as the problem asks for, and lives until the stream has been waited for.
            unsafe { gemm.run(bench.stream(), operands, Epilogue::default()) }.unwrap();
        };
        run(places[0]);
        bench.wait();
        let graph = bench.captured(|| run(places[1]));
        for _ in 0..3 {
            graph.launch().unwrap();
        }
        assert_eq!(bench.down(&outs[1]), bench.down(&outs[0]), "{tokens} tokens, {}", gemm.kernel());
    }
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let Some(bench) = hopper() else { return };
    let problem = GemmProblem::plain(DataType::BF16, DataType::BF16, 64, 8, 64);
    let plan = |problem| Gemm::new(&bench.device, problem);
    let few = GemmMethod::all(problem, bench.device.architecture())[0];
    assert!(matches!(
        Gemm::with(&bench.device, GemmProblem { tokens: 9, ..problem }, few),
        Err(Error::GemmMethod { .. })
    ));
    assert!(matches!(plan(GemmProblem { output: DataType::F16, ..problem }), Err(Error::Product { .. })));
    assert!(matches!(plan(GemmProblem { tokens: 0, ..problem }), Err(Error::Dimension { what: "tokens", .. })));
    assert!(matches!(
        plan(GemmProblem { tokens: usize::MAX, ..problem }),
        Err(Error::Dimension { what: "tokens", .. })
    ));
    let mixed = GemmProblem { x_element: DataType::F16, ..problem };
    assert!(matches!(plan(mixed), Err(Error::MixedElements { element: DataType::BF16, x_element: DataType::F16 })));
    let gemm = plan(problem).unwrap();
    let memory = bench.poisoned(1 << 16, 0u32);
    let at = bench.at(&memory);
    let operands = GemmOperands { weight: Packed { values: at, meta: at }, x: at, out: at, workspace: 0 };
    // SAFETY: none of these calls launches anything.
    let run = |operands, epilogue| unsafe { gemm.run(bench.stream(), operands, epilogue) };
    let plain = Epilogue::default();
    assert!(matches!(run(GemmOperands { x: at + 1, ..operands }, plain), Err(Error::Pointer { what: "X", .. })));
    // What would have to be copied has nowhere to go.
    assert_eq!(gemm.workspace_bytes(), 0);
    for unaligned in [GemmOperands { x: at + 2, ..operands }, GemmOperands { x: at + 8, ..operands }] {
        assert!(matches!(run(unaligned, plain), Err(Error::Pointer { what: "workspace", .. })));
    }
    assert!(matches!(run(GemmOperands { out: 0, ..operands }, plain), Err(Error::Pointer { what: "result", .. })));
    assert!(matches!(run(operands, Epilogue { alpha: 2.0, ..plain }), Err(Error::Epilogue)));
}

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

/// By every method, for every output, in every order, with and without an epilogue, from aligned addresses and others, stored or added.
fn any_problem<T: Number, X: Number>(outputs: &[DataType]) {
    let Some(bench) = bench_for(T::ELEMENT) else { return };
    let architecture = bench.device.architecture();
    let mut turn = 0;
    for &shape in &ANY_SHAPES {
        for &output in outputs {
            for (x_order, order) in [
                (XOrder::TokensFirst, Order::TokensFirst),
                (XOrder::TokensFirst, Order::FeaturesFirst),
                (XOrder::ReductionFirst, Order::TokensFirst),
                (XOrder::ReductionFirst, Order::FeaturesFirst),
            ] {
                // Each case has another of these, so that all of them meet all shapes and orders in turn.
                turn += 1;
                let (before, accumulate) = (turn % 2, turn / 2 % 2 == 1);
                let activation = [None, Some(Activation::Gelu)][turn / 4 % 2].filter(|_| output != DataType::I32);
                let plain = Case::plain(shape, output);
                let case = Case { x_order, order, before, accumulate, activation, ..plain };
                let given = Given::<T, X>::new(&bench, &case);
                let mut methods = GemmMethod::likely(given.problem, architecture);
                assert!(!methods.is_empty(), "{:?}", given.problem);
                methods.extend(mma::MmaTile::all(T::ELEMENT, architecture).into_iter().map(GemmMethod::Mma));
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

/// As many features as a vocabulary has words.
#[test]
fn a_vocabulary() {
    let Some(bench) = bench() else { return };
    for tokens in [1, 3, 130] {
        check::<bf16>(&bench, &Case::plain((50257, tokens, 64), DataType::BF16));
    }
}

/// What is added is what would be stored, bit for bit: by tiles that TMA stores and adds, one by one, and by kernels for few tokens.
#[test]
fn accumulation_adds_what_would_be_stored() {
    let Some(bench) = bench() else { return };
    let architecture = bench.device.architecture();
    for (shape, order) in [
        ((256, 264, 192), Order::TokensFirst),
        ((256, 264, 192), Order::FeaturesFirst),
        ((64, 5, 128), Order::TokensFirst),
        ((100, 40, 128), Order::TokensFirst),
    ] {
        for output in [DataType::BF16, DataType::F32] {
            let stored = Given::<bf16, bf16>::new(&bench, &Case { order, ..Case::plain(shape, output) });
            let added = Given::<bf16, bf16> {
                problem: GemmProblem { accumulate: true, ..stored.problem },
                ..Given::new(&bench, &Case { order, accumulate: true, ..Case::plain(shape, output) })
            };
            let width = output.bytes();
            let number = |bytes: &[u8]| result(bytes, output, 0.0).0;
            let there: Vec<u8> =
                (0..shape.0 * shape.1).flat_map(|i| result_bytes(output, (i % 11) as f64 / 8.0 - 0.5)).collect();
            for method in GemmMethod::likely(added.problem, architecture) {
                let plan = |given: &Given<'_, bf16, bf16>| planned(&bench, given.problem, Some(method));
                let results = stored.run(&plan(&stored), &there, "stored");
                let sums = added.run(&plan(&added), &there, "added");
                let sum = |(a, b): (&[u8], &[u8])| match output {
                    DataType::F32 => f64::from((number(a) + number(b)) as f32),
                    _ => bf16::from_f64(number(a) + number(b)).to_f64(),
                };
                let expected = results.chunks(width).zip(there.chunks(width)).map(sum);
                let found = sums.chunks(width).map(number);
                assert!(expected.eq(found), "{method:?} for {:?}", added.problem);
            }
        }
    }
}
