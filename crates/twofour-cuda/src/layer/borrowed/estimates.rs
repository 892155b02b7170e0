//! 2:4 estimates of dense matrices, and the products with them.

use twofour::{Axis, estimate::Estimator};

use super::MasterSlice;
use crate::{
    DataType, DevicePtr, Result,
    layer::{
        Accumulate, DeviceSlice, DeviceSliceMut, LayerContext, elements,
        forward::workspace_bytes,
        gradient::{expect_gradient, sampled_problem, zero},
    },
    raw::{
        Packed,
        compress::{CompressRule, CompressTarget},
        estimate::EstimateTarget,
        gemm::{Epilogue, Gemm, GemmOperands, packed_bytes},
        soft_threshold::SoftThresholdScale,
    },
};

/// Launches the scale of the soft threshold for a master weight into one f32 (S-STE, Hu et al., NeurIPS 2024):
/// [`twofour::estimate::soft_threshold_scale`].
///
/// # Errors
/// Those of [`remask`](super::remask).
pub fn soft_threshold_scale(context: &LayerContext, master: MasterSlice<'_>, scale: DeviceSliceMut<'_>) -> Result<()> {
    let weight = master.expect(context)?;
    let scale = scale.expect("the scale of the soft threshold", context, DataType::F32, 1)?;
    let kernel = SoftThresholdScale::new(context.device(), master.data.dtype())?;
    let mut work = context.work();
    let [workspace] = work.parts([SoftThresholdScale::WORKSPACE_BYTES])?;
    // SAFETY: the weight is valid for its shape, the scale is one f32, and the stream is of their device.
    unsafe { kernel.run(context.raw(), weight, scale, workspace) }
}

/// An estimator, and where the rest of its seed is.
#[derive(Debug, Clone, Copy)]
pub struct Sampling<'a> {
    /// The estimator.
    pub estimator: Estimator,
    /// A u64 in device memory, as eight i8s, that is added to the estimator's seed when the kernel runs.
    pub seed: Option<DeviceSlice<'a>>,
}

impl Sampling<'_> {
    fn seed_at(self, context: &LayerContext) -> Result<Option<DevicePtr>> {
        self.seed.map(|seed| seed.expect("the seed", context, DataType::I8, 8)).transpose()
    }
}

/// Launches the 2:4 estimate of a matrix along its rows, as a dense matrix of the same type, f32, f16 or bf16, with
/// zeros ([`twofour::estimate::estimate`]). `scale` is one f32 in device memory that values are multiplied by.
///
/// # Errors
/// Those of [`super::remask`].
pub fn estimate(
    context: &LayerContext,
    matrix: MasterSlice<'_>,
    sampling: Sampling<'_>,
    scale: Option<DeviceSlice<'_>>,
    out: DeviceSliceMut<'_>,
) -> Result<()> {
    let dtype = matrix.data.dtype();
    let dense = matrix.expect(context)?;
    let factor = scale.map(|scale| scale.expect("the scale of the estimate", context, DataType::F32, 1)).transpose()?;
    let out = out.expect("the estimate", context, dtype, elements(matrix.rows, matrix.cols)?)?;
    let to = EstimateTarget { out, factor, seed: sampling.seed_at(context)? };
    // SAFETY: the matrix and the result are valid for their shape, and the stream is of their device.
    unsafe { context.estimator(dtype)?.run(context.raw(), dense, sampling.estimator, to) }
}

/// Launches `dw = dyᵀ · x` with the 2:4 estimate of `dyᵀ` along tokens: a sparse GEMM. `dy` is `[tokens,
/// out_features]`, `x` `[tokens, in_features]`, both of f16 or bf16, and `dw` `[out_features, in_features]` of the same
/// type or f32. Bit for bit what [`SparseLinear`](super::super::SparseLinear) computes from the same seed.
///
/// # Errors
/// Those of [`super::remask`].
pub fn sampled_weight_gradient(
    context: &LayerContext,
    (dy, x): (MasterSlice<'_>, MasterSlice<'_>),
    sampling: Sampling<'_>,
    dw: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, output, tokens) = (dy.data.dtype(), dw.dtype(), dy.rows);
    let gradient = dy.expect(context)?;
    let input = x.data.expect("the input", context, dtype, elements(tokens, x.cols)?)?;
    let out = dw.expect("the weight gradient", context, output, elements(dy.cols, x.cols)?)?;
    let seed = sampling.seed_at(context)?;
    expect_gradient(output, dtype)?;
    if dy.cols == 0 || x.cols == 0 || tokens == 0 {
        return zero(context, Accumulate::Overwrite, out, dw.len() * output.bytes());
    }
    let gemm = context.gemm(sampled_problem((dtype, output), (dy.cols, x.cols), tokens, Accumulate::Overwrite))?;
    let compressor = context.compressor(dtype, dtype)?;
    let bytes = packed_bytes(dtype, dy.cols, tokens);
    let mut work = context.work();
    let sizes = [bytes.values, bytes.meta, workspace_bytes(&gemm, input, out), 8];
    let [values, meta, workspace, wrong] = work.parts(sizes)?;
    let weight = Packed { values, meta };
    let to = CompressTarget { packed: weight, order: Gemm::meta_order_of(dtype), factor: None, seed, wrong };
    let (stream, rule) = (context.raw(), CompressRule::Estimate(sampling.estimator));
    // SAFETY: the slices have been found to be as long as their shapes require, the workspace has been allocated for
    // the estimate, and the stream is of their device.
    unsafe {
        compressor.run(stream, gradient, Axis::Column, rule, to)?;
        gemm.run(stream, GemmOperands { weight, x: input, out, workspace }, Epilogue::default())
    }
}
