//! The engines that can compute a product, and products that one of them has been chosen for.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};
use serde::{Deserialize, Serialize};
use twofour::{Axis, estimate::Estimator};

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::expect_pointers,
    compress::{CompressRule, CompressTarget, Compressor},
    gemm::{
        Epilogue, Gemm, GemmMethod, GemmOperands, GemmProblem, Order, XOrder, expect_epilogue, finish::Finish,
        packed_bytes,
    },
    libraries::{
        Libraries,
        cublaslt::{self, DenseProblem, PartialSums},
        cusparselt,
    },
    prune::{DenseWeight, NO_NAN, Packed},
};

/// Who computes a product, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// This crate's kernels.
    TwoFour(GemmMethod),
    /// cuSPARSELt, with the algorithm of that number.
    CusparseLt(i32),
    /// cuBLASLt with the weight as if it were dense, with the heuristics' choice of that number.
    CublasLt(usize),
}

impl Engine {
    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Engine::TwoFour(_) => "twofour",
            Engine::CusparseLt(_) => "cusparselt",
            Engine::CublasLt(_) => "cublaslt",
        }
    }

    /// Whether its calls read the dense weight, and not a compressed one.
    pub fn reads_dense(self) -> bool {
        matches!(self, Engine::CublasLt(_))
    }
}

/// How many choices cuBLASLt's heuristics are asked for.
pub const HEURISTICS: usize = 16;

impl Libraries {
    /// Every engine that computes a problem: this crate's kernels any, cuBLASLt any whose W and X are of the same type, cuSPARSELt those of [`GemmProblem::plain`].
    pub fn engines(&self, device: &Device, problem: GemmProblem) -> Vec<Engine> {
        let ours = GemmMethod::likely(problem, device.architecture()).into_iter().map(Engine::TwoFour);
        let sparse = self.sparse.as_ref().filter(|_| is_plain(problem));
        let sparse = sparse.map_or(0, |sparse| sparse.algorithms(problem).unwrap_or(0));
        let dense = self.dense.as_ref().filter(|_| !problem.is_mixed());
        let dense = dense
            .map_or(0, |dense| dense.plans(dense_of(problem), PartialSums::Any, HEURISTICS).map_or(0, |p| p.len()));
        ours.chain((0..sparse).map(Engine::CusparseLt)).chain((0..dense).map(Engine::CublasLt)).collect()
    }
}

/// Whether a problem is one of [`GemmProblem::plain`], the only ones that cuSPARSELt is asked for.
fn is_plain(problem: GemmProblem) -> bool {
    let GemmProblem { element, output, features, tokens, reduction, .. } = problem;
    problem == GemmProblem::plain(element, output, features, tokens, reduction)
}

/// The product as cuBLASLt has it: column-major `[features, tokens]` is row-major `[tokens, features]`, and the operands are exchanged for `[features, tokens]`.
fn dense_of(problem: GemmProblem) -> DenseProblem {
    let GemmProblem { element, features, tokens, reduction, x, order, .. } = problem;
    let across = x == XOrder::ReductionFirst;
    let (rows, cols, a_transposed, b_transposed) = match order {
        Order::TokensFirst => (features, tokens, true, across),
        Order::FeaturesFirst => (tokens, features, !across, false),
    };
    let accumulate = problem.accumulate && !needs_finish(problem);
    DenseProblem { element, output: dense_sums(problem), rows, cols, reduction, a_transposed, b_transposed, accumulate }
}

/// What cuBLASLt's own result of a problem is made of: it has no 16-bit results of integers.
fn dense_sums(problem: GemmProblem) -> DataType {
    if problem.element == DataType::I8 { DataType::I32 } else { problem.output }
}

/// Whether cuBLASLt's own result is not the problem's: it has other epilogues, or is of another type.
fn needs_finish(problem: GemmProblem) -> bool {
    problem.epilogue || dense_sums(problem) != problem.output
}

/// Bytes of memory for cuBLASLt's own result, where it cannot lie in the problem's.
fn sums_bytes(problem: GemmProblem) -> usize {
    let apart = needs_finish(problem) && (problem.accumulate || dense_sums(problem) != problem.output);
    if apart { problem.features * problem.tokens * dense_sums(problem).bytes() } else { 0 }
}

/// What the result of cuBLASLt's product of a problem is made of: the problem's output.
pub fn dense_output(problem: GemmProblem) -> DataType {
    problem.output
}

/// A weight that is 2:4 along its rows, on the device: one or both of its forms.
#[derive(Debug, Clone, Copy)]
pub struct Weight {
    /// As it is, `[features, reduction]`: read while a product is made by an engine that compresses it, and by cuBLASLt at every call. Where it is not there, only this crate's kernels can be used.
    pub dense: Option<DevicePtr>,
    /// Compressed, with metadata in [`Gemm::meta_order_of`] and padded ([`crate::gemm::packed_bytes`]): read at every call by this crate's kernels, which compress for themselves where it is
    /// not there.
    pub packed: Option<Packed>,
}

/// Which forms of a weight stay in memory once its product was made. Both take 1.5625 times (16-bit elements) or 1.625 times (8-bit ones) the bytes of the dense form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum KeptForm {
    /// Whichever the fastest engine reads; the caller keeps what it has.
    Any,
    /// A compressed one only: cuBLASLt, which reads the dense weight at every call, is left out.
    Compressed,
    /// The dense one only: engines that read a compressed weight are left out.
    Dense,
}

impl KeptForm {
    /// Whether an engine reads no other form at its calls.
    pub fn allows(self, engine: Engine) -> bool {
        match self {
            KeptForm::Any => true,
            KeptForm::Compressed => !engine.reads_dense(),
            KeptForm::Dense => engine.reads_dense(),
        }
    }
}

/// Bytes of device memory that a product keeps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ProductBytes {
    /// Of its own form of the weight; 0 where it reads one of the caller's.
    pub weight: usize,
    /// Of memory that its calls work in.
    pub workspace: usize,
}

/// A product by one engine, with the weight in the form that the engine wants.
pub struct Product {
    problem: GemmProblem,
    engine: Engine,
    plan: ProductPlan,
    bytes: ProductBytes,
}

enum ProductPlan {
    TwoFour {
        gemm: Box<Gemm>,
        packed: Packed,
        workspace: DevicePtr,
        _memory: Vec<CudaSlice<u8>>,
    },
    // The library asks for a mutable plan at every call, and does not change it.
    CusparseLt {
        plan: Mutex<cusparselt::CusparseLtPlan>,
        compressed: DevicePtr,
        workspace: DevicePtr,
        _memory: Vec<CudaSlice<u8>>,
    },
    CublasLt {
        plan: cublaslt::CublasLtPlan,
        weight: DevicePtr,
        workspace: DevicePtr,
        finish: Option<Finish>,
        /// Memory for the library's own result, where that cannot lie in the problem's.
        sums: Option<DevicePtr>,
        _memory: Vec<CudaSlice<u8>>,
    },
}

impl fmt::Debug for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Product").field("problem", &self.problem).field("engine", &self.engine).finish()
    }
}

fn failed(error: cudarc::driver::DriverError) -> Error {
    Error::driver("preparing a product", error)
}

impl Product {
    /// Plans, allocates what the engine needs, and compresses the weight where the engine has a form of its own; waits until that is done.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], [`Error::Vendor`]; those of [`Gemm::with`], and [`Error::Types`] where this crate's kernels would have to compress 8-bit
    /// elements; [`Error::NoForm`] for a weight without the form that the engine reads; [`Error::NotComputed`] for a problem that the engine does not compute; [`Error::OutOfMemory`].
    ///
    /// # Safety
    /// The weight is valid, and 2:4, until this returns, and what [`Weight`] says is read at every call, until the last call is done.
    pub unsafe fn new(
        device: &Device,
        libraries: &Libraries,
        stream: &Arc<CudaStream>,
        problem: GemmProblem,
        engine: Engine,
        weight: Weight,
    ) -> Result<Self> {
        let memory = |bytes: usize| stream.alloc_zeros::<u8>(bytes.max(16)).map_err(failed);
        let at = |memory: &CudaSlice<u8>| memory.device_ptr(stream).0;
        let raw = Stream(stream.cu_stream());
        let GemmProblem { features, reduction, element, .. } = problem;
        let dense = || weight.dense.ok_or(Error::NoForm { engine });
        let mut weight_bytes = 0;
        let workspace_bytes;
        let plan = match engine {
            Engine::TwoFour(method) => {
                let gemm = Gemm::with(device, problem, method)?;
                workspace_bytes = gemm.workspace_bytes();
                let mut held = vec![memory(workspace_bytes)?];
                let workspace = at(&held[0]);
                let packed = match weight.packed {
                    Some(packed) => packed,
                    None => {
                        let compressor = Compressor::new(device, element, element)?;
                        let bytes = packed_bytes(element, features, reduction);
                        weight_bytes = bytes.total();
                        held.extend([memory(bytes.values)?, memory(bytes.meta)?]);
                        let packed = Packed { values: at(&held[1]), meta: at(&held[2]) };
                        let dense = DenseWeight { data: dense()?, rows: features, cols: reduction };
                        let nan = stream.clone_htod(&[NO_NAN]).map_err(failed)?;
                        let wrong = nan.device_ptr(stream).0;
                        let to = CompressTarget { packed, order: gemm.meta_order(), factor: None, seed: None, wrong };
                        // SAFETY: the weight is valid, as this function requires; the rest was allocated above.
                        unsafe {
                            compressor.run(raw, dense, Axis::Row, CompressRule::Estimate(Estimator::Magnitude), to)
                        }?;
                        stream.synchronize().map_err(failed)?;
                        packed
                    }
                };
                ProductPlan::TwoFour { gemm: Box::new(gemm), packed, workspace, _memory: held }
            }
            Engine::CusparseLt(algorithm) => {
                if !is_plain(problem) {
                    return Err(Error::NotComputed { engine, problem });
                }
                let library = libraries.sparse.as_ref().ok_or(cusparselt::MISSING)?;
                let mut plan = library.plan(problem, Some(algorithm))?;
                let (bytes, scratch) = plan.compressed_bytes();
                weight_bytes = bytes;
                workspace_bytes = plan.workspace_bytes();
                let (compressed, scratch, workspace) = (memory(bytes)?, memory(scratch)?, memory(workspace_bytes)?);
                // SAFETY: the weight is valid, as this function requires; the rest was allocated above.
                unsafe { plan.compress(raw, dense()?, at(&compressed), at(&scratch)) }?;
                stream.synchronize().map_err(failed)?;
                let (compressed_at, workspace_at) = (at(&compressed), at(&workspace));
                let held = vec![compressed, workspace];
                let plan = Mutex::new(plan);
                ProductPlan::CusparseLt { plan, compressed: compressed_at, workspace: workspace_at, _memory: held }
            }
            Engine::CublasLt(which) => {
                if problem.is_mixed() {
                    return Err(Error::NotComputed { engine, problem });
                }
                let library = libraries.dense.as_ref().ok_or(cublaslt::MISSING)?;
                let mut plans = library.plans(dense_of(problem), PartialSums::Any, HEURISTICS)?;
                if which >= plans.len() {
                    let action = "choosing a heuristic that is not there";
                    return Err(Error::Vendor { library: "cuBLASLt", action, status: which as i32 });
                }
                let sums_bytes = sums_bytes(problem);
                workspace_bytes = cublaslt::WORKSPACE_BYTES + sums_bytes;
                let held = vec![memory(cublaslt::WORKSPACE_BYTES)?, memory(sums_bytes)?];
                ProductPlan::CublasLt {
                    plan: plans.swap_remove(which),
                    weight: dense()?,
                    workspace: at(&held[0]),
                    finish: needs_finish(problem).then(|| Finish::new(device)).transpose()?,
                    sums: (sums_bytes > 0).then(|| at(&held[1])),
                    _memory: held,
                }
            }
        };
        let bytes = ProductBytes { weight: weight_bytes, workspace: workspace_bytes };
        Ok(Self { problem, engine, plan, bytes })
    }

    /// Bytes of device memory that the product keeps, beside the forms of the weight that the caller keeps for it.
    pub fn bytes(&self) -> ProductBytes {
        self.bytes
    }

    /// Launches the GEMM with the accumulators as they are; neither allocates nor waits.
    ///
    /// # Errors
    /// Those of [`Product::run_with`].
    ///
    /// # Safety
    /// That of [`Product::run_with`].
    pub unsafe fn run(&self, stream: Stream, x: DevicePtr, out: DevicePtr) -> Result<()> {
        // SAFETY: X and the result are valid, and the stream is of the device, as this function requires.
        unsafe { self.run_with(stream, x, out, Epilogue::default()) }
    }

    /// Launches the GEMM with an epilogue; neither allocates nor waits. Where a library has no such epilogue or no such results, a kernel of this crate follows its GEMM: sums are then rounded to the output's type
    /// before the epilogue, but for integers and where results are added.
    ///
    /// # Errors
    /// Those of [`Gemm::run`], whose X and result must be aligned to 16 bytes here, and [`Error::Vendor`].
    ///
    /// # Safety
    /// That of [`Gemm::run`]; and calls that may run at once on several streams need products of their own, for engines have memory to work in.
    pub unsafe fn run_with(&self, stream: Stream, x: DevicePtr, out: DevicePtr, epilogue: Epilogue) -> Result<()> {
        expect_pointers(&[("X", x, 16), ("result", out, 16)])?;
        let problem = self.problem;
        if !problem.epilogue && epilogue != Epilogue::default() {
            return Err(Error::Epilogue);
        }
        match &self.plan {
            ProductPlan::TwoFour { gemm, packed, workspace, .. } => {
                let operands = GemmOperands { weight: *packed, x, out, workspace: *workspace };
                // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
                unsafe { gemm.run(stream, operands, epilogue) }
            }
            ProductPlan::CusparseLt { plan, compressed, workspace, .. } => {
                let mut plan = plan.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: X and the result are valid, as this function requires; the other memory is held by the plan.
                unsafe { plan.run(stream, *compressed, x, out, *workspace) }
            }
            ProductPlan::CublasLt { plan, weight, workspace, finish, sums, .. } => {
                let to = sums.unwrap_or(out);
                let (a, b) = match problem.order {
                    Order::TokensFirst => (*weight, x),
                    Order::FeaturesFirst => (x, *weight),
                };
                // SAFETY: weight, X and result are valid, as this function requires; the workspace is held by the plan.
                unsafe { plan.run(stream, a, b, to, *workspace) }?;
                let Some(finish) = finish else { return Ok(()) };
                expect_epilogue(epilogue, problem.output)?;
                // SAFETY: the sums are held by the plan or lie in the result, which is valid, as this function requires.
                unsafe { finish.run(stream, problem, (to, dense_sums(problem)), out, epilogue) }
            }
        }
    }

    /// The engine that computes it.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// The problem.
    pub fn problem(&self) -> GemmProblem {
        self.problem
    }

    /// The kernel's name, as far as the engine tells it.
    pub fn kernel(&self) -> String {
        match (&self.plan, self.engine) {
            (ProductPlan::TwoFour { gemm, .. }, _) => gemm.kernel(),
            (_, Engine::CusparseLt(id)) => format!("algorithm {id}"),
            (_, Engine::CublasLt(which)) => format!("heuristic {which}"),
            (_, Engine::TwoFour(_)) => String::new(),
        }
    }
}
