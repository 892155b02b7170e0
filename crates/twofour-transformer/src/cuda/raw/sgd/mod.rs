//! Stochastic gradient descent with momentum, with decay of pruned elements in the same pass (SR-STE: Zhou et al.,
//! "Learning N:M Fine-grained Structured Sparse Neural Networks From Scratch", ICLR 2021). Results are bit for bit
//! those of the `twofour-nn` crate's optimizer on a CPU.

use twofour_cuda::{
    Device, DevicePtr, Result, Stream,
    device::Kernel,
    raw::headers,
    source::{File, Source, Support},
};

/// The kernel, on one device.
#[derive(Debug, Clone)]
pub(crate) struct Sgd {
    kernel: Kernel,
}

/// The kernel's parameters, in its memory layout; `kernel.cu` says what each is.
#[repr(C)]
pub(crate) struct SgdParameters {
    pub(crate) weight: DevicePtr,
    pub(crate) gradient: DevicePtr,
    pub(crate) momentum: DevicePtr,
    pub(crate) tiles: DevicePtr,
    pub(crate) gradient_scale: DevicePtr,
    pub(crate) copy: DevicePtr,
    pub(crate) skip: DevicePtr,
    pub(crate) count: u64,
    pub(crate) cols: u32,
    pub(crate) copy_is_bf16: u32,
    pub(crate) weight_decay: f32,
    pub(crate) pruned_decay: f32,
    pub(crate) pruned_left: f32,
    pub(crate) momentum_rate: f32,
    pub(crate) learning_rate: f32,
}

/// Returns the source.
pub(crate) fn source() -> Source {
    let kernel = File::new("sgd/kernel.cu", include_str!("kernel.cu"));
    Source::new("sgd".to_owned(), Support::ALL).with([headers::COMMON, kernel])
}

impl Sgd {
    /// Loads the kernel.
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self { kernel: device.kernel(&source(), "step")? })
    }

    /// Launches a step.
    ///
    /// # Safety
    /// The pointers are valid for `count` elements (the mask for its tiles, whose columns are a multiple of 4) until
    /// the stream has passed this call, and nothing else writes there; the stream is of this device.
    pub(crate) unsafe fn run(&self, stream: Stream, parameters: &SgdParameters) -> Result<()> {
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.kernel.launch_over(stream, (parameters.count, 4), parameters) }
    }
}
