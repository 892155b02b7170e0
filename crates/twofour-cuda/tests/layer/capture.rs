//! Calls captured in a graph.

use half::bf16;
use twofour::{kernel::Activation, select::Transposable};
use twofour_cuda::{
    DataType, Error,
    layer::{self, Accumulate, DeviceBuffer, MaskRule, SparseLinear, SparseLinearSettings, WeightGradient},
};

use crate::{
    cuda::Cuda,
    dense::numbers,
    support::{self, bench},
};

/// A step of training as one graph: replays give the bits that the calls themselves give, and draw new seeds.
#[test]
fn a_training_step_is_captured_in_a_graph() {
    let Some(bench) = bench() else { return };
    for rule in [MaskRule::Magnitude, MaskRule::Transposable(Transposable::GreedyAbs), MaskRule::SoftThreshold] {
        for weight_gradient in [WeightGradient::Dense, WeightGradient::Masked, WeightGradient::Mvue] {
            let engine = Cuda::<bf16>::new(&bench.device);
            let (out, inputs, tokens) = (128, 192, 72);
            let settings = SparseLinearSettings { rule, weight_gradient, ..Default::default() };
            let (mut master, x, dy) = (
                engine.up(&numbers::<f32>(out * inputs, 1)),
                engine.up(&numbers::<bf16>(tokens * inputs, 2)),
                engine.up(&numbers::<bf16>(tokens * out, 3)),
            );
            let bias = engine.up(&numbers::<bf16>(out, 4));
            let new = || SparseLinear::new(&engine.context, master.as_slice(), (out, inputs), DataType::BF16, settings);
            let (mut layer, mut plain) = (new().unwrap(), new().unwrap());
            let (mut y, mut dx, mut dw, mut db) = (
                engine.zeros(tokens * out),
                engine.zeros(tokens * inputs),
                engine.zeros(out * inputs),
                engine.zeros(out),
            );
            let step = |layer: &mut SparseLinear,
                        master: &DeviceBuffer,
                        (y, dx, dw, db): (
                &mut DeviceBuffer,
                &mut DeviceBuffer,
                &mut DeviceBuffer,
                &mut DeviceBuffer,
            )| {
                layer.remask(master.as_slice())?;
                let (bias, activation) = (Some(bias.as_slice()), Activation::Gelu);
                let forward = layer::Forward { bias, activation, pre_activation: None };
                layer.forward(x.as_slice(), tokens, forward, y.as_slice_mut())?;
                layer.input_gradient(dy.as_slice(), tokens, dx.as_slice_mut())?;
                for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
                    layer.weight_gradient(dy.as_slice(), x.as_slice(), tokens, accumulate, dw.as_slice_mut())?;
                }
                layer.bias_gradient(dy.as_slice(), tokens, Accumulate::Overwrite, db.as_slice_mut())
            };
            layer.prepare(tokens, DataType::BF16).unwrap();
            engine.context.synchronize().unwrap();
            let graph = support::captured_on(engine.context.stream(), || {
                step(&mut layer, &master, (&mut y, &mut dx, &mut dw, &mut db)).unwrap();
            })
            .unwrap();
            let mut seen = Vec::new();
            for replay in 0..3 {
                master.write(&numbers::<f32>(out * inputs, 10 + replay)).unwrap();
                graph.launch().unwrap();
                let bits = |buffers: [&DeviceBuffer; 4]| buffers.map(|b| b.to_host::<bf16>().unwrap());
                let found = bits([&y, &dx, &dw, &db]);
                let flips = layer.flips().unwrap();
                step(&mut plain, &master, (&mut y, &mut dx, &mut dw, &mut db)).unwrap();
                let what = format!("{rule:?}, {weight_gradient:?}, replay {replay}");
                assert!(found == bits([&y, &dx, &dw, &db]), "{what}");
                assert_eq!((flips, layer.mask().unwrap()), (plain.flips().unwrap(), plain.mask().unwrap()), "{what}");
                assert_eq!(layer.seed().unwrap(), plain.seed().unwrap(), "{what}");
                seen.push(found[2].clone());
            }
            assert!(seen[0] != seen[1] || weight_gradient == WeightGradient::Dense, "{rule:?}, {weight_gradient:?}");
        }
    }
}

#[test]
fn what_a_graph_cannot_hold_is_refused_with_what_to_do() {
    let Some(bench) = bench() else { return };
    let engine = Cuda::<bf16>::new(&bench.device);
    let (out, inputs, tokens) = (64, 64, 16);
    let master = engine.up(&numbers::<f32>(out * inputs, 1));
    let settings = SparseLinearSettings::default();
    let layer = SparseLinear::new(&engine.context, master.as_slice(), (out, inputs), DataType::BF16, settings).unwrap();
    let (x, mut y) = (engine.up(&numbers::<bf16>(tokens * inputs, 2)), engine.zeros(tokens * out));
    engine.context.synchronize().unwrap();
    let mut error = None;
    support::captured_on(engine.context.stream(), || {
        error = layer.forward(x.as_slice(), tokens, layer::Forward::default(), y.as_slice_mut()).err();
    });
    let error = error.unwrap();
    assert!(matches!(error, Error::Capturing { .. }), "{error}");
    assert!(error.to_string().contains("prepare"), "{error}");
}
