//! Dense linear layers.

use twofour::{Arithmetic, kernel::Activation};
use twofour_cuda::{
    Error,
    layer::{Accumulate, DenseLinear, LayerContext},
};

use crate::{
    Check, for_each_type,
    reference::{expect_close, expect_close_to, numbers, product, transposed, wide},
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
        let mut pre = unwritten::<T>(context, tokens * out);
        let to = (pre.as_slice_mut(), y.as_slice_mut());
        let bias = Some(b_there.as_slice());
        layer.forward_activated(context, x_in, w_there.as_slice(), bias, Activation::Relu, to).unwrap();
        expect_close_to(&format!("{what}: bias"), &pre.to_host::<T>().unwrap(), &biased, tolerance, size);
        let relu: Vec<f64> = wide(&pre.to_host::<T>().unwrap()).iter().map(|x| x.max(0.0)).collect();
        expect_close(&format!("{what}: ReLU"), &y.to_host::<T>().unwrap(), &relu, 0.0);

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

fn gelu(x: f64) -> f64 {
    0.5 * x * (1.0 + ((2.0 / std::f64::consts::PI).sqrt() * (x + 0.044715 * x.powi(3))).tanh())
}

struct Fused;

impl Check for Fused {
    fn run<T: Arithmetic>(&self, context: &LayerContext, tolerance: f64) {
        let (tokens, hidden, inputs) = (80, 128, 64);
        let (up_layer, down) = (
            DenseLinear { out_features: hidden, in_features: inputs },
            DenseLinear { out_features: inputs, in_features: hidden },
        );
        let (x, w, b) = (numbers::<T>(tokens * inputs, 1), numbers::<T>(hidden * inputs, 2), numbers::<T>(hidden, 3));
        let (dy, w2) = (numbers::<T>(tokens * inputs, 4), numbers::<T>(inputs * hidden, 5));
        let [x_there, w_there, b_there, dy_there, w2_there] = [&x, &w, &b, &dy, &w2].map(|values| up(context, values));
        let (mut pre, mut y) = (unwritten::<T>(context, tokens * hidden), unwritten::<T>(context, tokens * hidden));
        let to = (pre.as_slice_mut(), y.as_slice_mut());
        let bias = Some(b_there.as_slice());
        let run = up_layer.forward_tanh_gelu(context, (x_there.as_slice(), tokens), w_there.as_slice(), bias, to);
        match run {
            Err(error @ (Error::NoLibrary { .. } | Error::Vendor { .. })) => {
                return eprintln!("skipped for {:?}: {error}", T::DTYPE);
            }
            run => run.unwrap(),
        }
        let plain = product(&wide(&x), &wide(&w), (tokens, hidden, inputs));
        let biased: Vec<f64> = plain.iter().enumerate().map(|(i, y)| y + f64::from(b[i % hidden].to_f32())).collect();
        let found = pre.to_host::<T>().unwrap();
        expect_close_to("pre-activation", &found, &biased, tolerance, 8.0);
        // The library's tanh is the GPU's approximation, with a relative error of 2^-11.
        let approximate = tolerance.max(5e-4);
        let expected: Vec<f64> = biased.iter().map(|x| gelu(*x)).collect();
        expect_close_to("GELU", &y.to_host::<T>().unwrap(), &expected, approximate, 8.0);
        let (mut dpre, mut db) = (unwritten::<T>(context, tokens * hidden), unwritten::<T>(context, hidden));
        let (dy_in, to) = ((dy_there.as_slice(), tokens), (dpre.as_slice_mut(), Some(db.as_slice_mut())));
        let run =
            down.input_gradient_through_tanh_gelu(context, dy_in, w2_there.as_slice(), pre.as_slice(), to.0, to.1);
        if let Err(error @ Error::Vendor { .. }) = run {
            return eprintln!("skipped for {:?}: {error}", T::DTYPE);
        }
        run.unwrap();
        let back = product(&wide(&dy), &transposed(&wide(&w2), (inputs, hidden)), (tokens, hidden, inputs));
        let slope = |x: f64| (gelu(x + 1e-5) - gelu(x - 1e-5)) / 2e-5;
        let expected: Vec<f64> = back.iter().zip(wide(&found)).map(|(dy, pre)| dy * slope(pre)).collect();
        expect_close_to("through GELU", &dpre.to_host::<T>().unwrap(), &expected, approximate, 8.0);
        let sums: Vec<f64> = (0..hidden).map(|c| (0..tokens).map(|t| expected[t * hidden + c]).sum()).collect();
        expect_close_to("bias gradient", &db.to_host::<T>().unwrap(), &sums, approximate, 60.0);
    }
}

#[test]
fn gelu_is_part_of_the_gemm_where_the_library_has_it() {
    for_each_type(&Fused);
}
