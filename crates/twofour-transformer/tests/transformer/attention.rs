//! Attention.

use twofour::Arithmetic;
use twofour_cuda::{Error, layer::LayerContext};
use twofour_transformer::{
    AttentionShape, ScoreOptions,
    cuda::{
        AttentionEngine, AttentionGradients, AttentionInputs, Rotary, SplitHeads, SplitHeadsMut, attention_backward,
        attention_backward_projected, attention_forward, attention_forward_projected, attention_reads_projection,
        merge_heads, merge_heads_gradient, prepare_attention, rotate_projection, rotate_projection_gradient,
        split_heads, split_heads_gradient,
    },
};

use crate::{
    Check, for_each_type,
    reference::{expect_close, expect_close_to, numbers, wide},
    unwritten, up,
};

/// Attention and its gradients in f64.
#[derive(Default)]
struct Expected {
    out: Vec<f64>,
    lse: Vec<f64>,
    dq: Vec<f64>,
    dk: Vec<f64>,
    dv: Vec<f64>,
}

fn expected(shape: AttentionShape, q: &[f64], k: &[f64], v: &[f64], dout: &[f64]) -> Expected {
    let AttentionShape { positions, heads, kv_heads, head_dim: dim, scores: options, .. } = shape;
    let scale = options.scale.map_or(1.0 / (dim as f64).sqrt(), f64::from);
    // A score and its slope.
    let capped = |score: f64| match options.soft_cap.map(f64::from) {
        Some(cap) => (cap * (score / cap).tanh(), 1.0 - (score / cap).tanh().powi(2)),
        None => (score, 1.0),
    };
    let mut all =
        Expected { dq: vec![0.0; q.len()], dk: vec![0.0; k.len()], dv: vec![0.0; v.len()], ..Expected::default() };
    let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
    for query in 0..q.len() / dim {
        let (head, position) = (query / positions, query % positions);
        let first = (head / heads * kv_heads + head % heads / (heads / kv_heads)) * positions;
        let keys = shape.keys_of(position);
        let (first, count) = (first + keys.start, keys.len());
        let row = |data: &[f64], at: usize| data[at * dim..(at + 1) * dim].to_vec();
        let (q_row, do_row) = (row(q, query), row(dout, query));
        let products = (0..count).map(|j| capped(scale * dot(&q_row, &row(k, first + j))));
        let (scores, slopes): (Vec<f64>, Vec<f64>) = products.unzip();
        let largest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let sum: f64 = scores.iter().map(|s| (s - largest).exp()).sum();
        all.lse.push(largest + sum.ln());
        let p: Vec<f64> = scores.iter().map(|s| (s - largest).exp() / sum).collect();
        let out: Vec<f64> = (0..dim).map(|c| (0..count).map(|j| p[j] * v[(first + j) * dim + c]).sum()).collect();
        let delta = dot(&out, &do_row);
        for j in 0..count {
            let ds = scale * slopes[j] * p[j] * (dot(&do_row, &row(v, first + j)) - delta);
            for c in 0..dim {
                all.dq[query * dim + c] += ds * k[(first + j) * dim + c];
                all.dk[(first + j) * dim + c] += ds * q_row[c];
                all.dv[(first + j) * dim + c] += p[j] * do_row[c];
            }
        }
        all.out.extend(out);
    }
    all
}

struct Case(AttentionShape, AttentionEngine);

impl Check for Case {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Case(shape, engine) = *self;
        let what = format!("{shape:?} {engine:?} {:?}", T::DTYPE);
        let (q_len, k_len) = (shape.query_len().unwrap(), shape.key_len().unwrap());
        let (q, k, v) = (numbers::<T>(q_len, 1), numbers::<T>(k_len, 2), numbers::<T>(k_len, 3));
        let dout = numbers::<T>(q_len, 4);
        let [q_there, k_there, v_there, dout_there] = [&q, &k, &v, &dout].map(|values| up(context, values));
        let inputs = AttentionInputs { q: q_there.as_slice(), k: k_there.as_slice(), v: v_there.as_slice() };
        let run = || {
            let (mut out, mut lse) =
                (unwritten::<T>(context, q_len), unwritten::<f32>(context, shape.lse_len().unwrap()));
            attention_forward(context, shape, engine, inputs, out.as_slice_mut(), lse.as_slice_mut())?;
            let [mut dq, mut dk, mut dv] = [q_len, k_len, k_len].map(|len| unwritten::<T>(context, len));
            let to = AttentionGradients { q: dq.as_slice_mut(), k: dk.as_slice_mut(), v: dv.as_slice_mut() };
            let saved = (out.as_slice(), lse.as_slice(), dout_there.as_slice());
            attention_backward(context, shape, engine, inputs, saved, to)?;
            Ok::<_, Error>((
                [out, dq, dk, dv].map(|found| found.to_host::<T>().unwrap()),
                lse.to_host::<f32>().unwrap(),
            ))
        };
        let (found, lse) = match run() {
            Err(Error::NoLibrary { .. }) => return eprintln!("skipped: no cuBLASLt"),
            // An engine that does not compute the type.
            Err(Error::DataType { .. }) if engine == AttentionEngine::Fused => return,
            found => found.unwrap(),
        };
        let all = expected(shape, &wide(&q), &wide(&k), &wide(&v), &wide(&dout));
        expect_close(&format!("{what}: lse"), &lse, &all.lse, tolerance.min(1e-4));
        for (name, found, expected) in [
            ("out", &found[0], &all.out),
            ("dq", &found[1], &all.dq),
            ("dk", &found[2], &all.dk),
            ("dv", &found[3], &all.dv),
        ] {
            // Sums of many rounded probabilities: relative to the largest result.
            let size = expected.iter().fold(1.0, |size: f64, x| size.max(x.abs()));
            expect_close_to(&format!("{what}: {name}"), found, expected, tolerance, size);
        }
        let (again, lse_again) = run().unwrap();
        assert!(again == found && lse_again == lse, "{what}: another run");
    }
}

fn check(engine: AttentionEngine, shapes: &[(usize, usize, usize, usize, usize)]) {
    for &(batch, positions, heads, kv_heads, head_dim) in shapes {
        for causal in [false, true] {
            check_with(engine, (batch, positions, heads, kv_heads, head_dim), causal, ScoreOptions::default());
        }
    }
}

fn check_with(
    engine: AttentionEngine,
    (batch, positions, heads, kv_heads, head_dim): (usize, usize, usize, usize, usize),
    causal: bool,
    scores: ScoreOptions,
) {
    for_each_type(&Case(AttentionShape { batch, positions, heads, kv_heads, head_dim, causal, scores }, engine));
}

/// Windows within a tile, of a tile, across tiles and of everything; caps that bend scores; scales.
fn check_options(engine: AttentionEngine, shapes: &[(usize, usize, usize, usize, usize)]) {
    let options = [
        ScoreOptions { window: Some(1), ..ScoreOptions::default() },
        ScoreOptions { window: Some(17), ..ScoreOptions::default() },
        ScoreOptions { window: Some(64), scale: Some(0.3), ..ScoreOptions::default() },
        ScoreOptions { window: Some(130), soft_cap: Some(0.7), ..ScoreOptions::default() },
        ScoreOptions { window: Some(100_000), ..ScoreOptions::default() },
        ScoreOptions { soft_cap: Some(1.5), ..ScoreOptions::default() },
        ScoreOptions { scale: Some(0.05), soft_cap: Some(50.0), ..ScoreOptions::default() },
    ];
    for shape in shapes {
        for scores in options {
            for causal in [false, true] {
                check_with(engine, *shape, causal, scores);
            }
        }
    }
}

#[test]
fn windows_scales_and_soft_caps_by_gemms_are_those_of_f64() {
    check_options(AttentionEngine::Batched, &[(2, 19, 4, 2, 32), (1, 150, 2, 1, 48)]);
}

#[test]
fn windows_scales_and_soft_caps_in_one_kernel_are_those_of_f64() {
    let shapes = [(1, 1, 1, 1, 32), (2, 150, 4, 2, 32), (1, 300, 2, 1, 64), (1, 257, 2, 2, 128)];
    check_options(AttentionEngine::Fused, &shapes);
}

#[test]
fn the_fastest_engine_computes_options_for_every_type_and_head() {
    check_options(AttentionEngine::Fastest, &[(1, 130, 2, 1, 64), (1, 70, 2, 2, 256)]);
}

#[test]
fn options_that_no_score_can_have_are_refused() {
    let Some(context) = crate::context() else { return };
    let options = [
        ScoreOptions { window: Some(0), ..ScoreOptions::default() },
        ScoreOptions { soft_cap: Some(0.0), ..ScoreOptions::default() },
        ScoreOptions { scale: Some(f32::NAN), ..ScoreOptions::default() },
    ];
    for scores in options {
        let shape =
            AttentionShape { batch: 1, positions: 4, heads: 1, kv_heads: 1, head_dim: 32, causal: true, scores };
        let refused = prepare_attention(&context, shape, AttentionEngine::Fastest, twofour_cuda::DataType::BF16);
        assert!(matches!(refused, Err(Error::Setting { .. })), "{scores:?}");
    }
}

#[test]
fn attention_by_gemms_and_its_gradients_are_those_of_f64() {
    let shapes = [(1, 1, 1, 1, 32), (2, 19, 4, 2, 32), (2, 64, 2, 2, 64), (1, 257, 2, 1, 128), (3, 40, 6, 3, 16)];
    check(AttentionEngine::Batched, &shapes);
}

#[test]
fn attention_in_one_kernel_and_its_gradients_are_those_of_f64() {
    let shapes = [
        (1, 1, 1, 1, 32),
        (2, 1, 2, 1, 64),
        (2, 17, 2, 2, 128),
        (2, 19, 4, 2, 32),
        (1, 33, 2, 2, 64),
        (2, 64, 2, 2, 64),
        (1, 65, 4, 1, 128),
        (1, 257, 2, 1, 128),
        (1, 257, 3, 3, 64),
        (2, 257, 4, 2, 32),
        (1, 128, 8, 2, 64),
        (1, 161, 2, 2, 64),
        (1, 1626, 1, 1, 64),
        (1, 641, 2, 1, 64),
        (1, 385, 1, 1, 128),
        (1, 577, 2, 1, 128),
        (1, 600, 1, 1, 64),
        (1, 321, 2, 2, 32),
    ];
    check(AttentionEngine::Fused, &shapes);
}

#[test]
fn the_fastest_engine_computes_every_type() {
    check(AttentionEngine::Fastest, &[(2, 65, 4, 2, 64), (1, 9, 2, 2, 48)]);
}

/// Attention that reads the fused projection, with the rotation or without.
struct Projected {
    shape: AttentionShape,
    rotates: bool,
}

impl Check for Projected {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        let Projected { shape, rotates } = *self;
        if !attention_reads_projection(T::DTYPE, shape.head_dim) {
            return;
        }
        let what = format!("{shape:?} {:?}, rotates {rotates}", T::DTYPE);
        let (q_len, k_len) = (shape.query_len().unwrap(), shape.key_len().unwrap());
        let half = shape.head_dim / 2;
        let angle = |i: usize| (i / half) as f32 * 100f32.powf((i % half) as f32 / half as f32).recip();
        let table = |f: fn(f32) -> f32| -> Vec<f32> { (0..shape.positions * half).map(|i| f(angle(i))).collect() };
        let (cos, sin) = (up(context, &table(f32::cos)), up(context, &table(f32::sin)));
        let rotary = rotates.then(|| Rotary { cos: cos.as_slice(), sin: sin.as_slice() });
        let mut qkv = up(context, &numbers::<T>(shape.fused_len().unwrap(), 1));
        let dmerged = up(context, &numbers::<T>(q_len, 4));
        let lse = || unwritten::<f32>(context, shape.lse_len().unwrap());
        let projection = || unwritten::<T>(context, shape.fused_len().unwrap());

        let new = || [q_len, q_len, k_len, k_len].map(|len| unwritten::<T>(context, len));
        let ([mut q, mut out, mut k, mut v], [mut dq, mut dout, mut dk, mut dv]) = (new(), new());
        let to = SplitHeadsMut { q: q.as_slice_mut(), k: k.as_slice_mut(), v: v.as_slice_mut() };
        split_heads(context, shape, rotary, qkv.as_slice(), to).unwrap();
        let inputs = AttentionInputs { q: q.as_slice(), k: k.as_slice(), v: v.as_slice() };
        let (engine, mut apart_lse) = (AttentionEngine::Fused, lse());
        attention_forward(context, shape, engine, inputs, out.as_slice_mut(), apart_lse.as_slice_mut()).unwrap();
        let (mut merged, mut dqkv) = (unwritten::<T>(context, q_len), projection());
        merge_heads(context, shape, out.as_slice(), merged.as_slice_mut()).unwrap();
        merge_heads_gradient(context, shape, dmerged.as_slice(), dout.as_slice_mut()).unwrap();
        let to = AttentionGradients { q: dq.as_slice_mut(), k: dk.as_slice_mut(), v: dv.as_slice_mut() };
        let saved = (out.as_slice(), apart_lse.as_slice(), dout.as_slice());
        attention_backward(context, shape, engine, inputs, saved, to).unwrap();
        let gradients = SplitHeads { q: dq.as_slice(), k: dk.as_slice(), v: dv.as_slice() };
        split_heads_gradient(context, shape, rotary, gradients, dqkv.as_slice_mut()).unwrap();
        let expected = [&merged, &dqkv].map(|buffer| buffer.to_host::<T>().unwrap());

        let (mut merged, mut own_lse, mut dqkv) = (unwritten::<T>(context, q_len), lse(), projection());
        if let Some(rotary) = rotary {
            rotate_projection(context, shape, rotary, qkv.as_slice_mut()).unwrap();
        }
        let to = (merged.as_slice_mut(), own_lse.as_slice_mut());
        attention_forward_projected(context, shape, qkv.as_slice(), to.0, to.1).unwrap();
        let saved = (merged.as_slice(), own_lse.as_slice(), dmerged.as_slice());
        attention_backward_projected(context, shape, qkv.as_slice(), saved, dqkv.as_slice_mut()).unwrap();
        if let Some(rotary) = rotary {
            rotate_projection_gradient(context, shape, rotary, dqkv.as_slice_mut()).unwrap();
        }
        let found = [&merged, &dqkv].map(|buffer| buffer.to_host::<T>().unwrap());
        assert!(own_lse.to_host::<f32>().unwrap() == apart_lse.to_host::<f32>().unwrap(), "{what}: log-sum-exps");
        assert!(found[0] == expected[0], "{what}: the result");
        assert!(found[1] == expected[1], "{what}: the gradient");
    }
}

#[test]
fn attention_of_a_projection_has_the_bits_of_split_and_merged_heads() {
    for (batch, positions, heads, kv_heads, head_dim) in [
        (1, 1, 1, 1, 32),
        (2, 130, 4, 2, 64),
        (3, 257, 2, 2, 64),
        (1, 200, 6, 3, 128),
        (2, 128, 5, 5, 32),
        (2, 530, 2, 1, 64),
    ] {
        let capped = ScoreOptions { window: Some(40), soft_cap: Some(1.0), ..ScoreOptions::default() };
        for (causal, rotates) in [(false, false), (true, false), (true, true)] {
            for scores in [ScoreOptions::default(), capped] {
                let shape = AttentionShape { batch, positions, heads, kv_heads, head_dim, causal, scores };
                for_each_type(&Projected { shape, rotates });
            }
        }
    }
}
