//! GEMM engines (this crate's kernels, cuSPARSELt, cuBLASLt), and GEMMs planned with one of them.

use std::{
    fmt,
    sync::{Arc, Mutex, PoisonError},
};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _};
use serde::{Deserialize, Serialize};
use twofour::{Axis, estimate::Estimator};

use super::cusparselt::{self, CusparseLt};
use crate::{
    Device, DevicePtr, Error, Result, Stream,
    arguments::expect_pointers,
    cublaslt::{self, CublasLt, PartialSums},
    dense_gemm::{DenseGemm, DensePlans},
    problem::GemmProblem,
    raw::{
        DenseWeight, Packed,
        compress::{CompressRule, CompressTarget, Compressor},
        gemm::{Epilogue, Gemm, GemmMethod, GemmOperands, expect_epilogue, packed_bytes},
        prune::NO_NAN,
    },
};

/// A GEMM implementation: a library, and which of its kernels or algorithms.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Engine {
    /// This crate's kernels.
    TwoFour(GemmMethod),
    /// cuSPARSELt, with the algorithm of this number.
    CusparseLt(i32),
    /// cuBLASLt with the dense weight, with the heuristics' choice of this number.
    CublasLt(usize),
}

impl Engine {
    /// Returns the engine's name.
    pub fn name(self) -> &'static str {
        match self {
            Engine::TwoFour(_) => "twofour",
            Engine::CusparseLt(_) => "cusparselt",
            Engine::CublasLt(_) => "cublaslt",
        }
    }
}

/// Most choices requested from cuBLASLt's heuristics.
pub const HEURISTICS: usize = 16;

/// NVIDIA's libraries for GEMMs that are installed.
#[derive(Debug, Clone)]
pub struct Libraries {
    /// For dense weights.
    pub dense: Option<CublasLt>,
    /// For 2:4 weights.
    pub sparse: Option<CusparseLt>,
}

impl Libraries {
    /// Opens the libraries that are installed and support the device.
    pub fn found(device: &Device) -> Self {
        Self { dense: CublasLt::open(device).ok(), sparse: CusparseLt::open(device).ok() }
    }

    /// Returns every engine that computes a problem. This crate's kernels compute any problem, cuBLASLt any whose W and
    /// X have the same data type, and cuSPARSELt those of [`GemmProblem::plain`].
    pub fn engines(&self, device: &Device, problem: GemmProblem) -> Vec<Engine> {
        let ours = GemmMethod::likely(problem, device.architecture()).into_iter().map(Engine::TwoFour);
        let sparse = self.sparse.as_ref().filter(|_| is_plain(problem));
        let sparse = sparse.map_or(0, |sparse| sparse.algorithms(problem).unwrap_or(0));
        let dense = self.dense.as_ref().filter(|_| !problem.is_mixed());
        let dense = dense.map_or(0, |dense| plans_of(dense, problem).map_or(0, |plans| plans.len()));
        ours.chain((0..sparse).map(Engine::CusparseLt)).chain((0..dense).map(Engine::CublasLt)).collect()
    }
}

/// Returns cuBLASLt's plans of a problem.
fn plans_of(library: &CublasLt, problem: GemmProblem) -> Result<DensePlans> {
    DensePlans::new(library, problem, PartialSums::Any, HEURISTICS)
}

/// Returns whether a problem is one of [`GemmProblem::plain`], the only ones that are given to cuSPARSELt.
fn is_plain(problem: GemmProblem) -> bool {
    let GemmProblem { element, output, features, tokens, reduction, .. } = problem;
    problem == GemmProblem::plain(element, output, features, tokens, reduction)
}

/// A 2:4 weight in device memory, pruned along its rows, in one or both of its forms.
#[derive(Debug, Clone, Copy)]
pub struct Weight {
    /// The dense form, `[features, reduction]`. Engines that compress it read it once, when a GEMM is planned; cuBLASLt
    /// reads it at every call. Without it only this crate's kernels can be used.
    pub dense: Option<DevicePtr>,
    /// The compressed form, with metadata in [`Gemm::meta_order_of`] and padding ([`crate::raw::gemm::packed_bytes`]).
    /// This crate's kernels read it at every call. Without it they compress the dense form when a GEMM is planned.
    pub packed: Option<Packed>,
}

/// A GEMM planned with one engine, and the weight in the form that the engine reads.
pub struct Product {
    problem: GemmProblem,
    engine: Engine,
    plan: ProductPlan,
}

enum ProductPlan {
    TwoFour {
        gemm: Box<Gemm>,
        packed: Packed,
        workspace: DevicePtr,
        _memory: Vec<CudaSlice<u8>>,
    },
    // cuSPARSELt's C API takes a mutable plan at every call, but does not change it.
    CusparseLt {
        plan: Mutex<cusparselt::CusparseLtPlan>,
        compressed: DevicePtr,
        workspace: DevicePtr,
        _memory: Vec<CudaSlice<u8>>,
    },
    CublasLt {
        gemm: DenseGemm,
        weight: DevicePtr,
        workspace: [DevicePtr; 2],
        _memory: Vec<CudaSlice<u8>>,
    },
}

impl fmt::Debug for Product {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Product").field("problem", &self.problem).field("engine", &self.engine).finish()
    }
}

fn failed(error: cudarc::driver::DriverError) -> Error {
    Error::driver("planning a GEMM", error)
}

impl Product {
    /// Plans the GEMM, allocates the engine's memory, and compresses the weight where the engine has its own form.
    /// Returns after the compression is complete.
    ///
    /// # Errors
    /// [`Error::NoLibrary`], [`Error::Vendor`]; those of [`Gemm::with`]; [`Error::Types`] where this crate's kernels
    /// would have to compress 8-bit elements; [`Error::NoForm`] for a weight without the form that the engine reads;
    /// [`Error::NotComputed`] for a problem that the engine does not compute; [`Error::OutOfMemory`].
    ///
    /// # Safety
    /// The weight is valid and 2:4 until this function returns. The form that calls read, as [`Weight`] says, stays
    /// valid until the last call is complete.
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
        let dense = || weight.dense.ok_or(Error::NoForm { engine: engine.name() });
        let plan = match engine {
            Engine::TwoFour(method) => {
                let gemm = Gemm::with(device, problem, method)?;
                let mut held = vec![memory(gemm.workspace_bytes())?];
                let workspace = at(&held[0]);
                let packed = match weight.packed {
                    Some(packed) => packed,
                    None => {
                        let compressor = Compressor::new(device, element, element)?;
                        let bytes = packed_bytes(element, features, reduction);
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
                    return Err(Error::NotComputed { engine: engine.name(), problem });
                }
                let library = libraries.sparse.as_ref().ok_or(cusparselt::MISSING)?;
                let mut plan = library.plan(problem, Some(algorithm))?;
                let (bytes, scratch) = plan.compressed_bytes();
                let (compressed, scratch, workspace) =
                    (memory(bytes)?, memory(scratch)?, memory(plan.workspace_bytes())?);
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
                    return Err(Error::NotComputed { engine: engine.name(), problem });
                }
                let library = libraries.dense.as_ref().ok_or(cublaslt::MISSING)?;
                let gemm = plans_of(library, problem)?.take(device, which)?;
                let [workspace, sums] = gemm.workspace_bytes();
                let held = vec![memory(workspace)?, memory(sums)?];
                let workspace = [at(&held[0]), at(&held[1])];
                ProductPlan::CublasLt { gemm, weight: dense()?, workspace, _memory: held }
            }
        };
        Ok(Self { problem, engine, plan })
    }

    /// Launches the GEMM without an epilogue. It neither allocates nor synchronizes.
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

    /// Launches the GEMM with an epilogue. It neither allocates nor synchronizes. A bias along the result's contiguous
    /// axis, aligned to 16 bytes, is added by cuBLASLt itself where it is the whole epilogue. Where a library lacks the
    /// epilogue or the output type, a kernel of this crate runs after its GEMM. Accumulators are then rounded to the
    /// output's type before the epilogue, except for integers and where the result is added to the output.
    ///
    /// # Errors
    /// Those of [`Gemm::run`], except that X and the result must be aligned to 16 bytes; [`Error::Vendor`].
    ///
    /// # Safety
    /// That of [`Gemm::run`]. Calls that may run concurrently on several streams need one [`Product`] each, because its
    /// workspace is shared between calls.
    pub unsafe fn run_with(&self, stream: Stream, x: DevicePtr, out: DevicePtr, epilogue: Epilogue) -> Result<()> {
        expect_pointers(&[("X", x, 16), ("result", out, 16)])?;
        let problem = self.problem;
        expect_epilogue(epilogue, problem.epilogue, problem.output)?;
        match &self.plan {
            ProductPlan::TwoFour { gemm, packed, workspace, .. } => {
                let operands = GemmOperands { weight: *packed, x, out, workspace: *workspace };
                // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the
                // device, as this function requires.
                unsafe { gemm.run(stream, operands, epilogue) }
            }
            ProductPlan::CusparseLt { plan, compressed, workspace, .. } => {
                let mut plan = plan.lock().unwrap_or_else(PoisonError::into_inner);
                // SAFETY: X and the result are valid, as this function requires; the other memory is held by the plan.
                unsafe { plan.run(stream, *compressed, x, out, *workspace) }
            }
            ProductPlan::CublasLt { gemm, weight, workspace, .. } => {
                // SAFETY: weight, X, bias and result are valid, as this function requires; the workspace is held by the
                // plan.
                unsafe { gemm.run(stream, [*weight, x, out], *workspace, epilogue) }
            }
        }
    }

    /// Returns the engine.
    pub fn engine(&self) -> Engine {
        self.engine
    }

    /// Returns the kernel's name: for the libraries, the number of the algorithm or heuristic.
    pub fn kernel(&self) -> String {
        match (&self.plan, self.engine) {
            (ProductPlan::TwoFour { gemm, .. }, _) => gemm.kernel(),
            (_, Engine::CusparseLt(id)) => format!("algorithm {id}"),
            (ProductPlan::CublasLt { gemm, .. }, Engine::CublasLt(which)) if gemm.adds_bias() => {
                format!("heuristic {which}, adds a bias")
            }
            (_, Engine::CublasLt(which)) => format!("heuristic {which}"),
            (_, Engine::TwoFour(_)) => String::new(),
        }
    }
}
