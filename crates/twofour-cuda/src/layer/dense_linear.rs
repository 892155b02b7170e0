//! Dense linear layers.

use super::{
    Accumulate, DeviceSlice, DeviceSliceMut, LayerContext,
    dense::dense,
    gradient::{bias_gradient, zero},
};
use crate::{
    DataType, Error, Result,
    arguments::{Memory, positive, product},
    cublaslt::{DenseProblem, WORKSPACE_BYTES},
};

/// A dense linear layer `y = x · Wᵀ + b`, computed by cuBLASLt in f32 sums, without TF32. Weight `[out_features,
/// in_features]`, bias and activations are of one type: f32, f16 or bf16. GEMMs are planned by the first call for a
/// number of tokens, and those with a bias once for its address.
///
/// The gradient of the bias is [`crate::layer::bias_gradient`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct DenseLinear {
    /// Rows of the weight.
    pub out_features: usize,
    /// Columns of the weight.
    pub in_features: usize,
}

impl DenseLinear {
    fn problem(&self, dtype: DataType, (rows, cols, reduction): (usize, usize, usize)) -> DenseProblem {
        DenseProblem {
            element: dtype,
            output: dtype,
            rows,
            cols,
            reduction,
            a_transposed: false,
            b_transposed: false,
            accumulate: false,
        }
    }

    fn forward_problem(&self, dtype: DataType, tokens: usize) -> DenseProblem {
        let problem = self.problem(dtype, (self.out_features, tokens, self.in_features));
        DenseProblem { a_transposed: true, ..problem }
    }

    fn input_problem(&self, dtype: DataType, tokens: usize, accumulate: Accumulate) -> DenseProblem {
        let problem = self.problem(dtype, (self.in_features, tokens, self.out_features));
        DenseProblem { accumulate: accumulate == Accumulate::Add, ..problem }
    }

    /// Returns an error unless the layer has features: a GEMM without a reduction launches nothing.
    fn expect_features(&self, dtype: DataType) -> Result<()> {
        positive("in_features", self.in_features)?;
        positive("out_features", self.out_features)?;
        match dtype {
            DataType::F32 | DataType::F16 | DataType::BF16 => Ok(()),
            _ => Err(Error::DataType { operation: "a dense linear layer", dtype, supported: "f32, f16, bf16" }),
        }
    }

    /// Returns the address of the weight of a layer that has features.
    fn weight(&self, context: &LayerContext, dtype: DataType, weight: DeviceSlice<'_>) -> Result<u64> {
        self.expect_features(dtype)?;
        weight.at("the weight", context, dtype, product(self.out_features, self.in_features)?)
    }

    /// Plans the GEMMs of a training step for a number of tokens, except those with operands in their epilogue.
    ///
    /// # Errors
    /// Those of [`DenseLinear::forward`].
    pub fn prepare(&self, context: &LayerContext, dtype: DataType, tokens: usize) -> Result<()> {
        self.expect_features(dtype)?;
        if tokens == 0 {
            return Ok(());
        }
        context.dense(self.forward_problem(dtype, tokens))?;
        for accumulate in [Accumulate::Overwrite, Accumulate::Add] {
            context.dense(self.input_problem(dtype, tokens, accumulate))?;
            context.dense(self.weight_problem(dtype, tokens, accumulate))?;
        }
        context.work().parts([WORKSPACE_BYTES])?;
        Ok(())
    }

    /// Computes `y = x · Wᵀ + b` for `x` `[tokens, in_features]` and `y` `[tokens, out_features]`.
    ///
    /// # Errors
    /// [`Error::DataType`] for other types than f32, f16 and bf16; [`Error::Length`], [`Error::SliceType`],
    /// [`Error::OtherDevice`] and [`Error::Pointer`] for a tensor that does not fit; [`Error::Dimension`] for a layer
    /// without features; [`Error::NoLibrary`] where cuBLASLt is missing, and [`Error::Vendor`] where it fails;
    /// [`Error::Capturing`] where a GEMM must be planned during a capture; those of allocating workspace;
    /// [`Error::Driver`].
    pub fn forward(
        &self,
        context: &LayerContext,
        (x, tokens): (DeviceSlice<'_>, usize),
        weight: DeviceSlice<'_>,
        bias: Option<DeviceSlice<'_>>,
        y: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let dtype = x.dtype();
        let weight = self.weight(context, dtype, weight)?;
        let x = x.at("the input", context, dtype, product(tokens, self.in_features)?)?;
        let y = y.at("the result", context, dtype, product(tokens, self.out_features)?)?;
        let problem = self.forward_problem(dtype, tokens);
        let Some(bias) = bias else { return dense(context, problem, weight, x, y) };
        let bias = bias.at("the bias", context, dtype, self.out_features)?;
        if tokens == 0 {
            return Ok(());
        }
        // SAFETY: the bias has been found to be as long as the problem requires, and the plan runs while it is
        // borrowed, here and at later calls with its address.
        let plan = unsafe { context.dense_with_bias(problem, bias) }?;
        let mut work = context.work();
        let [workspace] = work.parts([WORKSPACE_BYTES])?;
        // SAFETY: the slices have been found to be as long as the problem requires; the stream is of their device.
        unsafe { plan.run(context.raw(), weight, x, y, workspace) }
    }

    /// Computes `dx = dy · W`, or adds it to `dx`, for `dy` `[tokens, out_features]` and `dx` `[tokens, in_features]`.
    ///
    /// # Errors
    /// Those of [`DenseLinear::forward`].
    pub fn input_gradient(
        &self,
        context: &LayerContext,
        (dy, tokens): (DeviceSlice<'_>, usize),
        weight: DeviceSlice<'_>,
        accumulate: Accumulate,
        dx: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let dtype = dy.dtype();
        let weight = self.weight(context, dtype, weight)?;
        let dy = dy.at("the output gradient", context, dtype, product(tokens, self.out_features)?)?;
        let dx = dx.at("the input gradient", context, dtype, product(tokens, self.in_features)?)?;
        dense(context, self.input_problem(dtype, tokens, accumulate), weight, dy, dx)
    }

    fn weight_problem(&self, dtype: DataType, tokens: usize, accumulate: Accumulate) -> DenseProblem {
        DenseProblem {
            output: DataType::F32,
            b_transposed: true,
            accumulate: accumulate == Accumulate::Add,
            ..self.problem(dtype, (self.in_features, self.out_features, tokens))
        }
    }

    /// Computes `dW = dyᵀ · x`, or adds it to `dw`, in f32 `[out_features, in_features]`; zeros for no tokens.
    ///
    /// # Errors
    /// Those of [`DenseLinear::forward`].
    pub fn weight_gradient(
        &self,
        context: &LayerContext,
        dy: DeviceSlice<'_>,
        x: DeviceSlice<'_>,
        tokens: usize,
        accumulate: Accumulate,
        dw: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (dtype, len) = (dy.dtype(), product(self.out_features, self.in_features)?);
        self.expect_features(dtype)?;
        let dy = dy.at("the output gradient", context, dtype, product(tokens, self.out_features)?)?;
        let x = x.at("the input", context, dtype, product(tokens, self.in_features)?)?;
        let dw = dw.at("the weight gradient", context, DataType::F32, len)?;
        if tokens == 0 {
            return zero(context, accumulate, dw, 4 * len);
        }
        dense(context, self.weight_problem(dtype, tokens, accumulate), x, dy, dw)
    }

    /// Computes `dW` as [`DenseLinear::weight_gradient`] does, and `db`, the column sums of `dy`, to f32
    /// `[out_features]`. Where both are overwritten and cuBLASLt is faster so, one GEMM computes both; the additions of
    /// the bias gradient are then in another order.
    ///
    /// # Errors
    /// Those of [`DenseLinear::forward`].
    #[expect(clippy::too_many_arguments, reason = "each is a tensor of its own")]
    pub fn parameter_gradients(
        &self,
        context: &LayerContext,
        dy: DeviceSlice<'_>,
        x: DeviceSlice<'_>,
        tokens: usize,
        accumulate: Accumulate,
        dw: DeviceSliceMut<'_>,
        db: DeviceSliceMut<'_>,
    ) -> Result<()> {
        let (dtype, len) = (dy.dtype(), product(self.out_features, self.in_features)?);
        self.expect_features(dtype)?;
        let vector = db.at("the bias gradient", context, DataType::F32, self.out_features)?;
        let plan = if tokens > 0 && accumulate == Accumulate::Overwrite {
            let problem = self.weight_problem(dtype, tokens, accumulate);
            // SAFETY: the vector has been found to be as long as the output features, and is borrowed at every run of
            // its plan.
            unsafe { context.dense_with_bias_gradient(problem, vector) }?
        } else {
            None
        };
        let Some(plan) = plan else {
            self.weight_gradient(context, dy, x, tokens, accumulate, dw)?;
            return bias_gradient(context, dy, tokens, accumulate, db);
        };
        let dy = dy.at("the output gradient", context, dtype, product(tokens, self.out_features)?)?;
        let x = x.at("the input", context, dtype, product(tokens, self.in_features)?)?;
        let dw = dw.at("the weight gradient", context, DataType::F32, len)?;
        let mut work = context.work();
        let [workspace] = work.parts([WORKSPACE_BYTES])?;
        // SAFETY: the slices have been found to be as long as the problem requires; the stream is of their device.
        unsafe { plan.run(context.raw(), x, dy, dw, workspace) }
    }
}
