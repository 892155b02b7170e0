//! Criteria and solvers against torch and numpy (`fixtures/criteria/*.py`).

use std::path::PathBuf;

use half::bf16;
use twofour::{
    Element, Error, Mask, MatrixRef, Pattern,
    calibration::{Hessian, InputNorms},
    criterion::{
        self, ActivationNorm, Criterion, GlobalWeight, Magnitude, Movement, Norm, Normalization, OptimalBrainDamage,
        OptimalBrainSurgeon, Random, Ria, Saliency, Scorer, Wanda, WandaVariant, Weight,
    },
    file::{Reader, StoredElement},
    select::{self, Sparsity},
    solve::{Precision, Solved, SparseGpt, sparsegpt},
};

fn oracle(name: &str) -> Reader {
    Reader::open(PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/criteria").join(name)).unwrap()
}

fn read<T: StoredElement>(reader: &Reader, key: &str) -> Vec<T> {
    reader.tensor(key).unwrap().elements().unwrap().into_owned()
}

fn shape(reader: &Reader, key: &str) -> (usize, usize) {
    let tensor = reader.plain_tensors().find(|t| t.name == key).unwrap();
    (tensor.shape[0], tensor.shape[1])
}

/// Elements whose fate differs from the oracle's.
fn differing(mask: &Mask, reader: &Reader, key: &str) -> usize {
    let expected = read::<u8>(reader, key);
    assert_eq!(expected.len(), mask.rows() * mask.cols(), "{key}");
    let cols = mask.cols();
    expected.iter().enumerate().filter(|(i, kept)| mask.is_kept(i / cols, i % cols) != (**kept != 0)).count()
}

fn masks_of<T: Element + StoredElement>(reader: &Reader, name: &str) {
    let (rows, cols) = shape(reader, &format!("{name}.w"));
    let w = read::<T>(reader, &format!("{name}.w"));
    let matrix = MatrixRef::new(rows, cols, &w).unwrap();
    let mut norms = InputNorms::new(cols);
    norms.add(&read::<f32>(reader, &format!("{name}.x"))).unwrap();
    let magnitude = Magnitude::default();
    let wanda = |variant| Wanda { norms: &norms, variant };
    let (paper, torchao) = (wanda(WandaVariant::Paper), wanda(WandaVariant::Torchao));
    let ria = Ria { norms: &norms, exponent: Ria::EXPONENT };
    let mut criteria: Vec<(&str, &dyn Criterion)> = vec![("wanda", &paper), ("torchao", &torchao), ("ria", &ria)];
    if name == "f32" {
        criteria.push(("magnitude", &magnitude));
    }
    for (criterion_name, criterion) in criteria {
        for (key, sparsity) in [
            ("2:4", Sparsity::Groups(Pattern::TWO_FOUR)),
            ("4:8", Sparsity::Groups(Pattern::new(4, 8).unwrap())),
            ("rows", Sparsity::EachRow(0.6)),
            ("tensor", Sparsity::Tensor(0.35)),
        ] {
            let key = format!("{name}.{criterion_name}.{key}");
            let mask = criterion::mask(matrix, criterion, sparsity).unwrap();
            assert_eq!(differing(&mask, reader, &key), 0, "{key}");
            if let Sparsity::Groups(pattern) = sparsity {
                let scores = criterion::scores(matrix, criterion).unwrap();
                let scores = MatrixRef::new(rows, cols, &scores).unwrap();
                assert_eq!(select::by_score(scores, pattern, twofour::Axis::Row).unwrap(), mask);
            }
        }
    }
}

#[test]
fn masks_of_magnitude_wanda_and_ria_are_torchs() {
    let reader = oracle("masks.safetensors");
    masks_of::<f32>(&reader, "f32");
    masks_of::<bf16>(&reader, "bf16");
}

/// The constants of torchao's own tests of Wanda.
#[test]
fn wanda_on_torchaos_constants() {
    let kept = |mask: &Mask| (0..mask.cols()).map(|col| mask.is_kept(0, col)).collect::<Vec<_>>();
    for variant in [WandaVariant::Paper, WandaVariant::Torchao] {
        let mut norms = InputNorms::new(8);
        norms.add(&[1.0; 8]).unwrap();
        let w: Vec<f32> = (1..=8).map(|v| v as f32).collect();
        let wanda = Wanda { norms: &norms, variant };
        let mask = criterion::mask(MatrixRef::new(1, 8, &w).unwrap(), &wanda, "2:4".parse().unwrap()).unwrap();
        assert_eq!(kept(&mask), [false, false, true, true, false, false, true, true]);

        let mut norms = InputNorms::new(4);
        norms.add(&[100.0, 10.0, 1.0, 0.1]).unwrap();
        let wanda = Wanda { norms: &norms, variant };
        for sparsity in ["2:4", "unstructured@0.5", "unstructured-rows@0.5"] {
            let matrix = MatrixRef::new(1, 4, &w[..4]).unwrap();
            let mask = criterion::mask(matrix, &wanda, sparsity.parse().unwrap()).unwrap();
            assert_eq!(kept(&mask), [true, true, false, false], "{sparsity}");
        }
    }
}

fn solve(reader: &Reader, name: &str, settings: SparseGpt) -> (Solved, Hessian) {
    let (rows, cols) = shape(reader, &format!("{name}.w"));
    let w = read::<f32>(reader, &format!("{name}.w"));
    let mut hessian = Hessian::new(cols).unwrap();
    hessian.add(&read::<f32>(reader, &format!("{name}.x"))).unwrap();
    let solved = sparsegpt(MatrixRef::new(rows, cols, &w).unwrap(), &hessian, &settings).unwrap();
    (solved, hessian)
}

/// Masks equal on 99.9 %, weights within 1e-3 in the rows whose masks are equal. (A row with another choice at a near
/// tie is another, equally good, row.)
fn agrees(name: &str, settings: SparseGpt) -> Solved {
    let reader = oracle("sparsegpt.safetensors");
    let (solved, _) = solve(&reader, name, settings);
    let (rows, cols) = (solved.mask.rows(), solved.mask.cols());
    let differing_elements = differing(&solved.mask, &reader, &format!("{name}.kept"));
    assert!(differing_elements * 1000 <= rows * cols, "{name}: {differing_elements} of {}", rows * cols);
    let expected = read::<f32>(&reader, &format!("{name}.weight"));
    let kept = read::<u8>(&reader, &format!("{name}.kept"));
    for row in 0..rows {
        if (0..cols).any(|col| solved.mask.is_kept(row, col) != (kept[row * cols + col] != 0)) {
            continue;
        }
        let range = row * cols..(row + 1) * cols;
        for (found, expected) in solved.weight[range.clone()].iter().zip(&expected[range]) {
            assert!(
                (found - expected).abs() <= 1e-3 * (1.0 + expected.abs()),
                "{name}: row {row}, {found} for {expected}"
            );
        }
    }
    for row in 0..rows {
        for col in 0..cols {
            let weight = solved.weight[row * cols + col];
            assert!(solved.mask.is_kept(row, col) || weight.to_bits() == 0, "{name}: {row} {col} {weight}");
        }
    }
    let error = read::<f64>(&reader, &format!("{name}.error"))[0];
    assert!((solved.squared_error / error - 1.0).abs() < 1e-2, "{name}: {} for {error}", solved.squared_error);
    solved
}

fn groups(pattern: &str) -> SparseGpt {
    SparseGpt::new(Sparsity::Groups(pattern.parse().unwrap()))
}

#[test]
fn sparsegpt_is_that_of_the_paper_in_float64() {
    for precision in [Precision::F32, Precision::F64] {
        let with = |settings: SparseGpt| SparseGpt { precision, ..settings };
        agrees("two_four", with(groups("2:4")));
        agrees("four_eight", with(groups("4:8")));
        agrees("one_three", with(groups("1:3")));
        agrees("dead", with(groups("2:4")));
        agrees("few_tokens", with(SparseGpt { damping: 0.1, ..groups("2:4") }));
        agrees("tensor", with(SparseGpt::new(Sparsity::Tensor(0.5))));
        agrees("rows", with(SparseGpt { block: 64, ..SparseGpt::new(Sparsity::EachRow(0.6)) }));
    }
}

/// What the methods are for: on correlated inputs SparseGPT's outputs are nearer to the dense layer's than Wanda's, and
/// those nearer than magnitude's.
#[test]
fn the_order_of_the_methods() {
    let reader = oracle("sparsegpt.safetensors");
    let (solved, hessian) = solve(&reader, "two_four", groups("2:4"));
    let (rows, cols) = shape(&reader, "two_four.w");
    let w = read::<f32>(&reader, "two_four.w");
    let matrix = MatrixRef::new(rows, cols, &w).unwrap();
    let mut norms = InputNorms::new(cols);
    norms.add(&read::<f32>(&reader, "two_four.x")).unwrap();
    let error = |pruned: &[f32]| {
        let change: Vec<f32> = w.iter().zip(pruned).map(|(a, b)| a - b).collect();
        hessian.squared_outputs(MatrixRef::new(rows, cols, &change).unwrap()).unwrap()
    };
    let by = |criterion: &dyn Criterion| {
        error(&criterion::mask(matrix, criterion, "2:4".parse().unwrap()).unwrap().apply(matrix).unwrap())
    };
    let magnitude = by(&Magnitude::default());
    let wanda = by(&Wanda { norms: &norms, variant: WandaVariant::Paper });
    let own = error(&solved.weight);
    assert!(own < 0.8 * wanda && wanda < 0.9 * magnitude, "{own} {wanda} {magnitude}");
    // The solver's own figure includes the damping.
    assert!(own <= solved.squared_error && own > 0.8 * solved.squared_error, "{own} {}", solved.squared_error);
}

#[test]
fn results_do_not_depend_on_threads() {
    let reader = oracle("sparsegpt.safetensors");
    let pool = |threads| rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
    for (name, settings) in [("two_four", groups("2:4")), ("tensor", SparseGpt::new(Sparsity::Tensor(0.5)))] {
        let one = pool(1).install(|| solve(&reader, name, settings).0);
        assert_eq!(pool(4).install(|| solve(&reader, name, settings).0), one, "{name}");
    }
}

/// A criterion that returns what it is told to.
struct Given(Vec<f32>);

impl Criterion for Given {
    fn scorer<'a>(&'a self, weight: &Weight<'a>) -> twofour::Result<Scorer<'a>> {
        let cols = weight.cols();
        Ok(Box::new(move |row, _, scores| scores.copy_from_slice(&self.0[row * cols..][..cols])))
    }
}

#[test]
fn what_is_not_finite_is_named() {
    let sparsities = ["2:4", "unstructured@0.5", "unstructured-rows@0.5", "unstructured@1"];
    let norms = |value: f32| {
        let mut norms = InputNorms::new(8);
        norms.add(&[value; 8]).unwrap();
        norms
    };
    for sparsity in sparsities.map(|s| s.parse::<Sparsity>().unwrap()) {
        for (value, nan) in [(f32::NAN, true), (f32::INFINITY, false), (f32::NEG_INFINITY, false)] {
            let mut w = vec![1f32; 4 * 8];
            w[19] = value;
            w[30] = value;
            let matrix = MatrixRef::new(4, 8, &w).unwrap();
            let norms = norms(1.0);
            let wanda = Wanda { norms: &norms, variant: WandaVariant::Paper };
            let criteria: [&dyn Criterion; 4] =
                [&Magnitude::default(), &Random { seed: 1 }, &ActivationNorm { norms: &norms }, &wanda];
            for criterion in criteria {
                let error = criterion::mask(matrix, criterion, sparsity).unwrap_err();
                let place = match error {
                    Error::NotANumber { row, col } if nan => (row, col),
                    Error::Infinite { row, col } if !nan => (row, col),
                    other => panic!("{other}"),
                };
                assert_eq!(place, (2, 3));
            }
        }
        // A score that is NaN, and one that is infinite.
        let w = vec![1f32; 4 * 8];
        let matrix = MatrixRef::new(4, 8, &w).unwrap();
        let mut scores: Vec<f32> = (0..32).map(|i| i as f32).collect();
        scores[9] = f32::INFINITY;
        scores[16] = f32::NEG_INFINITY;
        let mask = criterion::mask(matrix, &Given(scores.clone()), sparsity).unwrap();
        let all = sparsity == Sparsity::Tensor(1.0);
        assert!(mask.is_kept(1, 1) != all && !mask.is_kept(2, 0));
        scores[20] = f32::NAN;
        let error = criterion::mask(matrix, &Given(scores), sparsity).unwrap_err();
        assert!(matches!(error, Error::NanScore { row: 2, col: 4 }), "{error}");
    }
    let w = [1f32; 4];
    let matrix = MatrixRef::new(1, 4, &w).unwrap();
    for value in [-0.1, 1.1, f64::NAN] {
        let error = criterion::mask(matrix, &Magnitude::default(), Sparsity::EachRow(value)).unwrap_err();
        assert!(matches!(error, Error::SparsityLevel { .. }), "{error}");
    }
    let norms = norms(1.0);
    let wanda = Wanda { norms: &norms, variant: WandaVariant::Paper };
    assert!(matches!(
        criterion::mask(matrix, &wanda, "2:4".parse().unwrap()),
        Err(Error::Length { expected: 4, found: 8, .. })
    ));
    let damage = OptimalBrainDamage { diagonal: &[1.0, f32::NAN, 1.0, 1.0] };
    assert!(matches!(criterion::mask(matrix, &damage, "2:4".parse().unwrap()), Err(Error::Statistic { index: 1, .. })));
}

#[test]
fn solver_refuses_what_it_cannot_solve() {
    let mut hessian = Hessian::new(4).unwrap();
    hessian.add(&[1.0, 2.0, 3.0, 4.0, -1.0, 1.0, 0.5, 2.0]).unwrap();
    let solve =
        |w: &[f32], settings: SparseGpt| sparsegpt(MatrixRef::new(w.len() / 4, 4, w).unwrap(), &hessian, &settings);
    let good = [0.1f32, 0.2, 0.3, 0.4];
    assert!(solve(&good, groups("2:4")).is_ok());
    assert!(matches!(solve(&[1.0, f32::NAN, 0.0, 0.0], groups("2:4")), Err(Error::NotANumber { row: 0, col: 1 })));
    assert!(matches!(solve(&[1.0, f32::INFINITY, 0.0, 0.0], groups("2:4")), Err(Error::Infinite { row: 0, col: 1 })));
    assert!(matches!(
        solve(&good, SparseGpt { damping: 0.0, ..groups("2:4") }),
        Err(Error::NotPositiveDefinite { .. })
    ));
    assert!(matches!(solve(&good, SparseGpt { damping: -1.0, ..groups("2:4") }), Err(Error::Setting { .. })));
    assert!(matches!(solve(&good, SparseGpt { block: 0, ..groups("2:4") }), Err(Error::Setting { .. })));
    assert!(matches!(solve(&good, SparseGpt::new(Sparsity::Tensor(1.5))), Err(Error::SparsityLevel { .. })));
    let none = sparsegpt(MatrixRef::<f32>::new(0, 4, &[]).unwrap(), &hessian, &groups("2:4")).unwrap();
    assert!(none.weight.is_empty());
    let empty = Hessian::new(4).unwrap();
    let unseen = sparsegpt(MatrixRef::new(1, 4, &good).unwrap(), &empty, &groups("2:4"));
    assert!(matches!(unseen, Err(Error::NoTokens { .. })));
}

#[test]
fn criteria_that_require_more_than_the_weight() {
    let w = [1f32, -2.0, 3.0, -4.0, 0.5, 0.5, 0.0, 1.0];
    let matrix = MatrixRef::new(2, 4, &w).unwrap();
    let g = [4f32, -1.0, 0.5, 0.25, 1.0, -3.0, 9.0, 1.0];
    let scores = |criterion: &dyn Criterion| criterion::scores(matrix, criterion).unwrap();
    assert_eq!(scores(&Saliency { gradient: &g }), [4.0, 2.0, 1.5, 1.0, 0.5, 1.5, 0.0, 1.0]);
    let mut movement = Movement::new(2, 4).unwrap();
    let gradient = MatrixRef::new(2, 4, &g).unwrap();
    movement.add(matrix, gradient).unwrap();
    movement.add(matrix, gradient).unwrap();
    assert_eq!(scores(&movement), [-8.0, -4.0, -3.0, 2.0, -1.0, 3.0, 0.0, -2.0]);
    assert!(movement.add(MatrixRef::new(4, 2, &w).unwrap(), gradient).is_err());
    assert_eq!(
        scores(&OptimalBrainDamage { diagonal: &[2.0, 4.0, 0.0, 2.0] }),
        [1.0, 8.0, 0.0, 16.0, 0.25, 0.5, 0.0, 1.0]
    );
    assert_eq!(scores(&OptimalBrainDamage { diagonal: &g.map(f32::abs) })[4..], [0.125, 0.375, 0.0, 0.5]);
    let surgeon = OptimalBrainSurgeon { inverse_diagonal: &[0.5, 0.25, 1.0, 0.5] };
    assert_eq!(scores(&surgeon), [1.0, 8.0, 4.5, 16.0, 0.25, 0.5, 0.0, 1.0]);
    assert_eq!(scores(&Magnitude { norm: Norm::L2 }), w.map(|v| v * v));
    let mut norms = InputNorms::new(4);
    norms.add(&[3.0, 0.0, 1.0, 2.0, 4.0, 0.0, 0.0, 0.0]).unwrap();
    assert_eq!(scores(&ActivationNorm { norms: &norms })[4..], [5.0, 0.0, 1.0, 2.0]);
    let random = scores(&Random { seed: 3 });
    assert!(random == scores(&Random { seed: 3 }) && random != scores(&Random { seed: 4 }));
    assert!(random.iter().all(|score| (0.0..1.0).contains(score)));
}

#[test]
fn a_global_threshold_takes_from_where_scores_are_low() {
    // The second weight is a tenth of the first: by magnitude it goes first, over the mean both lose the same.
    let large: Vec<f32> = (0..40).map(|i| (i * 7 % 40) as f32 + 1.0).collect();
    let small: Vec<f32> = large.iter().map(|w| w * 0.001).collect();
    let magnitude = Magnitude::default();
    let masks = |normalization| {
        let weight = |name, data| GlobalWeight {
            name,
            weight: Weight::new(MatrixRef::new(5, 8, data).unwrap()),
            criterion: &magnitude as &dyn Criterion,
        };
        criterion::global_masks(&[weight("large", &large[..]), weight("small", &small[..])], 0.5, normalization)
            .unwrap()
    };
    let counts = |masks: Vec<Mask>| masks.iter().map(Mask::count).collect::<Vec<_>>();
    assert_eq!(counts(masks(Normalization::None)), [40, 0]);
    assert_eq!(counts(masks(Normalization::Mean)), [20, 20]);
    assert_eq!(counts(masks(Normalization::RootMeanSquare)), [20, 20]);
    let bad = [1f32, f32::NAN];
    let weight = Weight::new(MatrixRef::new(1, 2, &bad).unwrap());
    let weights = [GlobalWeight { name: "layers.3.up", weight, criterion: &magnitude }];
    let error = criterion::global_masks(&weights, 0.5, Normalization::Mean).unwrap_err().to_string();
    assert!(error.contains("layers.3.up") && error.contains("column 1"), "{error}");
}
