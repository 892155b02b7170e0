//! Gated activations and their gradients.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::Kernel,
    raw::{float_types::FloatSource, headers},
    source::File,
};

/// The number of gates.
const GATES: usize = 4;

/// The kernels for tensors of one data type, on one device. Gates: SiLU, GELU, GELU by tanh, ReLU.
#[derive(Debug, Clone)]
pub(crate) struct Gated {
    dtype: DataType,
    apply: [Kernel; GATES],
    gradient: [Kernel; GATES],
    clamped: Kernel,
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[derive(Default)]
#[repr(C)]
pub(crate) struct GatedParameters {
    pub(crate) x: DevicePtr,
    pub(crate) dy: DevicePtr,
    pub(crate) out: DevicePtr,
    pub(crate) count: u64,
    pub(crate) width: u32,
    pub(crate) slope: f32,
    pub(crate) limit: f32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "gated",
    operation: "a gated activation",
    contracts_fma: true,
    files: &[headers::FUNCTIONS, File::new("gated/kernel.cu", include_str!("kernel.cu"))],
};

impl Gated {
    /// Loads the kernels for tensors of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let kernels = |prefix: &str| -> Result<[Kernel; GATES]> {
            let kernel = |name: &str| kernel(&format!("{prefix}_{name}"));
            Ok([kernel("silu")?, kernel("gelu")?, kernel("tanh_gelu")?, kernel("relu")?])
        };
        Ok(Self { dtype, apply: kernels("apply")?, gradient: kernels("gradient")?, clamped: kernel("apply_clamped")? })
    }

    /// Launches the activation with the gate of this index, or its gradient where there is `dy`, for at least one
    /// element.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn run(&self, stream: Stream, gate: usize, parameters: &GatedParameters) -> Result<()> {
        let kernels = if parameters.dy == 0 { &self.apply } else { &self.gradient };
        // SAFETY: pointers and stream are valid, as this function requires.
        unsafe { self.launch(stream, &kernels[gate], parameters) }
    }

    /// Launches the activation with gpt-oss's gate, for at least one element.
    ///
    /// # Safety
    /// That of [`Gated::run`].
    pub(crate) unsafe fn clamped(&self, stream: Stream, parameters: &GatedParameters) -> Result<()> {
        // SAFETY: pointers and stream are valid, as this function requires.
        unsafe { self.launch(stream, &self.clamped, parameters) }
    }

    /// Launches a kernel of this module.
    ///
    /// # Safety
    /// That of [`Gated::run`].
    unsafe fn launch(&self, stream: Stream, kernel: &Kernel, parameters: &GatedParameters) -> Result<()> {
        let over = (parameters.count, 16 / self.dtype.bytes() as u64);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { kernel.launch_over(stream, over, parameters) }
    }
}
