//! Embedding, norms, gates and the choice of a token.

use twofour::{Arithmetic, MatrixRef, kernel::quantize};
use twofour_cuda::{
    DataType,
    layer::{DeviceBuffer, LayerContext},
};
use twofour_transformer::cuda::{
    Gate, NormKind,
    decode::{
        ChosenTokens, Normalized, TokenEmbedding, TokenNorm, TokenNormTensors, choose_tokens, embed_tokens, gate_to_i8,
        normalize_tokens,
    },
    gated_forward,
};

use crate::{
    Check, for_each_type,
    reference::{expect_close, numbers, wide},
    up,
};

/// The CPU's integers and scales.
fn integers<T: Arithmetic>(values: &[T], rows: usize, width: usize) -> (Vec<i8>, Vec<f32>) {
    let values: Vec<f32> = values.iter().map(|value| value.to_f32()).collect();
    quantize(MatrixRef::new(rows, width, &values).unwrap()).unwrap()
}

struct NormCase(NormKind, usize, usize, usize);

impl Check for NormCase {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let NormCase(kind, tokens, width, every) = *self;
        let (what, rows) = (format!("{kind:?} [{tokens}, {width}] {:?}", T::DTYPE), tokens / every);
        let (x, delta) = (numbers::<f32>(tokens * width, 1), numbers::<T>(tokens * width, 2));
        let (gain, bias) = (numbers::<f32>(width, 3), numbers::<f32>(width, 4));
        let (delta_there, gain_there, bias_there) = (up(context, &delta), up(context, &gain), up(context, &bias));
        let norm = TokenNorm { kind, tokens, width, epsilon: 1e-5, every, replaces: false };
        let normalized = |to: Normalized<'_>, replaces: bool| -> Vec<f32> {
            let mut x_there = up(context, &x);
            let tensors = TokenNormTensors {
                x: x_there.as_slice_mut(),
                delta: Some(delta_there.as_slice()),
                gain: gain_there.as_slice(),
                bias: Some(bias_there.as_slice()),
                to,
            };
            normalize_tokens(context, TokenNorm { replaces, ..norm }, tensors).unwrap();
            x_there.to_host().unwrap()
        };
        let mut y = up(context, &vec![T::from_f32(f32::NAN); rows * width]);
        let sums = normalized(Normalized::Floats(y.as_slice_mut()), false);
        let mut expected = vec![];
        for row in 0..rows {
            let at = ((row + 1) * every - 1) * width;
            let sum: Vec<f64> = (at..at + width).map(|i| f64::from(x[i] + delta[i].to_f32())).collect();
            expect_close(&what, &sums[at..at + width], &sum, 1e-6);
            let mean = if kind == NormKind::Layer { sum.iter().sum::<f64>() / width as f64 } else { 0.0 };
            let square = sum.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / width as f64;
            let rstd = 1.0 / (square + 1e-5).sqrt();
            let of = |i: usize| (sum[i] - mean) * rstd * f64::from(gain[i]) + f64::from(bias[i]);
            expected.extend((0..width).map(of));
        }
        let y = y.to_host::<T>().unwrap();
        expect_close(&what, &y, &expected, tolerance);
        // The integers are those of the CPU for the floats.
        let mut values = DeviceBuffer::zeros(context, DataType::I8, rows * width).unwrap();
        let mut scales = up(context, &vec![f32::NAN; rows]);
        let to =
            Normalized::Integers { values: values.as_slice_mut(), scales: scales.as_slice_mut(), rounded: T::DTYPE };
        let replaced = normalized(to, true);
        for (row, expected) in expected.chunks(width).enumerate() {
            expect_close(&what, &replaced[((row + 1) * every - 1) * width..][..width], expected, 1e-4);
        }
        let (q, s) = integers(&y, rows, width);
        assert_eq!(values.to_host::<i8>().unwrap(), q, "{what}");
        assert_eq!(scales.to_host::<f32>().unwrap(), s, "{what}");
    }
}

#[test]
fn norms_are_those_of_f64_and_their_integers_those_of_the_cpu() {
    for kind in [NormKind::RootMeanSquare, NormKind::Layer] {
        for (tokens, width, every) in [(1, 1, 1), (3, 100, 1), (1, 1000, 1), (32, 4096, 1), (6, 4100, 3), (2, 8192, 1)]
        {
            for_each_type(&NormCase(kind, tokens, width, every));
        }
    }
}

struct GateCase(Gate, usize, usize);

impl Check for GateCase {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        let GateCase(gate, rows, width) = *self;
        let mut x = numbers::<T>(rows * 2 * width, 1);
        // The third token's results are zeros.
        x.iter_mut().skip(4 * width + width).take(width).for_each(|up| *up = T::from_f32(0.0));
        let x = up(context, &x);
        let mut y = DeviceBuffer::zeros(context, T::DTYPE, rows * width).unwrap();
        gated_forward(context, gate, (rows, width), x.as_slice(), y.as_slice_mut()).unwrap();
        let mut values = DeviceBuffer::zeros(context, DataType::I8, rows * width).unwrap();
        let mut scales = up(context, &vec![f32::NAN; rows]);
        gate_to_i8(context, gate, (rows, width), x.as_slice(), (values.as_slice_mut(), scales.as_slice_mut())).unwrap();
        let (q, s) = integers(&y.to_host::<T>().unwrap(), rows, width);
        assert_eq!(values.to_host::<i8>().unwrap(), q, "{gate:?} {:?}", T::DTYPE);
        assert_eq!(scales.to_host::<f32>().unwrap(), s, "{gate:?} {:?}", T::DTYPE);
    }
}

#[test]
fn gates_to_integers_are_those_of_gates_to_floats() {
    for gate in [Gate::Silu, Gate::Gelu, Gate::TanhGelu, Gate::Relu] {
        // Of one CTA and of clusters of 2, 4 and 8; wider than the vectors that stay in registers; not a whole number
        // of vectors.
        let shapes = [
            (1, 1),
            (3, 100),
            (3, 4097),
            (1, 14_336),
            (8, 14_336),
            (32, 14_336),
            (70, 4096),
            (140, 8192),
            (2, 40_000),
            (150, 20_000),
        ];
        for (rows, width) in shapes {
            for_each_type(&GateCase(gate, rows, width));
        }
    }
}

struct Embed;

impl Check for Embed {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        let (table, learned) = (numbers::<T>(40 * 100, 1), numbers::<T>(9 * 100, 2));
        let (ids, before) = ([3u32, 39, 0, 40, 7, 7], [2u32, 6]);
        let (table_there, learned_there) = (up(context, &table), up(context, &learned));
        let (ids_there, positions) =
            (DeviceBuffer::from_ids(context, &ids).unwrap(), DeviceBuffer::from_ids(context, &before).unwrap());
        for context_len in [0, 9] {
            let shape = TokenEmbedding { batch: 2, count: 3, vocabulary: 40, width: 100, context: context_len };
            let mut x = up(context, &[f32::NAN; 600]);
            let tables = (table_there.as_slice(), (context_len > 0).then(|| learned_there.as_slice()));
            embed_tokens(context, shape, (ids_there.as_slice(), positions.as_slice()), tables, x.as_slice_mut())
                .unwrap();
            let expected: Vec<f32> = (0..600)
                .map(|i| {
                    let (token, d) = (i / 100, i % 100);
                    let position = before[token / 3] as usize + token % 3;
                    let of_id = if ids[token] < 40 { table[ids[token] as usize * 100 + d].to_f32() } else { 0.0 };
                    let of_position = if context_len > 0 { learned[position * 100 + d].to_f32() } else { 0.0 };
                    of_id + of_position
                })
                .collect();
            assert_eq!(x.to_host::<f32>().unwrap(), expected);
        }
    }
}

#[test]
fn embeddings_are_sums_of_rows() {
    for_each_type(&Embed);
}

struct Choose(usize);

impl Check for Choose {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        let vocabulary = self.0;
        // Random numbers with ties; all alike; infinities; a NaN in front, and one behind.
        let mut logits = numbers::<T>(5 * vocabulary, 1);
        logits[vocabulary..2 * vocabulary].fill(T::from_f32(-1.0));
        logits[2 * vocabulary..3 * vocabulary].fill(T::from_f32(f32::NEG_INFINITY));
        logits[3 * vocabulary] = T::from_f32(f32::NAN);
        logits[5 * vocabulary - 1] = T::from_f32(f32::NAN);
        let expected: Vec<u32> = logits
            .chunks(vocabulary)
            .map(|row| {
                (0..vocabulary).fold(0, |best, i| if row[i].to_f32() > row[best].to_f32() { i } else { best }) as u32
            })
            .collect();
        let there = up(context, &logits);
        let mut ids = DeviceBuffer::from_ids(context, &[99; 5]).unwrap();
        let mut positions = DeviceBuffer::from_ids(context, &[0, 1, 2, 3, 4]).unwrap();
        let mut history = DeviceBuffer::from_ids(context, &[77; 5 * 4]).unwrap();
        let to = ChosenTokens {
            ids: ids.as_slice_mut(),
            positions: positions.as_slice_mut(),
            history: history.as_slice_mut(),
        };
        choose_tokens(context, (5, vocabulary, 4), there.as_slice(), to).unwrap();
        assert_eq!(ids.ids_to_host().unwrap(), expected, "{vocabulary} {:?}", T::DTYPE);
        assert_eq!(positions.ids_to_host().unwrap(), [1, 2, 3, 4, 5]);
        let history = history.ids_to_host().unwrap();
        for sequence in 0..3 {
            assert_eq!(history[sequence * 4 + sequence + 1], expected[sequence]);
        }
        assert_eq!(history.iter().filter(|id| **id == 77).count(), 17);
        assert_eq!(wide(&logits).len(), 5 * vocabulary);
    }
}

#[test]
fn the_most_likely_token_is_chosen_and_the_lower_of_equals() {
    for vocabulary in [1, 7, 256, 1000, 128_256] {
        for_each_type(&Choose(vocabulary));
    }
}
