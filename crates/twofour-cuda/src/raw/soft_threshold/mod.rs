//! The scale of a soft threshold (S-STE, Hu et al., NeurIPS 2024), computed on the device:
//! [`twofour::estimate::soft_threshold_scale`].
//!
//! Sums are in f64 and in a fixed order. Calls only launch kernels: they neither allocate nor synchronize, and a CUDA
//! graph can capture them.

use crate::{
    DataType, Device, DevicePtr, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    raw::{
        DenseWeight,
        float_types::FloatSource,
        grid::{BLOCK, shape},
    },
    source::File,
};

/// CTAs that sum parts of a weight: few, because one thread adds their partial sums.
const PARTS: u32 = 256;

/// The kernels for weights of one data type, on one device.
#[derive(Debug, Clone)]
pub struct SoftThresholdScale {
    dtype: DataType,
    sum_parts: Kernel,
    scale_of_parts: Kernel,
}

/// The kernels' parameters, in their memory layout.
#[repr(C)]
struct SoftThresholdParameters {
    weight: DevicePtr,
    partial: DevicePtr,
    scale: DevicePtr,
    rows: u32,
    cols: u32,
    blocks: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "soft-threshold",
    operation: "the scale of a soft threshold",
    contracts_fma: false,
    files: &[File::new("soft_threshold/kernel.cu", include_str!("kernel.cu"))],
};

impl SoftThresholdScale {
    /// Bytes of workspace of a call.
    pub const WORKSPACE_BYTES: usize = 16 * PARTS as usize;

    /// Loads the kernels for weights of f32, f16 or bf16.
    ///
    /// # Errors
    /// [`Error::DataType`](crate::Error::DataType) for other types; those of compiling and loading.
    pub fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let (sum_parts, scale_of_parts) = (kernel("sum_parts")?, kernel("scale_of_parts")?);
        Ok(Self { dtype, sum_parts, scale_of_parts })
    }

    /// Writes an f32: the scale that brings a weight's soft threshold nearest to the weight; 1 where the soft threshold
    /// is zero everywhere. The scale of a weight with a NaN or an infinity is meaningless.
    ///
    /// # Errors
    /// [`Error::Pointer`](crate::Error::Pointer) for pointers that are null or not aligned (workspace: 16 bytes; else
    /// to their elements), [`Error::TooLarge`](crate::Error::TooLarge), [`Error::Driver`](crate::Error::Driver).
    ///
    /// # Safety
    /// The pointers are valid for what is read and written (the workspace: [`SoftThresholdScale::WORKSPACE_BYTES`])
    /// until the stream has passed this call, and nothing else writes there; the stream is of this device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        weight: DenseWeight,
        scale: DevicePtr,
        workspace: DevicePtr,
    ) -> Result<()> {
        let (rows, cols) = shape(weight)?;
        expect_pointers(&[("scale", scale, 4), ("workspace", workspace, 16)])?;
        if rows > 0 && cols > 0 {
            expect_pointers(&[("weight", weight.data, self.dtype.bytes() as u64)])?;
        }
        let parameters =
            SoftThresholdParameters { weight: weight.data, partial: workspace, scale, rows, cols, blocks: PARTS };
        // SAFETY: the structure has the kernels' layout, and its pointers are valid, as this function requires.
        unsafe {
            self.sum_parts.launch(stream, Launch::simple((PARTS, 1), BLOCK), &parameters)?;
            self.scale_of_parts.launch(stream, Launch::simple((1, 1), 1), &parameters)
        }
    }
}
