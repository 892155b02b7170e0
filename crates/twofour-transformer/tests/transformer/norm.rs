//! Normalization.

use twofour::Arithmetic;
use twofour_cuda::{
    Error,
    layer::{Accumulate, DeviceBuffer, LayerContext},
};
use twofour_transformer::cuda::{
    Norm, NormBackward, NormForward, NormInput, NormKind, add_in_place, norm_backward, norm_forward,
};

use crate::{
    Check, context, for_each_type,
    reference::{expect_close, expect_close_to, numbers, wide},
    unwritten, up,
};

/// The results of a normalization in f64.
struct Expected {
    y: Vec<f64>,
    dx: Vec<f64>,
    dgain: Vec<f64>,
    dbias: Vec<f64>,
    /// The largest reciprocal deviation: input gradients are differences of numbers that are as large.
    size: f64,
}

fn expected(norm: Norm, x: &[f64], gain: &[f64], bias: &[f64], dy: &[f64]) -> Expected {
    let width = norm.width;
    let mut all =
        Expected { y: Vec::new(), dx: Vec::new(), dgain: vec![0.0; width], dbias: vec![0.0; width], size: 1.0 };
    for (x, dy) in x.chunks(width).zip(dy.chunks(width)) {
        let mean_of = |f: &dyn Fn(usize) -> f64| (0..width).map(f).sum::<f64>() / width as f64;
        let mean = if norm.kind == NormKind::Layer { mean_of(&|i| x[i]) } else { 0.0 };
        let rstd = 1.0 / (mean_of(&|i| (x[i] - mean).powi(2)) + f64::from(norm.epsilon)).sqrt();
        all.size = all.size.max(rstd);
        let normal: Vec<f64> = x.iter().map(|x| (x - mean) * rstd).collect();
        let shift = if norm.kind == NormKind::Layer { mean_of(&|i| dy[i] * gain[i]) } else { 0.0 };
        let turn = mean_of(&|i| dy[i] * gain[i] * normal[i]);
        for i in 0..width {
            all.y.push(normal[i] * gain[i] + bias[i]);
            all.dx.push(rstd * (dy[i] * gain[i] - shift - normal[i] * turn));
            all.dgain[i] += dy[i] * normal[i];
            all.dbias[i] += dy[i];
        }
    }
    all
}

/// A normalization of a tensor or of a sum, with gains of f32 or the activations' type.
struct Case {
    kind: NormKind,
    shape: (usize, usize),
    of_sum: bool,
    wide_gain: bool,
}

impl Check for Case {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Case { kind, shape: (rows, width), of_sum, wide_gain } = *self;
        let what = format!("{kind:?} [{rows}, {width}] {:?}, of a sum: {of_sum}", T::DTYPE);
        let norm = Norm { kind, rows, width, epsilon: 1e-5 };
        let len = rows * width;
        let (x, other, dy) = (numbers::<T>(len, 1), numbers::<T>(len, 2), numbers::<T>(len, 3));
        let (gain, bias) = (numbers::<T>(width, 4), numbers::<T>(width, 5));
        let parameter = |values: &[T]| match wide_gain {
            true => up(context, &values.iter().map(|v| v.to_f32()).collect::<Vec<f32>>()),
            false => up(context, values),
        };
        let (gain_there, bias_there) = (parameter(&gain), parameter(&bias));
        let (x_there, mut sum, dy_there) = (up(context, &x), up(context, &other), up(context, &dy));
        let mut y = unwritten::<T>(context, len);
        let (mut mean, mut rstd) = (unwritten::<f32>(context, rows), unwritten::<f32>(context, rows));
        let centered = kind == NormKind::Layer;
        let forward = NormForward {
            x: match of_sum {
                true => NormInput::Sum(x_there.as_slice(), sum.as_slice_mut()),
                false => NormInput::Tensor(x_there.as_slice()),
            },
            gain: gain_there.as_slice(),
            bias: Some(bias_there.as_slice()),
            y: y.as_slice_mut(),
            mean: centered.then(|| mean.as_slice_mut()),
            rstd: rstd.as_slice_mut(),
        };
        norm_forward(context, norm, forward).unwrap();
        let input: Vec<T> = match of_sum {
            true => x.iter().zip(&other).map(|(x, r)| T::from_f32(x.to_f32() + r.to_f32())).collect(),
            false => x,
        };
        if of_sum {
            assert!(sum.to_host::<T>().unwrap() == input, "{what}: the sum");
        }
        let all = expected(norm, &wide(&input), &wide(&gain), &wide(&bias), &wide(&dy));
        expect_close(&what, &y.to_host::<T>().unwrap(), &all.y, tolerance);

        let input_there = up(context, &input);
        let before = numbers::<T>(len, 6);
        let mut dx = up(context, &before);
        let (mut dgain, mut dbias) = (unwritten::<f32>(context, width), unwritten::<f32>(context, width));
        let mut backward = |accumulate_dx, accumulate| {
            let tensors = NormBackward {
                x: input_there.as_slice(),
                gain: gain_there.as_slice(),
                mean: centered.then(|| mean.as_slice()),
                rstd: rstd.as_slice(),
                dy: dy_there.as_slice(),
                dx: dx.as_slice_mut(),
                accumulate_dx,
                dgain: dgain.as_slice_mut(),
                dbias: Some(dbias.as_slice_mut()),
                accumulate,
            };
            norm_backward(context, norm, tensors).unwrap();
            (dx.to_host::<T>().unwrap(), dgain.to_host::<f32>().unwrap(), dbias.to_host::<f32>().unwrap())
        };
        let size = all.size;
        let (found, first_gain, first_bias) = backward(Accumulate::Add, Accumulate::Overwrite);
        let sums: Vec<f64> = all.dx.iter().zip(wide(&before)).map(|(dx, before)| dx + before).collect();
        expect_close_to(&what, &found, &sums, tolerance, size);
        let (found, again_gain, again_bias) = backward(Accumulate::Overwrite, Accumulate::Overwrite);
        expect_close_to(&what, &found, &all.dx, tolerance, size);
        let size = (rows as f64).sqrt();
        expect_close_to(&format!("{what}: gain"), &first_gain, &all.dgain, 1e-5, size);
        expect_close_to(&format!("{what}: bias"), &first_bias, &all.dbias, 1e-5, size);
        assert!(first_gain == again_gain && first_bias == again_bias, "{what}: another run");
        let (_, twice_gain, _) = backward(Accumulate::Overwrite, Accumulate::Add);
        assert!(twice_gain.iter().zip(&first_gain).all(|(twice, once)| *twice == once + once), "{what}: accumulated");
    }
}

#[test]
fn normalization_and_its_gradients_are_those_of_f64() {
    for kind in [NormKind::Layer, NormKind::RootMeanSquare] {
        for shape in [(1, 1), (3, 7), (70, 64), (300, 129), (5, 1000), (2, 16_384), (9, 4097)] {
            for (of_sum, wide_gain) in [(false, true), (true, false)] {
                for_each_type(&Case { kind, shape, of_sum, wide_gain });
            }
        }
    }
}

/// A sum and its normalization in one pass have the bits of two passes.
struct Apart {
    kind: NormKind,
    shape: (usize, usize),
}

impl Check for Apart {
    fn run<T: Arithmetic>(&self, context: &LayerContext, _: f64) {
        let Apart { kind, shape: (rows, width) } = *self;
        let norm = Norm { kind, rows, width, epsilon: 1e-6 };
        let (x, gain) = (up(context, &numbers::<T>(rows * width, 1)), up(context, &numbers::<f32>(width, 2)));
        let run = |together: bool| {
            let mut sum = up(context, &numbers::<T>(rows * width, 3));
            let mut y = unwritten::<T>(context, rows * width);
            let (mut mean, mut rstd) = (unwritten::<f32>(context, rows), unwritten::<f32>(context, rows));
            if !together {
                add_in_place(context, x.as_slice(), sum.as_slice_mut()).unwrap();
            }
            let forward = NormForward {
                x: match together {
                    true => NormInput::Sum(x.as_slice(), sum.as_slice_mut()),
                    false => NormInput::Tensor(sum.as_slice()),
                },
                gain: gain.as_slice(),
                bias: None,
                y: y.as_slice_mut(),
                mean: (kind == NormKind::Layer).then(|| mean.as_slice_mut()),
                rstd: rstd.as_slice_mut(),
            };
            norm_forward(context, norm, forward).unwrap();
            (sum.to_host::<T>().unwrap(), y.to_host::<T>().unwrap(), rstd.to_host::<f32>().unwrap())
        };
        assert!(run(true) == run(false), "{kind:?} [{rows}, {width}] {:?}", T::DTYPE);
    }
}

#[test]
fn a_sum_and_its_normalization_have_the_bits_of_two_passes() {
    for kind in [NormKind::Layer, NormKind::RootMeanSquare] {
        for shape in [(1, 1), (3, 7), (70, 64), (5, 1280), (9, 4097)] {
            for_each_type(&Apart { kind, shape });
        }
    }
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let Some(context) = context() else { return };
    let norm = Norm { kind: NormKind::RootMeanSquare, rows: 4, width: 8, epsilon: 1e-5 };
    let (x, gain) = (up(&context, &[1f32; 32]), up(&context, &[1f32; 8]));
    let (mut y, mut rstd) = (up(&context, &[0f32; 32]), up(&context, &[0f32; 4]));
    let mut run = |norm, x: &DeviceBuffer, gain: &DeviceBuffer| {
        let tensors = NormForward {
            x: NormInput::Tensor(x.as_slice()),
            gain: gain.as_slice(),
            bias: None,
            y: y.as_slice_mut(),
            mean: None,
            rstd: rstd.as_slice_mut(),
        };
        norm_forward(&context, norm, tensors)
    };
    assert!(run(norm, &x, &gain).is_ok());
    let found = run(Norm { rows: 5, ..norm }, &x, &gain).unwrap_err();
    assert!(matches!(found, Error::Length { what: "the input", expected: 40, found: 32 }), "{found}");
    let found = run(norm, &x, &x).unwrap_err();
    assert!(matches!(found, Error::Length { what: "the gain", expected: 8, .. }), "{found}");
    let found = run(Norm { kind: NormKind::Layer, ..norm }, &x, &gain).unwrap_err();
    assert!(found.to_string().contains("means"), "{found}");
}
