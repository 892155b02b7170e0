//! Sums, conversions and constants, element by element.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream, device::Kernel, raw::float_types::FloatSource, source::File,
};

/// An operation on each element.
#[derive(Debug, Clone, Copy)]
pub(crate) enum PointwiseOperation {
    /// `out = a + b`.
    Add,
    /// `out = a` for `a` of f32 and `out` of the kernels' type.
    FromF32,
    /// `out = a` for `a` of the kernels' type and `out` of f32.
    ToF32,
    /// `out = value`.
    Fill,
    /// `out = value · a`.
    Scale,
    /// `out = value · tanh(a / value)`.
    Bound,
    /// `out = b · (1 - tanh(a / value)²)`.
    BoundGradient,
}

/// The names of the kernels, in the order of the operations.
const KERNELS: [&str; 7] = ["add", "from_f32", "to_f32", "fill", "scale", "bound", "bound_gradient"];

/// The kernels for tensors of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct Pointwise {
    dtype: DataType,
    kernels: Vec<Kernel>,
}

/// The kernels' parameters, in their memory layout.
#[derive(Default)]
#[repr(C)]
pub(crate) struct PointwiseParameters {
    pub(crate) a: DevicePtr,
    pub(crate) b: DevicePtr,
    pub(crate) out: DevicePtr,
    pub(crate) count: u64,
    pub(crate) value: f32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "pointwise",
    operation: "an element-wise operation",
    contracts_fma: true,
    files: &[File::new("pointwise/kernel.cu", include_str!("kernel.cu"))],
};

impl Pointwise {
    /// Loads the kernels for tensors of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let kernels = KERNELS.iter().map(|name| kernel(name)).collect::<Result<_>>()?;
        Ok(Self { dtype, kernels })
    }

    /// Launches an operation.
    ///
    /// # Safety
    /// The pointers that the operation uses are valid for `count` elements until the stream has passed this call; the
    /// stream is of this device.
    pub(crate) unsafe fn run(
        &self,
        stream: Stream,
        operation: PointwiseOperation,
        parameters: &PointwiseParameters,
    ) -> Result<()> {
        let over = (parameters.count, 16 / self.dtype.bytes() as u64);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.kernels[operation as usize].launch_over(stream, over, parameters) }
    }
}
