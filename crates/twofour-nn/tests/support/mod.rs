//! Devices, and comparisons of both engines, for tests.

// Not every test needs all of it.
#![allow(dead_code)]

pub(crate) mod checkpoints;

use twofour::DataType;
use twofour_cuda::Device;
use twofour_nn::{
    model::ModelParts as _,
    train::{Trainer, TrainingData},
};
use twofour_transformer::engine::{Memory as _, cpu::CpuEngine, cuda::CudaEngine};

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
