//! Gated activations.

use twofour::Arithmetic;
use twofour_cuda::layer::LayerContext;
use twofour_transformer::cuda::{
    ClampedGate, ElementFunction, Gate, activation_backward, activation_forward, clamped_gate_forward, gated_backward,
    gated_forward,
};

use crate::{
    Check, for_each_type,
    reference::{expect_close, numbers, wide},
    unwritten, up,
};

/// Φ in f64, by Simpson's rule.
fn cumulative(x: f64) -> f64 {
    let (steps, density) = (400, |t: f64| (-0.5 * t * t).exp() / (2.0 * std::f64::consts::PI).sqrt());
    let h = x / f64::from(steps);
    let weight = |i: i32| if i == 0 || i == steps { 1.0 } else { f64::from(2 + 2 * (i % 2)) };
    0.5 + (0..=steps).map(|i| weight(i) * density(f64::from(i) * h)).sum::<f64>() * h / 3.0
}

fn value(gate: Gate, x: f64) -> f64 {
    match gate {
        Gate::Silu => x / (1.0 + (-x).exp()),
        Gate::Gelu => x * cumulative(x),
        Gate::TanhGelu => 0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh()),
        Gate::Relu => x.max(0.0),
    }
}

struct Case(Gate, usize, usize);

impl Check for Case {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Case(gate, rows, width) = *self;
        let what = format!("{gate:?} [{rows}, {width}] {:?}", T::DTYPE);
        let (x, dy) = (numbers::<T>(rows * 2 * width, 1), numbers::<T>(rows * width, 2));
        let (x_there, dy_there) = (up(context, &x), up(context, &dy));
        let (mut y, mut dx) = (unwritten::<T>(context, dy.len()), unwritten::<T>(context, x.len()));
        gated_forward(context, gate, (rows, width), x_there.as_slice(), y.as_slice_mut()).unwrap();
        let (x_in, dy_in) = (x_there.as_slice(), dy_there.as_slice());
        gated_backward(context, gate, (rows, width), x_in, dy_in, dx.as_slice_mut()).unwrap();
        let (x, dy) = (wide(&x), wide(&dy));
        let (mut expected, mut gradient) = (vec![0.0; dy.len()], vec![0.0; x.len()]);
        for (at, dy) in dy.iter().enumerate() {
            let (g, u) = (at / width * 2 * width + at % width, at / width * 2 * width + at % width + width);
            let step = 1e-5;
            expected[at] = value(gate, x[g]) * x[u];
            let slope = if gate == Gate::Relu && x[g] == 0.0 {
                0.0
            } else {
                (value(gate, x[g] + step) - value(gate, x[g] - step)) / (2.0 * step)
            };
            (gradient[g], gradient[u]) = (dy * x[u] * slope, dy * value(gate, x[g]));
        }
        expect_close(&what, &y.to_host::<T>().unwrap(), &expected, tolerance);
        expect_close(&format!("{what}: gradient"), &dx.to_host::<T>().unwrap(), &gradient, tolerance);
    }
}

#[test]
fn gated_activations_and_their_gradients_are_those_of_f64() {
    for gate in [Gate::Silu, Gate::Gelu, Gate::TanhGelu, Gate::Relu] {
        for (rows, width) in [(1, 1), (3, 7), (16, 64), (9, 100)] {
            for_each_type(&Case(gate, rows, width));
        }
    }
}

struct SquaredRelu;

impl Check for SquaredRelu {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let (x, dy) = (numbers::<T>(1000, 1), numbers::<T>(1000, 2));
        let (x_there, dy_there) = (up(context, &x), up(context, &dy));
        let (mut y, mut dx) = (unwritten::<T>(context, 1000), unwritten::<T>(context, 1000));
        let function = ElementFunction::SquaredRelu;
        activation_forward(context, function, x_there.as_slice(), y.as_slice_mut()).unwrap();
        activation_backward(context, function, x_there.as_slice(), dy_there.as_slice(), dx.as_slice_mut()).unwrap();
        let (x, dy) = (wide(&x), wide(&dy));
        let expected: Vec<f64> = x.iter().map(|x| x.max(0.0).powi(2)).collect();
        expect_close("squared ReLU", &y.to_host::<T>().unwrap(), &expected, tolerance);
        let expected: Vec<f64> = x.iter().zip(&dy).map(|(x, dy)| 2.0 * x.max(0.0) * dy).collect();
        expect_close("squared ReLU's gradient", &dx.to_host::<T>().unwrap(), &expected, tolerance);
    }
}

#[test]
fn an_activation_by_itself_and_its_gradient_are_those_of_f64() {
    for_each_type(&SquaredRelu);
}

/// Rows and width of gpt-oss's gate.
struct Clamped(usize, usize);

impl Check for Clamped {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Clamped(rows, width) = *self;
        let x = numbers::<T>(rows * 2 * width, 1);
        let (x_there, mut y) = (up(context, &x), unwritten::<T>(context, rows * width));
        // Both bounds are reached.
        let gate = ClampedGate { slope: 1.702, limit: 0.6 };
        clamped_gate_forward(context, gate, (rows, width), x_there.as_slice(), y.as_slice_mut()).unwrap();
        let (x, limit) = (wide(&x), f64::from(gate.limit));
        let of = |row: &[f64]| -> Vec<f64> {
            let joined = |(gate, up): (&f64, &f64)| {
                let (gate, up) = (gate.min(limit), up.clamp(-limit, limit));
                (up + 1.0) * gate / (1.0 + (-1.702 * gate).exp())
            };
            row[..width].iter().zip(&row[width..]).map(joined).collect()
        };
        let expected: Vec<f64> = x.chunks_exact(2 * width).flat_map(of).collect();
        expect_close(&format!("[{rows}, {width}] {:?}", T::DTYPE), &y.to_host::<T>().unwrap(), &expected, tolerance);
    }
}

#[test]
fn a_clamped_gate_is_that_of_f64() {
    for (rows, width) in [(1, 1), (3, 7), (9, 100)] {
        for_each_type(&Clamped(rows, width));
    }
}
