//! Attention over a cache.

use twofour::Arithmetic;
use twofour_cuda::layer::{CapturedWork, DeviceBuffer, LayerContext};
use twofour_transformer::{
    ScoreOptions,
    cuda::{
        Rotary,
        decode::{CacheShape, CachedAttention, CachedTokens, HeadNorms},
    },
};

use crate::{
    Check, for_each_type,
    reference::{expect_close, numbers, wide},
    up,
};

const PLAIN: ScoreOptions = ScoreOptions { window: None, scale: None, soft_cap: None };

/// Sequences, heads, heads of keys, elements of a head, capacity; new tokens of each call; whether heads are rotated
/// and normalized; what becomes of scores; whether heads have sinks.
struct Case {
    shape: CacheShape,
    counts: &'static [usize],
    turned: bool,
    scores: ScoreOptions,
    sinks: bool,
}

/// Normalizes and rotates a head as the kernel is documented to.
fn turned(head: &[f64], gain: Option<&[f64]>, position: usize, tables: Option<(&[f64], &[f64])>) -> Vec<f64> {
    let (half, mut head) = (head.len() / 2, head.to_vec());
    if let Some(gain) = gain {
        let rstd = 1.0 / (head.iter().map(|x| x * x).sum::<f64>() / head.len() as f64 + 1e-6).sqrt();
        head.iter_mut().zip(gain).for_each(|(x, gain)| *x *= rstd * gain);
    }
    let Some((cos, sin)) = tables else { return head };
    (0..2 * half)
        .map(|i| {
            let (pair, at) = (i % half, position * half + i % half);
            let (a, b) = (head[pair], head[pair + half]);
            if i < half { a * cos[at] - b * sin[at] } else { b * cos[at] + a * sin[at] }
        })
        .collect()
}

impl Check for Case {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let CacheShape { batch, heads, kv_heads, head_dim, capacity } = self.shape;
        let (half, stride) = (head_dim / 2, (heads + 2 * kv_heads) * head_dim);
        let attention = CachedAttention::new(context, T::DTYPE, self.shape).unwrap();
        let cached = self.shape.len().unwrap();
        let (mut keys, mut values) = (
            DeviceBuffer::zeros(context, T::DTYPE, cached).unwrap(),
            DeviceBuffer::zeros(context, T::DTYPE, cached).unwrap(),
        );
        let angles: Vec<f32> =
            (0..capacity * half).map(|i| (i / half) as f32 * 0.9f32.powi((i % half) as i32)).collect();
        let (cos, sin): (Vec<f32>, Vec<f32>) = angles.iter().map(|a| (a.cos(), a.sin())).unzip();
        let gains = [numbers::<f32>(head_dim, 11), numbers::<f32>(head_dim, 12)];
        let (cos_there, sin_there) = (up(context, &cos), up(context, &sin));
        let gains_there = [up(context, &gains[0]), up(context, &gains[1])];
        let (cos, sin, gains) = (wide(&cos), wide(&sin), gains.map(|gain| wide(&gain)));
        let tables = self.turned.then_some((cos.as_slice(), sin.as_slice()));
        let of = |gain: usize| self.turned.then(|| gains[gain].as_slice());
        let sinks = self.sinks.then(|| numbers::<f32>(heads, 13));
        let sinks_there = sinks.as_ref().map(|sinks| up(context, sinks));
        // Every key and value so far, by sequence.
        let mut past: Vec<Vec<(Vec<f64>, Vec<f64>)>> = vec![vec![]; batch * kv_heads];
        let mut before = 0;
        for (call, &count) in self.counts.iter().enumerate() {
            let qkv = numbers::<T>(batch * count * stride, 20 + call as u64);
            let qkv_there = up(context, &qkv);
            let positions = DeviceBuffer::from_ids(context, &vec![before as u32; batch]).unwrap();
            let mut out = up(context, &vec![T::from_f32(f32::NAN); batch * count * heads * head_dim]);
            let tensors = CachedTokens {
                qkv: qkv_there.as_slice(),
                positions: positions.as_slice(),
                rotary: self.turned.then(|| Rotary { cos: cos_there.as_slice(), sin: sin_there.as_slice() }),
                norms: self.turned.then(|| HeadNorms {
                    query: gains_there[0].as_slice(),
                    key: gains_there[1].as_slice(),
                    epsilon: 1e-6,
                }),
                scores: self.scores,
                sinks: sinks_there.as_ref().map(DeviceBuffer::as_slice),
                keys: keys.as_slice_mut(),
                values: values.as_slice_mut(),
                out: out.as_slice_mut(),
            };
            attention.run(count, tensors).unwrap();
            let qkv = wide(&qkv);
            let mut expected = vec![];
            for sequence in 0..batch {
                for token in 0..count {
                    let row = &qkv[(sequence * count + token) * stride..][..stride];
                    let head = |head: usize| &row[head * head_dim..][..head_dim];
                    let position = before + token;
                    for kv in 0..kv_heads {
                        // The cache rounds keys to its type.
                        let key = turned(head(heads + kv), of(1), position, tables);
                        let key = key.into_iter().map(|x| f64::from(T::from_f32(x as f32).to_f32())).collect();
                        past[sequence * kv_heads + kv].push((key, head(heads + kv_heads + kv).to_vec()));
                    }
                    for query in 0..heads {
                        let q = turned(head(query), of(0), position, tables);
                        let all = &past[sequence * kv_heads + query * kv_heads / heads];
                        let ScoreOptions { window, scale, soft_cap } = self.scores;
                        let first = window.map_or(0, |window| (position + 1).saturating_sub(window));
                        let scale = scale.map_or(1.0 / (head_dim as f64).sqrt(), f64::from);
                        let seen = &all[first..];
                        let dot = |k: &[f64]| {
                            let score = scale * q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>();
                            soft_cap.map(f64::from).map_or(score, |cap| cap * (score / cap).tanh())
                        };
                        let scores: Vec<f64> = seen.iter().map(|(k, _)| dot(k)).collect();
                        let most = scores.iter().fold(f64::NEG_INFINITY, |m, s| m.max(*s));
                        let shares: Vec<f64> = scores.iter().map(|s| (s - most).exp()).collect();
                        let sink = sinks.as_ref().map_or(0.0, |sinks| (f64::from(sinks[query]) - most).exp());
                        let sum = shares.iter().sum::<f64>() + sink;
                        for d in 0..head_dim {
                            expected.push(shares.iter().zip(seen).map(|(p, (_, v))| p * v[d]).sum::<f64>() / sum);
                        }
                    }
                }
            }
            let what = format!("{:?} {:?} of {:?}, {before} + {count}", T::DTYPE, self.shape, self.scores);
            expect_close(&what, &out.to_host::<T>().unwrap(), &expected, tolerance);
            before += count;
        }
    }
}

#[test]
fn attention_over_a_cache_is_that_of_f64() {
    let shape = |batch, heads, kv_heads, head_dim, capacity| CacheShape { batch, heads, kv_heads, head_dim, capacity };
    let cases = [
        // The first token alone, then one by one, then several; across a tile's end; heads alone and in groups of 2, 3,
        // 4, 7 and 8.
        Case {
            shape: shape(1, 4, 4, 32, 80),
            counts: &[1, 1, 3, 60, 1, 1, 1],
            turned: false,
            scores: PLAIN,
            sinks: false,
        },
        Case { shape: shape(2, 4, 2, 64, 300), counts: &[70, 1, 1, 130, 1], turned: true, scores: PLAIN, sinks: false },
        Case { shape: shape(3, 8, 2, 128, 520), counts: &[500, 1, 1, 5, 1], turned: true, scores: PLAIN, sinks: false },
        Case { shape: shape(1, 6, 2, 64, 200), counts: &[128, 1, 63, 1], turned: false, scores: PLAIN, sinks: false },
        Case { shape: shape(2, 14, 2, 64, 100), counts: &[64, 1, 1, 30, 1], turned: true, scores: PLAIN, sinks: false },
        Case { shape: shape(1, 8, 1, 128, 100), counts: &[2, 1, 90, 1], turned: true, scores: PLAIN, sinks: false },
        // Windows, within a tile and across tiles.
        Case {
            shape: shape(2, 4, 2, 32, 300),
            counts: &[1, 9, 60, 1, 1, 100, 1],
            turned: true,
            scores: ScoreOptions { window: Some(5), ..PLAIN },
            sinks: false,
        },
        Case {
            shape: shape(1, 4, 1, 64, 400),
            counts: &[250, 1, 1, 100, 1],
            turned: false,
            scores: ScoreOptions { window: Some(130), ..PLAIN },
            sinks: false,
        },
        // Scales and soft caps; heads of 256, alone and in groups of 2 and 3.
        Case {
            shape: shape(2, 4, 2, 64, 200),
            counts: &[70, 1, 1, 90, 1],
            turned: true,
            scores: ScoreOptions { window: None, scale: Some(0.3), soft_cap: Some(0.8) },
            sinks: false,
        },
        Case {
            shape: shape(1, 4, 2, 256, 300),
            counts: &[33, 1, 200, 1, 1],
            turned: true,
            scores: ScoreOptions { window: Some(70), scale: Some(0.0625), soft_cap: Some(50.0) },
            sinks: false,
        },
        Case {
            shape: shape(2, 3, 1, 256, 130),
            counts: &[1, 1, 64, 1, 60, 1],
            turned: false,
            scores: PLAIN,
            sinks: false,
        },
        Case { shape: shape(1, 2, 2, 256, 40), counts: &[31, 1, 1, 1], turned: false, scores: PLAIN, sinks: false },
        // Sinks, of a cache in one part and in several, with groups of heads and windows.
        Case { shape: shape(1, 4, 4, 32, 60), counts: &[1, 1, 3, 40, 1], turned: false, scores: PLAIN, sinks: true },
        Case {
            shape: shape(2, 6, 2, 64, 300),
            counts: &[64, 1, 140, 1, 1],
            turned: true,
            scores: ScoreOptions { window: Some(100), scale: Some(0.3), soft_cap: None },
            sinks: true,
        },
        Case { shape: shape(1, 4, 1, 128, 400), counts: &[130, 1, 1], turned: true, scores: PLAIN, sinks: true },
        // Several tiles of a split, of one new token: many heads, and a group of more than eight.
        Case {
            shape: shape(16, 8, 8, 32, 500),
            counts: &[300, 1, 1, 18, 1, 1],
            turned: true,
            scores: PLAIN,
            sinks: false,
        },
        Case { shape: shape(1, 12, 1, 64, 300), counts: &[200, 1, 1, 60, 1], turned: true, scores: PLAIN, sinks: true },
        // Full at the end.
        Case { shape: shape(1, 4, 1, 64, 65), counts: &[63, 1, 1], turned: true, scores: PLAIN, sinks: false },
    ];
    for case in cases {
        for_each_type(&case);
    }
}

/// A graph of one step, replayed at every position, has the bits of the calls.
#[test]
fn a_graph_follows_the_position_in_device_memory() {
    let Some(device) = crate::support::device() else { return };
    let context = LayerContext::new(&device).unwrap();
    type T = half::bf16;
    let shape = CacheShape { batch: 2, heads: 8, kv_heads: 2, head_dim: 128, capacity: 200 };
    let attention = CachedAttention::new(&context, twofour_cuda::DataType::BF16, shape).unwrap();
    let qkv = up(&context, &numbers::<T>(2 * 12 * 128, 3));
    let mut positions = DeviceBuffer::from_ids(&context, &[0, 0]).unwrap();
    let cache = |seed| up(&context, &numbers::<T>(shape.len().unwrap(), seed));
    let (mut keys, mut values) = (cache(4), cache(5));
    let mut out = up(&context, &vec![T::ZERO; 2 * 8 * 128]);
    let step = |positions: &DeviceBuffer, [keys, values, out]: [&mut DeviceBuffer; 3]| {
        let tensors = CachedTokens {
            qkv: qkv.as_slice(),
            positions: positions.as_slice(),
            rotary: None,
            norms: None,
            scores: PLAIN,
            sinks: None,
            keys: keys.as_slice_mut(),
            values: values.as_slice_mut(),
            out: out.as_slice_mut(),
        };
        attention.run(1, tensors)
    };
    step(&positions, [&mut keys, &mut values, &mut out]).unwrap();
    let mut graph = CapturedWork::capture(&context, || step(&positions, [&mut keys, &mut values, &mut out])).unwrap();
    // The sequences are at different positions; the last is full, and its results stay.
    for at in [[0, 63], [64, 1], [127, 128], [199, 150], [200, 199]] {
        positions.write_ids(&at).unwrap();
        assert!(graph.replay().unwrap());
        let replayed = out.to_host::<T>().unwrap();
        step(&positions, [&mut keys, &mut values, &mut out]).unwrap();
        assert_eq!(replayed, out.to_host::<T>().unwrap(), "{at:?}");
    }
}
