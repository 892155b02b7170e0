//! GEMMs with a packed 8-bit weight, whose activations are first quantized to 8 bits on the device.

use cudarc::driver::{CudaSlice, DevicePtr as _, result};

use super::LayerContext;
use crate::{
    DataType, DevicePtr, Error, Result,
    problem::{EpilogueKind, GemmProblem},
    raw::{
        DenseWeight, Packed,
        gemm::{Epilogue, GemmOperands},
        quantize::TensorScale,
    },
};

/// The scale of a weight in 8-bit floats, recomputed at every step.
#[derive(Debug)]
pub(super) struct WeightScale {
    memory: CudaSlice<u8>,
    scale: TensorScale,
    dtype: DataType,
}

impl WeightScale {
    /// Allocates the scale of a weight whose longer side is `features`, in `dtype`.
    pub(super) fn new(context: &LayerContext, features: usize, dtype: DataType) -> Result<Self> {
        let memory = context.allocate(16 + 4 * features)?;
        let amax = memory.device_ptr(context.stream()).0;
        let scale = TensorScale { amax, inverse: amax + 4, scales: amax + 16, count: features };
        Ok(Self { memory, scale, dtype })
    }

    /// Returns a copy in memory of its own.
    pub(super) fn copy(&self, context: &LayerContext) -> Result<Self> {
        let memory = context.copy_of(&self.memory)?;
        let amax = memory.device_ptr(context.stream()).0;
        let scale = TensorScale { amax, inverse: amax + 4, scales: amax + 16, ..self.scale };
        Ok(Self { memory, scale, dtype: self.dtype })
    }

    /// Launches the computation of the scale of the master weight `master`.
    pub(super) fn update(&self, context: &LayerContext, weight: DenseWeight, master: DataType) -> Result<()> {
        let (quantizer, count) = (context.quantizer(master)?, weight.rows * weight.cols);
        zero(context, self.scale.amax)?;
        // SAFETY: the weight is valid for its shape, the scale's memory was allocated for it, and the stream is of
        // their device.
        unsafe { quantizer.scale_to_floats(context.raw(), weight.data, count, self.dtype, self.scale) }
    }

    /// Returns the address of an f32 that the weight is multiplied by before it is rounded.
    pub(super) fn inverse(&self) -> DevicePtr {
        self.scale.inverse
    }

    /// Returns the address of the scale, repeated for each feature, that accumulators are multiplied by.
    pub(super) fn scales(&self) -> DevicePtr {
        self.scale.scales
    }

    /// Returns the bytes of device memory.
    pub(super) fn bytes(&self) -> usize {
        self.memory.len()
    }
}

fn zero(context: &LayerContext, at: DevicePtr) -> Result<()> {
    context.device().bind()?;
    // SAFETY: the place is four bytes of memory that was allocated for it, and the stream is of its device.
    let set = unsafe { result::memset_d8_async(at, 0, 4, context.stream().cu_stream()) };
    set.map_err(|error| Error::driver("resetting a scale", error))
}

/// Returns the bytes of the workspace's parts for a GEMM: quantized activations, their scales, scratch memory of the
/// scale, and the GEMM's own workspace.
fn bytes(problem: GemmProblem, gemm: usize) -> [usize; 4] {
    [problem.tokens * problem.reduction, 4 * problem.tokens, 8, gemm]
}

/// Plans [`quantized_linear`] for a problem and an epilogue.
pub(super) fn prepare(
    context: &LayerContext,
    problem: GemmProblem,
    kind: EpilogueKind,
    activations: DataType,
) -> Result<()> {
    let gemm = context.packed_gemm(GemmProblem { epilogue: Some(kind), ..problem })?;
    context.quantizer(activations)?;
    context.work().parts(bytes(problem, gemm.most_sparse_bytes()))?;
    Ok(())
}

/// Launches a GEMM with a packed 8-bit weight. The activations `x` `[tokens, reduction]` of type `activations` are
/// first quantized to the problem's X: to integers with a scale for each token, or to floats with one scale. The
/// epilogue has the weight's scales.
pub(super) fn quantized_linear(
    context: &LayerContext,
    problem: GemmProblem,
    weight: Packed,
    (x, activations): (DevicePtr, DataType),
    epilogue: Epilogue,
    out: DevicePtr,
) -> Result<()> {
    let kind = EpilogueKind::of(true, epilogue.activation);
    let gemm = context.packed_gemm(GemmProblem { epilogue: Some(kind), ..problem })?;
    let quantizer = context.quantizer(activations)?;
    let (tokens, cols, of) = (problem.tokens, problem.reduction, problem.x_element);
    let mut work = context.work();
    // The quantized activations are aligned.
    let mut parts = |gemm| work.parts(bytes(problem, gemm));
    let (way, [quantized, scales, scale, workspace]) = gemm.place(context, (0, out), &mut parts)?;
    let stream = context.raw();
    if of != DataType::I8 {
        zero(context, scale)?;
    }
    // SAFETY: the slices have been found to be as long as the problem reads and writes, the workspace has been
    // allocated for the quantized activations and their scales, and the stream is of their device.
    unsafe {
        if of == DataType::I8 {
            quantizer.rows_to_i8(stream, x, (tokens, cols), quantized, scales)?;
        } else {
            let scale = TensorScale { amax: scale, inverse: scale + 4, scales, count: tokens };
            quantizer.scale_to_floats(stream, x, tokens * cols, of, scale)?;
            quantizer.to_floats(stream, x, tokens * cols, of, scale, quantized)?;
        }
        let epilogue = Epilogue { token_scales: Some(scales), ..epilogue };
        gemm.run(context, way, GemmOperands { weight, x: quantized, out, workspace }, epilogue, &mut parts)
    }
}
