//! Softmax of attention scores, and its gradient.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        float_types::FloatSource,
        grid::{BLOCK, threads_of_row},
    },
    source::File,
};

/// The kernels for probabilities of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct Softmax {
    forward: Kernel,
    backward: Kernel,
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[derive(Default)]
#[repr(C)]
pub(crate) struct SoftmaxParameters {
    pub(crate) scores: DevicePtr,
    pub(crate) probabilities: DevicePtr,
    pub(crate) lse: DevicePtr,
    pub(crate) capped: DevicePtr,
    pub(crate) positions: u32,
    pub(crate) scale: f32,
    pub(crate) causal: u32,
    pub(crate) window: u32,
    pub(crate) soft_cap: f32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "softmax",
    operation: "softmax",
    contracts_fma: true,
    files: &[File::new("softmax/kernel.cu", include_str!("kernel.cu"))],
};

impl Softmax {
    /// Loads the kernels for probabilities of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        Ok(Self { forward: kernel("forward")?, backward: kernel("backward")? })
    }

    /// Launches the softmax of `rows` rows, or its gradient, for at least one row.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn run(
        &self,
        stream: Stream,
        is_gradient: bool,
        rows: u32,
        parameters: &SoftmaxParameters,
    ) -> Result<()> {
        let kernel = if is_gradient { &self.backward } else { &self.forward };
        let launch = Launch::simple((rows, 1), threads_of_row(4 * parameters.positions as usize, BLOCK));
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { kernel.launch(stream, launch, parameters) }
    }
}
