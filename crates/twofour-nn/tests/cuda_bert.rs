//! On a device: the encoder on the GPU against the encoder on the CPU. Without a device the tests skip; with `TWOFOUR_REQUIRE_GPU` set they fail.
#![cfg(feature = "cuda")]

use twofour::{
    DataType,
    layer::{Accumulate, SparseLinearSettings},
};
use twofour_cuda::Device;
use twofour_nn::{
    engine::{Engine, Kind, Nonlinearity, cpu::CpuEngine, cuda::CudaEngine},
    model::{Bert, BertConfig, BertSamples, EncoderConfig, EncoderTask},
    random::Stream,
};

/// An engine on the first device, or a message why the test is skipped.
fn engine(compute: DataType) -> Option<CudaEngine> {
    match Device::open(0) {
        Ok(device) => Some(CudaEngine::new(&device, compute).unwrap()),
        Err(error) if std::env::var_os("TWOFOUR_REQUIRE_GPU").is_none() => {
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

const TASKS: [EncoderTask; 2] = [EncoderTask::MaskedTokens, EncoderTask::Answers];

/// Heads of 32 elements, as MiniLM's; 37 positions fill no tile of the attention kernels.
fn config(task: EncoderTask) -> BertConfig {
    let encoder = EncoderConfig {
        vocabulary: 211,
        context: 40,
        token_types: 2,
        layers: 2,
        width: 128,
        heads: 4,
        feed_forward: 256,
        epsilon: 1e-12,
        activation: Nonlinearity::Gelu,
    };
    BertConfig { encoder, task, positions: 37 }
}

fn model<E: Engine>(engine: &E, task: EncoderTask, sparse: bool) -> Bert<E> {
    let mut model = Bert::build(engine, &config(task), |name, shape| {
        let (stream, mean) = (Stream::new(3, name), if name.ends_with("norm.weight") { 1.0 } else { 0.0 });
        let count: usize = shape.iter().product();
        Ok((0..count as u64).map(|i| (mean + 0.08 * stream.normal(i)) as f32).collect())
    })
    .unwrap();
    if sparse {
        for linear in model.linears_mut().filter(|linear| linear.name().starts_with("blocks.")) {
            linear.make_sparse(engine, SparseLinearSettings::default(), 1).unwrap();
        }
    }
    model.begin_training(engine).unwrap();
    model
}

/// The loss of three sequences, and the gradient of each parameter by name.
fn passes<E: Engine>(engine: &E, task: EncoderTask, sparse: bool) -> (f64, Vec<(String, Vec<f32>)>) {
    let tokens: Vec<u32> = (0..3 * 37u32).map(|i| i * i % 211).collect();
    let types: Vec<u32> = (0..3 * 37).map(|i| u32::from(i % 37 > 11)).collect();
    let places: Vec<u32> = (0..18).map(|i| 6 * (i % 6) + i / 6).collect();
    let (places, targets) = match task {
        EncoderTask::MaskedTokens => (places, (0..18).map(|i| 11 * i).collect()),
        EncoderTask::Answers => (vec![], vec![3u32, 5, 0, 36, 17, 17]),
    };
    let samples = BertSamples { sequences: 3, tokens: &tokens, types: &types, places: &places, targets: &targets };
    let mut model = model(engine, task, sparse);
    let mut loss = engine.zeros(Kind::Wide, 1).unwrap();
    // Twice, so that buffers of the first pass are used again.
    for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
        model.gradients(engine, samples, (0.5, accumulate), &mut loss).unwrap();
    }
    let gradient = |parameter: &twofour_nn::parameter::Parameter<E>| {
        (parameter.name().to_owned(), engine.read(parameter.gradient().unwrap()).unwrap())
    };
    (f64::from(engine.read(&loss).unwrap()[0]), model.parameters().into_iter().map(gradient).collect())
}

fn largest(values: &[f32]) -> f32 {
    values.iter().fold(0f32, |most, x| most.max(x.abs()))
}

/// The largest difference over the largest magnitude, or over `least` where that is more.
fn distance(found: &[f32], expected: &[f32], least: f32) -> f32 {
    assert_eq!(found.len(), expected.len());
    found.iter().zip(expected).fold(0f32, |d, (a, b)| d.max((a - b).abs())) / largest(expected).max(least)
}

#[test]
fn losses_and_gradients_of_every_parameter_are_those_of_the_cpu() {
    // TF32 is not used; bf16 has 8 bits of mantissa, over two layers forward and back.
    for (compute, tolerance) in [(DataType::F32, 2e-4), (DataType::BF16, 0.12), (DataType::F16, 0.03)] {
        let Some(engine) = engine(compute) else { return };
        for (task, sparse) in TASKS.into_iter().flat_map(|task| [(task, false), (task, true)]) {
            // The GPU has no 2:4 layers in f32.
            if sparse && compute == DataType::F32 {
                continue;
            }
            let (expected_loss, expected) = passes(&CpuEngine, task, sparse);
            let (loss, found) = passes(&engine, task, sparse);
            let off = (loss / expected_loss - 1.0).abs();
            assert!(off < f64::from(tolerance) / 4.0, "{compute} {task:?} {sparse}: {loss} and {expected_loss}");
            // Some gradients are zero but for rounding: that of the last norm's bias, because the gradients of answers' scores add up to zero over positions.
            let least = 1e-3 * expected.iter().fold(0f32, |most, (_, gradient)| most.max(largest(gradient)));
            for ((name, found), (other, expected)) in found.iter().zip(&expected) {
                assert_eq!(name, other);
                let d = distance(found, expected, least);
                // The gradient of the keys' bias is zero but for rounding, and lies within that of the whole bias.
                assert!(d < tolerance, "{compute} {task:?}, 2:4 {sparse}, {name}: off by {d} of the largest element");
            }
        }
    }
}

#[test]
fn passes_repeat_bit_for_bit() {
    let Some(engine) = engine(DataType::BF16) else { return };
    for task in TASKS {
        let (first, second) = (passes(&engine, task, true), passes(&engine, task, true));
        assert_eq!(first.0.to_bits(), second.0.to_bits(), "{task:?}");
        for ((name, a), (_, b)) in first.1.iter().zip(&second.1) {
            assert!(a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits()), "{task:?} {name}");
        }
    }
}
