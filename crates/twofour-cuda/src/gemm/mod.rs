//! GEMM with a 2:4 weight on tensor cores: `act(alpha · scales · X Wᵀ + bias)`.
//!
//! A weight comes compressed, as [`crate::prune`] leaves it, with metadata in the order that the plan asks for ([`Gemm::meta_order`]). The input
//! gradient is the same product with the compressed transpose; the weight's gradient, `MVUE(dYᵀ) X`, is one whose weight is the compressed gradient of the output,
//! whose tokens are the layer's inputs, and whose reduction is over the layer's tokens.
//!
//! | tensor | shape |
//! |---|---|
//! | W | `[features, reduction]`, compressed |
//! | X | `[tokens, reduction]` or `[reduction, tokens]`, row-major ([`XOrder`]) |
//! | result | `[tokens, features]` or `[features, tokens]`, row-major ([`Order`]) |
//!
//! Weights of four bits have an order and a kernel of their own ([`int4`]).
//!
//! On Hopper products are by `wgmma.sp` ([`sm90`]), those of few tokens by `mma.sp` ([`rings`]) or, for 8-bit floats and the largest weights, by `wgmma.sp`, too
//! ([`stream`]). Elsewhere from sm_80 on they are by `mma.sp` ([`mma`]), and those of one or two tokens everywhere ([`direct`]). A weight is in the same order for all of
//! them.
//!
//! A [`Gemm`] is planned once for a problem. Its calls only launch: they neither allocate nor wait, and may be captured in a graph.

mod copies;
mod cost;
pub mod direct;
mod epilogue;
pub(crate) mod finish;
pub mod int4;
pub mod mma;
mod panels;
mod problem;
pub mod rings;
pub mod sm90;
mod staging;
pub mod stream;
mod wgmma;

use serde::{Deserialize, Serialize};

use crate::{
    Architecture, DataType, Device, Error, Result, Stream, arguments::expect_pointers, prune::MetaOrder, source::Source,
};

use epilogue::RawOutput;
pub(crate) use epilogue::expect_epilogue;
pub use epilogue::{Activation, Epilogue};
pub(crate) use problem::tile_k;
pub use problem::{GemmOperands, GemmProblem, Order, PackedBytes, XOrder, packed_bytes};
use problem::{TYPES, is_hopper};
use staging::Staging;

/// Every source.
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

/// How a GEMM is computed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum GemmMethod {
    /// Tile by tile, for many tokens, by `wgmma.sp`.
    Tiled(sm90::Sm90Tile),
    /// All tokens at once, for few, by `wgmma.sp`.
    Streamed(stream::StreamShape),
    /// All tokens at once, for few, by `mma.sp` and without a cluster.
    Rings(rings::RingsShape),
    /// All tokens at once, for at most eight, by `mma.sp`.
    Direct(direct::DirectShape),
    /// Tile by tile, by `mma.sp`: on Hopper, too, but not at its best there.
    Mma(mma::MmaTile),
}

/// How far from the least time by the model a method may be, and how many there may be, to be worth measuring.
const LIKELY: f64 = 1.5;
const MOST_LIKELY: usize = 24;

impl GemmMethod {
    /// Those that compute a problem.
    pub fn all(problem: GemmProblem, architecture: Architecture) -> Vec<GemmMethod> {
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

    /// Those of them that may be the fastest by a model of the device's time: what is worth measuring. On Hopper at most 24.
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

    /// The one that takes the least time by a model of the device.
    pub fn best(problem: GemmProblem, architecture: Architecture, multiprocessors: u32) -> GemmMethod {
        let problem = problem.computed(architecture);
        if is_hopper(architecture) {
            let time = |method: &GemmMethod| cost::microseconds(*method, problem);
            let best = Self::all(problem, architecture).into_iter().min_by(|a, b| time(a).total_cmp(&time(b)));
            return best.expect("a persistent tile computes any problem");
        }
        let direct = direct::DirectShape::best(problem, architecture, multiprocessors).map(GemmMethod::Direct);
        direct.unwrap_or_else(|| GemmMethod::Mma(mma::MmaTile::best(problem, architecture, multiprocessors)))
    }
}

/// A GEMM that has been planned: its kernel is loaded and its launch is settled.
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
    /// Plans with the method that a model of the device's time finds best.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for the device, [`Error::Product`] and [`Error::MixedElements`] for a combination of types that no kernel has, [`Error::Dimension`] for a dimension that is 0 or more than
    /// kernels count; those of compiling and loading.
    pub fn new(device: &Device, problem: GemmProblem) -> Result<Self> {
        // The model takes no empty problem.
        problem.expect_known()?;
        Self::with(device, problem, GemmMethod::best(problem, device.architecture(), device.multiprocessors()))
    }

    /// Plans with a method of the caller's choice: one of [`GemmMethod::all`], or any of [`mma::MmaTile::all`].
    ///
    /// # Errors
    /// Those of [`Gemm::new`], and [`Error::GemmMethod`].
    pub fn with(device: &Device, problem: GemmProblem, method: GemmMethod) -> Result<Self> {
        problem.expect_known()?;
        let architecture = device.architecture();
        let computed = problem.computed(architecture);
        let known = match method {
            // What the architecture lacks is an error of its own.
            GemmMethod::Mma(_) => computed.x == XOrder::TokensFirst,
            GemmMethod::Direct(shape) => direct::DirectShape::all(computed, architecture).contains(&shape),
            _ if !is_hopper(architecture) => {
                let (major, minor) = architecture.capability();
                let needs = "9.0 (Hopper)";
                return Err(Error::Unsupported { operation: "a product by wgmma.sp", major, minor, needs });
            }
            _ => GemmMethod::all(computed, architecture).contains(&method),
        };
        if !known {
            return Err(Error::GemmMethod { method, problem });
        }
        let plan = match method {
            GemmMethod::Tiled(tile) => GemmPlan::Tiled(sm90::Sm90Plan::new(device, computed, tile)?),
            GemmMethod::Streamed(shape) => GemmPlan::Streamed(stream::StreamPlan::new(device, computed, shape)?),
            GemmMethod::Rings(shape) => GemmPlan::Rings(rings::RingsPlan::new(device, computed, shape)?),
            GemmMethod::Direct(shape) => GemmPlan::Direct(direct::DirectPlan::new(device, computed, shape)?),
            GemmMethod::Mma(tile) => GemmPlan::Mma(mma::MmaPlan::new(device, computed, tile)?),
        };
        let (x_row, stores_by_tma) = match &plan {
            GemmPlan::Tiled(plan) => (computed.x_row_by_tma(), plan.stores_by_tma()),
            GemmPlan::Streamed(_) | GemmPlan::Rings(_) => (computed.x_row_by_tma(), false),
            // They read whole steps.
            GemmPlan::Direct(_) | GemmPlan::Mma(_) => (computed.padded().1, false),
        };
        let staging = Staging::new(device, (problem, computed), x_row, stores_by_tma)?;
        Ok(Self { problem, plan, staging })
    }

    /// Bytes of workspace that a call needs whose X and result are aligned to 16 bytes: those of a copy of X where its rows cannot be read as they are, otherwise 0.
    pub fn workspace_bytes(&self) -> usize {
        self.staging.bytes()
    }

    /// Bytes of workspace that a call needs whose X or result is aligned to its elements only.
    pub fn unaligned_workspace_bytes(&self) -> usize {
        self.staging.unaligned_bytes()
    }

    /// Multiplies.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null, or values, metadata and workspace not aligned to 16 bytes, or others not to their elements; [`Error::Epilogue`] where one is
    /// asked for that was not planned, [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what the problem reads and writes until the stream has come past this call, and nothing else writes there; the weight is padded
    /// ([`packed_bytes`]), and its padding's values are zeros; the workspace has as many bytes as [`Gemm::workspace_bytes`] or, where X or the result is not aligned to 16 bytes,
    /// [`Gemm::unaligned_workspace_bytes`] says, and calls that may run at once on several streams have one each; the metadata's codes are six of the sixteen, as compressing makes them; the stream is of the plan's device.
    pub unsafe fn run(&self, stream: Stream, operands: GemmOperands, epilogue: Epilogue) -> Result<()> {
        let GemmOperands { weight, x, out, .. } = operands;
        let problem = self.problem;
        expect_pointers(&[
            ("values", weight.values, 16),
            ("metadata", weight.meta, 16),
            ("X", x, problem.x_element.bytes() as u64),
            ("result", out, problem.output.bytes() as u64),
        ])?;
        if !problem.epilogue && epilogue != Epilogue::default() {
            return Err(Error::Epilogue);
        }
        expect_epilogue(epilogue, problem.output)?;
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

    /// The problem.
    pub fn problem(&self) -> GemmProblem {
        self.problem
    }

    /// The order that metadata must be in.
    pub fn meta_order(&self) -> MetaOrder {
        Self::meta_order_of(self.problem.element)
    }

    /// The order that metadata of an element type must be in, whatever the method.
    pub fn meta_order_of(element: DataType) -> MetaOrder {
        MetaOrder::Sm90(tile_k(element))
    }

    /// The kernel's name, which tells its shape.
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
