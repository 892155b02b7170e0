//! Pruning's solvers on a GPU: a [`Backend`] whose matrices stay in device memory, and statistics of inputs that are
//! there.
//!
//! GEMMs are cuBLASLt's in f32, without TF32. Sums round in another order than on the CPU, so that elements of nearly
//! equal scores may be pruned here and kept there; a layer's error is the same but for rounding. Results repeat bit for
//! bit on one kind of device with one library.
//!
//! [`Backend`]: twofour::solve::Backend

mod inverse;
mod operations;
mod statistics;

use std::fmt;

pub use statistics::InputSums;
use twofour::DataType;

use crate::{
    Device, Result,
    arguments::{product, side},
    layer::{Accumulate, DenseLinear, DeviceBuffer, DeviceSlice, DeviceSliceMut, LayerContext},
    raw::solve::{SolveKernel, SolveKernels, SolveParameters},
};

/// A GPU on which solvers compute.
#[derive(Clone)]
pub struct GpuBackend {
    context: LayerContext,
    kernels: SolveKernels,
}

impl fmt::Debug for GpuBackend {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GpuBackend").field("context", &self.context).finish()
    }
}

impl GpuBackend {
    /// Loads the kernels on a device, on a stream of their own. It times no GEMMs to choose among them, so that results
    /// repeat. The device keeps the memory that is freed ([`Device::keep_pooled_memory`]): solvers wait for it often.
    ///
    /// # Errors
    /// Those of creating a stream and of loading kernels.
    pub fn new(device: &Device) -> Result<Self> {
        device.keep_pooled_memory()?;
        let stream = LayerContext::new(device)?.stream().clone();
        let context = LayerContext::repeatable(device, stream);
        let kernels = context.kernels((), SolveKernels::new)?;
        Ok(GpuBackend { context, kernels })
    }

    /// The context that work is launched on.
    pub fn context(&self) -> &LayerContext {
        &self.context
    }

    fn zeros(&self, len: usize) -> Result<DeviceBuffer> {
        DeviceBuffer::zeros(&self.context, DataType::F32, len)
    }

    /// Computes `y = x · square` for `x: [rows, order]` and a matrix `[order, order]`.
    fn multiply(
        &self,
        (x, rows): (DeviceSlice<'_>, usize),
        (square, order): (DeviceSlice<'_>, usize),
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let shape = DenseLinear { out_features: order, in_features: order };
        shape.input_gradient(&self.context, (x, rows), square, Accumulate::Overwrite, y)
    }

    /// Launches a kernel.
    ///
    /// # Safety
    /// That of [`SolveKernels::run`].
    unsafe fn launch(&self, kernel: SolveKernel, parameters: &SolveParameters) -> Result<()> {
        // SAFETY: the pointers are valid as this function requires, and the stream is of the kernels' device.
        unsafe { self.kernels.run(self.context.raw(), kernel, parameters) }
    }
}

/// Rows and columns as kernels take them, of so many elements in rows of `cols`.
fn shape(len: usize, cols: usize) -> Result<(u32, u32)> {
    let rows = len.checked_div(cols).unwrap_or(0);
    crate::arguments::expect_multiple("elements of rows", len, cols.max(1))?;
    product(rows, cols)?;
    Ok((side("rows", rows)?, side("columns", cols)?))
}
