//! On a device: the dispatcher measures once, remembers, and what it hands out multiplies. Without a device the tests
//! skip.

mod support;

use half::{bf16, f16};
use support::{Bench, hopper, numbers::result};
use tempfile::TempDir;
use twofour::{Axis, Compressed, MatrixRef, Pattern, int4::Granularity, select};
use twofour_cuda::{
    Activation, DataType, Error,
    cache::Cache,
    compare::{Dispatcher, Engine, Int4Trial, Weight},
    problem::{EpilogueKind, GemmProblem, Int4Problem, Order, XOrder},
    raw::gemm::{Epilogue, int4},
};

fn problem(features: usize, tokens: usize, reduction: usize) -> GemmProblem {
    let (element, output) = (DataType::BF16, DataType::BF16);
    GemmProblem::plain(element, output, features, tokens, reduction)
}

#[test]
fn a_choice_is_remembered_by_the_next_process() {
    let Some(bench) = hopper() else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    let choice = Dispatcher::with_cache(&bench.device, &cache).choose(problem(256, 32, 512)).unwrap();
    assert!(choice.measured().windows(2).all(|pair| pair[0].us <= pair[1].us), "{choice}");
    assert!(choice.of("twofour").is_some());
    let again = Dispatcher::with_cache(&bench.device, &cache);
    assert_eq!(again.choose(problem(256, 32, 512)).unwrap(), choice);
    // A damaged file is as good as none.
    std::fs::write(again.file(), "[{").unwrap();
    assert!(Dispatcher::with_cache(&bench.device, &cache).choose(problem(256, 32, 512)).is_ok());
}

/// Engines are compared on every kind of problem.
#[test]
fn every_kind_of_problem_is_compared() {
    let Some(bench) = hopper() else { return };
    let folder = tempfile::tempdir().unwrap();
    let dispatcher = Dispatcher::with_cache(&bench.device, &Cache::at(folder.path()));
    let plain = problem(100, 40, 72);
    let gradient = GemmProblem { x: XOrder::ReductionFirst, order: Order::FeaturesFirst, accumulate: true, ..plain };
    let mixed = GemmProblem {
        element: DataType::E4M3,
        x_element: DataType::E5M2,
        epilogue: Some(EpilogueKind::Bias),
        ..problem(64, 40, 128)
    };
    for problem in [plain, GemmProblem { epilogue: Some(EpilogueKind::Bias), ..plain }, gradient, mixed] {
        let choice = dispatcher.choose(problem).unwrap();
        assert!(choice.of("twofour").is_some(), "{choice}");
        assert_eq!(dispatcher.choose(problem).unwrap(), choice);
    }
}

#[test]
fn a_choice_for_four_bits_is_remembered_too() {
    let Some(bench) = hopper() else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    for (granularity, tokens) in [(Granularity::Group, 3), (Granularity::Row, 40)] {
        let problem = Int4Problem {
            element: DataType::F16,
            output: DataType::F16,
            granularity,
            features: 256,
            tokens,
            reduction: 512,
            order: Order::TokensFirst,
            epilogue: (tokens == 40).then_some(EpilogueKind::Activation),
        };
        let trial = Int4Trial::random(&bench.device, problem).unwrap();
        let choice = Dispatcher::with_cache(&bench.device, &cache).choose_int4_by(&trial).unwrap();
        assert!(choice.measured().windows(2).all(|pair| pair[0].us <= pair[1].us), "{choice}");
        assert_eq!(choice.problem(), problem);
        assert!(int4::Int4Gemm::with(&bench.device, problem, choice.best().how).is_ok());
        assert_eq!(Dispatcher::with_cache(&bench.device, &cache).choose_int4_by(&trial).unwrap(), choice);
        let other = Int4Problem { tokens: 65, ..problem };
        let refused = Int4Trial::random(&bench.device, other);
        assert!(matches!(refused, Err(Error::Dimension { what: "tokens", .. })));
    }
}

/// A dispatcher with an empty cache, where cuBLASLt is installed.
fn with_cublaslt(bench: &Bench, folder: &TempDir) -> Option<Dispatcher> {
    let dispatcher = Dispatcher::with_cache(&bench.device, &Cache::at(folder.path()));
    if dispatcher.libraries().dense.is_none() {
        eprintln!("skipped: no cuBLASLt");
        return None;
    }
    Some(dispatcher)
}

/// One product with one bias, another, an epilogue that cuBLASLt lacks, and the first again; and a captured call,
/// between which and its replay the bias is another.
#[test]
fn a_bias_comes_with_each_call() {
    let Some(bench) = hopper() else { return };
    let folder = tempfile::tempdir().unwrap();
    let Some(dispatcher) = with_cublaslt(&bench, &folder) else { return };
    let problem = GemmProblem { epilogue: Some(EpilogueKind::Bias), ..problem(64, 16, 128) };
    let (w, x) = ([bf16::ONE; 64 * 128], [bf16::ONE; 16 * 128]);
    let (w, x) = (bench.up(&w), bench.up(&x));
    let weight = Weight { dense: Some(bench.at(&w)), packed: None };
    // SAFETY: the dense engine reads the weight as it is, which lives until the product was run.
    let product = unsafe { bench.product(&dispatcher, problem, Engine::CublasLt(0), weight) }.unwrap();
    assert!(product.kernel().contains("adds a bias"), "{}", product.kernel());
    let biases = [1.0f32, 5.0].map(|bias| bench.up(&[bf16::from_f32(bias); 64]));
    let out = bench.up(&[bf16::ZERO; 64 * 16]);
    let run = |which: usize, alpha: f32| {
        let epilogue = Epilogue { alpha, bias: Some(bench.at(&biases[which])), ..Epilogue::default() };
        // SAFETY: all memory is allocated above, as long as the problem asks for, and lives until the stream has been
        // waited for.
        unsafe { product.run_with(bench.stream(), bench.at(&x), bench.at(&out), epilogue) }
    };
    let found = || {
        let found = bench.down(&out);
        assert!(found.iter().all(|value| *value == found[0]), "{found:?}");
        found[0].to_f32()
    };
    for (which, alpha, expected) in [(0, 1.0, 129.0), (1, 1.0, 133.0), (1, 0.5, 69.0), (0, 1.0, 129.0)] {
        run(which, alpha).unwrap();
        assert_eq!(found(), expected, "bias {which}, alpha {alpha}");
    }
    bench.wait();
    let graph = bench.captured(|| run(0, 1.0).unwrap());
    run(1, 1.0).unwrap();
    assert_eq!(found(), 133.0);
    graph.launch().unwrap();
    assert_eq!(found(), 129.0, "the captured bias");
    let none = Epilogue { bias: Some(0), ..Epilogue::default() };
    // SAFETY: the call is refused before anything is launched.
    let refused = unsafe { product.run_with(bench.stream(), bench.at(&x), bench.at(&out), none) };
    assert!(matches!(refused, Err(Error::Pointer { .. })), "{refused:?}");
}

/// The library takes another type of bias where results of 8-bit floats are in f32.
#[test]
fn a_bias_of_8_bit_products_is_of_the_results_type() {
    let Some(bench) = hopper() else { return };
    let folder = tempfile::tempdir().unwrap();
    let Some(dispatcher) = with_cublaslt(&bench, &folder) else { return };
    // Ones in e4m3.
    let (w, x) = (bench.up(&[0x38u8; 64 * 128]), bench.up(&[0x38u8; 16 * 128]));
    for output in [DataType::BF16, DataType::F16, DataType::F32] {
        let bytes = |value: f32| match output {
            DataType::F32 => value.to_le_bytes().to_vec(),
            DataType::F16 => f16::from_f32(value).to_le_bytes().to_vec(),
            _ => bf16::from_f32(value).to_le_bytes().to_vec(),
        };
        let problem = GemmProblem {
            epilogue: Some(EpilogueKind::Bias),
            ..GemmProblem::plain(DataType::E4M3, output, 64, 16, 128)
        };
        let weight = Weight { dense: Some(bench.at(&w)), packed: None };
        // SAFETY: the dense engine reads the weight as it is, which lives until the product was run.
        let product = unsafe { bench.product(&dispatcher, problem, Engine::CublasLt(0), weight) }.unwrap();
        let (bias, out) = (bench.up(&bytes(3.0).repeat(64)), bench.up(&bytes(0.0).repeat(64 * 16)));
        let epilogue = Epilogue { bias: Some(bench.at(&bias)), ..Epilogue::default() };
        // SAFETY: all memory is allocated above, as long as the problem asks for, and lives until the stream has been
        // waited for.
        unsafe { product.run_with(bench.stream(), bench.at(&x), bench.at(&out), epilogue) }.unwrap();
        assert!(bench.down(&out) == bytes(131.0).repeat(64 * 16), "{output}, {}", product.kernel());
    }
}

/// What the epilogue of a problem is.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Ending {
    Plain,
    /// The bias of the result's contiguous axis, which cuBLASLt adds itself, aligned to 16 bytes or not.
    Bias {
        is_aligned: bool,
    },
    /// A scale, both biases and ReLU.
    All,
}

/// Every engine that is there, from one dense 2:4 weight, for every kind of problem.
#[test]
fn all_engines_compute_the_same() {
    let Some(bench) = hopper() else { return };
    let plain = problem(128, 48, 256);
    let by_feature = GemmProblem { order: Order::FeaturesFirst, ..plain };
    let gradient = GemmProblem { x: XOrder::ReductionFirst, accumulate: true, ..by_feature };
    let f32s = GemmProblem { output: DataType::F32, accumulate: true, ..plain };
    let epilogue = GemmProblem { epilogue: Some(EpilogueKind::Bias), ..plain };
    let problems = [
        plain,
        by_feature,
        gradient,
        f32s,
        epilogue,
        GemmProblem { accumulate: true, ..epilogue },
        GemmProblem { epilogue: Some(EpilogueKind::Bias), ..by_feature },
        GemmProblem { epilogue: Some(EpilogueKind::Bias), ..gradient },
        GemmProblem { x: XOrder::ReductionFirst, ..epilogue },
        problem(100, 37, 88),
        GemmProblem { epilogue: Some(EpilogueKind::Bias), accumulate: true, ..problem(51, 7, 30) },
    ];
    for problem in problems {
        let aligned = [true, false].map(|is_aligned| Ending::Bias { is_aligned });
        let endings =
            if problem.epilogue.is_some() { vec![Ending::All, aligned[0], aligned[1]] } else { vec![Ending::Plain] };
        for ending in endings {
            engines_compute_the_same(&bench, problem, ending);
        }
    }
}

fn engines_compute_the_same(bench: &Bench, problem: GemmProblem, ending: Ending) {
    let GemmProblem { features, tokens, reduction, .. } = problem;
    let number = |i: usize| bf16::from_f32(((i * 7919 + 13) % 257) as f32 / 128.0 - 1.0);
    let dense: Vec<bf16> = (0..features * reduction).map(number).collect();
    let matrix = MatrixRef::new(features, reduction, &dense).unwrap();
    let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
    let dense = Compressed::from_masked(matrix, &mask).unwrap().to_dense();
    let x: Vec<bf16> = (0..tokens * reduction).map(|i| number(i + 3)).collect();
    let x_at = |t: usize, k: usize| match problem.x {
        XOrder::TokensFirst => x[t * reduction + k],
        XOrder::ReductionFirst => x[k * tokens + t],
    };
    let bias_bytes = |bias: &[f32]| -> Vec<u8> {
        match problem.output {
            DataType::F32 => bias.iter().flat_map(|b| b.to_le_bytes()).collect(),
            _ => bias.iter().flat_map(|b| bf16::from_f32(*b).to_le_bytes()).collect(),
        }
    };
    // One value before each, so that the bias itself can be unaligned.
    let bias: Vec<f32> = (0..=features).map(|f| (f % 5) as f32 - 2.0).collect();
    let token_bias: Vec<f32> = (0..=tokens).map(|t| (t % 3) as f32).collect();
    let biases = [bench.up(&bias_bytes(&bias)), bench.up(&bias_bytes(&token_bias))];
    let skipped = usize::from(ending == Ending::Bias { is_aligned: false });
    let (bias, token_bias) = (&bias[skipped..], &token_bias[skipped..]);
    let [at_bias, at_token_bias] =
        [0, 1].map(|i: usize| Some(bench.at(&biases[i]) + (skipped * problem.output.bytes()) as u64));
    let (w_there, x_there) = (bench.up(&dense), bench.up(&x));
    let by_token = problem.order == Order::FeaturesFirst;
    let none = Epilogue::default();
    let epilogue = match ending {
        Ending::Plain => none,
        Ending::Bias { .. } if by_token => Epilogue { token_bias: at_token_bias, ..none },
        Ending::Bias { .. } => Epilogue { bias: at_bias, ..none },
        Ending::All => {
            Epilogue { alpha: 0.5, bias: at_bias, token_bias: at_token_bias, activation: Activation::Relu, ..none }
        }
    };
    let folder = tempfile::tempdir().unwrap();
    let dispatcher = Dispatcher::with_cache(&bench.device, &Cache::at(folder.path()));
    let weight = Weight { dense: Some(bench.at(&w_there)), packed: None };
    let start = bias_bytes(&vec![1.0; features * tokens]);
    let mut seen = std::collections::BTreeSet::new();
    for engine in dispatcher.libraries().engines(&bench.device, problem) {
        // One algorithm of cuSPARSELt's in eight will do, and what it lists but does not take is no engine.
        if matches!(engine, Engine::CusparseLt(id) if id % 8 != 0) {
            continue;
        }
        // SAFETY: the weight is 2:4 and lives until the product was run.
        let made = unsafe { bench.product(&dispatcher, problem, engine, weight) };
        let Ok(product) = made else { continue };
        let out = bench.up(&start);
        // SAFETY: all memory is allocated above, as long as the problem asks for, and lives until the stream has been
        // waited for.
        unsafe { product.run_with(bench.stream(), bench.at(&x_there), bench.at(&out), epilogue) }.unwrap();
        let found = bench.down(&out);
        for (i, found) in found.chunks(problem.output.bytes()).enumerate() {
            let (t, f) = match problem.order {
                Order::TokensFirst => (i / features, i % features),
                Order::FeaturesFirst => (i % tokens, i / tokens),
            };
            let terms = (0..reduction).map(|k| dense[f * reduction + k].to_f64() * x_at(t, k).to_f64());
            let (mut expected, mut size): (f64, f64) = terms.fold((0.0, 0.0), |(a, b), v| (a + v, b + v.abs()));
            // A library's sums are rounded before an epilogue of ours.
            let mut rounded = expected.abs();
            match ending {
                Ending::Plain => {}
                Ending::Bias { .. } => expected += f64::from(if by_token { token_bias[t] } else { bias[f] }),
                Ending::All => expected = (0.5 * expected + f64::from(bias[f] + token_bias[t])).max(0.0),
            }
            if ending != Ending::Plain {
                rounded += expected.abs();
            }
            if problem.accumulate {
                expected += 1.0;
                rounded += expected.abs();
            }
            // cuBLASLt may round partial sums to the output's type.
            size *= if matches!(engine, Engine::CublasLt(_)) { 1e-3 } else { 1e-5 };
            let (value, _) = result(found, problem.output, expected);
            assert!(
                (value - expected).abs() <= rounded / 256.0 + size + 1e-6,
                "{engine:?} for {problem:?}, {ending:?}: {value}, expected {expected}"
            );
        }
        seen.insert(engine.name());
    }
    assert!(seen.contains("twofour"));
    eprintln!("compared: {seen:?}");
}
