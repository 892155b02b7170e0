//! Layers for inference, in every data type.

use half::bf16;
use twofour::{
    Arithmetic as _, Axis, Compressed, F8E4M3, MatrixRef, Pattern,
    int4::{Granularity, Int4},
    kernel::{Activation, quantize},
    select,
};
use twofour_cuda::{DataType, Error, layer::PackedLinear};

use crate::{
    cuda::Cuda,
    dense::{close, flipped, numbers, product, wide},
    support::bench,
};

#[test]
fn packed_layers_of_every_type_are_the_dense_layer_of_their_values() {
    let Some(bench) = bench() else { return };
    let engine = Cuda::<bf16>::new(&bench.device);
    let (context, dtype, gelu) = (&engine.context, DataType::BF16, Activation::Gelu);
    for (outputs, inputs) in [(64, 128), (40, 130), (7, 30), (1, 1)] {
        let dense = numbers::<f32>(outputs * inputs, 1);
        let matrix = MatrixRef::new(outputs, inputs, &dense).unwrap();
        let mask = select::magnitude(matrix, Pattern::TWO_FOUR, Axis::Row).unwrap();
        let weight = Compressed::from_masked(matrix, &mask).unwrap();
        let bias: Vec<f32> = numbers::<bf16>(outputs, 3).iter().map(|b| b.to_f32()).collect();
        let halves: Vec<bf16> = dense.iter().map(|v| bf16::from_f32(*v)).collect();
        let halves = Compressed::from_masked(MatrixRef::new(outputs, inputs, &halves).unwrap(), &mask).unwrap();
        let eighth = |v: &f32| F8E4M3::from_f32(v * 448.0);
        let eight: Vec<F8E4M3> = dense.iter().map(eighth).collect();
        let eight = Compressed::from_masked(MatrixRef::new(outputs, inputs, &eight).unwrap(), &mask).unwrap();
        let scales = vec![1.0 / 448.0; outputs];
        let (integers, row_scales) = quantize(MatrixRef::new(outputs, inputs, &weight.to_dense()).unwrap()).unwrap();
        // The numbers that a layer holds, and those that it makes of an input.
        let scaled = |values: Vec<f64>, scale: &dyn Fn(usize) -> f32| -> Vec<f64> {
            values.into_iter().enumerate().map(|(i, v)| v * f64::from(scale(i / inputs))).collect()
        };
        let as_it_is = |x: &[bf16]| wide(x);
        let by_token = |x: &[bf16]| {
            let values: Vec<f32> = x.iter().map(|v| v.to_f32()).collect();
            let (integers, scales) = quantize(MatrixRef::new(x.len() / inputs, inputs, &values).unwrap()).unwrap();
            scaled(wide(&integers), &|token| scales[token])
        };
        let by_tensor = |x: &[bf16]| {
            let inverse = 448.0 / x.iter().fold(0f32, |most, v| most.max(v.to_f32().abs()));
            let rounded: Vec<F8E4M3> = x.iter().map(|v| F8E4M3::from_f32(v.to_f32() * inverse)).collect();
            wide(&rounded).into_iter().map(|v| v / f64::from(inverse)).collect::<Vec<_>>()
        };
        type Quantize<'a> = &'a dyn Fn(&[bf16]) -> Vec<f64>;
        let mut layers: Vec<(&str, PackedLinear, Vec<f64>, Quantize<'_>)> = vec![
            (
                "bf16",
                PackedLinear::new(context, &halves, Some(&bias), gelu).unwrap(),
                wide(&halves.to_dense()),
                &as_it_is,
            ),
            (
                "i8",
                PackedLinear::quantized(context, &weight, Some(&bias), gelu, dtype).unwrap(),
                scaled(wide(&integers), &|row| row_scales[row]),
                &by_token,
            ),
            (
                "e4m3",
                PackedLinear::scaled(context, &eight, &scales, Some(&bias), gelu, dtype).unwrap(),
                scaled(wide(&eight.to_dense()), &|row| scales[row]),
                &by_tensor,
            ),
        ];
        assert_eq!(layers[0].1.to_compressed::<bf16>().unwrap(), halves);
        let int4 = Int4::quantize(&weight, Granularity::Group).unwrap();
        let layer = PackedLinear::int4(context, &int4, Some(&bias), gelu, dtype).unwrap();
        layers.push(("int4", layer, wide(&int4.dequantize().to_dense()), &as_it_is));
        for tokens in [1, 7, 130] {
            let x = numbers::<bf16>(tokens * inputs, 2);
            let x_there = engine.up(&x);
            for (name, layer, weight, quantize) in &layers {
                let what = format!("{name} [{outputs}, {inputs}], {tokens} tokens");
                let mut sums = product(&quantize(&x), &flipped(weight, outputs, inputs), (tokens, inputs, outputs));
                for (i, v) in sums.iter_mut().enumerate() {
                    *v = f64::from(gelu.apply((*v + f64::from(bias[i % outputs])) as f32));
                }
                let mut y = engine.zeros(tokens * outputs);
                layer.forward(x_there.as_slice(), tokens, y.as_slice_mut()).unwrap();
                close(&what, &y.to_host::<bf16>().unwrap(), &sums, 5e-3);
                let dy = numbers::<bf16>(tokens * outputs, 4);
                let mut dx = engine.zeros(tokens * inputs);
                let gradient = layer.input_gradient(engine.up(&dy).as_slice(), tokens, dx.as_slice_mut());
                if *name == "bf16" {
                    gradient.unwrap();
                    let sums = product(&wide(&dy), weight, (tokens, outputs, inputs));
                    close(&what, &dx.to_host::<bf16>().unwrap(), &sums, 1e-2);
                } else {
                    assert!(matches!(gradient, Err(Error::DataType { .. })));
                }
            }
        }
        let error = PackedLinear::new(context, &halves, Some(&bias[1..]), gelu);
        assert!(matches!(error, Err(Error::Length { what: "the bias", .. })));
    }
}
