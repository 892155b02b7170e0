//! The CPU engine's operations against sums in f64 and finite differences.

use twofour::layer::{Accumulate, SparseLinearSettings, WeightGradient};

use super::{CpuBuffer, CpuEngine};
use crate::{
    engine::{
        AdamWStep, AttentionShape, DistillationWeights, Elementwise, ErrorMeasure, Kind, LayerOperations as _,
        LinearOperations as _, LinearShape, Memory as _, Nonlinearity, NormGradients, NormInput, NormParameters,
        NormStatistics, OptimizerStep, ParameterState, PrunedDecay, ScoreOptions, SecondMoment, SparseLayer as _,
        SparsePrecision, StepOperations as _,
    },
    random::Stream,
};

const ENGINE: CpuEngine = CpuEngine;

fn random(len: usize, seed: u64) -> Vec<f32> {
    let stream = Stream::new(seed, "engine tests");
    (0..len as u64).map(|i| stream.normal(i) as f32).collect()
}

fn buffer(values: &[f32]) -> CpuBuffer {
    let mut buffer = ENGINE.zeros(Kind::Compute, values.len()).unwrap();
    ENGINE.write(&mut buffer, values).unwrap();
    buffer
}

fn ids(values: &[u32]) -> CpuBuffer {
    let mut buffer = ENGINE.zeros(Kind::Index, values.len()).unwrap();
    ENGINE.write_ids(&mut buffer, values).unwrap();
    buffer
}

fn zeros(len: usize) -> CpuBuffer {
    ENGINE.zeros(Kind::Wide, len).unwrap()
}

fn read(buffer: &CpuBuffer) -> Vec<f32> {
    ENGINE.read(buffer).unwrap()
}

fn dot(a: &[f32], b: &[f32]) -> f64 {
    a.iter().zip(b).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum()
}

/// The gradient of `loss` at a point, element by element, by central differences.
fn check(what: &str, point: &[f32], gradient: &[f32], loss: impl Fn(&[f32]) -> f64) {
    assert_eq!(point.len(), gradient.len());
    let h = 1e-2f32;
    for i in 0..point.len() {
        let moved = |by: f32| {
            let mut moved = point.to_vec();
            moved[i] += by;
            loss(&moved)
        };
        let numeric = (moved(h) - moved(-h)) / f64::from(2.0 * h);
        let found = f64::from(gradient[i]);
        assert!((numeric - found).abs() < 1e-2 * (1.0 + numeric.abs()), "{what}, element {i}: {found}, not {numeric}");
    }
}

#[test]
fn gradients_of_layer_norm() {
    for (tokens, width) in [(3, 5), (2, 40)] {
        let (x, dy) = (random(tokens * width, 1), random(tokens * width, 2));
        let gain: Vec<f32> = random(width, 3).iter().map(|v| 1.0 + 0.2 * v).collect();
        let bias = random(width, 4);
        let run = |x: &[f32], gain: &[f32], bias: &[f32]| {
            let (mut y, mut mean, mut rstd) = (zeros(x.len()), zeros(tokens), zeros(tokens));
            let statistics = NormStatistics { mean: Some(&mut mean), rstd: &mut rstd };
            let norm = NormParameters { gain: &buffer(gain), bias: Some(&buffer(bias)), epsilon: 1e-5 };
            ENGINE.norm(norm, NormInput::Tensor(&buffer(x)), &mut y, statistics).unwrap();
            (y, mean, rstd)
        };
        let (_, mean, rstd) = run(&x, &gain, &bias);
        let (mut dx, mut dgain, mut dbias) = (buffer(&vec![1.0; x.len()]), zeros(width), buffer(&vec![2.0; width]));
        let (x_at, gain_at) = (buffer(&x), buffer(&gain));
        let norm = NormParameters { gain: &gain_at, bias: Some(&buffer(&bias)), epsilon: 1e-5 };
        let saved = (&x_at, NormStatistics { mean: Some(&mean), rstd: &rstd });
        let gradients = NormGradients { gain: &mut dgain, bias: Some(&mut dbias) };
        ENGINE.norm_gradient(norm, saved, &buffer(&dy), &mut dx, Accumulate::Add, gradients).unwrap();
        // What was there before is still in the sums.
        let dx: Vec<f32> = read(&dx).iter().map(|v| v - 1.0).collect();
        let dbias: Vec<f32> = read(&dbias).iter().map(|v| v - 2.0).collect();
        check("x", &x, &dx, |x| dot(&read(&run(x, &gain, &bias).0), &dy));
        check("gain", &gain, &read(&dgain), |gain| dot(&read(&run(&x, gain, &bias).0), &dy));
        check("bias", &bias, &dbias, |bias| dot(&read(&run(&x, &gain, bias).0), &dy));
    }
}

/// The norm of a sum has the bits of the sum's norm, and leaves the sum.
#[test]
fn norms_of_sums() {
    let (x, y) = (random(3 * 40, 1), random(3 * 40, 2));
    let (gain, bias) = (buffer(&random(40, 3)), buffer(&random(40, 4)));
    for bias in [None, Some(&bias)] {
        let run = |input: NormInput<'_, CpuBuffer>| {
            let (mut out, mut mean, mut rstd) = (zeros(x.len()), zeros(3), zeros(3));
            let mean = if bias.is_some() { Some(&mut mean) } else { None };
            let norm = NormParameters { gain: &gain, bias, epsilon: 1e-5 };
            ENGINE.norm(norm, input, &mut out, NormStatistics { mean, rstd: &mut rstd }).unwrap();
            read(&out)
        };
        let (mut apart, mut sum) = (buffer(&y), buffer(&y));
        ENGINE.add(&buffer(&x), &mut apart).unwrap();
        let expected = run(NormInput::Tensor(&apart));
        assert_eq!(run(NormInput::Sum(&buffer(&x), &mut sum)), expected);
        assert_eq!(read(&sum), read(&apart));
    }
}

#[test]
fn norms_whose_operands_do_not_fit_are_refused() {
    let (gain, bias, x, mut rstd) = (zeros(4), zeros(4), zeros(8), zeros(2));
    let norm = |bias| NormParameters { gain: &gain, bias, epsilon: 1e-5 };
    let statistics = NormStatistics { mean: None, rstd: &mut rstd };
    let error = ENGINE.norm(norm(Some(&bias)), NormInput::Tensor(&x), &mut zeros(8), statistics).unwrap_err();
    assert!(error.to_string().contains("the means of a norm: expected 2 elements, found 0"), "{error}");
    let mut short = zeros(1);
    let statistics = NormStatistics { mean: None, rstd: &mut short };
    assert!(ENGINE.norm(norm(None), NormInput::Tensor(&x), &mut zeros(8), statistics).is_err());
    let mut d_gain = zeros(4);
    let gradients = NormGradients { gain: &mut d_gain, bias: None };
    let saved = (&x, NormStatistics { mean: Some(&rstd), rstd: &rstd });
    let refused = ENGINE.norm_gradient(norm(Some(&bias)), saved, &x, &mut zeros(8), Accumulate::Add, gradients);
    let error = refused.unwrap_err().to_string();
    assert!(error.contains("the gradient of a norm's bias"), "{error}");
}

#[test]
fn gradients_of_attention() {
    let plain = ScoreOptions::default();
    let capped = ScoreOptions { soft_cap: Some(0.6), scale: Some(0.9), ..plain };
    for (heads, kv_heads, causal, rotates, scores) in [
        (2, 2, true, true, plain),
        (4, 2, true, true, plain),
        (2, 1, false, true, plain),
        (2, 2, false, false, plain),
        (2, 1, true, true, ScoreOptions { window: Some(2), ..plain }),
        (2, 2, false, false, ScoreOptions { window: Some(3), ..capped }),
        (4, 2, true, false, capped),
    ] {
        let shape = AttentionShape { batch: 2, positions: 5, heads, kv_heads, head_dim: 4, causal, scores };
        let table = ENGINE.rotary(6, &[1.0, 0.01]).unwrap();
        let rotary = rotates.then_some(&table);
        let qkv = random(shape.tokens() * shape.qkv_width(), 5);
        let dy = random(shape.tokens() * shape.width(), 6);
        let run = |qkv: &[f32]| {
            let mut merged = zeros(dy.len());
            let state = ENGINE.attention(shape, &mut buffer(qkv), rotary, &mut merged).unwrap();
            (merged, state)
        };
        let (merged, state) = run(&qkv);
        let mut d_qkv = zeros(qkv.len());
        let qkv_at = buffer(&qkv);
        ENGINE.attention_gradient(shape, (state, &qkv_at, &merged), rotary, &buffer(&dy), &mut d_qkv).unwrap();
        let what = format!("{heads} heads, {kv_heads} of keys, causal {causal}, {scores:?}");
        check(&what, &qkv, &read(&d_qkv), |qkv| dot(&read(&run(qkv).0), &dy));
    }
}

/// Attention by its definition, in f64, without rotation.
#[test]
fn attention_is_its_definition() {
    let plain = ScoreOptions::default();
    let bent = ScoreOptions { window: Some(70), scale: Some(1.5), soft_cap: Some(0.4) };
    for (positions, causal, scores) in [
        (1, true, plain),
        (7, true, plain),
        (7, false, plain),
        (130, true, plain),
        (200, true, ScoreOptions { window: Some(3), ..plain }),
        (200, false, ScoreOptions { window: Some(65), ..plain }),
        (150, true, bent),
        (90, false, bent),
    ] {
        let shape = AttentionShape { batch: 2, positions, heads: 4, kv_heads: 2, head_dim: 2, causal, scores };
        let qkv = random(shape.tokens() * shape.qkv_width(), 7);
        let mut merged = zeros(shape.tokens() * shape.width());
        ENGINE.attention(shape, &mut buffer(&qkv), None, &mut merged).unwrap();
        let merged = read(&merged);
        let at = |batch: usize, position: usize, element: usize| {
            f64::from(qkv[(batch * positions + position) * shape.qkv_width() + element])
        };
        for batch in 0..2 {
            for head in 0..4 {
                for query in 0..positions {
                    let (key, value) = (8 + head / 2 * 2, 12 + head / 2 * 2);
                    let score = |position: usize| -> f64 {
                        let products = (0..2).map(|i| at(batch, query, head * 2 + i) * at(batch, position, key + i));
                        let score = products.sum::<f64>() * scores.scale.map_or(0.5f64.sqrt(), f64::from);
                        scores.soft_cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh()).exp()
                    };
                    let total: f64 = shape.keys_of(query).map(score).sum();
                    for i in 0..2 {
                        let weighted = shape.keys_of(query).map(|p| score(p) * at(batch, p, value + i));
                        let expected = weighted.sum::<f64>() / total;
                        let found = merged[(batch * positions + query) * 8 + head * 2 + i];
                        assert!((f64::from(found) - expected).abs() < 1e-5, "{shape:?}: {found}, {expected}");
                    }
                }
            }
        }
    }
}

#[test]
fn gradients_of_activations() {
    let all =
        [Nonlinearity::Relu, Nonlinearity::Gelu, Nonlinearity::TanhGelu, Nonlinearity::Silu, Nonlinearity::SquaredRelu];
    for activation in all {
        // Away from the corner of ReLU.
        let x: Vec<f32> = (-40..40).map(|i| i as f32 * 0.1 + 0.05).collect();
        let dy = random(x.len(), 8);
        let mut dx = buffer(&dy);
        ENGINE.activation_gradient(activation.into(), &buffer(&x), &mut dx, None).unwrap();
        check(&format!("{activation:?}"), &x, &read(&dx), |x| {
            let mut y = zeros(x.len());
            ENGINE.activation(activation.into(), &buffer(x), &mut y).unwrap();
            dot(&read(&y), &dy)
        });
    }
}

#[test]
fn gradients_of_bounded_scores_and_of_scaled_rows() {
    let (x, dy, factors) = (random(60, 8), random(60, 9), buffer(&random(12, 10)));
    let mut dx = buffer(&dy);
    ENGINE.activation_gradient(Elementwise::SoftCap(0.7), &buffer(&x), &mut dx, None).unwrap();
    check("soft cap", &x, &read(&dx), |x| {
        let mut y = zeros(x.len());
        ENGINE.activation(Elementwise::SoftCap(0.7), &buffer(x), &mut y).unwrap();
        assert!(read(&y).iter().zip(x).all(|(y, x)| (y - 0.7 * (x / 0.7).tanh()).abs() < 1e-6));
        dot(&read(&y), &dy)
    });
    let mut dx = buffer(&dy);
    ENGINE.scale_rows(&factors, &mut dx).unwrap();
    check("scaled rows", &x, &read(&dx), |x| {
        let mut y = buffer(x);
        ENGINE.scale_rows(&factors, &mut y).unwrap();
        dot(&read(&y), &dy)
    });
    assert!(ENGINE.scale_rows(&factors, &mut zeros(13)).is_err());
}

#[test]
fn gradients_of_linear_layers_dense_and_sparse() {
    let shape = LinearShape { tokens: 3, out_features: 4, in_features: 8 };
    let (x, w, b, dy) = (random(24, 9), random(32, 10), random(4, 11), random(12, 12));
    let dense = |x: &[f32], w: &[f32], b: &[f32]| {
        let mut y = zeros(12);
        ENGINE.linear(shape, &buffer(x), &buffer(w), Some(&buffer(b)), &mut y).unwrap();
        dot(&read(&y), &dy)
    };
    let (mut dx, mut dw, mut db) = (zeros(24), buffer(&[1.0; 32]), zeros(4));
    ENGINE.input_gradient(shape, &buffer(&dy), &buffer(&w), &mut dx).unwrap();
    ENGINE.weight_gradient(shape, &buffer(&dy), &buffer(&x), Accumulate::Add, &mut dw).unwrap();
    ENGINE.bias_gradient(&buffer(&dy), Accumulate::Overwrite, &mut db).unwrap();
    let dw: Vec<f32> = read(&dw).iter().map(|v| v - 1.0).collect();
    check("x", &x, &read(&dx), |x| dense(x, &w, &b));
    check("w", &w, &dw, |w| dense(&x, w, &b));
    check("b", &b, &read(&db), |b| dense(&x, &w, b));

    let settings = SparseLinearSettings { weight_gradient: WeightGradient::Masked, ..Default::default() };
    let master = buffer(&w);
    let layer = ENGINE.sparse_linear(&master, (4, 8), settings, SparsePrecision::Activations).unwrap();
    let mask = layer.mask().unwrap();
    let matrix = twofour::MatrixRef::new(4, 8, &w).unwrap();
    let masked = mask.apply(matrix).unwrap();
    let mut y = zeros(12);
    layer.forward(&buffer(&x), 3, Some(&buffer(&b)), &mut y).unwrap();
    assert!((dot(&read(&y), &dy) - dense(&x, &masked, &b)).abs() < 1e-4);
    let mut expected = zeros(24);
    ENGINE.input_gradient(shape, &buffer(&dy), &buffer(&masked), &mut expected).unwrap();
    layer.input_gradient(&buffer(&dy), 3, &mut dx).unwrap();
    assert!(read(&dx).iter().zip(read(&expected)).all(|(a, b)| (a - b).abs() < 1e-5));
    let mut masked_dw = zeros(32);
    layer.weight_gradient(&buffer(&dy), &buffer(&x), 3, Accumulate::Overwrite, &mut masked_dw).unwrap();
    for (i, (found, dense)) in read(&masked_dw).iter().zip(&dw).enumerate() {
        let expected = if mask.is_kept(i / 8, i % 8) { *dense } else { 0.0 };
        assert!((found - expected).abs() < 1e-5);
    }
}

#[test]
fn gradients_of_embedding_and_loss() {
    let tokens = [2u32, 0, 2, 1, 2];
    let (table, dy) = (random(4 * 3, 13), random(5 * 3, 14));
    let mut d_table = buffer(&[1.0; 12]);
    ENGINE.embedding_gradient(&buffer(&dy), 3, &ids(&tokens), Accumulate::Add, &mut d_table).unwrap();
    let d_table: Vec<f32> = read(&d_table).iter().map(|v| v - 1.0).collect();
    check("table", &table, &d_table, |table| {
        let mut out = zeros(15);
        ENGINE.embedding(&buffer(table), 3, &ids(&tokens), &mut out).unwrap();
        dot(&read(&out), &dy)
    });
    let targets = [3u32, 0, 1];
    let logits = random(3 * 4, 15);
    let loss_of = |logits: &[f32]| {
        let mut loss = zeros(1);
        ENGINE.cross_entropy(4, &mut buffer(logits), &ids(&targets), None, &mut loss).unwrap();
        f64::from(read(&loss)[0])
    };
    let (mut gradient, mut loss) = (buffer(&logits), buffer(&[10.0]));
    ENGINE.cross_entropy(4, &mut gradient, &ids(&targets), Some(0.5), &mut loss).unwrap();
    assert!((f64::from(read(&loss)[0]) - 10.0 - loss_of(&logits)).abs() < 1e-5);
    check("logits", &logits, &read(&gradient), |logits| 0.5 * loss_of(logits));
    let expected: f64 = logits
        .chunks(4)
        .zip(targets)
        .map(|(row, target)| {
            row.iter().map(|v| f64::from(*v).exp()).sum::<f64>().ln() - f64::from(row[target as usize])
        })
        .sum();
    assert!((loss_of(&logits) - expected).abs() < 1e-5);
    let error = ENGINE.cross_entropy(4, &mut buffer(&logits), &ids(&[3, 4, 0]), None, &mut zeros(1)).unwrap_err();
    assert!(error.to_string().contains("token 4 at position 1"), "{error}");
    assert!(ENGINE.embedding(&buffer(&table), 3, &ids(&[4]), &mut zeros(3)).is_err());
}

#[test]
fn the_loss_of_a_student_is_divergence_and_cross_entropy_with_their_gradients() {
    let (targets, logits, teacher) = ([3u32, 0, 1], random(3 * 5, 16), random(3 * 5, 17));
    let log_probabilities = |scores: &[f32]| -> Vec<f64> {
        let rows = scores.chunks(5).flat_map(|row| {
            let sum = row.iter().map(|v| f64::from(*v).exp()).sum::<f64>().ln();
            row.iter().map(move |v| f64::from(*v) - sum)
        });
        rows.collect()
    };
    for (divergence, cross_entropy) in [(1.0, 0.0), (0.0, 1.0), (0.7, 1.5)] {
        let weights = DistillationWeights { divergence, cross_entropy };
        let expected = |logits: &[f32]| -> f64 {
            let (own, taught) = (log_probabilities(logits), log_probabilities(&teacher));
            let apart: f64 = taught.iter().zip(&own).map(|(t, o)| t.exp() * (t - o)).sum();
            let missed: f64 = targets.iter().enumerate().map(|(row, at)| -own[5 * row + *at as usize]).sum();
            f64::from(divergence) * apart + f64::from(cross_entropy) * missed
        };
        let (mut gradient, mut loss) = (buffer(&logits), buffer(&[10.0]));
        let scores = (&mut gradient, &buffer(&teacher));
        ENGINE.distillation(weights, 5, scores, &ids(&targets), 0.5, &mut loss).unwrap();
        assert!((f64::from(read(&loss)[0]) - 10.0 - expected(&logits)).abs() < 1e-5, "{weights:?}");
        check(&format!("{weights:?}"), &logits, &read(&gradient), |logits| 0.5 * expected(logits));
    }
    // A teacher of the same opinion has nothing to say, and what it rules out counts for nothing.
    let (alone, mut loss) = (DistillationWeights { divergence: 1.0, cross_entropy: 0.0 }, zeros(1));
    let sure = [0.0, f32::NEG_INFINITY, 0.0, 0.0, 0.0].repeat(3);
    let mut same = buffer(&sure);
    ENGINE.distillation(alone, 5, (&mut same, &buffer(&sure)), &ids(&targets), 1.0, &mut loss).unwrap();
    assert!(read(&loss)[0].abs() < 1e-6 && read(&same).iter().all(|v| v.abs() < 1e-6), "{loss:?} {same:?}");
    let scores = (&mut buffer(&logits), &zeros(14));
    assert!(ENGINE.distillation(alone, 5, scores, &ids(&targets), 1.0, &mut loss).is_err());
    let scores = (&mut buffer(&logits), &zeros(15));
    assert!(ENGINE.distillation(alone, 5, scores, &ids(&[3, 5, 0]), 1.0, &mut loss).is_err());
}

#[test]
fn errors_of_rows_have_their_gradients() {
    let (x, target) = (random(21, 18), [random(14, 19), vec![0.0; 7]].concat());
    for measure in [ErrorMeasure::Squared, ErrorMeasure::RelativeSquared] {
        let expected = |x: &[f32]| -> f64 {
            let of_row = |(x, t): (&[f32], &[f32])| {
                let error: f64 = x.iter().zip(t).map(|(x, t)| (f64::from(*x) - f64::from(*t)).powi(2)).sum();
                match (measure, dot(t, t)) {
                    (ErrorMeasure::Squared, _) => error,
                    (ErrorMeasure::RelativeSquared, 0.0) => 0.0,
                    (ErrorMeasure::RelativeSquared, size) => error / size,
                }
            };
            3.0 * x.chunks(7).zip(target.chunks(7)).map(of_row).sum::<f64>()
        };
        let (mut dx, mut loss) = (buffer(&[1.0; 21]), buffer(&[10.0]));
        ENGINE.squared_error(measure, 7, (&buffer(&x), &buffer(&target)), (3.0, 0.5), &mut dx, &mut loss).unwrap();
        assert!((f64::from(read(&loss)[0]) - 10.0 - expected(&x)).abs() < 1e-4, "{measure:?}");
        check(&format!("{measure:?}"), &x, &read(&dx), |x| 0.5 * expected(x));
        let rows = (&buffer(&x), &zeros(20));
        assert!(ENGINE.squared_error(measure, 7, rows, (1.0, 1.0), &mut dx, &mut loss).is_err());
    }
}

#[test]
fn operands_that_do_not_fit_are_refused() {
    let shape = LinearShape { tokens: 3, out_features: 4, in_features: 8 };
    assert!(ENGINE.linear(shape, &zeros(24), &zeros(31), None, &mut zeros(12)).is_err());
    assert!(ENGINE.linear(shape, &zeros(24), &zeros(32), Some(&zeros(3)), &mut zeros(12)).is_err());
    assert!(ENGINE.add(&zeros(3), &mut zeros(4)).is_err() && ENGINE.add(&ids(&[1]), &mut zeros(1)).is_err());
    assert!(ENGINE.write(&mut ids(&[1]), &[1.0]).is_err() && ENGINE.read(&ids(&[1])).is_err());
    let attention = AttentionShape {
        batch: 1,
        positions: 7,
        heads: 2,
        kv_heads: 2,
        head_dim: 4,
        causal: true,
        scores: ScoreOptions::default(),
    };
    let table = ENGINE.rotary(6, &[1.0, 0.01]).unwrap();
    let error = ENGINE.attention(attention, &mut zeros(7 * 24), Some(&table), &mut zeros(7 * 8));
    let error = error.unwrap_err().to_string();
    assert!(error.contains("7 with heads of 4"), "{error}");
    let windowless =
        AttentionShape { scores: ScoreOptions { window: Some(0), ..ScoreOptions::default() }, ..attention };
    let error = ENGINE.attention(windowless, &mut zeros(7 * 24), None, &mut zeros(7 * 8)).unwrap_err().to_string();
    assert!(error.contains("the window of attention"), "{error}");
    let shared = AttentionShape { kv_heads: 0, ..attention };
    assert!(ENGINE.attention(shared, &mut zeros(7 * 8), None, &mut zeros(7 * 8)).is_err());
}

const STEP: AdamWStep = AdamWStep {
    learning_rate: 1e-2,
    beta1: 0.9,
    beta2: 0.95,
    epsilon: 1e-8,
    weight_decay: 0.1,
    step: 3,
    gradient_scale: 0.5,
    second_moment: SecondMoment::Moving,
    pruned_decay: PrunedDecay::None,
};

/// AdamW by its formula, in f64.
fn plain(step: &AdamWStep, kept: bool, (p, g, m, v): (f64, f64, f64, f64)) -> (f64, f64, f64) {
    let mut g = g * f64::from(step.gradient_scale);
    let mut decay = step.weight_decay;
    match step.pruned_decay {
        PrunedDecay::Gradient { strength } if !kept => g += f64::from(strength) * p,
        PrunedDecay::Weight { strength } if !kept => decay += strength,
        _ => {}
    }
    let m = step.beta1 * m + (1.0 - step.beta1) * g;
    let moved = step.beta2 * v + (1.0 - step.beta2) * g * g;
    let (v, at, epsilon) = match step.second_moment {
        SecondMoment::Frozen { at } => (v, at, step.epsilon.powf(0.75)),
        _ => (moved, step.step, step.epsilon),
    };
    let corrected = m / (1.0 - step.beta1.powi(step.step as i32));
    let root = (v / (1.0 - step.beta2.powi(at as i32))).sqrt() + epsilon;
    (p * (1.0 - step.learning_rate * decay) - step.learning_rate * corrected / root, m, v)
}

#[test]
fn adamw_is_its_formula_with_and_without_a_mask() {
    let cases = [
        (SecondMoment::Moving, PrunedDecay::None),
        (SecondMoment::Watched, PrunedDecay::Gradient { strength: 0.3 }),
        (SecondMoment::Frozen { at: 2 }, PrunedDecay::Weight { strength: 0.7 }),
    ];
    for (second_moment, pruned_decay) in cases {
        for masked in [false, true] {
            let step = AdamWStep { second_moment, pruned_decay, ..STEP };
            let (p, g, m) = (random(3 * 72, 16), random(3 * 72, 17), random(3 * 72, 18));
            let v: Vec<f32> = random(3 * 72, 19).iter().map(|v| v * v).collect();
            let (mut master, mut first, mut second) = (buffer(&p), buffer(&m), buffer(&v));
            let layer = ENGINE
                .sparse_linear(&master, (3, 72), SparseLinearSettings::default(), SparsePrecision::Activations)
                .unwrap();
            let mask = layer.mask().unwrap();
            let state = ParameterState {
                master: &mut master,
                gradient: &buffer(&g),
                first: &mut first,
                second: Some(&mut second),
                copy: None,
                sparse: masked.then_some(&layer),
            };
            let changes = ENGINE.step(&OptimizerStep::AdamW(step), vec![state], None).unwrap();
            let mut expected_changes = 0.0;
            for i in 0..p.len() {
                let kept = !masked || mask.is_kept(i / 72, i % 72);
                let state = (f64::from(p[i]), f64::from(g[i]), f64::from(m[i]), f64::from(v[i]));
                let expected = plain(&step, kept, state);
                expected_changes += (expected.2 - state.3).abs();
                let found = (read(&master)[i], read(&first)[i], read(&second)[i]);
                let near = |a: f32, b: f64| (f64::from(a) - b).abs() < 1e-5 * (1.0 + b.abs());
                assert!(
                    near(found.0, expected.0) && near(found.1, expected.1) && near(found.2, expected.2),
                    "{i}: {found:?}, {expected:?}"
                );
            }
            let watched = second_moment == SecondMoment::Watched;
            assert!((changes - if watched { expected_changes } else { 0.0 }).abs() < 1e-4 * (1.0 + expected_changes));
        }
    }
}

#[test]
fn the_norm_is_of_all_gradients_together() {
    let (a, b) = (random(40_000, 20), random(7, 21));
    let expected = (dot(&a, &a) + dot(&b, &b)).sqrt();
    let found = ENGINE.gradient_norm(&[&buffer(&a), &buffer(&b)]).unwrap();
    assert!((found - expected).abs() < 1e-9 * expected);
    assert!(ENGINE.gradient_norm(&[&buffer(&[1.0, f32::NAN])]).unwrap().is_nan());
    assert!(ENGINE.gradient_norm(&[&buffer(&[1.0, f32::INFINITY])]).unwrap().is_infinite());
}
