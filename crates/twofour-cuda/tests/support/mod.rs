//! A device and memory on it, for tests.

// Not every test needs all of it.
#![allow(dead_code)]

pub(crate) mod compressed;
pub(crate) mod numbers;

use std::sync::Arc;

use cudarc::driver::{
    CudaGraph, CudaSlice, CudaStream, DevicePtr, DeviceRepr,
    sys::{CUgraphInstantiate_flags, CUstreamCaptureMode},
};
use twofour_cuda::{
    Architecture, Device, Error, Stream,
    compare::{Dispatcher, Engine, Product, Weight},
    problem::GemmProblem,
};

/// The first device, or a message why the test is skipped. With `TWOFOUR_REQUIRE_GPU` set, as `bench/remote/gpu_run.sh`
/// does, a missing device is a failure; a GPU of another architecture than a test is for still skips that test.
pub(crate) fn device() -> Option<Device> {
    match Device::open(0) {
        Ok(device) => Some(device),
        Err(error @ (Error::NoDriver | Error::NoDevice { .. })) => {
            assert!(std::env::var_os("TWOFOUR_REQUIRE_GPU").is_none(), "TWOFOUR_REQUIRE_GPU is set: {error}");
            eprintln!("skipped: {error}");
            None
        }
        Err(error) => panic!("{error}"),
    }
}

/// A bench on it.
pub(crate) fn bench() -> Option<Bench> {
    device().map(Bench::new)
}

/// The same on a device with the tensor cores that some products are for.
pub(crate) fn hopper() -> Option<Bench> {
    let device = device()?;
    if device.architecture() != Architecture::SM_90 {
        eprintln!("skipped: not a Hopper GPU");
        return None;
    }
    Some(Bench::new(device))
}

/// A device, a stream of its own, and memory on it.
pub(crate) struct Bench {
    pub(crate) device: Device,
    stream: Arc<CudaStream>,
}

impl Bench {
    pub(crate) fn new(device: Device) -> Self {
        let stream = device.context().new_stream().unwrap();
        Self { device, stream }
    }

    pub(crate) fn up<T: DeviceRepr>(&self, data: &[T]) -> CudaSlice<T> {
        self.stream.clone_htod(data).unwrap()
    }

    /// Overwrites memory.
    pub(crate) fn write<T: DeviceRepr>(&self, data: &[T], to: &mut CudaSlice<T>) {
        self.stream.memcpy_htod(data, to).unwrap();
    }

    pub(crate) fn down<T: DeviceRepr>(&self, data: &CudaSlice<T>) -> Vec<T> {
        let data = self.stream.clone_dtoh(data).unwrap();
        self.stream.synchronize().unwrap();
        data
    }

    /// A product by one engine.
    ///
    /// # Safety
    /// That of [`Product::new`].
    pub(crate) unsafe fn product(
        &self,
        dispatcher: &Dispatcher,
        problem: GemmProblem,
        engine: Engine,
        weight: Weight,
    ) -> Result<Product, Error> {
        // SAFETY: the weight is valid and 2:4 as long as `Product::new` requires, because this function requires the
        // same.
        unsafe { Product::new(&self.device, dispatcher.libraries(), &self.stream, problem, engine, weight) }
    }

    /// What is launched meanwhile, as a graph.
    pub(crate) fn captured(&self, launch: impl FnOnce()) -> CudaGraph {
        captured_on(&self.stream, launch).unwrap()
    }

    /// Launches into one buffer of so many bytes, replays a graph of the same launch into another, and expects the same
    /// bytes. `launch` gets the buffer's address.
    pub(crate) fn expect_replays_alike(&self, what: &str, bytes: usize, launch: impl Fn(u64)) {
        let [direct, replayed] = std::array::from_fn(|_| self.poisoned(bytes, 0xFFu8));
        launch(self.at(&direct));
        self.wait();
        let at = self.at(&replayed);
        let graph = self.captured(|| launch(at));
        for _ in 0..3 {
            graph.launch().unwrap();
        }
        assert_eq!(self.down(&replayed), self.down(&direct), "{what}");
    }

    /// Waits until everything launched is done.
    pub(crate) fn wait(&self) {
        self.stream.synchronize().unwrap();
    }

    /// Memory full of bytes that no result has.
    pub(crate) fn poisoned<T: DeviceRepr + Clone>(&self, len: usize, poison: T) -> CudaSlice<T> {
        self.up(&vec![poison; len.max(1)])
    }

    pub(crate) fn at<T>(&self, data: &CudaSlice<T>) -> u64 {
        data.device_ptr(&self.stream).0
    }

    pub(crate) fn stream(&self) -> Stream {
        Stream(self.stream.cu_stream())
    }
}

/// What is launched on a stream meanwhile, as a graph; `None` where that is nothing.
pub(crate) fn captured_on(stream: &Arc<CudaStream>, launch: impl FnOnce()) -> Option<CudaGraph> {
    stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).unwrap();
    launch();
    stream.end_capture(CUgraphInstantiate_flags(0)).unwrap()
}
