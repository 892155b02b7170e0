//! On a GPU: operators, layers and the optimizer on CUDA tensors against those on the CPU. Without a device the tests
//! skip; with `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

use candle_core::{CudaDevice, DType, Device, Result, Tensor, Var, backprop::GradStore};
use candle_nn::{Linear, Module};
use twofour::{kernel::Activation, select::Transposable};
use twofour_candle::{
    AdamW, AdamWConfig, AnyLinear, SparseActivationLinear, SparseActivationSettings, SparseLinear, SparseSettings,
    activate, cross_entropy, layer_norm,
    linear::{InputActivation, InputGradient, MaskRule, Mode, PrunedGradient, Refresh, WeightGradient},
    rms_norm, rope, softmax,
};

const CPU: &Device = &Device::Cpu;
const FLOATS: [DType; 3] = [DType::F32, DType::BF16, DType::F16];
const HALVES: [DType; 2] = [DType::BF16, DType::F16];

/// The first GPU, or a message why the test is skipped.
fn gpu() -> Option<Device> {
    match Device::new_cuda(0) {
        Ok(device) => Some(device),
        Err(error) => {
            assert!(std::env::var_os("TWOFOUR_REQUIRE_GPU").is_none(), "TWOFOUR_REQUIRE_GPU is set: {error}");
            eprintln!("skipped: {error}");
            None
        }
    }
}

/// Reproducible values in -1..1 that hardly ever tie.
fn values(len: usize, seed: u64) -> Vec<f32> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 40) as f32 / (1u32 << 23) as f32 - 1.0
    };
    (0..len).map(|_| next()).collect()
}

fn tensor(shape: &[usize], seed: u64, dtype: DType) -> Tensor {
    Tensor::from_vec(values(shape.iter().product(), seed), shape, CPU).unwrap().to_dtype(dtype).unwrap()
}

fn var(tensor: &Tensor, device: &Device) -> Var {
    Var::from_tensor(&tensor.to_device(device).unwrap()).unwrap()
}

fn flat(tensor: &Tensor) -> Vec<f32> {
    tensor.to_device(CPU).unwrap().to_dtype(DType::F32).unwrap().flatten_all().unwrap().to_vec1().unwrap()
}

/// The bits of a tensor's elements.
fn bits(tensor: &Tensor) -> Vec<u32> {
    flat(tensor).into_iter().map(f32::to_bits).collect()
}

/// The largest difference, relative to the largest expected magnitude (at least 0.02), or infinity where an element is
/// not finite.
fn distance(found: &Tensor, expected: &Tensor) -> f32 {
    assert_eq!((found.dims(), found.dtype()), (expected.dims(), expected.dtype()));
    let (found, expected) = (flat(found), flat(expected));
    let scale = expected.iter().fold(2e-2f32, |most, value| most.max(value.abs()));
    let largest = found.iter().zip(&expected).fold(0f32, |most, (found, expected)| {
        let distance = (found - expected).abs();
        if distance.is_finite() { most.max(distance) } else { f32::INFINITY }
    });
    largest / scale
}

/// What results of a dtype may differ by: a few roundings.
fn tolerance(dtype: DType) -> f32 {
    match dtype {
        DType::F32 => 3e-5,
        DType::F16 => 3e-3,
        _ => 2e-2,
    }
}

/// A loss whose gradient for `y` has no two equal elements.
fn loss(y: &Tensor) -> Result<Tensor> {
    let weights = tensor(y.dims(), 99, y.dtype()).to_device(y.device())?;
    (y * weights)?.to_dtype(DType::F32)?.sum_all()
}

/// The value of a function and the gradients of its inputs.
fn evaluate(
    inputs: &[Tensor],
    device: &Device,
    f: &dyn Fn(&[Tensor]) -> Result<Tensor>,
) -> Result<(Tensor, Vec<Tensor>)> {
    let vars: Vec<Var> = inputs.iter().map(|input| var(input, device)).collect();
    let tensors: Vec<Tensor> = vars.iter().map(|var| var.as_tensor().clone()).collect();
    let y = f(&tensors)?;
    assert!(y.device().same_device(device));
    let gradients = loss(&y)?.backward()?;
    let of = |(index, var): (usize, &Var)| match gradients.get(var) {
        Some(gradient) => Ok(gradient.clone()),
        None => candle_core::bail!("input {index} has no gradient"),
    };
    Ok((y, vars.iter().enumerate().map(of).collect::<Result<_>>()?))
}

/// Expects a function's value and gradients on the GPU to be those on the CPU.
fn compare(
    what: &str,
    gpu: &Device,
    inputs: &[Tensor],
    f: impl Fn(&[Tensor]) -> twofour_candle::Result<Tensor>,
) -> Result<()> {
    let f = |inputs: &[Tensor]| Ok(f(inputs)?);
    let (expected, expected_gradients) = evaluate(inputs, CPU, &f)?;
    let (found, gradients) = evaluate(inputs, gpu, &f)?;
    let (dtype, dims) = (inputs[0].dtype(), inputs[0].dims());
    let most = tolerance(dtype);
    let apart = distance(&found, &expected);
    assert!(apart <= most, "{what} {dtype:?} {dims:?}: values differ by {apart}");
    for (index, (found, expected)) in gradients.iter().zip(&expected_gradients).enumerate() {
        let apart = distance(found, expected);
        assert!(apart <= 2.0 * most, "{what} {dtype:?} {dims:?}: gradient {index} differs by {apart}");
    }
    Ok(())
}

#[test]
fn norms_agree_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for dtype in FLOATS {
        for shape in [vec![3, 5, 48], vec![1, 1], vec![7, 33], vec![300, 64], vec![2, 4, 6, 1024]] {
            let width = shape[shape.len() - 1];
            let inputs = [tensor(&shape, 1, dtype), tensor(&[width], 2, dtype), tensor(&[width], 3, dtype)];
            compare("layer_norm", &gpu, &inputs, |v| Ok(layer_norm(&v[0], &v[1], &v[2], 1e-5)?))?;
            compare("rms_norm", &gpu, &inputs[..2], |v| Ok(rms_norm(&v[0], &v[1], 1e-5)?))?;
            // Parameters in f32 beside activations of another dtype.
            let wide = [tensor(&shape, 1, dtype), tensor(&[width], 2, DType::F32), tensor(&[width], 3, DType::F32)];
            compare("layer_norm, f32 parameters", &gpu, &wide, |v| Ok(layer_norm(&v[0], &v[1], &v[2], 1e-5)?))?;
        }
        let transposed = [tensor(&[16, 6], 4, dtype), tensor(&[16], 5, dtype)];
        compare("rms_norm of a view", &gpu, &transposed, |v| Ok(rms_norm(&v[0].t()?, &v[1], 1e-5)?))?;
        let part = [tensor(&[9, 32], 4, dtype), tensor(&[32], 5, dtype)];
        compare("rms_norm of a part", &gpu, &part, |v| Ok(rms_norm(&v[0].narrow(0, 3, 5)?, &v[1], 1e-5)?))?;
    }
    Ok(())
}

#[test]
fn softmax_agrees_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for dtype in FLOATS {
        for shape in [vec![5], vec![3, 1], vec![2, 3, 77], vec![300, 64], vec![2, 5000]] {
            compare("softmax", &gpu, &[tensor(&shape, 11, dtype)], |v| Ok(softmax(&(&v[0] * 6.0)?)?))?;
        }
    }
    let rows = [[f32::NEG_INFINITY, 1e30, 1e30, -1e30], [3e38, -3e38, 0.0, f32::NEG_INFINITY]];
    let found = softmax(&Tensor::new(&rows, &gpu)?)?.to_vec2::<f32>()?;
    assert_eq!(found, [[0.0, 0.5, 0.5, 0.0], [1.0, 0.0, 0.0, 0.0]]);
    let nan = softmax(&Tensor::new(&[[0f32, f32::NAN, 1.0]], &gpu)?)?.to_vec2::<f32>()?;
    assert!(nan[0].iter().all(|value| value.is_nan()));
    Ok(())
}

#[test]
fn rotary_embedding_agrees_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for dtype in FLOATS {
        for shape in [vec![2, 3, 7, 8], vec![1, 1, 1, 2], vec![2, 40, 64], vec![5, 6]] {
            let (positions, half) = (shape[shape.len() - 2], shape[shape.len() - 1] / 2);
            let angles = (tensor(&[positions, half], 21, DType::F32) * 3.0)?;
            let (cos, sin) = (angles.cos()?, angles.sin()?);
            let inputs = [tensor(&shape, 22, dtype)];
            compare("rope", &gpu, &inputs, |v| Ok(rope(&v[0], &cos, &sin)?))?;
            let (cos, sin) = (cos.to_device(&gpu)?, sin.to_device(&gpu)?);
            let there = rope(&inputs[0].to_device(&gpu)?, &cos, &sin)?;
            let here = rope(&inputs[0], &cos.to_device(CPU)?, &sin.to_device(CPU)?)?;
            assert!(distance(&there, &here) <= tolerance(dtype));
        }
    }
    Ok(())
}

#[test]
fn activations_agree_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for dtype in FLOATS {
        for activation in [Activation::Identity, Activation::Relu, Activation::Gelu, Activation::Silu] {
            let inputs = [tensor(&[3, 1001], 31, dtype)];
            compare(&format!("{activation:?}"), &gpu, &inputs, |v| Ok(activate(&(&v[0] * 6.0)?, activation)?))?;
        }
    }
    Ok(())
}

#[test]
fn cross_entropy_agrees_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for dtype in FLOATS {
        for (rows, classes) in [(1, 1), (5, 256), (100, 37), (64, 5000)] {
            let targets: Vec<u32> = (0..rows as u32).map(|row| row * 7 % classes as u32).collect();
            let targets = Tensor::new(targets, CPU)?;
            for place in [CPU, &gpu] {
                let targets = targets.to_device(place)?;
                let logits = tensor(&[rows, classes], 41, dtype);
                // The loss is f32; logits are of the dtype.
                let run = |device: &Device| -> Result<(f32, Tensor)> {
                    let logits = var(&logits, device);
                    let loss = cross_entropy(&(logits.as_tensor() * 5.0)?, &targets)?;
                    let gradients = (&loss * 3.0)?.backward()?;
                    Ok((loss.to_device(CPU)?.to_scalar()?, gradients.get(&logits).unwrap().clone()))
                };
                let ((expected, expected_gradient), (found, gradient)) = (run(CPU)?, run(&gpu)?);
                let what = format!("cross_entropy {dtype:?} [{rows}, {classes}]");
                assert!((found - expected).abs() <= 1e-5 * (1.0 + expected.abs()), "{what}: {found}, {expected}");
                let apart = distance(&gradient, &expected_gradient);
                assert!(apart <= tolerance(dtype), "{what}: the gradient differs by {apart}");
            }
        }
    }
    let logits = tensor(&[3, 4], 42, DType::F32).to_device(&gpu)?;
    let error = cross_entropy(&logits, &Tensor::new(&[0u32, 4, 1], &gpu)?).unwrap_err().to_string();
    assert!(error.contains("target 4 of row 1"), "{error}");
    Ok(())
}

/// Rules with and without a packed transpose.
fn rules() -> Vec<SparseSettings> {
    let mut all: Vec<_> =
        MaskRule::CHOOSING.into_iter().map(|rule| SparseSettings { rule, ..Default::default() }).collect();
    let rule = MaskRule::Transposable(Transposable::Optimal);
    all.push(SparseSettings { rule, input_gradient: InputGradient::PackedTranspose, ..Default::default() });
    all
}

fn layer(weight: &Tensor, bias: Option<&Tensor>, settings: SparseSettings) -> SparseLinear {
    SparseLinear::new(weight.clone(), bias.cloned(), settings).unwrap()
}

#[test]
fn masks_are_those_of_the_cpu_to_the_bit() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for settings in rules() {
        for dtype in FLOATS {
            for (rows, cols) in [(64, 128), (37, 52), (5, 7)] {
                let what = format!("{settings:?} {dtype:?} [{rows}, {cols}]");
                // Rounded to eighths: many ties.
                let weights = [51, 52]
                    .map(|seed| ((tensor(&[rows, cols], seed, DType::F32) * 8.0)?.round()? / 8.0)?.to_dtype(dtype));
                let [first, second] = weights;
                let (first, second) = (first?, second?);
                let (here, there) = (var(&first, CPU), var(&first, &gpu));
                let (cpu, cuda) = (layer(&here, None, settings), layer(&there, None, settings));
                assert!(cpu.mask()? == cuda.mask()?, "{what}: the first mask");
                assert_eq!(cuda.flip_rate()?, None, "{what}");
                here.set(&second)?;
                there.set(&second.to_device(&gpu)?)?;
                let rates = (cpu.refresh_mask()?, cuda.refresh_mask()?);
                assert!(cpu.mask()? == cuda.mask()?, "{what}: the second mask");
                assert_eq!(rates.0, rates.1, "{what}: flip rates");
                if dtype != DType::F32 && settings.rule != MaskRule::SoftThreshold {
                    let (here, there) = (cpu.effective_weight()?, cuda.effective_weight()?);
                    assert_eq!(bits(&here), bits(&there), "{what}: kept values");
                }
                cuda.restore(cpu.mask()?, 7).unwrap();
                assert_eq!((cuda.forwards(), cuda.flip_rate()?), (7, None));
            }
        }
    }
    Ok(())
}

#[test]
fn gradients_are_those_of_a_dense_layer_with_the_masked_weight() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for settings in rules() {
        for dtype in HALVES {
            for (shape, out, has_bias) in [
                (vec![64, 128], 96, true),
                (vec![3, 5, 64], 40, false),
                (vec![257, 256], 128, true),
                (vec![1, 128], 64, true),
                (vec![7, 20], 12, true),
            ] {
                let cols = shape[shape.len() - 1];
                let what = format!("{settings:?} {dtype:?} {shape:?} to {out}");
                let (x, weight) = (var(&tensor(&shape, 61, dtype), &gpu), var(&tensor(&[out, cols], 62, dtype), &gpu));
                let bias = has_bias.then(|| var(&tensor(&[out], 63, dtype), &gpu));
                let sparse = layer(&weight, bias.as_ref().map(Var::as_tensor), settings);
                let y = AnyLinear::from(sparse.clone()).forward(&x)?;
                let gradients = loss(&y)?.backward()?;
                sparse.check().unwrap();
                // In f32 on the CPU: no rounding but that of the operands and of the result.
                let wide = |t: &Tensor| var(&t.to_device(CPU).unwrap().to_dtype(DType::F32).unwrap(), CPU);
                let (x_here, masked) = (wide(&x), wide(&sparse.effective_weight()?));
                let bias_here = bias.as_ref().map(|bias| wide(bias));
                let dense = Linear::new(masked.as_tensor().clone(), bias_here.as_ref().map(|b| b.as_tensor().clone()));
                let expected = dense.forward(&x_here)?;
                let weights = tensor(y.dims(), 99, dtype).to_dtype(DType::F32)?;
                let reference = (&expected * weights)?.sum_all()?.backward()?;
                let apart = |found: &Tensor, expected: &Tensor| {
                    distance(&found.to_device(CPU).unwrap().to_dtype(DType::F32).unwrap(), expected)
                };
                let value = apart(&y, &expected);
                assert!(value <= tolerance(dtype), "{what}: values differ by {value}");
                let pairs =
                    [(Some(&x), Some(&x_here)), (Some(&weight), Some(&masked)), (bias.as_ref(), bias_here.as_ref())];
                for (index, pair) in pairs.into_iter().enumerate() {
                    let (Some(there), Some(here)) = pair else { continue };
                    let (found, expected) = (gradients.get(there).unwrap(), reference.get(here).unwrap());
                    assert_eq!(found.dtype(), dtype);
                    let apart = apart(found, expected);
                    assert!(apart <= tolerance(dtype), "{what}: gradient {index} differs by {apart}");
                }
            }
        }
    }
    Ok(())
}

#[test]
fn a_master_in_f32_has_an_f32_gradient() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for dtype in HALVES {
        let (x, weight) = (tensor(&[48, 128], 71, dtype), tensor(&[64, 128], 72, DType::F32));
        let (bias, settings) = (tensor(&[64], 73, DType::F32), SparseSettings::default());
        let (x_there, master, bias_there) = (var(&x, &gpu), var(&weight, &gpu), var(&bias, &gpu));
        let bias_tensor = Some(bias_there.as_tensor().clone());
        let sparse = SparseLinear::with_activations(master.as_tensor().clone(), bias_tensor, dtype, settings).unwrap();
        assert!(sparse.mask()? == layer(&weight, None, settings).mask()?, "{dtype:?}: the master's mask");
        let y = AnyLinear::from(sparse.clone()).forward(&x_there)?;
        assert_eq!((y.dtype(), sparse.activations()), (dtype, dtype));
        let gradients = loss(&y)?.backward()?;
        let x_here = x.to_dtype(DType::F32)?;
        let weights = tensor(&[48, 64], 99, dtype).to_dtype(DType::F32)?;
        let found = [gradients.get(&master).unwrap(), gradients.get(&bias_there).unwrap()];
        assert_eq!(found.map(Tensor::dtype), [DType::F32; 2]);
        // Sums of exact products in f32.
        let expected = [weights.t()?.matmul(&x_here)?, weights.sum(0)?];
        for (found, expected) in found.into_iter().zip(&expected) {
            let apart = distance(&found.to_device(CPU)?, expected);
            assert!(apart <= 1e-5, "{dtype:?}: {apart}");
        }
    }
    Ok(())
}

#[test]
fn weight_gradients_follow_the_settings() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let (x, weight) = (tensor(&[64, 128], 81, DType::BF16), tensor(&[64, 128], 82, DType::BF16));
    for weight_gradient in [WeightGradient::Masked, WeightGradient::Mvue, WeightGradient::MvueApproximate] {
        let settings = SparseSettings { weight_gradient, ..Default::default() };
        let run = |device: &Device| -> Result<(Tensor, SparseLinear)> {
            let master = var(&weight, device);
            let sparse = layer(&master, None, settings);
            let y = AnyLinear::from(sparse.clone()).forward(&x.to_device(device)?)?;
            Ok((loss(&y)?.backward()?.get(&master).unwrap().to_device(CPU)?, sparse))
        };
        let ((expected, _), (found, sparse)) = (run(CPU)?, run(&gpu)?);
        // Estimates are equal to the bit, so products of them are close.
        let apart = distance(&found, &expected);
        assert!(apart <= tolerance(DType::BF16), "{weight_gradient:?}: {apart}");
        if weight_gradient == WeightGradient::Masked {
            let (mask, found) = (sparse.mask()?, flat(&found));
            let pruned = (0..64 * 128).filter(|at| !mask.is_kept(at / 128, at % 128));
            assert!(pruned.into_iter().all(|at| found[at] == 0.0));
        }
    }
    Ok(())
}

#[test]
fn a_forward_pass_that_waits_for_its_backward_keeps_its_weights() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for settings in rules() {
        let (x, master) =
            (var(&tensor(&[16, 64], 91, DType::BF16), &gpu), var(&tensor(&[64, 64], 92, DType::BF16), &gpu));
        let any = AnyLinear::from(layer(&master, None, settings));
        let gradient_of = |y: &Tensor| -> Result<Tensor> { Ok(loss(y)?.backward()?.get(&x).unwrap().clone()) };
        let expected = gradient_of(&any.forward(&x)?)?;
        let waiting = any.forward(&x)?;
        master.set(&tensor(&[64, 64], 93, DType::BF16).to_device(&gpu)?)?;
        let other = gradient_of(&any.forward(&x)?)?;
        assert_eq!(bits(&gradient_of(&waiting)?), bits(&expected), "{settings:?}");
        assert!(bits(&other) != bits(&expected), "{settings:?}");
    }
    Ok(())
}

#[test]
fn sparse_activations_agree_with_the_cpu() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    for dtype in HALVES {
        for activation in [InputActivation::Identity, InputActivation::SquaredRelu] {
            for input_gradient in [PrunedGradient::Dense, PrunedGradient::Masked] {
                for (shape, out) in [(vec![64, 128], 96), (vec![2, 3, 4, 20], 12), (vec![130, 64], 64)] {
                    let settings = SparseActivationSettings { activation, input_gradient, ..Default::default() };
                    let cols = shape[shape.len() - 1];
                    let what = format!("{settings:?}");
                    let inputs =
                        [tensor(&shape, 101, dtype), tensor(&[out, cols], 102, dtype), tensor(&[out], 103, dtype)];
                    let of = |v: &[Tensor]| SparseActivationLinear::new(v[1].clone(), v.get(2).cloned(), settings);
                    compare(&what, &gpu, &inputs, |v| of(v)?.apply(&v[0]))?;
                    compare(&format!("{what} without a bias"), &gpu, &inputs[..2], |v| of(v)?.apply(&v[0]))?;
                    let there = inputs.iter().map(|t| t.to_device(&gpu)).collect::<Result<Vec<_>>>()?;
                    let masks = (of(&inputs)?.mask_of(&inputs[0])?, of(&there)?.mask_of(&there[0])?);
                    assert!(masks.0 == masks.1, "{what} {dtype:?} {shape:?}: masks differ");
                }
            }
        }
    }
    Ok(())
}

/// Gradients in which each element has a different slope.
fn gradients(vars: &[Var], step: u64) -> Result<GradStore> {
    let losses = vars.iter().enumerate().map(|(index, var)| {
        let slope = tensor(var.dims(), 1000 * step + index as u64, var.dtype()).to_device(var.device())?;
        (var.as_tensor() * slope)?.to_dtype(DType::F32)?.sum_all()
    });
    let losses = losses.collect::<Result<Vec<_>>>()?;
    Tensor::stack(&losses, 0)?.sum_all()?.backward()
}

fn optimizer(vars: &[Var]) -> AdamW {
    let named = |range: std::ops::Range<usize>| range.map(|i| (format!("p{i}"), vars[i].clone())).collect::<Vec<_>>();
    let config = AdamWConfig { learning_rate: 1e-2, weight_decay: 0.1, ..Default::default() };
    let mut optimizer = AdamW::new(named(0..3), config).unwrap();
    optimizer.add(named(3..vars.len()), 0.0).unwrap();
    optimizer
}

#[test]
fn the_optimizers_steps_are_those_of_the_cpu_to_the_bit() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let shapes: [(&[usize], DType); 6] = [
        (&[40_001], DType::F32),
        (&[33, 65], DType::BF16),
        (&[128, 64], DType::F16),
        (&[7], DType::F32),
        (&[1], DType::BF16),
        (&[3, 5, 2], DType::F16),
    ];
    let of = |device: &Device| -> Vec<Var> {
        shapes.iter().enumerate().map(|(i, (dims, dtype))| var(&tensor(dims, 111 + i as u64, *dtype), device)).collect()
    };
    let (here, there) = (of(CPU), of(&gpu));
    let (mut cpu, mut cuda) = (optimizer(&here), optimizer(&there));
    let expect_equal = |step: u64, cpu: &AdamW, cuda: &AdamW| -> Result<()> {
        for (index, (here, there)) in here.iter().zip(&there).enumerate() {
            assert_eq!(bits(here), bits(there), "parameter {index} after step {step}");
        }
        let (here, there) = (cpu.state()?, cuda.state()?);
        for (name, expected) in here.iter().filter(|(name, _)| *name != "steps") {
            assert_eq!(bits(expected), bits(&there[name]), "{name} after step {step}");
        }
        Ok(())
    };
    for step in 1..=5 {
        // A schedule: constants must follow.
        cpu.set_learning_rate(1e-2 / step as f64);
        cuda.set_learning_rate(1e-2 / step as f64);
        cpu.step(&gradients(&here, step)?)?;
        cuda.step(&gradients(&there, step)?)?;
        expect_equal(step, &cpu, &cuda)?;
    }
    // A state of the CPU on the GPU.
    let mut resumed = optimizer(&there);
    resumed.load_state(&cpu.state()?).unwrap();
    resumed.set_learning_rate(cpu.learning_rate());
    cpu.step(&gradients(&here, 6)?)?;
    resumed.step(&gradients(&there, 6)?)?;
    expect_equal(6, &cpu, &resumed)?;
    // The norm is summed in another order.
    let norms = (cpu.gradient_norm(&gradients(&here, 7)?)?, resumed.gradient_norm(&gradients(&there, 7)?)?);
    assert!((norms.0 - norms.1).abs() <= 1e-6 * norms.0, "{norms:?}");
    let clipped = resumed.step_clipped(&gradients(&there, 7)?, norms.0 / 4.0)?;
    assert_eq!((clipped, resumed.steps()), (norms.1, 7));
    cpu.step_clipped(&gradients(&here, 7)?, norms.0 / 4.0)?;
    for (here, there) in here.iter().zip(&there) {
        assert!(distance(&there.to_device(CPU)?, here) <= tolerance(here.dtype()));
    }
    let mut bad = gradients(&there, 8)?;
    let before = bits(&there[3]);
    bad.insert(&there[3], Tensor::new(&[0f32, 1.0, f32::NAN, 0.0, 0.0, 0.0, 0.0], &gpu)?);
    let error = resumed.step_clipped(&bad, 1.0).unwrap_err().to_string();
    assert!(error.contains("p3") && bits(&there[3]) == before && resumed.steps() == 7, "{error}");
    Ok(())
}

/// A feed-forward network with a 2:4 layer, a norm and a layer over 2:4 activations, and its optimizer.
struct Network {
    vars: Vec<Var>,
    up: SparseLinear,
    down: SparseActivationLinear,
    optimizer: AdamW,
}

impl Network {
    fn new(device: &Device) -> Result<Self> {
        let half = DType::BF16;
        let scaled =
            |shape: &[usize], seed: u64| -> Result<Tensor> { tensor(shape, seed, DType::F32).affine(0.2, 0.0) };
        let up = var(&scaled(&[128, 64], 121)?, device);
        let vars = vec![
            up,
            var(&scaled(&[32, 128], 122)?.to_dtype(half)?, device),
            var(&Tensor::zeros(32, half, CPU)?, device),
            var(&Tensor::ones(64, DType::F32, CPU)?, device),
        ];
        let settings = SparseSettings { rule: MaskRule::Transposable(Transposable::GreedyAbs), ..Default::default() };
        let down_settings = SparseActivationSettings { activation: InputActivation::SquaredRelu, ..Default::default() };
        let tensor_of = |index: usize| vars[index].as_tensor().clone();
        let up = layer(&tensor_of(0), None, settings);
        let down = SparseActivationLinear::new(tensor_of(1), Some(tensor_of(2)), down_settings)?;
        let optimizer = optimizer(&vars);
        Ok(Network { vars, up, down, optimizer })
    }

    /// The loss of a step, before it.
    fn step(&mut self, x: &Tensor, targets: &Tensor) -> Result<f32> {
        let normalized = rms_norm(x, self.vars[3].as_tensor(), 1e-5)?;
        let hidden = AnyLinear::from(self.up.clone()).forward(&normalized)?;
        let loss = cross_entropy(&self.down.apply(&hidden)?, targets)?;
        self.optimizer.step_clipped(&loss.backward()?, 1.0)?;
        loss.to_scalar()
    }

    /// The losses of so many steps.
    fn train(device: &Device, steps: usize) -> Result<Vec<f32>> {
        let mut network = Network::new(device)?;
        let x = tensor(&[96, 64], 123, DType::BF16).to_device(device)?;
        let targets = Tensor::new((0..96u32).map(|i| i * 5 % 32).collect::<Vec<_>>(), CPU)?;
        (0..steps).map(|_| network.step(&x, &targets)).collect()
    }
}

#[test]
fn a_training_loop_lowers_its_loss_and_repeats_bit_for_bit() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let losses = Network::train(&gpu, 60)?;
    assert!(losses.iter().all(|loss| loss.is_finite()), "{losses:?}");
    assert!(losses[59] < 0.5 * losses[0], "{losses:?}");
    let again: Vec<u32> = Network::train(&gpu, 60)?.into_iter().map(f32::to_bits).collect();
    assert_eq!(again, losses.into_iter().map(f32::to_bits).collect::<Vec<_>>());
    Ok(())
}

#[test]
fn two_streams_compute_the_same_side_by_side() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let expected = Network::train(&gpu, 20)?;
    let run = || Network::train(&Device::Cuda(CudaDevice::new_with_stream(0)?), 20);
    let found = std::thread::scope(|scope| {
        let threads = [scope.spawn(run), scope.spawn(run)];
        threads.map(|thread| thread.join().unwrap())
    });
    for losses in found {
        assert_eq!(losses?, expected);
    }
    // Tensors of two streams do not meet.
    let other = Device::Cuda(CudaDevice::new_with_stream(0)?);
    let sparse = layer(&tensor(&[64, 64], 1, DType::BF16).to_device(&gpu)?, None, SparseSettings::default());
    assert!(AnyLinear::from(sparse).forward(&tensor(&[4, 64], 2, DType::BF16).to_device(&other)?).is_err());
    Ok(())
}

#[test]
fn threads_on_their_default_streams_share_a_layer() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let weight = tensor(&[256, 256], 131, DType::BF16).to_device(&gpu)?;
    let sparse = layer(&weight, None, SparseSettings { refresh: Refresh::OnRequest, ..Default::default() });
    sparse.set_mode(Mode::Evaluate);
    let any = AnyLinear::from(sparse);
    // An odd number of tokens: the GEMM uses workspace.
    let run = |seed: u64| -> Result<Vec<Vec<u32>>> {
        let x = tensor(&[33, 256], seed, DType::BF16).to_device(&gpu)?;
        let normalized = |y: &Tensor| softmax(&y.to_dtype(DType::F32)?);
        (0..50).map(|_| Ok(bits(&normalized(&any.forward(&x)?)?))).collect()
    };
    let expected = [run(1)?, run(2)?];
    let found = std::thread::scope(|scope| {
        let threads = [1, 2].map(|seed| scope.spawn(move || run(seed)));
        threads.map(|thread| thread.join().unwrap())
    });
    for (found, expected) in found.into_iter().zip(&expected) {
        assert!(&found? == expected);
    }
    Ok(())
}

#[test]
fn what_does_not_fit_is_refused() -> Result<()> {
    let Some(gpu) = gpu() else { return Ok(()) };
    let message = |result: twofour_candle::Result<()>| result.unwrap_err().to_string();
    let weight = tensor(&[64, 64], 141, DType::F32).to_device(&gpu)?;
    let any = AnyLinear::from(layer(&weight, None, SparseSettings::default()));
    let error = message(any.apply(&tensor(&[4, 64], 142, DType::F32).to_device(&gpu)?).map(drop));
    assert!(error.contains("F32 where BF16 is needed"), "{error}");
    let error = message(any.apply(&tensor(&[4, 64], 142, DType::BF16)).map(drop));
    assert!(!error.is_empty());
    let error = message(any.apply(&tensor(&[4, 60], 142, DType::BF16).to_device(&gpu)?).map(drop));
    assert!(error.contains("[.., 64]"), "{error}");
    let error = message(any.operand().map(drop));
    assert!(error.contains("inside another operator"), "{error}");
    let error = message(SparseActivationLinear::new(weight.clone(), None, Default::default()).map(drop));
    assert!(error.contains("BF16 or F16"), "{error}");
    let bias = Tensor::zeros(64, DType::F32, CPU)?;
    assert!(SparseLinear::new(weight, Some(bias), SparseSettings::default()).is_err());
    let nan = tensor(&[8, 8], 143, DType::BF16).to_dtype(DType::F32)?.to_vec2::<f32>()?;
    let mut nan: Vec<f32> = nan.concat();
    nan[13] = f32::NAN;
    let nan = Tensor::from_vec(nan, (8, 8), &gpu)?.to_dtype(DType::BF16)?;
    assert!(SparseLinear::new(nan, None, SparseSettings::default()).is_err());
    Ok(())
}
