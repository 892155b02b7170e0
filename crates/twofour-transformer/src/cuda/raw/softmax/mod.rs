//! Softmax of attention scores, and its gradient.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{
        float_types::{FLOAT_TYPES, expect_float_type, row_source},
        grid::{BLOCK, threads_of_row},
    },
    source::{File, Source},
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

fn source(dtype: DataType) -> Source {
    row_source("softmax", dtype, [File::new("softmax/kernel.cu", include_str!("kernel.cu"))])
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    FLOAT_TYPES.into_iter().map(source).collect()
}

impl Softmax {
    /// Loads the kernels for probabilities of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        expect_float_type("softmax", dtype)?;
        let source = source(dtype);
        Ok(Self { forward: device.kernel(&source, "forward")?, backward: device.kernel(&source, "backward")? })
    }

    /// Launches the softmax of `rows` rows, or its gradient, for at least one row.
    ///
    /// # Safety
    /// The pointers are valid, with the lengths of the parameters' documentation, until the stream has passed this
    /// call; the stream is of this device.
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
