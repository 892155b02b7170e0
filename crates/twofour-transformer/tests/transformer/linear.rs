//! Dense linear layers.

use twofour::Arithmetic;
use twofour_cuda::{
    Error,
    layer::{Accumulate, DenseLinear, LayerContext},
};

use crate::{
    Check, for_each_type,
    reference::{expect_close_to, numbers, product, transposed, wide},
    unwritten, up,
};

struct Case(usize, usize, usize);

impl Check for Case {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let Case(tokens, out, inputs) = *self;
        let what = format!("{tokens} tokens, [{out}, {inputs}] {:?}", T::DTYPE);
        let layer = DenseLinear { out_features: out, in_features: inputs };
        let (x, w, b) = (numbers::<T>(tokens * inputs, 1), numbers::<T>(out * inputs, 2), numbers::<T>(out, 3));
        let dy = numbers::<T>(tokens * out, 4);
        let [x_there, w_there, b_there, dy_there] = [&x, &w, &b, &dy].map(|values| up(context, values));
        match layer.prepare(context, T::DTYPE, tokens) {
            Err(Error::NoLibrary { .. }) => return eprintln!("skipped: no cuBLASLt"),
            prepared => prepared.unwrap(),
        }
        let (x, w, b, dy) = (wide(&x), wide(&w), wide(&b), wide(&dy));
        let size = (inputs.max(out).max(tokens) as f64).sqrt();
        let mut y = unwritten::<T>(context, tokens * out);
        let x_in = (x_there.as_slice(), tokens);
        let plain = product(&x, &w, (tokens, out, inputs));
        layer.forward(context, x_in, w_there.as_slice(), None, y.as_slice_mut()).unwrap();
        expect_close_to(&what, &y.to_host::<T>().unwrap(), &plain, tolerance, size);
        let biased: Vec<f64> = plain.iter().enumerate().map(|(i, y)| y + b[i % out]).collect();
        layer.forward(context, x_in, w_there.as_slice(), Some(b_there.as_slice()), y.as_slice_mut()).unwrap();
        expect_close_to(&format!("{what}: bias"), &y.to_host::<T>().unwrap(), &biased, tolerance, size);

        let mut dx = unwritten::<T>(context, tokens * inputs);
        let dy_in = (dy_there.as_slice(), tokens);
        let back = product(&dy, &transposed(&w, (out, inputs)), (tokens, inputs, out));
        layer.input_gradient(context, dy_in, w_there.as_slice(), Accumulate::Overwrite, dx.as_slice_mut()).unwrap();
        expect_close_to(&format!("{what}: dx"), &dx.to_host::<T>().unwrap(), &back, tolerance, size);
        layer.input_gradient(context, dy_in, w_there.as_slice(), Accumulate::Add, dx.as_slice_mut()).unwrap();
        let twice: Vec<f64> = back.iter().map(|dx| 2.0 * dx).collect();
        expect_close_to(&format!("{what}: dx twice"), &dx.to_host::<T>().unwrap(), &twice, tolerance, size);

        let mut dw = unwritten::<f32>(context, out * inputs);
        let expected =
            product(&transposed(&dy, (tokens, out)), &transposed(&x, (tokens, inputs)), (out, inputs, tokens));
        let mut run = |accumulate| {
            let (dy, x) = (dy_there.as_slice(), x_there.as_slice());
            layer.weight_gradient(context, dy, x, tokens, accumulate, dw.as_slice_mut()).unwrap();
            dw.to_host::<f32>().unwrap()
        };
        let first = run(Accumulate::Overwrite);
        expect_close_to(&format!("{what}: dw"), &first, &expected, 1e-5, size);
        assert!(run(Accumulate::Overwrite) == first, "{what}: another run");
        let twice: Vec<f64> = expected.iter().map(|dw| 2.0 * dw).collect();
        expect_close_to(&format!("{what}: dw twice"), &run(Accumulate::Add), &twice, 1e-5, size);

        let mut db = unwritten::<f32>(context, out);
        let sums: Vec<f64> = (0..out).map(|col| (0..tokens).map(|token| dy[token * out + col]).sum()).collect();
        for (accumulate, times) in [(Accumulate::Overwrite, 1.0), (Accumulate::Add, 2.0)] {
            let (dy, x) = (dy_there.as_slice(), x_there.as_slice());
            let (w, b) = (dw.as_slice_mut(), db.as_slice_mut());
            layer.parameter_gradients(context, dy, x, tokens, accumulate, w, b).unwrap();
            let [weights, biases] = [&expected, &sums].map(|sums| sums.iter().map(|x| times * x).collect::<Vec<_>>());
            expect_close_to(&format!("{what}: both, dw"), &dw.to_host::<f32>().unwrap(), &weights, 1e-5, size);
            expect_close_to(&format!("{what}: both, db"), &db.to_host::<f32>().unwrap(), &biases, 1e-5, size);
        }
    }
}

#[test]
fn products_and_their_gradients_are_those_of_f64() {
    for (tokens, out, inputs) in [(1, 8, 8), (64, 128, 96), (257, 72, 200)] {
        for_each_type(&Case(tokens, out, inputs));
    }
}

/// Contexts that time nothing take the same algorithms.
struct Repeatable;

impl Check for Repeatable {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let (tokens, out, inputs) = (96, 64, 512);
        let (x, w) = (numbers::<T>(tokens * inputs, 1), numbers::<T>(out * inputs, 2));
        let layer = DenseLinear { out_features: out, in_features: inputs };
        let run = || {
            let context = LayerContext::repeatable(context.device(), context.stream().clone());
            let [x_there, w_there] = [&x, &w].map(|values| up(&context, values));
            let mut y = unwritten::<T>(&context, tokens * out);
            layer.forward(&context, (x_there.as_slice(), tokens), w_there.as_slice(), None, y.as_slice_mut())?;
            y.to_host::<T>()
        };
        let first = match run() {
            Err(Error::NoLibrary { .. }) => return eprintln!("skipped: no cuBLASLt"),
            first => first.unwrap(),
        };
        let expected = product(&wide(&x), &wide(&w), (tokens, out, inputs));
        expect_close_to("a repeatable context", &first, &expected, tolerance, 23.0);
        assert!(run().unwrap() == first, "{:?}: another context", T::DTYPE);
    }
}

#[test]
fn contexts_that_time_nothing_give_the_same_bits() {
    for_each_type(&Repeatable);
}
