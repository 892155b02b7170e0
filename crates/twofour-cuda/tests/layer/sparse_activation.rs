//! Layers with a 2:4 activation.

use half::bf16;
use twofour::select::Transposable;
use twofour_cuda::{
    DataType,
    layer::{
        Accumulate, InputActivation, PackedActivation, PrunedGradient, SparseActivationLinear, SparseActivationSettings,
    },
};

use crate::{
    cuda::Cuda,
    dense::{close, flipped, numbers, product, wide},
    support::bench,
};

#[test]
fn a_sparse_activation_layer_is_the_dense_one_over_the_pruned_activation() {
    let Some(bench) = bench() else { return };
    let engine = Cuda::<bf16>::new(&bench.device);
    let context = &engine.context;
    for (tokens, inputs, outputs) in [(64, 128, 192), (200, 64, 72), (37, 20, 9), (4, 64, 130), (1, 3, 2), (0, 8, 4)] {
        for activation in [InputActivation::Identity, InputActivation::SquaredRelu] {
            for input_gradient in [PrunedGradient::Dense, PrunedGradient::Masked] {
                let what = format!("{tokens}, {inputs}, {outputs}, {activation:?}, {input_gradient:?}");
                let settings = SparseActivationSettings { rule: Transposable::Optimal, activation, input_gradient };
                let layer = SparseActivationLinear::new(context, DataType::BF16, settings).unwrap();
                let (x, w) = (numbers::<bf16>(tokens * inputs, 1), numbers::<bf16>(outputs * inputs, 2));
                let (bias, dy) = (numbers::<bf16>(outputs, 3), numbers::<bf16>(tokens * outputs, 4));
                let (x_there, w_there) = (engine.up(&x), engine.up(&w));
                let (bias_there, dy_there) = (engine.up(&bias), engine.up(&dy));
                let mut packed = PackedActivation::new(context, DataType::BF16, tokens, inputs).unwrap();
                layer.pack(x_there.as_slice(), &mut packed).unwrap();
                packed.check().unwrap();
                // The CPU's layer packs the same.
                let cpu = twofour::layer::SparseActivationLinear::new(settings);
                let expected = cpu.pack(&x, tokens, inputs).unwrap();
                assert_eq!(&packed.mask().unwrap(), expected.mask(), "{what}");
                assert_eq!(packed.packed::<bf16>().unwrap(), expected.packed(), "{what}");
                assert_eq!(packed.packed_transpose::<bf16>().unwrap(), expected.packed_transpose(), "{what}");

                let pruned = wide(&expected.packed().to_dense());
                let mut y = engine.zeros(tokens * outputs);
                layer
                    .forward(&packed, w_there.as_slice(), outputs, Some(bias_there.as_slice()), y.as_slice_mut())
                    .unwrap();
                let mut sums = product(&pruned, &flipped(&wide(&w), outputs, inputs), (tokens, inputs, outputs));
                sums.iter_mut().enumerate().for_each(|(i, v)| *v += f64::from(bias[i % outputs].to_f32()));
                close(&format!("{what}, forward"), &y.to_host::<bf16>().unwrap(), &sums, 5e-3);

                let sums = product(&flipped(&wide(&dy), tokens, outputs), &pruned, (outputs, tokens, inputs));
                let mut dw = engine.up(&vec![f32::NAN; outputs * inputs]);
                layer
                    .weight_gradient(dy_there.as_slice(), &packed, outputs, Accumulate::Overwrite, dw.as_slice_mut())
                    .unwrap();
                close(&format!("{what}, weight gradient"), &dw.to_host::<f32>().unwrap(), &sums, 1e-5);
                layer
                    .weight_gradient(dy_there.as_slice(), &packed, outputs, Accumulate::Add, dw.as_slice_mut())
                    .unwrap();
                let twice: Vec<f64> = sums.iter().map(|v| 2.0 * v).collect();
                close(&format!("{what}, accumulated"), &dw.to_host::<f32>().unwrap(), &twice, 1e-5);

                let mut sums = product(&wide(&dy), &wide(&w), (tokens, outputs, inputs));
                for (i, v) in sums.iter_mut().enumerate() {
                    if activation == InputActivation::SquaredRelu {
                        *v *= 2.0 * f64::from(x[i].to_f32().max(0.0));
                    }
                    if input_gradient == PrunedGradient::Masked && !expected.mask().is_kept(i / inputs, i % inputs) {
                        *v = 0.0;
                    }
                }
                let (mut dx, weight) = (engine.zeros(tokens * inputs), (w_there.as_slice(), outputs));
                layer
                    .input_gradient(dy_there.as_slice(), weight, x_there.as_slice(), &packed, dx.as_slice_mut())
                    .unwrap();
                close(&format!("{what}, input gradient"), &dx.to_host::<bf16>().unwrap(), &sums, 1e-2);
            }
        }
    }
    let layer = SparseActivationLinear::new(context, DataType::BF16, SparseActivationSettings::default()).unwrap();
    let mut packed = PackedActivation::new(context, DataType::BF16, 4, 4).unwrap();
    let mut x = vec![bf16::ONE; 16];
    x[6] = bf16::NAN;
    layer.pack(engine.up(&x).as_slice(), &mut packed).unwrap();
    assert!(packed.check().unwrap_err().to_string().contains("row 1, column 2"));
}
