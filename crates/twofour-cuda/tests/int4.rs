//! On a device: products with four-bit weights are those of a reference in f64 with the integers and scales as they
//! are, and nothing else is written. Without a device the tests skip.

#[path = "gemm/activation.rs"]
mod activation;
mod support;

use std::collections::BTreeSet;

use activation::{activated, inexact};
use cudarc::driver::CudaSlice;
use half::{bf16, f16};
use support::{
    Bench, bench,
    numbers::{GUARD, Random, result},
};
use twofour::{
    Compressed,
    int4::{Granularity, Int4},
    layout::lanes,
};
use twofour_cuda::{
    Activation, DataType, Error,
    problem::{EpilogueKind, Int4Problem, Order},
    raw::gemm::{
        Epilogue,
        generic::staged::StagedShape,
        int4::{Int4Gemm, Int4Method, Int4Weight},
    },
};

/// Random integers, all sixteen of them, random codes, and scales that differ by as much as a thousand.
fn weight(random: &mut Random, rows: usize, cols: usize, granularity: Granularity) -> Int4 {
    let values = (0..rows * cols / 2).map(|_| (random.bits() % 16) as i8 - 8).collect();
    let meta = (0..rows * cols / 32).map(|_| random.codes()).collect();
    let scales = rows * granularity.scales_per_row(cols);
    let scales = (0..scales).map(|_| f16::from_f32(2f32.powf(random.number() * 2.5) / 16.0)).collect();
    Int4::from_parts(Compressed::from_parts(rows, cols, values, meta).unwrap(), scales, granularity).unwrap()
}

/// A weight that was brought to the device.
struct There {
    values: CudaSlice<u32>,
    meta: CudaSlice<u32>,
    scales: CudaSlice<u32>,
}

impl There {
    fn new(bench: &Bench, weight: &Int4) -> Self {
        let lanes = lanes::encode(weight).unwrap();
        Self { values: bench.up(&lanes.values), meta: bench.up(&lanes.meta), scales: bench.up(&lanes.scales) }
    }

    fn places(&self, bench: &Bench) -> Int4Weight {
        Int4Weight { values: bench.at(&self.values), meta: bench.at(&self.meta), scales: bench.at(&self.scales) }
    }
}

fn narrow(value: f32, element: DataType) -> ([u8; 2], f64) {
    match element {
        DataType::F16 => (f16::from_f32(value).to_le_bytes(), f16::from_f32(value).to_f64()),
        _ => (bf16::from_f32(value).to_le_bytes(), bf16::from_f32(value).to_f64()),
    }
}

/// What follows a product.
#[derive(Debug, Clone, Copy, PartialEq)]
enum After {
    Nothing,
    /// A bias, for which kernels have stores of its own.
    Bias,
    /// The bias and an activation.
    BiasThen(Activation),
    /// Scales, the bias and ReLU.
    All,
}

impl After {
    fn kind(self) -> Option<EpilogueKind> {
        match self {
            After::Nothing => None,
            After::Bias => Some(EpilogueKind::Bias),
            After::BiasThen(activation) => Some(EpilogueKind::of(false, activation)),
            After::All => Some(EpilogueKind::Scales),
        }
    }
}

/// What a product is made of, on the device, and what is expected of it: made once for all methods.
struct Given<'a> {
    bench: &'a Bench,
    problem: Int4Problem,
    weight: There,
    x: CudaSlice<u8>,
    factors: [CudaSlice<f32>; 2],
    bias: CudaSlice<u8>,
    after: After,
    /// For every token, of every feature: the result, and how far from it a sum in f32 may be.
    expected: Vec<(f64, f64)>,
}

const ALPHA: f32 = 0.0625;

impl<'a> Given<'a> {
    /// The problem's epilogue is the one that is given, and may be of another kind than `after`.
    fn new(bench: &'a Bench, problem: Int4Problem, after: After) -> Self {
        let Int4Problem { element, output, granularity, features, tokens, reduction, .. } = problem;
        let mut random = Random((features * 31 + tokens * 7 + reduction) as u64);
        let w = weight(&mut random, features, reduction, granularity);
        let (bytes, x): (Vec<_>, Vec<f64>) = (0..tokens * reduction).map(|_| narrow(random.number(), element)).unzip();
        let factors =
            |random: &mut Random, n: usize| -> Vec<f32> { (0..n).map(|_| random.number() / 4.0 + 1.0).collect() };
        let (by_feature, by_token) = (factors(&mut random, features), factors(&mut random, tokens));
        let bias: Vec<f32> = (0..features).map(|_| bf16::from_f32(random.number()).to_f32()).collect();
        let bias_bytes: Vec<u8> = match output {
            DataType::F32 => bias.iter().flat_map(|b| b.to_le_bytes()).collect(),
            _ => bias.iter().flat_map(|b| narrow(*b, output).0).collect(),
        };
        let dense: Vec<f64> = w.dequantize().to_dense().into_iter().map(f64::from).collect();
        let result_of = |t: usize, f: usize| {
            let terms = dense[f * reduction..][..reduction].iter().zip(&x[t * reduction..][..reduction]);
            let (mut sum, mut size) =
                terms.map(|(w, x)| w * x).fold((0.0, 0.0), |(sum, size), term| (sum + term, size + term.abs()));
            if after == After::All {
                let scale = f64::from(ALPHA * by_feature[f] * by_token[t]);
                (sum, size) = (sum * scale, size * scale.abs());
            }
            if after != After::Nothing {
                (sum, size) = (sum + f64::from(bias[f]), size + f64::from(bias[f]).abs());
            }
            let mut finishing = 0.0;
            match after {
                After::All => sum = sum.max(0.0),
                After::BiasThen(activation) => {
                    sum = activated(activation, sum);
                    finishing = inexact(activation, sum, output);
                }
                After::Nothing | After::Bias => {}
            }
            (sum, size * 2e-6 + finishing)
        };
        let places = (0..tokens * features).map(|i| (i / features, i % features));
        Self {
            bench,
            problem,
            weight: There::new(bench, &w),
            x: bench.up(&bytes.concat()),
            factors: [bench.up(&by_feature), bench.up(&by_token)],
            bias: bench.up(&bias_bytes),
            after,
            expected: places.map(|(t, f)| result_of(t, f)).collect(),
        }
    }

    fn check(&self, method: Option<Int4Method>) {
        self.check_plan(&self.planned(method));
    }

    fn planned(&self, method: Option<Int4Method>) -> Int4Gemm {
        match method {
            Some(method) => Int4Gemm::with(&self.bench.device, self.problem, method),
            None => Int4Gemm::new(&self.bench.device, self.problem),
        }
        .unwrap()
    }

    fn check_plan(&self, decode: &Int4Gemm) {
        let (bench, problem) = (self.bench, self.problem);
        let Int4Problem { output, features, tokens, order, .. } = problem;
        let what = format!("{} for {problem:?}, {:?}", decode.kernel(), self.after);
        let out: CudaSlice<u8> = bench.poisoned(features * tokens * output.bytes() + GUARD, 0xFFu8);
        let bias = Some(bench.at(&self.bias));
        let epilogue = match self.after {
            After::Nothing => Epilogue::default(),
            After::Bias => Epilogue { bias, ..Epilogue::default() },
            After::BiasThen(activation) => Epilogue { bias, activation, ..Epilogue::default() },
            After::All => Epilogue {
                alpha: ALPHA,
                feature_scales: Some(bench.at(&self.factors[0])),
                token_scales: Some(bench.at(&self.factors[1])),
                bias,
                token_bias: None,
                activation: Activation::Relu,
            },
        };
        let (x_at, out_at) = (bench.at(&self.x), bench.at(&out));
        // SAFETY: all memory is allocated above and in `new`, as long as the problem asks for, and lives until the
        // stream has been waited for.
        unsafe { decode.run(bench.stream(), self.weight.places(bench), x_at, out_at, epilogue) }.unwrap();
        let found = bench.down(&out);
        assert!(found[found.len() - GUARD..].iter().all(|byte| *byte == 0xFF), "{what}: written beyond the end");
        for (i, (sum, inexact)) in self.expected.iter().enumerate() {
            let (t, f) = (i / features, i % features);
            let at = match order {
                Order::TokensFirst => i,
                Order::FeaturesFirst => f * tokens + t,
            };
            let (value, rounding) = result(&found[at * output.bytes()..][..output.bytes()], output, *sum);
            let allowed = rounding + inexact;
            assert!(
                (value - sum).abs() <= allowed,
                "{what}: token {t}, feature {f}: {value}, expected {sum} ± {allowed}"
            );
        }
    }
}

/// By all methods that only Hopper has, or by all others, and by the one that a plan chooses.
fn products(element: DataType, hopper: bool) {
    let Some(bench) = bench() else { return };
    let is_of_hopper = |method: &Int4Method| matches!(method, Int4Method::WarpPipelines(_) | Int4Method::Cluster(_));
    for granularity in [Granularity::Group, Granularity::Row] {
        for (features, tokens, reduction) in [
            (16, 1, 128),
            (48, 7, 256),
            (272, 8, 1152),
            (160, 13, 640),
            (1024, 16, 4096),
            (176, 29, 1792),
            (144, 33, 384),
            (96, 64, 3968),
        ] {
            let problem = Int4Problem {
                element,
                output: element,
                granularity,
                features,
                tokens,
                reduction,
                order: Order::TokensFirst,
                epilogue: None,
            };
            let methods: Vec<Int4Method> = Int4Method::all(problem, bench.device.architecture());
            let other = Int4Problem { output: DataType::F32, order: Order::FeaturesFirst, ..problem };
            let (all, nothing) = (After::All, After::Nothing);
            let [gelu, silu] = [Activation::Gelu, Activation::Silu].map(After::BiasThen);
            let afters = [nothing, After::Bias, gelu, silu, all].map(|after| (problem, after));
            let in_f32 = Int4Problem { output: DataType::F32, ..problem };
            for (problem, after) in afters.into_iter().chain([(in_f32, nothing), (other, nothing), (other, gelu)]) {
                let given = Given::new(&bench, Int4Problem { epilogue: after.kind(), ..problem }, after);
                let methods = methods.iter().filter(|method| is_of_hopper(method) == hopper);
                for method in methods.copied().map(Some).chain([None]) {
                    given.check(method);
                }
            }
        }
    }
}

/// The limit of shared memory is one of a loaded kernel, and each plan of it needs another amount.
#[test]
fn plans_that_share_a_kernel_launch_in_any_order() {
    let Some(bench) = bench() else { return };
    let givens =
        [(64, 8, 8192), (1024, 8, 128), (384, 1, 128), (16, 7, 14_336)].map(|(features, tokens, reduction)| {
            let problem = Int4Problem {
                element: DataType::BF16,
                output: DataType::BF16,
                granularity: Granularity::Group,
                features,
                tokens,
                reduction,
                order: Order::TokensFirst,
                epilogue: None,
            };
            Given::new(&bench, problem, After::Nothing)
        });
    let plans_of = |given: &Given| {
        let methods = Int4Method::all(given.problem, bench.device.architecture());
        methods.into_iter().map(|method| given.planned(Some(method))).collect::<Vec<_>>()
    };
    let plans: Vec<_> = givens.iter().map(|given| (given, plans_of(given))).collect();
    for (given, plans) in &plans {
        plans.iter().for_each(|plan| given.check_plan(plan));
    }
}

#[test]
fn f16_products() {
    products(DataType::F16, false);
}

#[test]
fn bf16_products() {
    products(DataType::BF16, false);
}

#[test]
fn f16_products_on_hopper() {
    products(DataType::F16, true);
}

#[test]
fn bf16_products_on_hopper() {
    products(DataType::BF16, true);
}

#[test]
fn an_epilogue_of_another_kind_than_its_plans_is_computed() {
    let Some(bench) = bench() else { return };
    let problem = Int4Problem { tokens: 24, ..plain(DataType::F16, 144) };
    let [gelu, silu] = [Activation::Gelu, Activation::Silu].map(After::BiasThen);
    let afters = [After::Nothing, After::Bias, gelu, silu, After::All];
    for planned in [EpilogueKind::Bias, EpilogueKind::Activation].map(Some) {
        for output in [DataType::F16, DataType::F32] {
            let problem = Int4Problem { epilogue: planned, output, ..problem };
            let mut methods = Int4Method::all(problem, bench.device.architecture());
            methods.retain(|method| matches!(method, Int4Method::Cluster(_)));
            for after in afters.into_iter().filter(|after| after.kind() != planned) {
                let given = Given::new(&bench, problem, after);
                for method in &methods {
                    given.check(Some(*method));
                }
            }
        }
    }
}

/// Every kernel once, with two blocks to a cluster at most: for a sanitizer that makes each launch take a thousand
/// times as long.
fn kernels_once(problem: Int4Problem, after: After, columns: impl Fn(&Int4Method) -> usize) {
    let Some(bench) = bench() else { return };
    let mut seen = BTreeSet::new();
    for granularity in [Granularity::Group, Granularity::Row] {
        for tokens in [1, 7, 13, 27, 60] {
            let problem = |reduction| Int4Problem { granularity, tokens, reduction, epilogue: after.kind(), ..problem };
            let mut methods = Int4Method::all(problem(256), bench.device.architecture());
            methods.retain(|method| !matches!(method, Int4Method::Cluster(shape) if shape.split > 2));
            for reduction in methods.iter().map(&columns).collect::<BTreeSet<_>>() {
                let given = Given::new(&bench, problem(reduction), after);
                for method in methods.iter().filter(|method| columns(method) == reduction) {
                    let kernel = Int4Gemm::with(&bench.device, given.problem, *method).unwrap().kernel();
                    if seen.insert(kernel.clone()) {
                        eprintln!("{kernel} of {reduction} columns, {after:?}");
                        given.check(Some(*method));
                    }
                }
            }
        }
    }
}

/// What [`kernels_once`] is to vary.
fn plain(element: DataType, features: usize) -> Int4Problem {
    let (granularity, order) = (Granularity::Group, Order::TokensFirst);
    Int4Problem { element, output: element, granularity, features, tokens: 1, reduction: 256, order, epilogue: None }
}

/// With columns enough that buffers are filled again: `MAX_BUFFERS` of rings, `most_ahead` of a cluster's block, and
/// eight are shared by warps.
fn buffers_filled_again(element: DataType) {
    let columns = |method: &Int4Method| {
        let units = match method {
            Int4Method::WarpPipelines(_) => 32,
            Int4Method::Cluster(shape) => 20 * shape.split as usize,
            Int4Method::Staged(shape) => 10 * shape.k_warps as usize,
            Int4Method::Direct(_) => 4,
        };
        units * 128
    };
    kernels_once(plain(element, 16), After::Nothing, columns);
}

/// With few columns: plain, with an epilogue, and in f32 and the other order.
fn endings(element: DataType) {
    let plain = plain(element, 144);
    let other = Int4Problem { output: DataType::F32, order: Order::FeaturesFirst, ..plain };
    for (problem, after) in
        [(plain, After::Nothing), (plain, After::Bias), (plain, After::All), (other, After::Nothing)]
    {
        kernels_once(problem, after, |_| 256);
    }
}

#[test]
fn f16_buffers_filled_again() {
    buffers_filled_again(DataType::F16);
}

#[test]
fn bf16_buffers_filled_again() {
    buffers_filled_again(DataType::BF16);
}

#[test]
fn f16_endings() {
    endings(DataType::F16);
}

#[test]
fn bf16_endings() {
    endings(DataType::BF16);
}

/// Few tokens and more, captured once and replayed.
#[test]
fn calls_can_be_captured_in_a_graph() {
    let Some(bench) = bench() else { return };
    for tokens in [3, 20] {
        capture(&bench, tokens);
    }
}

fn capture(bench: &Bench, tokens: usize) {
    let mut random = Random(5);
    let (features, reduction) = (256, 2048);
    let w = weight(&mut random, features, reduction, Granularity::Group);
    let there = There::new(bench, &w);
    let problem = Int4Problem {
        element: DataType::F16,
        output: DataType::F16,
        granularity: Granularity::Group,
        features,
        tokens,
        reduction,
        order: Order::TokensFirst,
        epilogue: None,
    };
    let decode = Int4Gemm::new(&bench.device, problem).unwrap();
    let x: Vec<u8> = (0..tokens * reduction).flat_map(|_| narrow(random.number(), DataType::F16).0).collect();
    let x = bench.up(&x);
    let (places, x_at) = (there.places(bench), bench.at(&x));
    bench.expect_replays_alike(&format!("{tokens} tokens, {}", decode.kernel()), features * tokens * 2, |out| {
        // SAFETY: weight, X and result are as long as the problem asks for, and live until the stream has been waited
        // for.
        unsafe { decode.run(bench.stream(), places, x_at, out, Epilogue::default()) }.unwrap();
    });
}

#[test]
fn what_does_not_fit_is_refused_before_anything_is_launched() {
    let Some(bench) = bench() else { return };
    let problem = Int4Problem {
        element: DataType::F16,
        output: DataType::F16,
        granularity: Granularity::Group,
        features: 64,
        tokens: 8,
        reduction: 128,
        order: Order::TokensFirst,
        epilogue: None,
    };
    let plan = |problem| Int4Gemm::new(&bench.device, problem);
    assert!(matches!(plan(Int4Problem { element: DataType::I8, ..problem }), Err(Error::Product { .. })));
    assert!(matches!(plan(Int4Problem { output: DataType::BF16, ..problem }), Err(Error::Product { .. })));
    assert!(matches!(
        plan(Int4Problem { features: 40, ..problem }),
        Err(Error::Multiple { found: 40, multiple: 16, .. })
    ));
    assert!(matches!(
        plan(Int4Problem { reduction: 64, ..problem }),
        Err(Error::Multiple { found: 64, multiple: 128, .. })
    ));
    assert!(matches!(plan(Int4Problem { tokens: 0, ..problem }), Err(Error::Dimension { what: "tokens", .. })));
    assert!(matches!(plan(Int4Problem { tokens: 65, ..problem }), Err(Error::Dimension { what: "tokens", .. })));
    let more_tokens = Int4Method::Staged(StagedShape { tokens: 16, k_warps: 4, height: 1 });
    assert!(matches!(Int4Gemm::with(&bench.device, problem, more_tokens), Err(Error::Method { .. })));
    let decode = plan(problem).unwrap();
    let memory = bench.poisoned(1 << 16, 0u32);
    let at = bench.at(&memory);
    let weight = Int4Weight { values: at, meta: at, scales: at };
    // SAFETY: each of these calls returns an error before it launches anything.
    let with = |weight, x, out, epilogue| unsafe { decode.run(bench.stream(), weight, x, out, epilogue) };
    let run = |weight, x, out| with(weight, x, out, Epilogue::default());
    assert!(matches!(run(weight, at + 8, at), Err(Error::Pointer { what: "X", .. })));
    assert!(matches!(run(weight, at, 0), Err(Error::Pointer { what: "result", .. })));
    assert!(matches!(run(Int4Weight { scales: at + 4, ..weight }, at, at), Err(Error::Pointer { what: "scales", .. })));
    let biased = Epilogue { bias: Some(at), ..Epilogue::default() };
    assert!(matches!(with(weight, at, at, biased), Err(Error::Epilogue)));
}
