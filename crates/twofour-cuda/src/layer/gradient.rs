//! Gradients of a sparse layer's parameters.

use twofour::{
    Axis,
    estimate::Estimator,
    layer::{Accumulate, WeightGradient},
};

use super::{
    DeviceSlice, DeviceSliceMut, LayerContext, SparseLinear, dense::dense, elements, forward::workspace_bytes,
};
use crate::{
    Activation, DataType, DevicePtr, Error, Result,
    cublaslt::{DenseProblem, WORKSPACE_BYTES},
    problem::{GemmProblem, Order, XOrder},
    raw::{
        DenseWeight, Packed,
        column_sums::ColumnSumsTarget,
        compress::{CompressRule, CompressTarget},
        gemm::{Epilogue, Gemm, GemmOperands, packed_bytes},
    },
};

impl SparseLinear {
    /// Launches the weight gradient of the layer's settings, `dyᵀ · x`, for the gradient `dy` `[tokens, out_features]`
    /// of the pre-activation, `x` `[tokens, in_features]` and `dw` `[out_features, in_features]`, of f32 or of the
    /// activations' type. With an MVUE each call uses its own seed ([`SparseLinear::set_seed`]).
    ///
    /// # Errors
    /// Those of [`SparseLinear::forward`]; [`Error::NoLibrary`] where the GEMM is dense and cuBLASLt is not installed.
    pub fn weight_gradient(
        &self,
        dy: DeviceSlice<'_>,
        x: DeviceSlice<'_>,
        tokens: usize,
        accumulate: Accumulate,
        dw: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (context, dtype, output) = (&self.context, self.dtype, dw.dtype());
        expect_gradient(output, dtype)?;
        let dy = dy.expect("the output gradient", context, dtype, elements(tokens, self.out_features)?)?;
        let x = x.expect("the input", context, dtype, elements(tokens, self.in_features)?)?;
        let dw = dw.expect("the weight gradient", context, output, elements(self.out_features, self.in_features)?)?;
        if tokens == 0 {
            return zero(context, accumulate, dw, self.out_features * self.in_features * output.bytes());
        }
        match self.settings.weight_gradient {
            WeightGradient::Dense => dense(context, dense_weight_gradient(self, tokens, accumulate, output), x, dy, dw),
            WeightGradient::Masked => self.masked_weight_gradient(dy, x, tokens, accumulate, (dw, output)),
            WeightGradient::Mvue => {
                self.sampled(Estimator::Mvue { seed: 0 }, (dy, x), tokens, accumulate, (dw, output))
            }
            WeightGradient::MvueApproximate => {
                self.sampled(Estimator::MvueApproximate { seed: 0 }, (dy, x), tokens, accumulate, (dw, output))
            }
            other => Err(Error::NoMethod { what: format!("the weight gradient {other:?}") }),
        }
    }

    fn masked_weight_gradient(
        &self,
        dy: DevicePtr,
        x: DevicePtr,
        tokens: usize,
        accumulate: Accumulate,
        (dw, output): (DevicePtr, DataType),
    ) -> Result<()> {
        let (context, rows, cols) = (&self.context, self.out_features, self.in_features);
        if rows == 0 || cols == 0 {
            return Ok(());
        }
        let tiles = self.mask.tiles();
        if accumulate == Accumulate::Overwrite {
            dense(context, dense_weight_gradient(self, tokens, accumulate, output), x, dy, dw)?;
            let gradient = DenseWeight { data: dw, rows, cols };
            // SAFETY: gradient and mask are as long as the weight requires, and the stream is of their device.
            return unsafe { context.pruner(output, self.dtype)?.apply_mask(context.raw(), gradient, tiles, dw) };
        }
        let problem = dense_weight_gradient(self, tokens, Accumulate::Overwrite, DataType::F32);
        let (plan, elementwise) = (context.dense(problem)?.plan, context.elementwise(output)?);
        let mut work = context.work();
        let [product, workspace] = work.parts([4 * rows * cols, WORKSPACE_BYTES])?;
        // SAFETY: the slices have been found to be as long as the weight and the tokens require, the workspace has been
        // allocated for the product, and the stream is of their device.
        unsafe {
            plan.run(context.raw(), x, dy, product, workspace)?;
            elementwise.add_where_kept(context.raw(), product, tiles, dw, rows, cols)
        }
    }

    /// Computes the weight gradient from the 2:4 estimate of the output gradient along tokens.
    fn sampled(
        &self,
        estimator: Estimator,
        (dy, x): (DevicePtr, DevicePtr),
        tokens: usize,
        accumulate: Accumulate,
        (dw, output): (DevicePtr, DataType),
    ) -> Result<()> {
        let (context, dtype) = (&self.context, self.dtype);
        if self.out_features == 0 || self.in_features == 0 {
            return Ok(());
        }
        let gemm = context.gemm(sampled_problem(
            (dtype, output),
            (self.out_features, self.in_features),
            tokens,
            accumulate,
        ))?;
        let bytes = packed_bytes(dtype, self.out_features, tokens);
        let mut work = context.work();
        let [values, meta, workspace] = work.parts([bytes.values, bytes.meta, workspace_bytes(&gemm, x, dw)])?;
        let weight = Packed { values, meta };
        let to = CompressTarget {
            packed: weight,
            order: Gemm::meta_order_of(dtype),
            factor: None,
            seed: Some(self.seed_at()),
            wrong: self.wrong_at(),
        };
        let gradient = DenseWeight { data: dy, rows: tokens, cols: self.out_features };
        let (stream, rule) = (context.raw(), CompressRule::Estimate(estimator));
        // SAFETY: the slices have been found to be as long as the weight and the tokens require, the workspace has been
        // allocated for the estimate, and the stream is of their device.
        unsafe {
            self.compressor.run(stream, gradient, Axis::Column, rule, to)?;
            self.compressor.advance(stream, self.seed_at())?;
            gemm.run(stream, GemmOperands { weight, x, out: dw, workspace }, Epilogue::default())
        }
    }

    /// Launches [`SparseLinear::weight_gradient`] and [`SparseLinear::bias_gradient`]. Where the weight gradient is
    /// dense and overwritten, and `db` has its type, one GEMM computes both; the additions of the bias gradient are
    /// then in another order.
    ///
    /// # Errors
    /// Those of both calls.
    pub fn parameter_gradients(
        &self,
        dy: DeviceSlice<'_>,
        x: DeviceSlice<'_>,
        tokens: usize,
        accumulate: Accumulate,
        mut dw: DeviceSliceMut<'_>,
        mut db: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let is_dense = self.settings.weight_gradient == WeightGradient::Dense && accumulate == Accumulate::Overwrite;
        if !(is_dense && tokens > 0 && db.dtype() == dw.dtype()) {
            self.weight_gradient(dy, x, tokens, accumulate, dw.reborrow())?;
            return self.bias_gradient(dy, tokens, accumulate, db.reborrow());
        }
        let (context, dtype, output) = (&self.context, self.dtype, dw.dtype());
        expect_gradient(output, dtype)?;
        let vector = db.expect("the bias gradient", context, output, self.out_features)?;
        let problem = dense_weight_gradient(self, tokens, accumulate, output);
        // SAFETY: the vector has been found to be as long as the output features, and is passed to every run of its
        // plan.
        let plan = unsafe { context.dense_with_bias_gradient(problem, vector) }?;
        let Some(plan) = plan else {
            self.weight_gradient(dy, x, tokens, accumulate, dw.reborrow())?;
            return self.bias_gradient(dy, tokens, accumulate, db.reborrow());
        };
        let dy = dy.expect("the output gradient", context, dtype, elements(tokens, self.out_features)?)?;
        let x = x.expect("the input", context, dtype, elements(tokens, self.in_features)?)?;
        let dw = dw.expect("the weight gradient", context, output, elements(self.out_features, self.in_features)?)?;
        let mut work = context.work();
        let [workspace] = work.parts([WORKSPACE_BYTES])?;
        // SAFETY: the slices have been found to be as long as the problem reads and writes; the stream is of the plan's
        // device.
        unsafe { plan.run(context.raw(), x, dy, dw, workspace) }
    }

    /// Launches the bias gradient: the column sums of `dy` `[tokens, out_features]`, in f32, to `db` `[out_features]`
    /// of f32, f16 or bf16.
    ///
    /// # Errors
    /// Those of [`SparseLinear::forward`].
    pub fn bias_gradient(
        &self,
        dy: DeviceSlice<'_>,
        tokens: usize,
        accumulate: Accumulate,
        db: DeviceSliceMut<'_>,
    ) -> Result<()> {
        bias_gradient(&self.context, dy, tokens, accumulate, db)
    }
}

/// Launches the column sums of `dy` `[tokens, features]`, in f32, to `db` `[features]`; both are of f32, f16 or bf16.
///
/// # Errors
/// Those of [`SparseLinear::forward`].
pub fn bias_gradient(
    context: &LayerContext,
    dy: DeviceSlice<'_>,
    tokens: usize,
    accumulate: Accumulate,
    db: DeviceSliceMut<'_>,
) -> Result<()> {
    let features = db.len();
    let matrix = dy.expect("the output gradient", context, dy.dtype(), elements(tokens, features)?)?;
    let sums = db.expect("the bias gradient", context, db.dtype(), features)?;
    let kernel = context.column_sums(dy.dtype())?;
    let mut work = context.work();
    let [workspace] = work.parts([kernel.workspace_bytes(tokens, features)])?;
    let accumulate = accumulate == Accumulate::Add;
    let to = ColumnSumsTarget { sums, dtype: db.dtype(), accumulate, workspace };
    // SAFETY: the slices have been found to be as long as the tokens and features require, and the stream is of their
    // device.
    unsafe { kernel.run(context.raw(), matrix, tokens, features, to) }
}

/// Launches what [`activation_gradient`](super::activation_gradient) and [`bias_gradient`] do, in one pass: `dy ← dy ·
/// activation'(pre)` for `[tokens, features]` tensors, and its column sums to `db` `[features]`.
///
/// # Errors
/// Those of [`SparseLinear::forward`].
pub fn activation_and_bias_gradient(
    context: &LayerContext,
    activation: Activation,
    pre: DeviceSlice<'_>,
    dy: DeviceSliceMut<'_>,
    tokens: usize,
    accumulate: Accumulate,
    db: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, features) = (dy.dtype(), db.len());
    let len = elements(tokens, features)?;
    let input = pre.expect("the pre-activation", context, dtype, len)?;
    let gradient = dy.expect("the output gradient", context, dtype, len)?;
    let sums = db.expect("the bias gradient", context, db.dtype(), features)?;
    let kernel = context.column_sums(dtype)?;
    let mut work = context.work();
    let [workspace] = work.parts([kernel.workspace_bytes(tokens, features)])?;
    let to = ColumnSumsTarget { sums, dtype: db.dtype(), accumulate: accumulate == Accumulate::Add, workspace };
    // SAFETY: the slices have been found to be as long as the tokens and features require, and the stream is of their
    // device.
    unsafe { kernel.run_through(context.raw(), activation, (input, gradient), (tokens, features), to) }
}

/// Plans the GEMMs of the gradients for a number of tokens.
pub(super) fn prepare(layer: &SparseLinear, tokens: usize, accumulate: Accumulate, output: DataType) -> Result<()> {
    let (context, dtype) = (&layer.context, layer.dtype);
    let (rows, cols) = (layer.out_features, layer.in_features);
    expect_gradient(output, dtype)?;
    if tokens == 0 || rows == 0 || cols == 0 {
        return Ok(());
    }
    let sums = context.column_sums(dtype)?.workspace_bytes(tokens, rows);
    context.work().parts([sums])?;
    match layer.settings.weight_gradient {
        WeightGradient::Mvue | WeightGradient::MvueApproximate => {
            let gemm = context.gemm(sampled_problem((dtype, output), (rows, cols), tokens, accumulate))?;
            let bytes = packed_bytes(dtype, rows, tokens);
            context.work().parts([bytes.values, bytes.meta, gemm.unaligned_workspace_bytes()])?;
        }
        WeightGradient::Masked if accumulate == Accumulate::Add => {
            context.dense(dense_weight_gradient(layer, tokens, Accumulate::Overwrite, DataType::F32))?;
            context.elementwise(output)?;
            context.work().parts([4 * rows * cols, WORKSPACE_BYTES])?;
        }
        _ => {
            context.dense(dense_weight_gradient(layer, tokens, accumulate, output))?;
            context.pruner(output, dtype)?.load_masks()?;
            context.work().parts([WORKSPACE_BYTES])?;
        }
    }
    Ok(())
}

/// Returns the problem of the dense weight gradient: row-major `[out_features, in_features]` is column-major
/// `[in_features, out_features]`.
fn dense_weight_gradient(
    layer: &SparseLinear,
    tokens: usize,
    accumulate: Accumulate,
    output: DataType,
) -> DenseProblem {
    DenseProblem {
        element: layer.dtype,
        output,
        rows: layer.in_features,
        cols: layer.out_features,
        reduction: tokens,
        a_transposed: false,
        b_transposed: true,
        accumulate: accumulate == Accumulate::Add,
    }
}

/// Returns the problem of a weight gradient `[out_features, in_features]` whose packed operand is the estimate of the
/// transposed output gradient.
pub(super) fn sampled_problem(
    (dtype, output): (DataType, DataType),
    (out_features, in_features): (usize, usize),
    tokens: usize,
    accumulate: Accumulate,
) -> GemmProblem {
    GemmProblem {
        x: XOrder::ReductionFirst,
        order: Order::FeaturesFirst,
        accumulate: accumulate == Accumulate::Add,
        ..GemmProblem::plain(dtype, output, out_features, in_features, tokens)
    }
}

pub(super) fn expect_gradient(output: DataType, dtype: DataType) -> Result<()> {
    if output == DataType::F32 || output == dtype {
        return Ok(());
    }
    let (operation, supported) = ("the weight gradient", "f32 and the activations' type");
    Err(Error::DataType { operation, dtype: output, supported })
}

/// Zeros a gradient unless it is accumulated.
pub(super) fn zero(context: &LayerContext, accumulate: Accumulate, at: DevicePtr, bytes: usize) -> Result<()> {
    if accumulate == Accumulate::Add || bytes == 0 {
        return Ok(());
    }
    context.device().bind()?;
    // SAFETY: the memory has been found to be as long, and the stream is of its device.
    let set = unsafe { cudarc::driver::result::memset_d8_async(at, 0, bytes, context.stream().cu_stream()) };
    set.map_err(|error| Error::driver("zeroing a gradient", error))
}
