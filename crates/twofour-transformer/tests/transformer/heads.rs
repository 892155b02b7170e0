//! Splitting into heads, and merging.

use twofour::Arithmetic;
use twofour_cuda::layer::LayerContext;
use twofour_transformer::{
    AttentionShape, ScoreOptions,
    cuda::{
        Rotary, SplitHeads, SplitHeadsMut, merge_heads, merge_heads_gradient, rotate_projection,
        rotate_projection_gradient, split_heads, split_heads_gradient,
    },
};

use crate::{
    Check, for_each_type,
    reference::{expect_close, numbers, wide},
    unwritten, up,
};

struct Case {
    shape: AttentionShape,
    rotates: bool,
}

/// The heads of tokens `[batch * positions, all * dim]`, from `first` on, as `[batch, heads, positions, dim]`, rotated
/// where there are angles.
fn heads_of(
    fused: &[f64],
    shape: AttentionShape,
    (first, heads, all): (usize, usize, usize),
    angle: Option<&dyn Fn(usize, usize) -> f64>,
) -> Vec<f64> {
    let AttentionShape { batch, positions, head_dim: dim, .. } = shape;
    let mut out = Vec::new();
    for (b, h, p) in
        (0..batch * heads * positions).map(|i| (i / positions / heads, i / positions % heads, i % positions))
    {
        let from = &fused[((b * positions + p) * all + first + h) * dim..][..dim];
        for i in 0..dim {
            let pair = i % (dim / 2);
            let (low, high) = (from[pair], from[pair + dim / 2]);
            let (sin, cos) = angle.map_or((0.0, 1.0), |angle| angle(p, pair).sin_cos());
            out.push(if i < dim / 2 { low * cos - high * sin } else { high * cos + low * sin });
        }
    }
    out
}

impl Check for Case {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Case { shape, rotates } = *self;
        let what = format!("{shape:?} {:?}, rotates {rotates}", T::DTYPE);
        let AttentionShape { positions, heads, kv_heads, head_dim, .. } = shape;
        let (q_len, k_len) = (shape.query_len().unwrap(), shape.key_len().unwrap());
        let fused = numbers::<T>(shape.fused_len().unwrap(), 1);
        let angle = |p: usize, i: usize| p as f64 * 100f64.powf(-2.0 * i as f64 / head_dim as f64);
        let table = |f: fn(f64) -> f64| -> Vec<f32> {
            (0..positions * head_dim / 2).map(|i| f(angle(i / (head_dim / 2), i % (head_dim / 2))) as f32).collect()
        };
        let (cos, sin) = (up(context, &table(f64::cos)), up(context, &table(f64::sin)));
        let rotary = rotates.then(|| Rotary { cos: cos.as_slice(), sin: sin.as_slice() });
        let fused_there = up(context, &fused);
        let (mut q, mut k, mut v) =
            (unwritten::<T>(context, q_len), unwritten::<T>(context, k_len), unwritten::<T>(context, k_len));
        let to = SplitHeadsMut { q: q.as_slice_mut(), k: k.as_slice_mut(), v: v.as_slice_mut() };
        split_heads(context, shape, rotary, fused_there.as_slice(), to).unwrap();
        let (all, angles) = (heads + 2 * kv_heads, rotates.then_some(&angle as &dyn Fn(usize, usize) -> f64));
        let wide_fused = wide(&fused);
        let expected = heads_of(&wide_fused, shape, (0, heads, all), angles);
        expect_close(&format!("{what}: q"), &q.to_host::<T>().unwrap(), &expected, tolerance);
        let expected = heads_of(&wide_fused, shape, (heads, kv_heads, all), angles);
        expect_close(&format!("{what}: k"), &k.to_host::<T>().unwrap(), &expected, tolerance);
        let expected = heads_of(&wide_fused, shape, (heads + kv_heads, kv_heads, all), None);
        expect_close(&format!("{what}: v"), &v.to_host::<T>().unwrap(), &expected, 0.0);

        // A rotation's gradient is the opposite rotation: the way back of the heads is the projection again.
        let mut back = unwritten::<T>(context, fused.len());
        let from = SplitHeads { q: q.as_slice(), k: k.as_slice(), v: v.as_slice() };
        split_heads_gradient(context, shape, rotary, from, back.as_slice_mut()).unwrap();
        expect_close(&format!("{what}: back"), &back.to_host::<T>().unwrap(), &wide_fused, 2.0 * tolerance);

        // In place: what splitting, and the way back, do.
        if let Some(rotary) = rotary {
            let mut rotated = up(context, &fused);
            rotate_projection(context, shape, rotary, rotated.as_slice_mut()).unwrap();
            let [mut rotated_q, mut rotated_k, mut rotated_v] =
                [q_len, k_len, k_len].map(|len| unwritten::<T>(context, len));
            let to =
                SplitHeadsMut { q: rotated_q.as_slice_mut(), k: rotated_k.as_slice_mut(), v: rotated_v.as_slice_mut() };
            split_heads(context, shape, None, rotated.as_slice(), to).unwrap();
            for (name, found, expected) in [("q", &rotated_q, &q), ("k", &rotated_k, &k), ("v", &rotated_v, &v)] {
                let same = found.to_host::<T>().unwrap() == expected.to_host::<T>().unwrap();
                assert!(same, "{what}: {name} rotated in place");
            }
            rotate_projection_gradient(context, shape, rotary, rotated.as_slice_mut()).unwrap();
            assert!(rotated.to_host::<T>().unwrap() == back.to_host::<T>().unwrap(), "{what}: rotated back in place");
        }

        let merged = numbers::<T>(q_len, 2);
        let (merged_there, mut apart) = (up(context, &merged), unwritten::<T>(context, q_len));
        merge_heads_gradient(context, shape, merged_there.as_slice(), apart.as_slice_mut()).unwrap();
        let expected = heads_of(&wide(&merged), shape, (0, heads, heads), None);
        expect_close(&format!("{what}: apart"), &apart.to_host::<T>().unwrap(), &expected, 0.0);
        let mut again = unwritten::<T>(context, q_len);
        merge_heads(context, shape, apart.as_slice(), again.as_slice_mut()).unwrap();
        assert!(again.to_host::<T>().unwrap() == merged, "{what}: merged");
    }
}

#[test]
fn heads_are_split_rotated_and_merged() {
    for (batch, positions, heads, kv_heads, head_dim) in
        [(1, 1, 1, 1, 2), (2, 5, 3, 3, 6), (3, 17, 4, 2, 64), (2, 33, 8, 1, 32), (1, 9, 2, 2, 128)]
    {
        let shape = AttentionShape {
            batch,
            positions,
            heads,
            kv_heads,
            head_dim,
            causal: true,
            scores: ScoreOptions::default(),
        };
        for rotates in [false, true] {
            for_each_type(&Case { shape, rotates });
        }
    }
}
