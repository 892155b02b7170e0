//! Gated activations that are quantized to 8-bit integers.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::Kernel,
    raw::{float_types::FloatSource, headers, quantize::RowCtas},
    source::File,
};

/// Vectors of a row from which on another CTA is worth its share of a cluster's barriers, where each takes eight
/// exponentials.
const MIN_VECTORS: u32 = 128;

/// The kernels for inputs of one data type, on one device. Gates: SiLU, GELU, GELU by tanh, ReLU.
#[derive(Debug, Clone)]
pub(crate) struct QuantizedGates {
    kernels: [Kernel; 4],
    rows: RowCtas,
}

/// The kernels' parameters, in their memory layout; `kernel.cu` says what each is.
#[repr(C)]
pub(crate) struct QuantizedGateParameters {
    pub(crate) x: DevicePtr,
    pub(crate) y: DevicePtr,
    pub(crate) scales: DevicePtr,
    pub(crate) width: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "decode-gate",
    operation: "a gated activation",
    contracts_fma: true,
    files: &[
        headers::FUNCTIONS,
        headers::ROW_SCALE,
        headers::QUANTIZED_ROW,
        File::new("decode/gate/kernel.cu", include_str!("kernel.cu")),
    ],
};

impl QuantizedGates {
    /// Loads the kernels for f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let kernels = [kernel("silu")?, kernel("gelu")?, kernel("tanh_gelu")?, kernel("relu")?];
        Ok(Self { kernels, rows: RowCtas::new(device, dtype, MIN_VECTORS) })
    }

    /// Launches the gate of this index for `rows` rows, at least one.
    ///
    /// # Safety
    /// That of [`Kernel::launch`], with the lengths of the parameters' documentation.
    pub(crate) unsafe fn run(
        &self,
        stream: Stream,
        gate: usize,
        rows: u32,
        parameters: &QuantizedGateParameters,
    ) -> Result<()> {
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.kernels[gate].launch(stream, self.rows.launch(rows, parameters.width), parameters) }
    }
}
