//! Training with 8-bit floats.

use half::bf16;
use twofour::{
    Arithmetic as _, Compressed, Element as _, F8E4M3, MatrixRef,
    kernel::Activation,
    select::{self, Transposable},
};
use twofour_cuda::{
    DataType,
    layer::{self, Accumulate, MaskRule, SparseLinear, SparseLinearSettings},
};

use crate::{
    cuda::Cuda,
    dense::{close, flipped, numbers, product, wide},
    support::bench,
};

/// The products of 8-bit floats are those of f64 with the numbers that the CPU rounds to.
#[test]
fn a_layer_of_8_bit_floats_is_the_dense_one_of_its_rounded_numbers() {
    let Some(bench) = bench() else { return };
    if bench.device.architecture().features().float8 == twofour_cuda::architecture::Float8::Missing {
        eprintln!("skipped: no 8-bit floats");
        return;
    }
    let engine = Cuda::<bf16>::new(&bench.device);
    let rule = MaskRule::Transposable(Transposable::GreedyAbs);
    for (out, inputs, tokens) in [(128, 256, 72), (64, 128, 5), (36, 52, 9), (7, 30, 3), (1, 1, 1)] {
        let what = format!("{out}, {inputs}, {tokens}");
        let settings = SparseLinearSettings { rule, ..Default::default() };
        let mut master = numbers::<f32>(out * inputs, 1);
        let (shape, dtype, precision) = ((out, inputs), DataType::BF16, layer::Precision::Float8);
        let new = |master: &[f32], settings| {
            SparseLinear::with_precision(
                &engine.context,
                engine.up(master).as_slice(),
                shape,
                dtype,
                precision,
                settings,
            )
        };
        let mut layer = new(&master, settings).unwrap();
        // The scale follows the weight.
        master.iter_mut().for_each(|v| *v *= 0.01);
        layer.remask(engine.up(&master).as_slice()).unwrap();
        layer.check().unwrap();
        let largest = |values: &[f32]| values.iter().fold(0f32, |most, v| most.max(v.abs()));
        let inverse = 448.0 / largest(&master);
        let rounded: Vec<F8E4M3> = master.iter().map(|v| F8E4M3::from_f32(v * inverse)).collect();
        let mask =
            select::transposable(MatrixRef::new(out, inputs, &master).unwrap(), Transposable::GreedyAbs).unwrap();
        let packed = Compressed::from_masked(MatrixRef::new(out, inputs, &rounded).unwrap(), &mask).unwrap();
        assert_eq!(layer.packed::<F8E4M3>().unwrap(), packed, "{what}");
        assert_eq!(layer.mask().unwrap(), mask, "{what}");
        let weight: Vec<f64> = wide(&packed.to_dense()).iter().map(|v| v / f64::from(inverse)).collect();

        let (x, dy) = (numbers::<bf16>(tokens * inputs, 2), numbers::<bf16>(tokens * out, 3));
        let bias = numbers::<bf16>(out, 4);
        let rounded = |values: &[bf16], most: f32, round: fn(f32) -> f32| -> Vec<f64> {
            let values: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
            let inverse = most / largest(&values);
            values.iter().map(|v| f64::from(round(v * inverse)) / f64::from(inverse)).collect()
        };
        let x_rounded = rounded(&x, 448.0, |v| F8E4M3::from_f32(v).to_f32());
        let dy_rounded = rounded(&dy, 57344.0, |v| twofour::F8E5M2::from_f32(v).to_f32());
        let mut y = engine.zeros(tokens * out);
        let bias_there = engine.up(&bias);
        let forward =
            layer::Forward { bias: Some(bias_there.as_slice()), activation: Activation::Relu, pre_activation: None };
        layer.forward(engine.up(&x).as_slice(), tokens, forward, y.as_slice_mut()).unwrap();
        let mut sums = product(&x_rounded, &flipped(&weight, out, inputs), (tokens, inputs, out));
        sums.iter_mut().enumerate().for_each(|(i, v)| *v = (*v + f64::from(bias[i % out].to_f32())).max(0.0));
        close(&format!("{what}, forward"), &y.to_host::<bf16>().unwrap(), &sums, 5e-3);
        let mut dx = engine.zeros(tokens * inputs);
        layer.input_gradient(engine.up(&dy).as_slice(), tokens, dx.as_slice_mut()).unwrap();
        let sums = product(&dy_rounded, &weight, (tokens, out, inputs));
        close(&format!("{what}, input gradient"), &dx.to_host::<bf16>().unwrap(), &sums, 5e-3);
        let mut dw = engine.up(&vec![f32::NAN; out * inputs]);
        let (dy_there, x_there) = (engine.up(&dy), engine.up(&x));
        let accumulate = Accumulate::Overwrite;
        layer.weight_gradient(dy_there.as_slice(), x_there.as_slice(), tokens, accumulate, dw.as_slice_mut()).unwrap();
        let sums = product(&flipped(&wide(&dy), tokens, out), &wide(&x), (out, tokens, inputs));
        close(&format!("{what}, weight gradient"), &dw.to_host::<f32>().unwrap(), &sums, 1e-5);
    }
}

/// Under masks along rows the forward pass is in 8-bit floats, of the weight rounded to the activations' type, and
/// gradients are those without them.
#[test]
fn a_mask_along_rows_has_forward_passes_in_8_bit_floats() {
    let Some(bench) = bench() else { return };
    if bench.device.architecture().features().float8 == twofour_cuda::architecture::Float8::Missing {
        eprintln!("skipped: no 8-bit floats");
        return;
    }
    let engine = Cuda::<bf16>::new(&bench.device);
    for rule in [MaskRule::Magnitude, MaskRule::SoftThreshold] {
        for (out, inputs, tokens) in [(128, 256, 72), (36, 52, 9), (7, 30, 3), (1, 1, 1)] {
            let what = format!("{rule:?}, {out}, {inputs}, {tokens}");
            let settings = SparseLinearSettings { rule, ..Default::default() };
            let mut master = numbers::<f32>(out * inputs, 1);
            let (shape, dtype) = ((out, inputs), DataType::BF16);
            let new = |precision| {
                let master = engine.up(&master);
                SparseLinear::with_precision(&engine.context, master.as_slice(), shape, dtype, precision, settings)
            };
            let mut layer = new(layer::Precision::Float8).unwrap();
            let mut plain = new(layer::Precision::Activations).unwrap();
            // The scale follows the weight.
            master.iter_mut().for_each(|v| *v *= 0.01);
            for layer in [&mut layer, &mut plain] {
                layer.remask(engine.up(&master).as_slice()).unwrap();
                layer.check().unwrap();
            }
            assert_eq!(layer.mask().unwrap(), plain.mask().unwrap(), "{what}");
            let largest = |values: &[f32]| values.iter().fold(0f32, |most, v| most.max(v.abs()));
            let rounded = |values: &[bf16]| -> Vec<f64> {
                let values: Vec<f32> = values.iter().map(|v| v.to_f32()).collect();
                let inverse = 448.0 / largest(&values).max(f32::MIN_POSITIVE);
                values.iter().map(|v| f64::from(F8E4M3::from_f32(v * inverse).to_f32()) / f64::from(inverse)).collect()
            };
            let weight = rounded(&plain.packed::<bf16>().unwrap().to_dense());
            let (x, dy) = (numbers::<bf16>(tokens * inputs, 2), numbers::<bf16>(tokens * out, 3));
            let (x_there, dy_there) = (engine.up(&x), engine.up(&dy));
            let mut y = engine.zeros(tokens * out);
            layer.forward(x_there.as_slice(), tokens, layer::Forward::default(), y.as_slice_mut()).unwrap();
            let sums = product(&rounded(&x), &flipped(&weight, out, inputs), (tokens, inputs, out));
            close(&format!("{what}, forward"), &y.to_host::<bf16>().unwrap(), &sums, 5e-3);
            let gradients = |layer: &SparseLinear| {
                let mut dx = engine.zeros(tokens * inputs);
                layer.input_gradient(dy_there.as_slice(), tokens, dx.as_slice_mut()).unwrap();
                let mut dw = engine.up(&vec![f32::NAN; out * inputs]);
                let (dy, x, accumulate) = (dy_there.as_slice(), x_there.as_slice(), Accumulate::Overwrite);
                layer.weight_gradient(dy, x, tokens, accumulate, dw.as_slice_mut()).unwrap();
                (dx.to_host::<bf16>().unwrap(), dw.to_host::<f32>().unwrap())
            };
            assert!(gradients(&layer) == gradients(&plain), "{what}");
            // A weight of zeros has a scale, too.
            layer.repack(engine.up(&vec![0f32; out * inputs]).as_slice()).unwrap();
            layer.forward(x_there.as_slice(), tokens, layer::Forward::default(), y.as_slice_mut()).unwrap();
            assert!(y.to_host::<bf16>().unwrap().iter().all(|v| v.to_f32() == 0.0), "{what}");
        }
    }
}
