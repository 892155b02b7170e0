//! Dense GEMMs of a context, planned once for a problem.

use cudarc::driver::DevicePtr as _;

use super::{
    LayerContext,
    dense::{ALGORITHMS, TimedPlan, fastest, median_time},
};
use crate::{
    DevicePtr, Error, Result,
    cublaslt::{self, CublasLt, CublasLtPlan, DenseEpilogue, DenseProblem, PartialSums},
    raw::column_sums::ColumnSumsTarget,
};

const NO_DENSE: Error = Error::Vendor { library: "cuBLASLt", action: "planning a dense GEMM", status: 15 };

impl LayerContext {
    /// Returns the dense GEMM for a problem.
    pub(super) fn dense(&self, problem: DenseProblem) -> Result<TimedPlan> {
        self.plans().of(problem, || {
            self.expect_not_capturing("planning a dense GEMM")?;
            let plans = self.cublaslt()?.plans(problem, PartialSums::Wide, ALGORITHMS)?;
            fastest(self, (problem, 1), plans)?.ok_or(NO_DENSE)
        })
    }

    /// Returns cuBLASLt's GEMM for a problem, the fastest of a few of its algorithms, with a workspace of
    /// [`WORKSPACE_BYTES`](cublaslt::WORKSPACE_BYTES).
    ///
    /// # Errors
    /// [`Error::NoLibrary`], [`Error::Vendor`]; [`Error::Capturing`] where it must be planned while the stream is being
    /// captured.
    pub fn dense_plan(&self, problem: DenseProblem) -> Result<CublasLtPlan> {
        Ok(self.dense(problem)?.plan)
    }

    /// Returns cuBLASLt's GEMM for several problems of one shape, whose operands each follow one another in memory.
    ///
    /// # Errors
    /// Those of [`LayerContext::dense_plan`].
    pub fn dense_batched(&self, problem: DenseProblem, batches: usize) -> Result<CublasLtPlan> {
        let planned: TimedPlan = self.plans().of((problem, batches), || {
            self.expect_not_capturing("planning a dense GEMM")?;
            let plans = self.cublaslt()?.plans_batched(problem, batches, PartialSums::Wide, ALGORITHMS)?;
            fastest(self, (problem, batches), plans)?.ok_or(NO_DENSE)
        })?;
        Ok(planned.plan)
    }

    /// Returns the dense GEMM with a bias.
    ///
    /// # Safety
    /// The bias is valid, of the problem's output type, until this function returns. The plan may run only while it is
    /// valid.
    pub(super) unsafe fn dense_with_bias(&self, problem: DenseProblem, bias: DevicePtr) -> Result<CublasLtPlan> {
        let epilogue = DenseEpilogue::Bias;
        let planned: TimedPlan = self.plans().of((problem, epilogue, bias), || {
            self.expect_not_capturing("planning a dense GEMM")?;
            // SAFETY: the bias is valid while plans are made, and at every run, as this function requires.
            let plans = unsafe { self.cublaslt()?.plans_with(problem, epilogue, bias, PartialSums::Wide, ALGORITHMS) }?;
            fastest(self, (problem, 1), plans)?.ok_or(NO_DENSE)
        })?;
        Ok(planned.plan)
    }

    /// Returns the dense GEMM for a weight gradient that also writes the bias gradient to a vector, or `None` where the
    /// library has none or where a dense GEMM and column sums are faster.
    ///
    /// # Safety
    /// The vector is valid, of the problem's output type, until this function returns. The plan may run only while the
    /// vector is valid.
    pub(super) unsafe fn dense_with_bias_gradient(
        &self,
        problem: DenseProblem,
        vector: DevicePtr,
    ) -> Result<Option<CublasLtPlan>> {
        self.plans().of((problem, vector), || {
            self.expect_not_capturing("planning a dense GEMM")?;
            let epilogue = DenseEpilogue::BiasGradient;
            // SAFETY: the vector is valid while plans are tried, and at every run, as this function requires.
            let plans =
                unsafe { self.cublaslt()?.plans_with(problem, epilogue, vector, PartialSums::Wide, ALGORITHMS) };
            let Some(together) = fastest(self, (problem, 1), plans.unwrap_or_default())? else { return Ok(None) };
            let (Some(together_us), Some(apart_us)) = (together.us, self.dense(problem)?.us) else {
                return Ok(Some(together.plan));
            };
            let is_faster = together_us <= apart_us + self.column_sums_us(problem)?;
            Ok(is_faster.then_some(together.plan))
        })
    }

    /// Microseconds that the sums of op(B) over the reduction take.
    fn column_sums_us(&self, problem: DenseProblem) -> Result<f64> {
        let DenseProblem { element, cols, reduction, output, .. } = problem;
        let kernel = self.column_sums(element)?;
        let bytes = [cols * reduction * element.bytes(), 4 * cols, kernel.workspace_bytes(reduction, cols)];
        let memory = bytes.into_iter().map(|bytes| self.allocate(bytes)).collect::<Result<Vec<_>>>()?;
        let [matrix, sums, workspace] = [0, 1, 2].map(|i: usize| memory[i].device_ptr(self.stream()).0);
        let to = ColumnSumsTarget { sums, dtype: output, accumulate: false, workspace };
        // SAFETY: the memory was allocated above for the matrix, and the stream is of its device.
        median_time(self, || unsafe { kernel.run(self.raw(), matrix, reduction, cols, to) })
    }

    pub(super) fn cublaslt(&self) -> Result<&CublasLt> {
        self.shared.cublaslt.as_ref().ok_or(cublaslt::MISSING)
    }
}
