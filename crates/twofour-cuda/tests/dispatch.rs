//! On a device: the dispatcher measures once, remembers, and what it hands out multiplies. Without a device the tests skip.

mod support;

use half::bf16;
use support::hopper;
use twofour::{Axis, Compressed, MatrixRef, Pattern, int4::Granularity, select};
use twofour_cuda::{
    DataType, Error,
    cache::Cache,
    dispatch::Dispatcher,
    engine::{Engine, Weight},
    gemm::{Order, Problem, int4},
};

fn problem(features: usize, tokens: usize, reduction: usize) -> Problem {
    let (element, output) = (DataType::BF16, DataType::BF16);
    Problem::plain(element, output, features, tokens, reduction)
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
    let other = Problem { epilogue: true, ..problem(256, 32, 512) };
    assert!(matches!(again.choose(other), Err(Error::NotCompared)));
}

#[test]
fn a_choice_for_four_bits_is_remembered_too() {
    let Some(bench) = hopper() else { return };
    let folder = tempfile::tempdir().unwrap();
    let cache = Cache::at(folder.path());
    for (granularity, tokens) in [(Granularity::Group, 3), (Granularity::Row, 40)] {
        let problem = int4::Problem {
            element: DataType::F16,
            output: DataType::F16,
            granularity,
            features: 256,
            tokens,
            reduction: 512,
            order: Order::TokensFirst,
        };
        let choice = Dispatcher::with_cache(&bench.device, &cache).choose_int4(problem).unwrap();
        assert!(choice.measured().windows(2).all(|pair| pair[0].us <= pair[1].us), "{choice}");
        assert_eq!(choice.problem(), problem);
        assert!(int4::Decode::with(&bench.device, problem, choice.best().how).is_ok());
        assert_eq!(Dispatcher::with_cache(&bench.device, &cache).choose_int4(problem).unwrap(), choice);
        let other = int4::Problem { tokens: 65, ..problem };
        let refused = Dispatcher::with_cache(&bench.device, &cache).choose_int4(other);
        assert!(matches!(refused, Err(Error::Dimension { what: "tokens", .. })));
    }
}

/// Every engine that is there, from one dense 2:4 weight.
#[test]
fn all_engines_compute_the_same() {
    let Some(bench) = hopper() else { return };
    let (features, tokens, reduction) = (128, 48, 256);
    let number = |i: usize| bf16::from_f32(((i * 7919 + 13) % 257) as f32 / 128.0 - 1.0);
    let dense: Vec<bf16> = (0..features * reduction).map(number).collect();
    let matrix = MatrixRef::new(features, reduction, &dense).unwrap();
    let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
    let dense = Compressed::from_masked(matrix, &mask).unwrap().to_dense();
    let x: Vec<bf16> = (0..tokens * reduction).map(|i| number(i + 3)).collect();
    let (w_there, x_there) = (bench.up(&dense), bench.up(&x));
    let folder = tempfile::tempdir().unwrap();
    let dispatcher = Dispatcher::with_cache(&bench.device, &Cache::at(folder.path()));
    let problem = problem(features, tokens, reduction);
    let weight = Weight { dense: bench.at(&w_there), packed: None };
    let mut seen = std::collections::BTreeSet::new();
    for engine in dispatcher.libraries().engines(&bench.device, problem) {
        // One algorithm of cuSPARSELt's in eight will do, and what it lists but does not take is no engine.
        if matches!(engine, Engine::CusparseLt(id) if id % 8 != 0) {
            continue;
        }
        // SAFETY: the weight is 2:4 and lives until the product was run.
        let made = unsafe { bench.product(&dispatcher, problem, engine, weight) };
        let Ok(product) = made else { continue };
        let out = bench.poisoned(tokens * features, bf16::NAN);
        // SAFETY: all memory is allocated above, as long as the problem asks for, and lives until the stream has been waited for.
        unsafe { product.run(bench.stream(), bench.at(&x_there), bench.at(&out)) }.unwrap();
        let found = bench.down(&out);
        for (i, found) in found.iter().enumerate() {
            let (t, f) = (i / features, i % features);
            let terms = (0..reduction).map(|k| dense[f * reduction + k].to_f64() * x[t * reduction + k].to_f64());
            let expected: f64 = terms.sum();
            assert!(
                (found.to_f64() - expected).abs() <= expected.abs() / 256.0 + 1e-3,
                "{engine:?}: {found}, {expected}"
            );
        }
        seen.insert(engine.name());
    }
    assert!(seen.contains("twofour"));
    eprintln!("compared: {seen:?}");
}
