//! GEMM with a 2:4 weight on tensor cores: `act(alpha · scales · X Wᵀ + bias)`.
//!
//! The weight is compressed by [`crate::raw::prune`], with metadata in the order that [`Gemm::meta_order`] returns. The input gradient is a GEMM with the
//! compressed transpose of the weight. The weight gradient, `MVUE(dYᵀ) X`, is a GEMM whose weight is the compressed output gradient, whose tokens are
//! the layer's `in_features`, and whose reduction runs over the layer's tokens.
//!
//! | tensor | shape |
//! |---|---|
//! | W | `[features, reduction]` (`[out_features, in_features]` of a layer), compressed |
//! | X | `[tokens, reduction]` or `[reduction, tokens]`, row-major ([`XOrder`]) |
//! | result | `[tokens, features]` or `[features, tokens]`, row-major ([`Order`]) |
//!
//! Int4 weights have their own order and kernels ([`int4`]).
//!
//! On Hopper, prefill-sized GEMMs run on `wgmma.sp` ([`sm90`]). Small batches run on `mma.sp` ([`rings`]) or, for 8-bit floats and the largest
//! weights, on `wgmma.sp` ([`stream`]). On other architectures from sm_80 on, GEMMs run on `mma.sp` ([`mma`]). At most
//! eight tokens of 16-bit elements also have a kernel that loads the weight straight into registers, on every architecture ([`direct`]). All of them
//! read the same order of weight and metadata.
//!
//! A [`Gemm`] is planned once for a problem. Its calls only launch kernels: they neither allocate nor synchronize, and a CUDA graph can capture them.

pub(crate) mod copies;
mod cost;
pub mod direct;
mod epilogue;
pub mod finish;
pub mod int4;
pub mod mma;
mod operands;
mod panels;
pub mod rings;
pub mod sm90;
mod staging;
pub mod stream;
mod supported;
pub mod tensor_map;
mod wgmma;

pub use epilogue::Epilogue;
use epilogue::RawOutput;
pub(crate) use epilogue::expect_epilogue;
pub(crate) use operands::tile_k;
pub use operands::{GemmOperands, PackedBytes, packed_bytes};
use serde::{Deserialize, Serialize};
use staging::Staging;
use supported::{TYPES, is_hopper};

use crate::{
    Architecture, DataType, Device, Error, Result, Stream,
    arguments::expect_pointers,
    device::Launch,
    problem::{GemmProblem, Order, XOrder},
    raw::MetaOrder,
    source::Source,
};

/// Returns the source of every GEMM kernel.
pub(crate) fn sources() -> Vec<Source> {
    let tiled = sm90::Sm90Kernel::all().into_iter().map(|variant| variant.source());
    let streamed = stream::StreamKernel::all().into_iter().map(|variant| variant.source());
    let rings = rings::RingsKernel::all().into_iter().map(|variant| variant.source());
    let mma = mma::MmaKernel::all().into_iter().map(|variant| variant.source());
    let direct = direct::DirectKernel::all().into_iter().map(|variant| variant.source());
    let int4 = int4::Int4Kernel::all().into_iter().map(|variant| variant.source());
    tiled
        .chain([copies::source(), finish::source()])
        .chain(streamed)
        .chain(rings)
        .chain(mma)
        .chain(direct)
        .chain(int4)
        .collect()
}

/// The kernel family that computes a GEMM, with its tile or shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GemmMethod {
    /// `wgmma.sp`, a grid of tiles; for many tokens.
    Tiled(sm90::Sm90Tile),
    /// `wgmma.sp`, every CTA computes all tokens of its rows of W; for small batches.
    Streamed(stream::StreamShape),
    /// `mma.sp` without clusters, every CTA computes all tokens of its rows of W; for small batches.
    Rings(rings::RingsShape),
    /// `mma.sp`, the weight goes straight into registers; for at most eight tokens.
    Direct(direct::DirectShape),
    /// `mma.sp`, a grid of tiles. It runs on Hopper, too, below `wgmma.sp`'s throughput.
    Mma(mma::MmaTile),
}

/// Methods are measured if the model's time is at most this many times the least one; at most this many methods.
const LIKELY: f64 = 1.5;
const MOST_LIKELY: usize = 24;

impl GemmMethod {
    /// Returns the launch configuration for a problem as [`GemmProblem::computed`] returns it.
    fn launch(self, problem: GemmProblem, multiprocessors: u32) -> Launch {
        match self {
            GemmMethod::Tiled(tile) => tile.launch_of(problem, multiprocessors),
            GemmMethod::Streamed(shape) => shape.launch_of(problem),
            GemmMethod::Rings(shape) => shape.launch_of(problem),
            GemmMethod::Direct(shape) => shape.launch_of(problem),
            GemmMethod::Mma(tile) => tile.launch_of(problem),
        }
    }

    /// Returns the methods that compute a problem: none for one that [`Gemm::new`] refuses.
    pub fn all(problem: GemmProblem, architecture: Architecture) -> Vec<GemmMethod> {
        if problem.expect_known().is_err() {
            return Vec::new();
        }
        let problem = problem.computed(architecture);
        let direct = direct::DirectShape::all(problem, architecture).into_iter().map(GemmMethod::Direct);
        if !is_hopper(architecture) {
            let tiles = mma::MmaTile::all(problem.element, architecture).into_iter().map(GemmMethod::Mma);
            return direct.chain(tiles).collect();
        }
        let tiled = sm90::Sm90Tile::all(problem).into_iter().map(GemmMethod::Tiled);
        if problem.x == XOrder::ReductionFirst {
            return tiled.collect();
        }
        if problem.is_mixed() {
            return tiled.collect();
        }
        let streamed = stream::StreamShape::all(problem).into_iter().map(GemmMethod::Streamed);
        let rings = rings::RingsShape::all(problem.element, problem.tokens).into_iter().map(GemmMethod::Rings);
        direct.chain(rings).chain(streamed).chain(tiled).collect()
    }

    /// Returns the methods that may be the fastest according to the model of the device's time: those worth measuring. On Hopper they are at most 24.
    pub fn likely(problem: GemmProblem, architecture: Architecture) -> Vec<GemmMethod> {
        let mut methods = Self::all(problem, architecture);
        if is_hopper(architecture) {
            let mut times: Vec<f64> = methods.iter().map(|method| cost::microseconds(*method, problem)).collect();
            times.sort_by(f64::total_cmp);
            if let Some(least) = times.first() {
                let most = (LIKELY * least).min(times[times.len().min(MOST_LIKELY) - 1]);
                methods.retain(|method| cost::microseconds(*method, problem) <= most);
            }
        }
        methods
    }

    /// Returns the method with the least time according to the model of the device.
    ///
    /// # Errors
    /// Those of [`Gemm::new`] for a problem that no kernel computes.
    pub fn best(problem: GemmProblem, architecture: Architecture, multiprocessors: u32) -> Result<GemmMethod> {
        problem.expect_known()?;
        let problem = problem.computed(architecture);
        if is_hopper(architecture) {
            let time = |method: &GemmMethod| cost::microseconds(*method, problem);
            let best = Self::all(problem, architecture).into_iter().min_by(|a, b| time(a).total_cmp(&time(b)));
            return Ok(best.expect("a persistent tile computes any problem"));
        }
        let direct = direct::DirectShape::best(problem, architecture, multiprocessors).map(GemmMethod::Direct);
        Ok(direct.unwrap_or_else(|| GemmMethod::Mma(mma::MmaTile::best(problem, architecture, multiprocessors))))
    }
}

/// A planned GEMM: its kernel is loaded and its launch configuration is fixed.
#[derive(Debug, Clone)]
pub struct Gemm {
    problem: GemmProblem,
    plan: GemmPlan,
    staging: Staging,
}

#[derive(Debug, Clone)]
enum GemmPlan {
    Tiled(sm90::Sm90Plan),
    Streamed(stream::StreamPlan),
    Rings(rings::RingsPlan),
    Direct(direct::DirectPlan),
    Mma(mma::MmaPlan),
}

impl Gemm {
    /// Plans with the method of least time according to the model of the device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for the device; [`Error::Product`] and [`Error::MixedElements`] for a combination of data types that no kernel has;
    /// [`Error::Dimension`] for a dimension that is 0 or larger than kernels support; those of compiling and loading.
    pub fn new(device: &Device, problem: GemmProblem) -> Result<Self> {
        // The model requires dimensions of at least 1.
        problem.expect_known()?;
        Self::with(device, problem, GemmMethod::best(problem, device.architecture(), device.multiprocessors())?)
    }

    /// Plans with a given method: one of [`GemmMethod::all`], or any of [`mma::MmaTile::all`].
    ///
    /// # Errors
    /// Those of [`Gemm::new`], and [`Error::GemmMethod`].
    pub fn with(device: &Device, problem: GemmProblem, method: GemmMethod) -> Result<Self> {
        problem.expect_known()?;
        let architecture = device.architecture();
        let computed = problem.computed(architecture);
        let known = match method {
            // [`mma::MmaPlan::new`] returns an error of its own for a missing instruction.
            GemmMethod::Mma(_) => computed.x == XOrder::TokensFirst,
            GemmMethod::Direct(shape) => direct::DirectShape::all(computed, architecture).contains(&shape),
            _ if !is_hopper(architecture) => {
                let (major, minor) = architecture.capability();
                let needs = "9.0 (Hopper)";
                return Err(Error::Unsupported { operation: "GEMM by wgmma.sp", major, minor, needs });
            }
            _ => GemmMethod::all(computed, architecture).contains(&method),
        };
        if !known {
            return Err(Error::GemmMethod { method, problem });
        }
        let launch = method.launch(computed, device.multiprocessors());
        launch.expect_within(architecture)?;
        let plan = match method {
            GemmMethod::Tiled(tile) => GemmPlan::Tiled(sm90::Sm90Plan::new(device, computed, tile, launch)?),
            GemmMethod::Streamed(shape) => {
                GemmPlan::Streamed(stream::StreamPlan::new(device, computed, shape, launch)?)
            }
            GemmMethod::Rings(shape) => GemmPlan::Rings(rings::RingsPlan::new(device, computed, shape, launch)?),
            GemmMethod::Direct(shape) => GemmPlan::Direct(direct::DirectPlan::new(device, computed, shape, launch)?),
            GemmMethod::Mma(tile) => GemmPlan::Mma(mma::MmaPlan::new(device, computed, tile, launch)?),
        };
        let (x_row, stores_by_tma) = match &plan {
            GemmPlan::Tiled(plan) => (computed.x_row_by_tma(), plan.stores_by_tma()),
            GemmPlan::Streamed(_) | GemmPlan::Rings(_) => (computed.x_row_by_tma(), false),
            // These kernels read whole steps of the reduction.
            GemmPlan::Direct(_) | GemmPlan::Mma(_) => (computed.padded().1, false),
        };
        let staging = Staging::new(device, (problem, computed), x_row, stores_by_tma)?;
        Ok(Self { problem, plan, staging })
    }

    /// Returns the bytes of workspace that a call needs if X and the result are aligned to 16 bytes: those of a copy of X where its rows cannot be
    /// read in place, otherwise 0.
    pub fn workspace_bytes(&self) -> usize {
        self.staging.bytes()
    }

    /// Returns the bytes of workspace that a call needs if X or the result is aligned to its elements only.
    pub fn unaligned_workspace_bytes(&self) -> usize {
        self.staging.unaligned_bytes()
    }

    /// Launches the GEMM.
    ///
    /// # Errors
    /// [`Error::Pointer`] for a pointer that is null, for values, metadata or workspace that are not aligned to 16 bytes, and for other pointers that
    /// are not aligned to their elements; [`Error::Epilogue`] for an epilogue where the problem has none; [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what the problem reads and writes until the stream has passed this call, and nothing else writes there. The weight
    /// is padded ([`packed_bytes`]), and the values of its padding are zeros. The workspace has [`Gemm::workspace_bytes`] bytes or, where X or the
    /// result is not aligned to 16 bytes, [`Gemm::unaligned_workspace_bytes`]. Calls that may run concurrently on several streams have one workspace
    /// each. Each metadata code is one of the six valid ones of sixteen, as compression writes them. The stream is of the plan's device.
    pub unsafe fn run(&self, stream: Stream, operands: GemmOperands, epilogue: Epilogue) -> Result<()> {
        let GemmOperands { weight, x, out, .. } = operands;
        let problem = self.problem;
        expect_pointers(&[
            ("values", weight.values, 16),
            ("metadata", weight.meta, 16),
            ("X", x, problem.x_element.bytes() as u64),
            ("result", out, problem.output.bytes() as u64),
        ])?;
        expect_epilogue(epilogue, problem.epilogue, problem.output)?;
        let kernel = |operands| match &self.plan {
            // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
            GemmPlan::Tiled(plan) => unsafe { plan.run(stream, operands, epilogue) },
            // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
            GemmPlan::Streamed(plan) => unsafe { plan.run(stream, operands, epilogue) },
            // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
            GemmPlan::Rings(plan) => unsafe { plan.run(stream, operands, epilogue) },
            // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
            GemmPlan::Direct(plan) => unsafe { plan.run(stream, operands, epilogue) },
            // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
            GemmPlan::Mma(plan) => unsafe { plan.run(stream, operands, epilogue) },
        };
        // SAFETY: operands and workspace are valid, and the stream is of the device, as this function requires.
        unsafe { self.staging.run(stream, operands, kernel) }
    }

    /// Returns the problem.
    pub fn problem(&self) -> GemmProblem {
        self.problem
    }

    /// Returns the order that metadata must be in.
    pub fn meta_order(&self) -> MetaOrder {
        Self::meta_order_of(self.problem.element)
    }

    /// Returns the order that metadata of an element type must be in. It is the same for all methods.
    pub fn meta_order_of(element: DataType) -> MetaOrder {
        MetaOrder::Sm90(tile_k(element))
    }

    /// Returns the kernel's name, which includes its tile or shape.
    pub fn kernel(&self) -> String {
        match &self.plan {
            GemmPlan::Tiled(plan) => plan.kernel(),
            GemmPlan::Streamed(plan) => plan.kernel(),
            GemmPlan::Rings(plan) => plan.kernel(),
            GemmPlan::Direct(plan) => plan.kernel(),
            GemmPlan::Mma(plan) => plan.kernel(),
        }
    }
}

#[cfg(test)]
mod tests;
