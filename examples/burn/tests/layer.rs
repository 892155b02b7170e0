//! The 2:4 layer against burn's own with the same weight.

use burn::module::{Lora, Module, Param, ParamGroup, Quantizer};
use burn::nn::{Linear, LinearConfig};
use burn::tensor::quantization::{Calibration, QuantValue};
use burn::tensor::{DType, Device, Distribution, Int, Tensor, Tolerance};
use twofour_burn::{AnyLinear, Error, SparseLinear};

fn device() -> Device {
    Device::flex()
}

/// A layer that keeps the two largest magnitudes of each group of four inputs, computed here.
fn two_four(d_input: usize, d_output: usize, bias: bool) -> Linear {
    let dense = LinearConfig::new(d_input, d_output).with_bias(bias).init(&device());
    let weight: Vec<f32> = dense.weight.val().transpose().into_data().iter::<f32>().collect();
    let kept: Vec<f32> = weight
        .chunks(d_input)
        .flat_map(|row| row.chunks(4))
        .flat_map(|group| {
            let above = |value: f32| group.iter().filter(|other| other.abs() > value.abs()).count();
            group.iter().map(move |value| if above(*value) < 2 { *value } else { 0.0 }).collect::<Vec<_>>()
        })
        .collect();
    let weight = Tensor::<1>::from_floats(kept.as_slice(), &device()).reshape([d_output, d_input]).transpose();
    Linear { weight: Param::from_tensor(weight), bias: dense.bias }
}

fn random<const D: usize>(shape: [usize; D]) -> Tensor<D> {
    Tensor::random(shape, Distribution::Normal(0.0, 1.0), &device())
}

fn expect_close<const D: usize>(found: Tensor<D>, expected: Tensor<D>, tolerance: f32) {
    let (found, expected) = (found.cast(DType::F32).into_data(), expected.cast(DType::F32).into_data());
    found.assert_approx_eq::<f32>(&expected, Tolerance::absolute(tolerance).set_relative(tolerance));
}

#[test]
fn outputs_are_those_of_burns_layer_with_zeros() {
    for (d_input, d_output, bias) in [(64, 32, true), (30, 7, false), (1, 1, true), (129, 65, true)] {
        let dense = two_four(d_input, d_output, bias);
        for layer in [SparseLinear::from_linear(&dense).unwrap(), SparseLinear::pruned(&dense).unwrap()] {
            assert_eq!(layer.dims(), [d_input, d_output]);
            let x = random([2, 5, d_input]);
            expect_close(layer.forward(x.clone()).unwrap(), dense.forward(x), 1e-4);
            let x = random([d_input]);
            expect_close(layer.forward(x.clone()).unwrap(), dense.forward(x), 1e-4);
            assert_eq!(layer.forward(random([0, d_input])).unwrap().dims(), [0, d_output]);
            expect_close(layer.to_linear().unwrap().weight.val(), dense.weight.val(), 0.0);
        }
    }
    // A dense weight is pruned to the same.
    let full = LinearConfig::new(64, 32).init(&device());
    assert!(matches!(SparseLinear::from_linear(&full), Err(Error::Weight(_))));
    let pruned = SparseLinear::pruned(&full).unwrap();
    let zeros = pruned.to_linear().unwrap().weight.val().equal_elem(0.0).int().sum().into_scalar::<i64>();
    assert_eq!(zeros, 64 * 32 / 2);
    // Of 32 bits 17 are left.
    assert_eq!(pruned.packed().unwrap().0, 64 * 32 * 4 * 17 / 32);
}

#[test]
fn halves_stay_halves() {
    for (dtype, tolerance) in [(DType::F16, 0.02), (DType::BF16, 0.1)] {
        let dense = two_four(64, 32, true);
        let cast = Linear {
            weight: Param::from_tensor(dense.weight.val().cast(dtype)),
            bias: dense.bias.map(|bias| Param::from_tensor(bias.val().cast(dtype))),
        };
        let layer = SparseLinear::from_linear(&cast).unwrap();
        assert_eq!(layer.packed().unwrap().0, 64 * 32 * 2 * 9 / 16);
        let x = random([3, 64]).cast(dtype);
        let y = layer.forward(x.clone()).unwrap();
        assert_eq!(y.dtype(), dtype);
        expect_close(y, cast.forward(x), tolerance);
    }
}

#[derive(Module, Debug)]
struct Model {
    up: AnyLinear,
    down: AnyLinear,
}

impl Model {
    fn new(d_input: usize, width: usize) -> Self {
        let dense = |a, b| AnyLinear::Dense(LinearConfig::new(a, b).init(&device()));
        Model { up: dense(d_input, width), down: dense(width, d_input) }
    }

    fn sparsify(self) -> Self {
        Model { up: self.up.sparsify().unwrap(), down: self.down.sparsify().unwrap() }
    }

    fn forward(&self, x: Tensor<2>) -> Tensor<2> {
        self.down.forward(burn::tensor::activation::relu(self.up.forward(x).unwrap())).unwrap()
    }
}

#[test]
fn records_hold_the_canonical_form_and_load_into_another_model() {
    let model = Model::new(30, 48).sparsify();
    let x = random([4, 30]);
    let expected = model.forward(x.clone());
    let path = std::env::temp_dir().join(format!("twofour-burn-{}.bpk", std::process::id()));
    model.clone().save_file(&path).unwrap();
    let loaded = Model::new(30, 48).sparsify().try_load_file(&path);
    let wrong = Model::new(30, 44).sparsify().try_load_file(&path);
    let dense = Model::new(30, 48).try_load_file(&path);
    let loaded = loaded.unwrap();
    loaded.forward(x).into_data().assert_eq(&expected.into_data(), true);
    // burn reads the file lazily: it is removed after the last load.
    std::fs::remove_file(&path).unwrap();
    assert!(wrong.is_err() && dense.is_err());
    // Values, metadata and bias of each; burn counts parameters that are floats.
    assert_eq!(loaded.clone().into_record().len(), 6);
    assert_eq!(loaded.num_params(), 48 * 16 + 48 + 30 * 24 + 30);
    let empty = SparseLinear::zeros(30, 48, true, &device()).unwrap();
    let AnyLinear::Sparse(up) = &loaded.up else { panic!("the layer is dense") };
    let again = empty.try_load_record(up.clone().into_record()).unwrap();
    let x = random([2, 30]);
    again.forward(x.clone()).unwrap().into_data().assert_eq(&up.forward(x).unwrap().into_data(), true);
}

/// Sets every integer of a module.
struct Fill(i64);

impl burn::module::ModuleMapper for Fill {
    fn map_int<const D: usize>(&mut self, param: Param<Tensor<D, Int>>) -> Param<Tensor<D, Int>> {
        param.map(|tensor| tensor.full_like(self.0))
    }
}

#[test]
fn what_is_no_two_four_weight_is_refused_when_it_is_multiplied() {
    let layer = SparseLinear::from_linear(&two_four(32, 8, true)).unwrap();
    let refusal = |layer: &SparseLinear, x: Tensor<2>| layer.forward(x).unwrap_err().to_string();
    assert_eq!(refusal(&layer, random([2, 31])), "the input has shape [2, 31], and [2, 32] is required");
    assert!(refusal(&layer, random([2, 32]).cast(DType::F64)).contains("the input is F64"));
    // A record with metadata that is not 2:4: code 15 keeps all four.
    let broken = layer.clone().map(&mut Fill(-1));
    assert!(matches!(broken.forward(random([2, 32])), Err(Error::Weight(_))), "{broken:?}");
    // It is kept as it is, and can be mended.
    assert_eq!(broken.clone().into_record().len(), 3);
    let mended = broken.load_record(layer.clone().into_record());
    mended.forward(random([2, 32])).unwrap();
    // Adapters would be lost.
    let adapted = layer.clone().apply_lora(Lora::new(2, 1.0));
    assert!(matches!(adapted.forward(random([2, 32])), Err(Error::Adapted { .. })));
    // So would scales; a bias in integers is taken.
    let scheme = device().settings().quantization.scheme.with_value(QuantValue::Q8S);
    let mut quantizer = Quantizer::new(Calibration::MinMax, scheme);
    let quantized = layer.clone().quantize_weights(&mut quantizer);
    assert!(matches!(quantized.forward(random([2, 32])), Err(Error::DType { what: "the weight", .. })));
    let x = random([2, 32]);
    let expected = layer.forward(x.clone()).unwrap();
    let bias = layer.clone().quantize_weights_group(&mut quantizer, ParamGroup::from_path("bias"));
    expect_close(bias.forward(x).unwrap(), expected, 0.02);
    let mut bad = two_four(32, 8, false);
    bad.weight = bad.weight.map(|weight| weight.slice_fill([5..6, 3..4], f32::NAN));
    for found in [SparseLinear::pruned(&bad), SparseLinear::from_linear(&bad)] {
        let message = found.unwrap_err().to_string();
        assert!(message.contains("row 3") && message.contains("column 5"), "{message}");
    }
    let long = Tensor::<1>::zeros([9], &device());
    let weight = twofour::Compressed::from_dense(twofour::MatrixRef::new(1, 4, &[1f32, 0.0, 0.0, 2.0]).unwrap());
    let error = SparseLinear::new(weight.unwrap(), Some(long), &device()).unwrap_err();
    assert_eq!(error.to_string(), "the bias has shape [9], and [1] is required");
}

#[test]
fn gradients_are_those_of_burns_layer() {
    let device = device().autodiff();
    let dense = two_four(32, 8, true).train();
    let layer = SparseLinear::from_linear(&dense).unwrap();
    let gradient = |forward: &dyn Fn(Tensor<2>) -> Tensor<2>, bias: &Param<Tensor<1>>| {
        let x = Tensor::<2>::ones([3, 32], &device).require_grad();
        let gradients = forward(x.clone()).powi_scalar(2).sum().backward();
        (x.grad(&gradients).unwrap(), bias.val().grad(&gradients).unwrap())
    };
    let found = gradient(&|x| layer.forward(x).unwrap(), layer.bias().unwrap());
    let expected = gradient(&|x| dense.forward(x), dense.bias.as_ref().unwrap());
    expect_close(found.0, expected.0, 1e-4);
    expect_close(found.1, expected.1, 1e-4);
    // A batch without autodiff, as burn's layer takes it.
    let x = random([3, 32]);
    let gradient = |y: Tensor<2>, bias: &Param<Tensor<1>>| bias.val().grad(&y.powi_scalar(2).sum().backward()).unwrap();
    let found = gradient(layer.forward(x.clone()).unwrap(), layer.bias().unwrap());
    let expected = gradient(dense.forward(x), dense.bias.as_ref().unwrap());
    expect_close(found, expected, 1e-4);
    // Frozen: a mapper that asks for gradients gets none, and the layer computes the same.
    let trained = layer.clone().train().set_require_grad(true).valid();
    let x = random([2, 32]);
    expect_close(trained.forward(x.clone()).unwrap(), layer.valid().forward(x).unwrap(), 1e-6);
}
