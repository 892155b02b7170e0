//! Devices, and comparisons of both engines, for tests.

// Not every test needs all of it.
#![allow(dead_code)]

pub(crate) mod checkpoints;

use std::sync::Arc;

use twofour::DataType;
use twofour_cuda::Device;
use twofour_nn::{
    model::{CudaInference, CudaSession, ModelParts as _},
    train::{Corpus, Trainer, TrainingData},
};
use twofour_transformer::engine::{Engine, Kind, Memory as _, cpu::CpuEngine, cuda::CudaEngine};

/// The first `count` devices, or a message why the test is skipped. With the variable `required` set, too few are a
/// failure.
fn devices(count: usize, required: &str) -> Option<Vec<Device>> {
    match (0..count).map(Device::open).collect() {
        Ok(devices) => Some(devices),
        Err(error @ (twofour_cuda::Error::NoDriver | twofour_cuda::Error::NoDevice { .. })) => {
            assert!(std::env::var_os(required).is_none(), "{required} is set: {error}");
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// The first device, or a message why the test is skipped. With `TWOFOUR_REQUIRE_GPU` set a missing device is a
/// failure.
pub(crate) fn device() -> Option<Device> {
    devices(1, "TWOFOUR_REQUIRE_GPU")?.pop()
}

/// An engine on the first device, as [`device`].
pub(crate) fn engine(compute: DataType) -> Option<CudaEngine> {
    device().map(|device| CudaEngine::new(&device, compute).unwrap())
}

/// Engines on the first two devices, or a message why the test is skipped. With `TWOFOUR_REQUIRE_TWO_GPUS` set fewer
/// devices are a failure.
pub(crate) fn two_engines(compute: DataType) -> Option<Vec<CudaEngine>> {
    let devices = devices(2, "TWOFOUR_REQUIRE_TWO_GPUS")?;
    Some(devices.iter().map(|device| CudaEngine::new(device, compute).unwrap()).collect())
}

/// Of each parameter: its name, the norm of its gradient on the CPU in the last step, and that of the difference to the
/// GPU's.
pub(crate) fn gradients<D: TrainingData>(
    cpu: &Trainer<CpuEngine, D>,
    cuda: &Trainer<CudaEngine, D>,
) -> Vec<(String, f64, f64)> {
    let norm = |v: &mut dyn Iterator<Item = f32>| v.map(|v| f64::from(v).powi(2)).sum::<f64>().sqrt();
    let pairs = cpu.model().parameters().into_iter().zip(cuda.model().parameters());
    pairs
        .map(|(a, b)| {
            let (x, y) =
                (cpu.engine().read(a.gradient().unwrap()).unwrap(), cuda.engine().read(b.gradient().unwrap()).unwrap());
            let apart = norm(&mut x.iter().zip(&y).map(|(x, y)| x - y));
            (a.name().to_owned(), norm(&mut x.iter().copied()), apart)
        })
        .collect()
}

/// Steps of both: losses and norms of gradients are within these shares of the CPU's, and the gradient of each
/// parameter in the first step, while weights are the same, within a share of its own norm and one of the whole
/// gradient's.
pub(crate) fn expect_alike<D: TrainingData>(
    name: &str,
    (cpu, cuda): (&mut Trainer<CpuEngine, D>, &mut Trainer<CudaEngine, D>),
    steps: usize,
    [of_loss, of_norm]: [f64; 2],
    of_gradients: Option<[f64; 2]>,
) {
    for step in 0..steps {
        let (a, b) = (cpu.step().unwrap(), cuda.step().unwrap());
        let what = format!("{name}, step {step}: {a:?}, {b:?}");
        assert!((a.loss - b.loss).abs() < of_loss * a.loss, "{what}");
        assert!((a.gradient_norm - b.gradient_norm).abs() < of_norm * a.gradient_norm, "{what}");
        let Some([own, whole]) = of_gradients.filter(|_| step == 0) else { continue };
        for (name, size, apart) in gradients(cpu, cuda) {
            assert!(apart < own * size + whole * a.gradient_norm, "{what}, {name}: {apart} of {size}");
        }
    }
}

/// The layers of the feed-forward blocks of two layers.
pub(crate) fn layers() -> Vec<String> {
    (0..2).flat_map(|layer| ["up", "down"].map(|part| format!("blocks.{layer}.mlp.{part}"))).collect()
}

/// A text to train on.
pub(crate) fn corpus() -> Arc<Corpus> {
    let text = b"Two of every four weights are kept, and the others are zero. ".repeat(60);
    Arc::new(Corpus::new(text, 0.1).unwrap())
}

/// A buffer with these values.
pub(crate) fn buffer<E: Engine>(engine: &E, kind: Kind, values: &[f32]) -> E::Buffer {
    let mut buffer = engine.zeros(kind, values.len()).unwrap();
    engine.write(&mut buffer, values).unwrap();
    buffer
}

/// The largest difference of elements, which norms make about one.
pub(crate) fn distance(found: &[Vec<f32>], expected: &[Vec<f32>]) -> f32 {
    let (found, expected) = (found.concat(), expected.concat());
    assert_eq!(found.len(), expected.len());
    let difference = |(a, b): (&f32, &f32)| if a.is_nan() || b.is_nan() { f32::INFINITY } else { (a - b).abs() };
    found.iter().zip(&expected).map(difference).fold(0f32, f32::max)
}

/// The tokens that the sequences of a batch choose in a step, and the scores of the last one.
pub(crate) type Decoded = (Vec<u32>, Vec<f32>);

/// What three sequences of `text`s choose in so many steps, with the scores of the last sequence; and the session after
/// them. Steps are launched call by call, or replayed where the model allows it.
pub(crate) fn decoded<'a>(
    model: &'a CudaInference,
    text: impl Fn(usize) -> Vec<u32>,
    (steps, launched): (usize, bool),
) -> (Vec<Decoded>, CudaSession<'a>) {
    let mut session = model.session(3, 96).unwrap();
    for sequence in 0..3 {
        session.prefill(sequence, &text(10 + 7 * sequence)).unwrap();
    }
    session.choose().unwrap();
    let mut all = vec![];
    for _ in 0..steps {
        if launched {
            session.decode_launched().unwrap()
        } else {
            session.decode().unwrap()
        }
        all.push((session.chosen().unwrap(), session.scores(2).unwrap()));
    }
    (all, session)
}
