//! On a device: the sparse layer over device memory passes the conformance tests that the one over slices passes, and can be captured in a graph.
//! Without a device the tests skip.

#[path = "../../twofour/tests/layer/conformance.rs"]
mod conformance;
mod support;

use std::marker::PhantomData;

use conformance::{Dims, Engine, Forward, Outputs};
use half::{bf16, f16};
use support::bench;
use twofour::{
    Arithmetic, Axis, Compressed, Element as _, F8E4M3, Mask, MatrixRef, Pattern,
    int4::{Granularity, Int4},
    kernel::{Activation, quantize},
    select::{self, Transposable},
};
use twofour_cuda::{
    DataType, Device, Error,
    layer::{
        self, Accumulate, DeviceBuffer, InputActivation, InputGradient, LayerContext, MaskRule, PackedActivation,
        PackedLinear, PrunedGradient, SparseActivationLinear, SparseActivationSettings, SparseLinear,
        SparseLinearSettings, WeightGradient,
    },
};

struct Cuda<T> {
    context: LayerContext,
    element: PhantomData<T>,
}

impl<T: Arithmetic> Cuda<T> {
    fn new(device: &Device) -> Self {
        Self { context: LayerContext::new(device).unwrap(), element: PhantomData }
    }

    fn up<E: twofour::Element>(&self, values: &[E]) -> DeviceBuffer {
        DeviceBuffer::from_host(&self.context, values).unwrap()
    }

    fn zeros(&self, len: usize) -> DeviceBuffer {
        // Every byte is overwritten.
        self.up(&vec![T::from_f32(f32::NAN); len])
    }
}

impl<T: Arithmetic> Engine for Cuda<T> {
    type Element = T;
    type Layer = SparseLinear;

    fn shapes(&self) -> Vec<Dims> {
        vec![(64, 128, 5), (128, 64, 100), (1, 1, 1), (7, 30, 3), (36, 52, 9), (600, 12, 33)]
    }

    fn layer(
        &self,
        (out, inputs, _): Dims,
        master: &[f32],
        settings: SparseLinearSettings,
    ) -> Result<SparseLinear, String> {
        SparseLinear::new(&self.context, self.up(master).as_slice(), (out, inputs), T::DTYPE, settings)
            .map_err(|e| e.to_string())
    }

    fn remask(&self, layer: &mut SparseLinear, master: &[f32]) -> u64 {
        layer.remask(self.up(master).as_slice()).unwrap();
        layer.check().unwrap();
        layer.flips().unwrap()
    }

    fn repack(&self, layer: &mut SparseLinear, master: &[f32]) {
        layer.repack(self.up(master).as_slice()).unwrap();
    }

    fn set_mask(&self, layer: &mut SparseLinear, master: &[f32], mask: &Mask) -> Result<u64, String> {
        layer.set_mask(self.up(master).as_slice(), mask).map_err(|e| e.to_string())?;
        Ok(layer.flips().unwrap())
    }

    fn mask(&self, layer: &SparseLinear) -> Mask {
        layer.mask().unwrap()
    }

    fn packed(&self, layer: &SparseLinear) -> Compressed<T> {
        layer.packed().unwrap()
    }

    fn packed_transpose(&self, layer: &SparseLinear) -> Option<Compressed<T>> {
        layer.packed_transpose().unwrap()
    }

    fn scale(&self, layer: &SparseLinear) -> Option<f32> {
        layer.scale().unwrap()
    }

    fn forward(&self, layer: &SparseLinear, x: &[T], forward: Forward<'_>) -> Outputs<T> {
        let Forward { tokens, bias, activation, stores_pre_activation } = forward;
        let outputs = tokens * layer.out_features();
        let bias: Option<Vec<T>> = bias.map(|bias| bias.iter().map(|b| T::from_f32(*b)).collect());
        let (x, bias, mut y) = (self.up(x), bias.map(|bias| self.up(&bias)), self.zeros(outputs));
        let mut pre = stores_pre_activation.then(|| self.zeros(outputs));
        let forward = layer::Forward {
            bias: bias.as_ref().map(DeviceBuffer::as_slice),
            activation,
            pre_activation: pre.as_mut().map(DeviceBuffer::as_slice_mut),
        };
        layer.forward(x.as_slice(), tokens, forward, y.as_slice_mut()).unwrap();
        Outputs { y: y.to_host().unwrap(), pre_activation: pre.map(|pre| pre.to_host().unwrap()) }
    }

    fn input_gradient(&self, layer: &SparseLinear, dy: &[T], tokens: usize) -> Vec<T> {
        let mut dx = self.zeros(tokens * layer.in_features());
        layer.input_gradient(self.up(dy).as_slice(), tokens, dx.as_slice_mut()).unwrap();
        dx.to_host().unwrap()
    }

    fn weight_gradient(
        &self,
        layer: &SparseLinear,
        (dy, x): (&[T], &[T]),
        tokens: usize,
        accumulate: Accumulate,
        dw: &mut Vec<f32>,
    ) {
        let mut there = self.up(dw);
        let (dy, x) = (self.up(dy), self.up(x));
        layer.weight_gradient(dy.as_slice(), x.as_slice(), tokens, accumulate, there.as_slice_mut()).unwrap();
        *dw = there.to_host().unwrap();
    }

    fn bias_gradient(&self, layer: &SparseLinear, dy: &[T], tokens: usize, accumulate: Accumulate, db: &mut Vec<f32>) {
        let mut there = self.up(db);
        layer.bias_gradient(self.up(dy).as_slice(), tokens, accumulate, there.as_slice_mut()).unwrap();
        *db = there.to_host().unwrap();
    }

    fn activation_gradient(&self, activation: Activation, pre: &[T], dy: &mut Vec<T>) {
        let (pre, mut there) = (self.up(pre), self.up(dy));
        layer::activation_gradient(&self.context, activation, pre.as_slice(), there.as_slice_mut()).unwrap();
        *dy = there.to_host().unwrap();
    }

    fn seed(&self, layer: &SparseLinear) -> u64 {
        layer.seed().unwrap()
    }

    fn set_seed(&self, layer: &SparseLinear, seed: u64) {
        layer.set_seed(seed).unwrap();
    }
}

#[test]
fn the_layer_conforms_in_bf16() {
    let Some(bench) = bench() else { return };
    conformance::run(&Cuda::<bf16>::new(&bench.device));
}

#[test]
fn the_layer_conforms_in_f16() {
    let Some(bench) = bench() else { return };
    conformance::run(&Cuda::<f16>::new(&bench.device));
}

fn numbers<T: Arithmetic>(len: usize, seed: usize) -> Vec<T> {
    (0..len).map(|i| T::from_f32(((i * 7919 + seed * 104_729) % 2003) as f32 / 1001.0 - 1.0)).collect()
}

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

#[test]
fn slices_that_do_not_fit_are_refused_before_anything_is_launched() {
    let Some(bench) = bench() else { return };
    let engine = Cuda::<bf16>::new(&bench.device);
    let (out, inputs, tokens) = (64, 128, 8);
    let master = engine.up(&numbers::<f32>(out * inputs, 1));
    let settings = SparseLinearSettings { input_gradient: InputGradient::Automatic, ..Default::default() };
    let mut layer =
        SparseLinear::new(&engine.context, master.as_slice(), (out, inputs), DataType::BF16, settings).unwrap();
    let short = engine.up(&numbers::<f32>(out * inputs - 1, 1));
    let halves = engine.up(&numbers::<f16>(tokens * inputs, 1));
    let x = engine.up(&numbers::<bf16>(tokens * inputs, 1));
    let mut y = engine.zeros(tokens * out);
    assert!(matches!(
        layer.remask(short.as_slice()),
        Err(Error::Length { what: "the master weight", expected: 8192, found: 8191 })
    ));
    let mut forward = |x: &DeviceBuffer, tokens| {
        layer.forward(x.as_slice(), tokens, layer::Forward::default(), y.as_slice_mut()).unwrap_err()
    };
    assert!(matches!(
        forward(&halves, tokens),
        Error::SliceType { what: "the input", expected: DataType::BF16, found: DataType::F16 }
    ));
    assert!(matches!(forward(&x, tokens - 1), Error::Length { what: "the input", .. }));
    assert!(matches!(forward(&x, usize::MAX), Error::TooLarge { .. }));
    let error =
        SparseLinear::new(&engine.context, master.as_slice(), (out, inputs), DataType::F32, settings).unwrap_err();
    assert!(matches!(error, Error::DataType { dtype: DataType::F32, .. }), "{error}");
}

/// `a · b` for `[n, k]` and `[k, m]` in f64.
fn product(a: &[f64], b: &[f64], (n, k, m): (usize, usize, usize)) -> Vec<f64> {
    (0..n * m).map(|i| (0..k).map(|at| a[i / m * k + at] * b[at * m + i % m]).sum()).collect()
}

fn wide<T: twofour::Element>(values: &[T]) -> Vec<f64> {
    values.iter().map(|v| f64::from(v.to_f32())).collect()
}

fn flipped(data: &[f64], rows: usize, cols: usize) -> Vec<f64> {
    (0..cols).flat_map(|c| (0..rows).map(move |r| data[r * cols + c])).collect()
}

fn close<T: twofour::Element>(what: &str, found: &[T], expected: &[f64], tolerance: f64) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        let found = f64::from(found.to_f32());
        assert!(
            (found - expected).abs() <= tolerance * (1.0 + expected.abs()),
            "{what}: element {i}: {found}, expected {expected}"
        );
    }
}

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

/// The products of 8-bit floats are those of f64 with the numbers that the CPU rounds to.
#[test]
fn a_layer_of_8_bit_floats_is_the_dense_one_of_its_rounded_numbers() {
    let Some(bench) = bench() else { return };
    if bench.device.architecture().capability() < (8, 9) {
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

        let error = new(&master, SparseLinearSettings::default()).unwrap_err();
        assert!(error.to_string().contains("transposable"), "{error}");
    }
}

#[test]
fn both_gradients_at_once_are_those_of_each_by_itself() {
    let Some(bench) = bench() else { return };
    let engine = Cuda::<bf16>::new(&bench.device);
    for (out, inputs, tokens) in [(64, 128, 72), (40, 52, 9), (7, 30, 3)] {
        for weight_gradient in [WeightGradient::Dense, WeightGradient::Masked, WeightGradient::Mvue] {
            let settings = SparseLinearSettings { weight_gradient, ..Default::default() };
            let master = engine.up(&numbers::<f32>(out * inputs, 1));
            let layer =
                SparseLinear::new(&engine.context, master.as_slice(), (out, inputs), DataType::BF16, settings).unwrap();
            let (x, dy) =
                (engine.up(&numbers::<bf16>(tokens * inputs, 2)), engine.up(&numbers::<bf16>(tokens * out, 3)));
            let (mut dw, mut db) = (engine.zeros(out * inputs), engine.zeros(out));
            let (mut dw_apart, mut db_apart) = (engine.zeros(out * inputs), engine.zeros(out));
            for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
                layer.set_seed(5).unwrap();
                let (w, b) = (dw.as_slice_mut(), db.as_slice_mut());
                layer.parameter_gradients(dy.as_slice(), x.as_slice(), tokens, accumulate, w, b).unwrap();
                layer.set_seed(5).unwrap();
                let (w, b) = (dw_apart.as_slice_mut(), db_apart.as_slice_mut());
                layer.weight_gradient(dy.as_slice(), x.as_slice(), tokens, accumulate, w).unwrap();
                layer.bias_gradient(dy.as_slice(), tokens, accumulate, b).unwrap();
                let what = format!("{out}, {inputs}, {tokens}, {weight_gradient:?}, {accumulate:?}");
                let (found, expected) = (dw.to_host::<bf16>().unwrap(), wide(&dw_apart.to_host::<bf16>().unwrap()));
                close(&format!("{what}, weight"), &found, &expected, 1e-2);
                let (found, expected) = (db.to_host::<bf16>().unwrap(), wide(&db_apart.to_host::<bf16>().unwrap()));
                close(&format!("{what}, bias"), &found, &expected, 1e-2);
            }
        }
    }
}
