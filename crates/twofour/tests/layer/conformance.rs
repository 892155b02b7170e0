//! What a sparse layer must do on every engine. `tests/layer.rs` runs it over slices on the CPU, and `twofour-cuda`'s
//! `tests/layer/main.rs` over device memory.

// An engine's tests use what it has.
#![allow(dead_code)]

use twofour::{
    Arithmetic, Axis, Compressed, DataType, Element as _, Mask, MatrixRef, Pattern,
    estimate::{Estimator, estimate, soft_threshold_scale},
    kernel::Activation,
    layer::{Accumulate, InputGradient, MaskRule, SparseLinearSettings, WeightGradient},
    select::{self, Transposable},
};

/// Output features, input features, tokens.
pub(crate) type Dims = (usize, usize, usize);

/// An engine's layer, fed from and read into host memory. Master weights and parameter gradients are f32.
pub(crate) trait Engine {
    /// What activations and packed values are made of.
    type Element: Arithmetic;
    /// The layer.
    type Layer;

    /// Shapes that the engine takes, small and odd ones among them.
    fn shapes(&self) -> Vec<Dims>;
    fn layer(&self, dims: Dims, master: &[f32], settings: SparseLinearSettings) -> Result<Self::Layer, String>;
    fn remask(&self, layer: &mut Self::Layer, master: &[f32]) -> u64;
    fn repack(&self, layer: &mut Self::Layer, master: &[f32]);
    fn set_mask(&self, layer: &mut Self::Layer, master: &[f32], mask: &Mask) -> Result<u64, String>;
    fn mask(&self, layer: &Self::Layer) -> Mask;
    fn packed(&self, layer: &Self::Layer) -> Compressed<Self::Element>;
    /// The packed transpose, where the engine keeps one for the settings.
    fn packed_transpose(&self, layer: &Self::Layer) -> Option<Compressed<Self::Element>>;
    fn scale(&self, layer: &Self::Layer) -> Option<f32>;
    /// The output, and the pre-activation where it is asked for.
    fn forward(&self, layer: &Self::Layer, x: &[Self::Element], forward: Forward<'_>) -> Outputs<Self::Element>;
    fn input_gradient(&self, layer: &Self::Layer, dy: &[Self::Element], tokens: usize) -> Vec<Self::Element>;
    fn weight_gradient(
        &self,
        layer: &Self::Layer,
        operands: (&[Self::Element], &[Self::Element]),
        tokens: usize,
        accumulate: Accumulate,
        dw: &mut Vec<f32>,
    );
    fn bias_gradient(
        &self,
        layer: &Self::Layer,
        dy: &[Self::Element],
        tokens: usize,
        accumulate: Accumulate,
        db: &mut Vec<f32>,
    );
    fn activation_gradient(&self, activation: Activation, pre: &[Self::Element], dy: &mut Vec<Self::Element>);
    fn seed(&self, layer: &Self::Layer) -> u64;
    fn set_seed(&self, layer: &Self::Layer, seed: u64);
}

/// A forward pass.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Forward<'a> {
    pub(crate) tokens: usize,
    pub(crate) bias: Option<&'a [f32]>,
    pub(crate) activation: Activation,
    pub(crate) stores_pre_activation: bool,
}

/// What a forward pass stored.
#[derive(Debug)]
pub(crate) struct Outputs<T> {
    pub(crate) y: Vec<T>,
    pub(crate) pre_activation: Option<Vec<T>>,
}

/// Every rule that chooses a mask.
const RULES: [MaskRule; 6] = [
    MaskRule::Magnitude,
    MaskRule::Transposable(Transposable::GreedyAbs),
    MaskRule::Transposable(Transposable::GreedySigned),
    MaskRule::Transposable(Transposable::Causal1122),
    MaskRule::Transposable(Transposable::Optimal),
    MaskRule::SoftThreshold,
];

const ACTIVATIONS: [Activation; 4] = [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::Silu];

/// Runs everything.
pub(crate) fn run<E: Engine>(engine: &E) {
    for dims in engine.shapes() {
        masks_values_and_flips(engine, dims);
        given_masks(engine, dims);
        forward_passes(engine, dims);
        gradients(engine, dims);
        sampled_gradients(engine, dims);
    }
    contradictions(engine);
}

/// Reproducible numbers in -1..1, some of them tied.
fn numbers(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..len).map(|i| if i % 13 == 5 { 0.5 } else { next() }).collect()
}

fn elements<T: Arithmetic>(len: usize, seed: u64) -> Vec<T> {
    numbers(len, seed).into_iter().map(T::from_f32).collect()
}

fn matrix((out, inputs, _): Dims, data: &[f32]) -> MatrixRef<'_, f32> {
    MatrixRef::new(out, inputs, data).unwrap()
}

fn expected_mask(dims: Dims, master: &[f32], rule: MaskRule) -> Mask {
    match rule {
        MaskRule::Transposable(rule) => select::transposable(matrix(dims, master), rule).unwrap(),
        _ => select::magnitude(matrix(dims, master), Pattern::TWO_FOUR, Axis::Row).unwrap(),
    }
}

fn expected_values<T: Arithmetic>(dims: Dims, master: &[f32], rule: MaskRule, scale: Option<f32>) -> Compressed<T> {
    if rule == MaskRule::SoftThreshold {
        return estimate(matrix(dims, master), Estimator::SoftThreshold, scale.unwrap()).unwrap();
    }
    let values: Vec<T> = master.iter().map(|v| T::from_f32(*v)).collect();
    let values = MatrixRef::new(dims.0, dims.1, &values).unwrap();
    Compressed::from_masked(values, &expected_mask(dims, master, rule)).unwrap()
}

fn transposed<T: Arithmetic>(weight: &Compressed<T>, mask: &Mask) -> Compressed<T> {
    let dense = weight.to_dense();
    let dense = MatrixRef::new(weight.rows(), weight.cols(), &dense).unwrap().transposed();
    let dense = MatrixRef::new(weight.cols(), weight.rows(), &dense).unwrap();
    Compressed::from_masked(dense, &mask.transposed()).unwrap()
}

fn masks_values_and_flips<E: Engine>(engine: &E, dims: Dims) {
    let (out, inputs, _) = dims;
    for rule in RULES {
        for input_gradient in [InputGradient::Automatic, InputGradient::PackedTranspose] {
            let settings = SparseLinearSettings { rule, input_gradient, ..Default::default() };
            if settings.check().is_err() {
                continue;
            }
            let what = format!("{dims:?}, {settings:?}");
            let mut master = numbers(out * inputs, 1);
            let mut layer = engine.layer(dims, &master, settings).unwrap();
            let scale = engine.scale(&layer);
            assert_eq!(scale.is_some(), rule == MaskRule::SoftThreshold, "{what}");
            if let Some(scale) = scale {
                // A sum in another order may round otherwise.
                let expected = soft_threshold_scale(matrix(dims, &master)).unwrap();
                assert!((scale / expected - 1.0).abs() <= f32::EPSILON, "{what}: {scale}, expected {expected}");
            }
            let check = |layer: &E::Layer, master: &[f32], mask: &Mask, values: &Compressed<E::Element>, when: &str| {
                assert_eq!(&engine.mask(layer), mask, "{what}, {when}: mask");
                assert_eq!(&engine.packed(layer), values, "{what}, {when}: values");
                let transpose = engine.packed_transpose(layer);
                assert!(transpose.is_some() || input_gradient == InputGradient::Automatic, "{what}");
                if let Some(transpose) = transpose {
                    assert_eq!(transpose, transposed(values, mask), "{what}, {when}: the transpose");
                }
                let _ = master;
            };
            let mask = expected_mask(dims, &master, rule);
            check(&layer, &master, &mask, &expected_values(dims, &master, rule, scale), "new");

            // An optimizer step: some elements change, and so do some masks.
            for (i, v) in master.iter_mut().enumerate() {
                *v = if i % 3 == 0 { -*v * 1.5 } else { *v };
            }
            let next = expected_mask(dims, &master, rule);
            assert_eq!(engine.remask(&mut layer, &master), mask.flips(&next).unwrap(), "{what}: flips");
            assert_eq!(engine.scale(&layer), scale, "{what}: the scale is frozen");
            check(&layer, &master, &next, &expected_values(dims, &master, rule, scale), "chosen anew");
            assert_eq!(engine.remask(&mut layer, &master), 0, "{what}: nothing has changed");

            // A step that keeps the mask.
            master.iter_mut().enumerate().for_each(|(i, v)| *v += (i % 7) as f32 * 0.25);
            engine.repack(&mut layer, &master);
            if rule == MaskRule::SoftThreshold {
                let mask = expected_mask(dims, &master, rule);
                check(&layer, &master, &mask, &expected_values(dims, &master, rule, scale), "repacked");
            } else {
                let values: Vec<E::Element> = master.iter().map(|v| E::Element::from_f32(*v)).collect();
                let values = Compressed::from_masked(MatrixRef::new(out, inputs, &values).unwrap(), &next).unwrap();
                check(&layer, &master, &next, &values, "repacked");
            }

            // Training is resumed: a mask that the layer has already changes nothing.
            let (present, values) = (engine.mask(&layer), engine.packed(&layer));
            assert_eq!(engine.set_mask(&mut layer, &master, &present).unwrap(), 0, "{what}: flips of the same mask");
            check(&layer, &master, &present, &values, "restored");
        }
    }
}

fn given_masks<E: Engine>(engine: &E, dims: Dims) {
    let (out, inputs, _) = dims;
    // The mask of a master weight that is 2:4 already, one both ways.
    let first = expected_mask(dims, &numbers(out * inputs, 3), MaskRule::Transposable(Transposable::Optimal));
    let pruned = first.apply(matrix(dims, &numbers(out * inputs, 3))).unwrap();
    let settings = SparseLinearSettings {
        rule: MaskRule::Given,
        input_gradient: InputGradient::PackedTranspose,
        ..Default::default()
    };
    let mut layer = engine.layer(dims, &pruned, settings).unwrap();
    let nonzeros = Mask::of_nonzeros(matrix(dims, &pruned));
    assert_eq!(engine.mask(&layer), nonzeros);
    let master = numbers(out * inputs, 4);
    let second = expected_mask(dims, &master, MaskRule::Transposable(Transposable::GreedyAbs));
    assert_eq!(engine.set_mask(&mut layer, &master, &second).unwrap(), nonzeros.flips(&second).unwrap());
    for changed in [4, 5] {
        let master = numbers(out * inputs, changed);
        assert_eq!(engine.remask(&mut layer, &master), 0, "a given mask stays");
        let values: Vec<E::Element> = master.iter().map(|v| E::Element::from_f32(*v)).collect();
        let expected = Compressed::from_masked(MatrixRef::new(out, inputs, &values).unwrap(), &second).unwrap();
        assert_eq!((engine.mask(&layer), engine.packed(&layer)), (second.clone(), expected));
    }
    // 2:4 along rows is not enough for a packed transpose, and a dense mask for nothing.
    if out >= 3 && inputs >= 4 {
        let rows_only = Mask::from_fn(out, inputs, |_, col| col % 4 < 2);
        assert!(engine.set_mask(&mut layer, &master, &rows_only).unwrap_err().contains("column 0, group 0"));
        let dense = Mask::from_fn(out, inputs, |_, _| true);
        assert!(engine.set_mask(&mut layer, &master, &dense).unwrap_err().contains("row 0, group 0"));
        assert_eq!(engine.mask(&layer), second, "a mask that is refused changes nothing");
    }
}

fn contradictions<E: Engine>(engine: &E) {
    let Some(dims) = engine.shapes().into_iter().next() else { return };
    let settings = SparseLinearSettings { input_gradient: InputGradient::PackedTranspose, ..Default::default() };
    let error = engine.layer(dims, &numbers(dims.0 * dims.1, 1), settings).err().unwrap();
    assert!(error.contains("transposable"), "{error}");
    let mut master = numbers(dims.0 * dims.1, 1);
    master[dims.1 + 2] = f32::NAN;
    let error = engine.layer(dims, &master, SparseLinearSettings::default()).err().unwrap();
    assert!(error.contains("row 1, column 2") && error.contains("NaN"), "{error}");
}

/// What rounding to an element type, and an f32 sum of products of this total magnitude, may take away from a result.
fn tolerance(dtype: DataType, truth: f64, magnitude: f64) -> f64 {
    let relative = match dtype {
        DataType::F32 => 2f64.powi(-23),
        DataType::BF16 => 2f64.powi(-8),
        DataType::F16 => 2f64.powi(-11),
        other => panic!("no result is {other}"),
    };
    truth.abs() * relative * 1.01 + magnitude * 1e-5 + 1e-6
}

fn close<T: Arithmetic>(what: &str, found: &[T], expected: &[(f64, f64)]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, (truth, magnitude))) in found.iter().zip(expected).enumerate() {
        let found = f64::from(found.to_f32());
        let allowed = tolerance(T::DTYPE, *truth, *magnitude);
        assert!((found - truth).abs() <= allowed, "{what}, element {i}: {found}, expected {truth} within {allowed}");
    }
}

fn wide<T: Arithmetic>(values: &[T]) -> Vec<f64> {
    values.iter().map(|v| f64::from(v.to_f32())).collect()
}

/// `a · b`, `[n, k]` by `[k, m]`, in f64, with the sum of magnitudes.
fn product(a: &[f64], b: &[f64], (n, k, m): (usize, usize, usize)) -> Vec<(f64, f64)> {
    let mut out = vec![(0.0, 0.0); n * m];
    for row in 0..n {
        for at in 0..k {
            for col in 0..m {
                let term = a[row * k + at] * b[at * m + col];
                out[row * m + col].0 += term;
                out[row * m + col].1 += term.abs();
            }
        }
    }
    out
}

fn flipped(data: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| data[r * cols + c])).collect()
}

fn forward_passes<E: Engine>(engine: &E, dims: Dims) {
    let (out, inputs, tokens) = dims;
    let master = numbers(out * inputs, 6);
    let (x, bias) = (elements::<E::Element>(tokens * inputs, 7), elements::<E::Element>(out, 8));
    let bias: Vec<f32> = bias.iter().map(|b| b.to_f32()).collect();
    for rule in [MaskRule::Magnitude, MaskRule::Transposable(Transposable::GreedyAbs), MaskRule::SoftThreshold] {
        let layer = engine.layer(dims, &master, SparseLinearSettings { rule, ..Default::default() }).unwrap();
        let weight = wide(&engine.packed(&layer).to_dense());
        let sums = product(&wide(&x), &flipped(&weight, out, inputs), (tokens, inputs, out));
        for bias in [None, Some(&bias[..])] {
            let pre: Vec<(f64, f64)> = sums
                .iter()
                .enumerate()
                .map(|(i, (sum, size))| bias.map_or((*sum, *size), |b| (sum + f64::from(b[i % out]), size + 1.0)))
                .collect();
            for activation in ACTIVATIONS {
                let what = format!("{dims:?}, {rule:?}, {activation:?}, bias {}", bias.is_some());
                let apply = |v: f64| f64::from(activation.apply(v as f32));
                // Slopes of activations are at most 1.13.
                let expected: Vec<(f64, f64)> = pre.iter().map(|(v, size)| (apply(*v), size * 1.2)).collect();
                let forward = Forward { tokens, bias, activation, stores_pre_activation: false };
                let found = engine.forward(&layer, &x, forward);
                close(&what, &found.y, &expected);
                let found = engine.forward(&layer, &x, Forward { stores_pre_activation: true, ..forward });
                let stored = found.pre_activation.unwrap();
                close(&format!("{what}, pre-activation"), &stored, &pre);
                // The activation is applied to what is stored.
                let expected: Vec<(f64, f64)> = wide(&stored).iter().map(|v| (apply(*v), 0.1)).collect();
                close(&format!("{what}, after the pre-activation"), &found.y, &expected);
            }
        }
    }
}

fn gradients<E: Engine>(engine: &E, dims: Dims) {
    let (out, inputs, tokens) = dims;
    let master = numbers(out * inputs, 9);
    let (x, dy) = (elements::<E::Element>(tokens * inputs, 10), elements::<E::Element>(tokens * out, 11));
    let dense = product(&flipped(&wide(&dy), tokens, out), &wide(&x), (out, tokens, inputs));
    for rule in RULES {
        for (input_gradient, weight_gradient) in [
            (InputGradient::Automatic, WeightGradient::Dense),
            (InputGradient::PackedTranspose, WeightGradient::Masked),
            (InputGradient::Automatic, WeightGradient::Masked),
        ] {
            let settings = SparseLinearSettings { rule, input_gradient, weight_gradient };
            if settings.check().is_err() {
                continue;
            }
            let what = format!("{dims:?}, {settings:?}");
            let layer = engine.layer(dims, &master, settings).unwrap();
            let (weight, mask) = (wide(&engine.packed(&layer).to_dense()), engine.mask(&layer));
            let dx = engine.input_gradient(&layer, &dy, tokens);
            close(&format!("{what}, input"), &dx, &product(&wide(&dy), &weight, (tokens, out, inputs)));

            let is_kept = |i: usize| weight_gradient == WeightGradient::Dense || mask.is_kept(i / inputs, i % inputs);
            let expected: Vec<(f64, f64)> =
                dense.iter().enumerate().map(|(i, v)| if is_kept(i) { *v } else { (0.0, 0.0) }).collect();
            let mut dw = vec![f32::NAN; out * inputs];
            engine.weight_gradient(&layer, (&dy, &x), tokens, Accumulate::Overwrite, &mut dw);
            close(&format!("{what}, weight"), &dw, &expected);
            assert!((0..dw.len()).all(|i| is_kept(i) || dw[i] == 0.0), "{what}");
            // A second micro-step.
            engine.weight_gradient(&layer, (&dy, &x), tokens, Accumulate::Add, &mut dw);
            let twice: Vec<(f64, f64)> = expected.iter().map(|(v, size)| (2.0 * v, 2.0 * size)).collect();
            close(&format!("{what}, weight, accumulated"), &dw, &twice);
        }
    }
    let layer = engine.layer(dims, &master, SparseLinearSettings::default()).unwrap();
    let ones = vec![1.0; tokens];
    let expected = product(&ones, &wide(&dy), (1, tokens, out));
    let mut db = vec![f32::NAN; out];
    engine.bias_gradient(&layer, &dy, tokens, Accumulate::Overwrite, &mut db);
    close(&format!("{dims:?}, bias"), &db, &expected);
    engine.bias_gradient(&layer, &dy, tokens, Accumulate::Add, &mut db);
    let twice: Vec<(f64, f64)> = expected.iter().map(|(v, size)| (2.0 * v, 2.0 * size)).collect();
    close(&format!("{dims:?}, bias, accumulated"), &db, &twice);

    for activation in ACTIVATIONS {
        let pre = elements::<E::Element>(tokens * out, 12);
        let mut found = dy.clone();
        engine.activation_gradient(activation, &pre, &mut found);
        let slope = |v: f64| {
            (f64::from(activation.apply((v + 1e-2) as f32)) - f64::from(activation.apply((v - 1e-2) as f32))) / 2e-2
        };
        let values = wide(&pre).into_iter().zip(wide(&dy));
        for (i, ((pre, dy), found)) in values.zip(wide(&found)).enumerate() {
            // At its corner ReLU has no slope to compare with.
            if activation != Activation::Relu || pre.abs() > 2e-2 {
                let truth = dy * slope(pre);
                let allowed = tolerance(E::Element::DTYPE, truth, 0.0) + 1e-3;
                assert!((found - truth).abs() <= allowed, "{activation:?}, element {i}: {found}, expected {truth}");
            }
        }
    }
}

fn sampled_gradients<E: Engine>(engine: &E, dims: Dims) {
    let (out, inputs, tokens) = dims;
    let master = numbers(out * inputs, 13);
    let (x, dy) = (elements::<E::Element>(tokens * inputs, 14), elements::<E::Element>(tokens * out, 15));
    for weight_gradient in [WeightGradient::Mvue, WeightGradient::MvueApproximate] {
        let what = format!("{dims:?}, {weight_gradient:?}");
        let settings = SparseLinearSettings { weight_gradient, ..Default::default() };
        let layer = match engine.layer(dims, &master, settings) {
            Ok(layer) => layer,
            Err(error) => {
                eprintln!("skipped: {what}: {error}");
                continue;
            }
        };
        let expected = |seed: u64| {
            let estimator = weight_gradient.estimator(seed).unwrap();
            let estimate = twofour::layer::gradient_estimate(&dy, tokens, out, estimator).unwrap();
            product(&wide(&estimate.to_dense()), &wide(&x), (out, tokens, inputs))
        };
        assert_eq!(engine.seed(&layer), 0);
        engine.set_seed(&layer, 40);
        let run = |accumulate, dw: &mut Vec<f32>| {
            engine.weight_gradient(&layer, (&dy, &x), tokens, accumulate, dw);
        };
        let mut dw = vec![f32::NAN; out * inputs];
        run(Accumulate::Overwrite, &mut dw);
        close(&what, &dw, &expected(40));
        // Each call takes a seed of its own.
        let first = dw.clone();
        run(Accumulate::Add, &mut dw);
        assert_eq!(engine.seed(&layer), 42, "{what}");
        let both: Vec<(f64, f64)> =
            expected(40).iter().zip(expected(41)).map(|(a, b)| (a.0 + b.0, a.1 + b.1)).collect();
        close(&format!("{what}, accumulated"), &dw, &both);
        engine.set_seed(&layer, 40);
        run(Accumulate::Overwrite, &mut dw);
        assert_eq!(dw, first, "{what}: the same seed, the same bits");
    }
}
