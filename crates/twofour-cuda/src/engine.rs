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
    compress::{CompressRule, CompressTarget, Compressor},
    gemm::{Epilogue, Gemm, Method, Operands, Order, Problem, XOrder},
    libraries::{
        Libraries,
        cublaslt::{self, DenseProblem},
        cusparselt,
    },
    prune::{DenseWeight, NO_NAN, Packed},
};

/// Who computes a product, and how.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// This crate's kernels.
    TwoFour(Method),
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
}

/// How many choices cuBLASLt's heuristics are asked for.
pub const HEURISTICS: usize = 16;

impl Libraries {
    /// Every engine for a problem whose result is [`Order::TokensFirst`] and has no epilogue: no other is compared.
    pub fn engines(&self, device: &Device, problem: Problem) -> Vec<Engine> {
        let ours = Method::likely(problem, device.architecture()).into_iter().map(Engine::TwoFour);
        let sparse = self.sparse.as_ref().map_or(0, |sparse| sparse.algorithms(problem).unwrap_or(0));
        let dense =
            self.dense.as_ref().map_or(0, |dense| dense.plans(dense_of(problem), HEURISTICS).map_or(0, |p| p.len()));
        ours.chain((0..sparse).map(Engine::CusparseLt)).chain((0..dense).map(Engine::CublasLt)).collect()
    }
}

/// The product as cuBLASLt has it: column-major `[features, tokens]` is row-major `[tokens, features]`. It knows no 16-bit results of integers.
fn dense_of(problem: Problem) -> DenseProblem {
    DenseProblem {
        element: problem.element,
        output: dense_output(problem),
        rows: problem.features,
        cols: problem.tokens,
        reduction: problem.reduction,
        a_transposed: true,
        b_transposed: false,
        accumulate: false,
    }
}

/// What cuBLASLt's result of a problem is made of.
pub fn dense_output(problem: Problem) -> DataType {
    if problem.element == DataType::I8 { DataType::I32 } else { problem.output }
}

/// A weight that is 2:4 along its rows, on the device.
#[derive(Debug, Clone, Copy)]
pub struct Weight {
    /// As it is, `[features, reduction]`: read while a product is made, and by cuBLASLt at every call.
    pub dense: DevicePtr,
    /// Compressed, with metadata in [`Gemm::meta_order_of`]: read at every call by this crate's kernels, which compress for themselves where it is
    /// not there.
    pub packed: Option<Packed>,
}

/// A product by one engine, with the weight in the form that the engine wants.
pub struct Product {
    problem: Problem,
    engine: Engine,
    plan: ProductPlan,
}

enum ProductPlan {
    TwoFour {
        gemm: Gemm,
        packed: Packed,
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
        _memory: CudaSlice<u8>,
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
    /// elements; [`Error::OutOfMemory`].
    ///
    /// # Safety
    /// The weight is valid, and 2:4, until this returns, and what [`Weight`] says is read at every call, until the last call is done.
    pub unsafe fn new(
        device: &Device,
        libraries: &Libraries,
        stream: &Arc<CudaStream>,
        problem: Problem,
        engine: Engine,
        weight: Weight,
    ) -> Result<Self> {
        let memory = |bytes: usize| stream.alloc_zeros::<u8>(bytes.max(16)).map_err(failed);
        let at = |memory: &CudaSlice<u8>| memory.device_ptr(stream).0;
        let raw = Stream(stream.cu_stream());
        let Problem { features, reduction, element, .. } = problem;
        let plan = match engine {
            Engine::TwoFour(method) => {
                let gemm = Gemm::with(device, problem, method)?;
                let mut held = Vec::new();
                let packed = match weight.packed {
                    Some(packed) => packed,
                    None => {
                        let compressor = Compressor::new(device, element, element)?;
                        held.push(memory(features * reduction / 2 * element.bytes())?);
                        held.push(memory(features * reduction / 8)?);
                        let packed = Packed { values: at(&held[0]), meta: at(&held[1]) };
                        let dense = DenseWeight { data: weight.dense, rows: features, cols: reduction };
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
                ProductPlan::TwoFour { gemm, packed, _memory: held }
            }
            Engine::CusparseLt(algorithm) => {
                let library = libraries.sparse.as_ref().ok_or(cusparselt::MISSING)?;
                let mut plan = library.plan(problem, Some(algorithm))?;
                let (bytes, scratch) = plan.compressed_bytes();
                let (compressed, scratch, workspace) =
                    (memory(bytes)?, memory(scratch)?, memory(plan.workspace_bytes())?);
                // SAFETY: the weight is valid, as this function requires; the rest was allocated above.
                unsafe { plan.compress(raw, weight.dense, at(&compressed), at(&scratch)) }?;
                stream.synchronize().map_err(failed)?;
                let (compressed_at, workspace_at) = (at(&compressed), at(&workspace));
                let held = vec![compressed, workspace];
                let plan = Mutex::new(plan);
                ProductPlan::CusparseLt { plan, compressed: compressed_at, workspace: workspace_at, _memory: held }
            }
            Engine::CublasLt(which) => {
                let library = libraries.dense.as_ref().ok_or(cublaslt::MISSING)?;
                let mut plans = library.plans(dense_of(problem), HEURISTICS)?;
                if which >= plans.len() {
                    let action = "choosing a heuristic that is not there";
                    return Err(Error::Vendor { library: "cuBLASLt", action, status: which as i32 });
                }
                let workspace = memory(cublaslt::WORKSPACE_BYTES)?;
                let workspace_at = at(&workspace);
                let (plan, weight) = (plans.swap_remove(which), weight.dense);
                ProductPlan::CublasLt { plan, weight, workspace: workspace_at, _memory: workspace }
            }
        };
        Ok(Self { problem, engine, plan })
    }

    /// Launches the GEMM; neither allocates nor waits.
    ///
    /// # Errors
    /// Those of [`Gemm::run`], and [`Error::Vendor`].
    ///
    /// # Safety
    /// That of [`Gemm::run`]; and calls that may run at once on several streams need products of their own, for engines have memory to work in.
    pub unsafe fn run(&self, stream: Stream, x: DevicePtr, out: DevicePtr) -> Result<()> {
        match &self.plan {
            ProductPlan::TwoFour { gemm, packed, .. } => {
                // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
                unsafe { gemm.run(stream, Operands { weight: *packed, x, out, workspace: 0 }, Epilogue::default()) }
            }
            ProductPlan::CusparseLt { plan, compressed, workspace, .. } => {
                let mut plan = plan.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: X and the result are valid, as this function requires; the other memory is held by the plan.
                unsafe { plan.run(stream, *compressed, x, out, *workspace) }
            }
            // SAFETY: weight, X and result are valid, as this function requires; the workspace is held by the plan.
            ProductPlan::CublasLt { plan, weight, workspace, .. } => unsafe {
                plan.run(stream, *weight, x, out, *workspace)
            },
        }
    }

    /// The engine that computes it.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// The problem.
    pub fn problem(&self) -> Problem {
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

/// Whether engines can be compared on a problem.
pub(crate) fn expect_plain(problem: Problem) -> Result<()> {
    let plain = problem.x == XOrder::TokensFirst && problem.order == Order::TokensFirst && !problem.epilogue;
    if plain { Ok(()) } else { Err(Error::NotCompared) }
}
