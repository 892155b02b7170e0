//! GEMM problems computed by cuBLASLt with a dense weight, and the epilogues that the library lacks.

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    cublaslt::{BiasedPlan, CublasLt, CublasLtPlan, DenseProblem, PartialSums, WORKSPACE_BYTES},
    problem::{GemmProblem, Order, XOrder},
    raw::gemm::{Epilogue, finish::Finish},
};

/// Returns the problem in cuBLASLt's column-major terms: column-major `[features, tokens]` is row-major `[tokens,
/// features]`. For a row-major `[features, tokens]` result the operands are exchanged.
fn dense_of(problem: GemmProblem) -> DenseProblem {
    let GemmProblem { element, features, tokens, reduction, x, order, .. } = problem;
    let mn_major = x == XOrder::ReductionFirst;
    let (rows, cols, a_transposed, b_transposed) = match order {
        Order::TokensFirst => (features, tokens, true, mn_major),
        Order::FeaturesFirst => (tokens, features, !mn_major, false),
    };
    let accumulate = problem.accumulate && !needs_finish(problem);
    DenseProblem { element, output: dense_sums(problem), rows, cols, reduction, a_transposed, b_transposed, accumulate }
}

/// Returns the data type of cuBLASLt's result: i32 for i8, because cuBLASLt has no 16-bit results of integers.
fn dense_sums(problem: GemmProblem) -> DataType {
    if problem.element == DataType::I8 { DataType::I32 } else { problem.output }
}

/// Returns whether [`Finish`] must follow cuBLASLt's GEMM: the problem has an epilogue, or another output type than
/// cuBLASLt's result.
fn needs_finish(problem: GemmProblem) -> bool {
    problem.epilogue.is_some() || dense_sums(problem) != problem.output
}

/// Returns the bytes of a buffer for cuBLASLt's result, or 0 where cuBLASLt writes straight to the problem's output.
fn sums_bytes(problem: GemmProblem) -> usize {
    let apart = needs_finish(problem) && (problem.accumulate || dense_sums(problem) != problem.output);
    if apart { problem.features * problem.tokens * dense_sums(problem).bytes() } else { 0 }
}

/// Returns the bias of a problem's epilogue where cuBLASLt can add it: a bias of its result's rows, and nothing else.
fn bias_of_rows(problem: GemmProblem, epilogue: Epilogue) -> Option<DevicePtr> {
    let Epilogue { bias, token_bias, .. } = epilogue;
    let (of_rows, alone) = match problem.order {
        Order::TokensFirst => (bias, Epilogue { bias, ..Epilogue::default() }),
        Order::FeaturesFirst => (token_bias, Epilogue { token_bias, ..Epilogue::default() }),
    };
    of_rows.filter(|bias| epilogue == alone && bias.is_multiple_of(16))
}

/// cuBLASLt's plans of a problem.
pub(crate) struct DensePlans {
    problem: GemmProblem,
    plain: Vec<CublasLtPlan>,
    /// Those that add a bias; none where the library has none, or where [`Finish`] must follow anyway.
    biased: Vec<BiasedPlan>,
}

impl DensePlans {
    /// Plans a problem with each of the algorithms that the library's heuristics rank best, at most `most`, best first.
    ///
    /// # Errors
    /// [`Error::Vendor`] for a problem that the library does not support.
    pub(crate) fn new(library: &CublasLt, problem: GemmProblem, sums: PartialSums, most: usize) -> Result<Self> {
        let dense = dense_of(problem);
        let plain = library.plans(dense, sums, most)?;
        // Where a buffer is needed for sums, another kernel has to follow anyway. For f32 results of 8-bit floats the
        // library reads biases of another type.
        let is_of_another_type = problem.element.bytes() == 1 && problem.output == DataType::F32;
        let biased = if problem.epilogue.is_some() && sums_bytes(problem) == 0 && !is_of_another_type {
            library.plans_biased(dense, sums, most).unwrap_or_default()
        } else {
            Vec::new()
        };
        Ok(Self { problem, plain, biased })
    }

    /// Returns the number of choices. Those with a bias and those without are numbered alike; where one kind has fewer,
    /// its last serves for the rest.
    pub(crate) fn len(&self) -> usize {
        self.plain.len().max(self.biased.len())
    }

    /// Returns the choice of this number.
    ///
    /// # Errors
    /// [`Error::Vendor`] where there is none; those of loading kernels.
    pub(crate) fn take(mut self, device: &Device, which: usize) -> Result<DenseGemm> {
        if which >= self.len() || self.plain.is_empty() {
            let action = "choosing a heuristic that does not exist";
            return Err(Error::Vendor { library: "cuBLASLt", action, status: which as i32 });
        }
        let plan = self.plain.swap_remove(which.min(self.plain.len() - 1));
        let last = self.biased.len().checked_sub(1);
        let biased = last.map(|last| self.biased.swap_remove(which.min(last)));
        let finish = needs_finish(self.problem).then(|| Finish::new(device)).transpose()?;
        Ok(DenseGemm { problem: self.problem, plan, biased, finish })
    }
}

/// A GEMM with a dense weight.
#[derive(Debug, Clone)]
pub(crate) struct DenseGemm {
    problem: GemmProblem,
    plan: CublasLtPlan,
    /// The GEMM that adds a bias itself.
    biased: Option<BiasedPlan>,
    finish: Option<Finish>,
}

impl DenseGemm {
    /// Returns the bytes of the library's workspace, and of a buffer for its result where that does not go straight to
    /// the output, or 0.
    pub(crate) fn workspace_bytes(&self) -> [usize; 2] {
        [WORKSPACE_BYTES, sums_bytes(self.problem)]
    }

    /// Returns whether cuBLASLt adds a bias itself.
    pub(crate) fn adds_bias(&self) -> bool {
        self.biased.is_some()
    }

    /// Launches the GEMM with an epilogue. A bias along the result's contiguous axis, aligned to 16 bytes, is added by
    /// cuBLASLt itself where it is the whole epilogue.
    ///
    /// # Errors
    /// [`Error::Vendor`], [`Error::Driver`].
    ///
    /// # Safety
    /// Weight, X, result and the epilogue's tensors are valid for the problem, and the workspace has the bytes of
    /// [`DenseGemm::workspace_bytes`], until the stream has passed this call; the stream is of the device.
    pub(crate) unsafe fn run(
        &self,
        stream: Stream,
        [weight, x, out]: [DevicePtr; 3],
        [workspace, sums]: [DevicePtr; 2],
        epilogue: Epilogue,
    ) -> Result<()> {
        let problem = self.problem;
        let to = if sums_bytes(problem) > 0 { sums } else { out };
        let (a, b) = match problem.order {
            Order::TokensFirst => (weight, x),
            Order::FeaturesFirst => (x, weight),
        };
        if let (Some(biased), Some(bias)) = (&self.biased, bias_of_rows(problem, epilogue)) {
            // SAFETY: weight, X, bias, result and workspace are valid, as this function requires.
            return unsafe { biased.run(stream, [a, b, bias, out], workspace) };
        }
        // SAFETY: weight, X, result and workspace are valid, as this function requires.
        unsafe { self.plan.run(stream, a, b, to, workspace) }?;
        let Some(finish) = &self.finish else { return Ok(()) };
        // SAFETY: `to` is the buffer for sums or the result, which are valid, as this function requires.
        unsafe { finish.run(stream, problem, (to, dense_sums(problem)), out, epilogue) }
    }
}
