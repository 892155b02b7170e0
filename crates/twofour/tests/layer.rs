//! The sparse layer over slices: the shared conformance tests, and what only the CPU has.

mod conformance;

use std::marker::PhantomData;

use conformance::{Dims, Engine, Forward, Outputs};
use half::{bf16, f16};
use twofour::{
    Arithmetic, Axis, Compressed, Error, Mask, MatrixRef, Pattern,
    int4::{Granularity, Int4},
    int8::Int8,
    kernel::{Activation, KernelElement},
    layer::{
        self, Accumulate, InputActivation, PackedLinear, PrunedGradient, SparseActivationLinear,
        SparseActivationSettings, SparseLinear, SparseLinearSettings,
    },
    select::{self, Transposable},
};

struct Cpu<T>(PhantomData<T>);

impl<T: KernelElement> Engine for Cpu<T> {
    type Element = T;
    type Layer = SparseLinear<T>;

    fn shapes(&self) -> Vec<Dims> {
        vec![(64, 128, 5), (128, 64, 100), (1, 1, 1), (7, 30, 3), (36, 52, 9), (20, 4, 2), (600, 12, 33)]
    }

    fn layer(&self, dims: Dims, master: &[f32], settings: SparseLinearSettings) -> Result<Self::Layer, String> {
        SparseLinear::new(MatrixRef::new(dims.0, dims.1, master).unwrap(), settings).map_err(|e| e.to_string())
    }

    fn remask(&self, layer: &mut Self::Layer, master: &[f32]) -> u64 {
        let master = MatrixRef::new(layer.out_features(), layer.in_features(), master).unwrap();
        let flips = layer.remask(master).unwrap();
        assert_eq!(layer.flips(), flips);
        flips
    }

    fn repack(&self, layer: &mut Self::Layer, master: &[f32]) {
        let master = MatrixRef::new(layer.out_features(), layer.in_features(), master).unwrap();
        layer.repack(master).unwrap();
    }

    fn set_mask(&self, layer: &mut Self::Layer, master: &[f32], mask: &Mask) -> Result<u64, String> {
        let master = MatrixRef::new(layer.out_features(), layer.in_features(), master).unwrap();
        layer.set_mask(master, mask.clone()).map_err(|e| e.to_string())
    }

    fn mask(&self, layer: &Self::Layer) -> Mask {
        layer.mask().clone()
    }

    fn packed(&self, layer: &Self::Layer) -> Compressed<T> {
        layer.packed()
    }

    fn packed_transpose(&self, layer: &Self::Layer) -> Option<Compressed<T>> {
        layer.packed_transpose()
    }

    fn scale(&self, layer: &Self::Layer) -> Option<f32> {
        layer.scale()
    }

    fn forward(&self, layer: &Self::Layer, x: &[T], forward: Forward<'_>) -> Outputs<T> {
        let Forward { tokens, bias, activation, stores_pre_activation } = forward;
        let mut y = vec![T::ZERO; tokens * layer.out_features()];
        let mut pre = stores_pre_activation.then(|| y.clone());
        let forward = layer::Forward { bias, activation, pre_activation: pre.as_deref_mut() };
        layer.forward(x, tokens, forward, &mut y).unwrap();
        Outputs { y, pre_activation: pre }
    }

    fn input_gradient(&self, layer: &Self::Layer, dy: &[T], tokens: usize) -> Vec<T> {
        let mut dx = vec![T::ZERO; tokens * layer.in_features()];
        layer.input_gradient(dy, tokens, &mut dx).unwrap();
        dx
    }

    fn weight_gradient(
        &self,
        layer: &Self::Layer,
        (dy, x): (&[T], &[T]),
        tokens: usize,
        accumulate: Accumulate,
        dw: &mut Vec<f32>,
    ) {
        layer.weight_gradient(dy, x, tokens, accumulate, dw).unwrap();
    }

    fn bias_gradient(&self, layer: &Self::Layer, dy: &[T], tokens: usize, accumulate: Accumulate, db: &mut Vec<f32>) {
        layer.bias_gradient(dy, tokens, accumulate, db).unwrap();
    }

    fn activation_gradient(&self, activation: Activation, pre: &[T], dy: &mut Vec<T>) {
        layer::activation_gradient(activation, pre, dy).unwrap();
    }

    fn seed(&self, layer: &Self::Layer) -> u64 {
        layer.seed()
    }

    fn set_seed(&self, layer: &Self::Layer, seed: u64) {
        layer.set_seed(seed);
    }
}

#[test]
fn the_layer_conforms_in_f32() {
    conformance::run(&Cpu::<f32>(PhantomData));
}

#[test]
fn the_layer_conforms_in_bf16() {
    conformance::run(&Cpu::<bf16>(PhantomData));
}

#[test]
fn the_layer_conforms_in_f16() {
    conformance::run(&Cpu::<f16>(PhantomData));
}

fn values<T: Arithmetic>(len: usize, seed: usize) -> Vec<T> {
    (0..len).map(|i| T::from_f32(((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0)).collect()
}

/// `a · b` for `[n, k]` and `[k, m]` in f64.
fn product(a: &[f32], b: &[f32], (n, k, m): (usize, usize, usize)) -> Vec<f64> {
    let term = |row: usize, at: usize, col: usize| f64::from(a[row * k + at]) * f64::from(b[at * m + col]);
    (0..n * m).map(|i| (0..k).map(|at| term(i / m, at, i % m)).sum()).collect()
}

fn close(found: &[f32], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len());
    for (i, (f, e)) in found.iter().zip(expected).enumerate() {
        assert!((f64::from(*f) - e).abs() <= tolerance * (1.0 + e.abs()), "element {i}: {f}, expected {e}");
    }
}

#[test]
fn a_sparse_activation_layer_is_the_dense_one_over_the_pruned_activation() {
    for (tokens, inputs, outputs) in [(8, 12, 5), (37, 20, 9), (4, 64, 130), (1, 3, 2), (0, 8, 4)] {
        for activation in [InputActivation::Identity, InputActivation::SquaredRelu] {
            for input_gradient in [PrunedGradient::Dense, PrunedGradient::Masked] {
                let settings = SparseActivationSettings { rule: Transposable::Optimal, activation, input_gradient };
                let layer = SparseActivationLinear::new(settings);
                let (x, w) = (values::<f32>(tokens * inputs, 1), values::<f32>(outputs * inputs, 2));
                let (bias, dy) = (values::<f32>(outputs, 3), values::<f32>(tokens * outputs, 4));
                let weight = MatrixRef::new(outputs, inputs, &w).unwrap();
                let function = |v: f32| match activation {
                    InputActivation::Identity => v,
                    InputActivation::SquaredRelu => v.max(0.0) * v.max(0.0),
                };
                let activated: Vec<f32> = x.iter().map(|v| function(*v)).collect();
                let matrix = MatrixRef::new(tokens, inputs, &activated).unwrap();
                let mask = select::transposable(matrix, settings.rule).unwrap();
                let pruned = mask.apply(matrix).unwrap();

                let packed = layer.pack(&x, tokens, inputs).unwrap();
                assert_eq!(packed.mask(), &mask);
                assert_eq!(packed.packed(), Compressed::from_masked(matrix, &mask).unwrap());
                assert_eq!(packed.packed_transpose().mask().rows(), inputs);

                let w_t = weight.transposed();
                let mut expected = product(&pruned, &w_t, (tokens, inputs, outputs));
                expected.iter_mut().enumerate().for_each(|(i, v)| *v += f64::from(bias[i % outputs]));
                let mut y = vec![f32::NAN; tokens * outputs];
                layer.forward(&packed, weight, Some(&bias), &mut y).unwrap();
                close(&y, &expected, 1e-5);

                let dy_t = MatrixRef::new(tokens, outputs, &dy).unwrap().transposed();
                let expected = product(&dy_t, &pruned, (outputs, tokens, inputs));
                let mut dw = vec![f32::NAN; outputs * inputs];
                layer.weight_gradient(&dy, &packed, Accumulate::Overwrite, &mut dw).unwrap();
                close(&dw, &expected, 1e-5);
                layer.weight_gradient(&dy, &packed, Accumulate::Add, &mut dw).unwrap();
                close(&dw, &expected.iter().map(|v| 2.0 * v).collect::<Vec<_>>(), 1e-5);

                let mut expected = product(&dy, &w, (tokens, outputs, inputs));
                for (i, v) in expected.iter_mut().enumerate() {
                    if activation == InputActivation::SquaredRelu {
                        *v *= 2.0 * f64::from(x[i].max(0.0));
                    }
                    if input_gradient == PrunedGradient::Masked && !mask.is_kept(i / inputs, i % inputs) {
                        *v = 0.0;
                    }
                }
                let mut dx = vec![f32::NAN; tokens * inputs];
                layer.input_gradient(&dy, weight, &x, &packed, &mut dx).unwrap();
                close(&dx, &expected, 1e-5);
                assert!(
                    layer.forward(&packed, MatrixRef::new(inputs, outputs, &w_t).unwrap(), None, &mut y).is_err()
                        || inputs == outputs
                );
            }
        }
    }
}

#[test]
fn packed_layers_of_every_type_are_the_dense_layer_of_their_values() {
    let (outputs, inputs, tokens) = (40, 130, 7);
    let dense = values::<f32>(outputs * inputs, 1);
    let matrix = MatrixRef::new(outputs, inputs, &dense).unwrap();
    let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
    let weight = Compressed::from_masked(matrix, &mask).unwrap();
    let (x, bias) = (values::<f32>(tokens * inputs, 2), values::<f32>(outputs, 3));
    let in_type = |weight: &Compressed<f32>| weight.to_dense().iter().map(|v| bf16::from_f32(*v)).collect::<Vec<_>>();
    let halves = in_type(&weight);
    let bf = Compressed::from_masked(MatrixRef::new(outputs, inputs, &halves).unwrap(), &mask).unwrap();
    let int4 = Int4::quantize(&weight, Granularity::Group).unwrap();
    let gelu = Activation::Gelu;
    let layers = [
        (PackedLinear::new(weight.clone(), Some(bias.clone()), gelu).unwrap(), 1e-5),
        (PackedLinear::new(bf, Some(bias.clone()), gelu).unwrap(), 2e-2),
        (PackedLinear::quantized(&weight, Some(bias.clone()), gelu).unwrap(), 3e-2),
    ];
    let exact = |weight: &Compressed<f32>| -> Vec<f64> {
        let dense = weight.to_dense();
        let t = MatrixRef::new(outputs, inputs, &dense).unwrap().transposed();
        let sums = product(&x, &t, (tokens, inputs, outputs));
        let biased = sums.iter().enumerate().map(|(i, v)| v + f64::from(bias[i % outputs]));
        biased.map(|v| f64::from(gelu.apply(v as f32))).collect()
    };
    for (layer, tolerance) in layers {
        let mut y = vec![f32::NAN; tokens * outputs];
        layer.forward(&x, tokens, &mut y).unwrap();
        close(&y, &exact(&weight), tolerance);
        let dy = values::<f32>(tokens * outputs, 4);
        let mut dx = vec![f32::NAN; tokens * inputs];
        let gradient = layer.input_gradient(&dy, tokens, &mut dx);
        if layer.dtype() == Some(twofour::DataType::I8) {
            assert!(matches!(gradient, Err(Error::UnsupportedDType { .. })));
        } else {
            gradient.unwrap();
            close(&dx, &product(&dy, &weight.to_dense(), (tokens, outputs, inputs)), tolerance * 2.0);
        }
        assert!(layer.forward(&x[1..], tokens, &mut y).is_err());
    }
    for granularity in Granularity::ALL {
        let four = Int4::quantize(&weight, granularity).unwrap();
        let eight = Int8::quantize(&weight, granularity).unwrap();
        for (exactly, layer) in [
            (four.dequantize(), PackedLinear::new_int4(&four, Some(bias.clone()), gelu).unwrap()),
            (eight.dequantize(), PackedLinear::new_int8(eight, Some(bias.clone()), gelu).unwrap()),
        ] {
            let mut y = vec![f32::NAN; tokens * outputs];
            layer.forward(&x, tokens, &mut y).unwrap();
            close(&y, &exact(&exactly), 3e-2);
            assert_eq!((layer.out_features(), layer.in_features()), (outputs, inputs));
        }
    }
    let layer = PackedLinear::new_int4(&int4, None, gelu).unwrap();
    assert!(layer.dtype().is_none() && layer.bytes() < outputs * inputs);
    assert!(layer.input_gradient(&[0.0f32; 40], 1, &mut [0.0; 130]).is_err());
    assert!(PackedLinear::new_int4(&int4, Some(vec![0.0; 3]), gelu).is_err());
    assert!(PackedLinear::new(weight, Some(vec![0.0; 3]), gelu).is_err());
}
