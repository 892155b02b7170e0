//! GEMM with a 2:4 weight on tensor cores: `act(alpha · scales · X Wᵀ + bias)`.
//!
//! The weight is compressed by [`crate::raw::prune`], with metadata in the order that [`Gemm::meta_order`] returns. The
//! input gradient is a GEMM with the compressed transpose of the weight. The weight gradient, `MVUE(dYᵀ) X`, is a GEMM
//! whose weight is the compressed output gradient, whose tokens are the layer's `in_features`, and whose reduction runs
//! over the layer's tokens.
//!
//! | tensor | shape |
//! |---|---|
//! | W | `[features, reduction]` (`[out_features, in_features]` of a layer), compressed |
//! | X | `[tokens, reduction]` or `[reduction, tokens]`, row-major ([`XOrder`]) |
//! | result | `[tokens, features]` or `[features, tokens]`, row-major ([`Order`]) |
//!
//! Int4 weights have their own order and kernels ([`int4`]).
//!
//! A kernel family is a folder, named by what it is, below [`hopper`] or [`generic`], and a line in the table of
//! `families.rs`:
//!
//! | family | instruction | for |
//! |---|---|---|
//! | [`hopper::tiled`] | `wgmma.sp` | many tokens on Hopper |
//! | [`hopper::cluster`] | `wgmma.sp` | small batches on Hopper |
//! | [`hopper::warp_pipelines`] | `mma.sp` | small batches on Hopper, but for 8-bit floats |
//! | [`generic::direct`] | `mma.sp` | at most eight tokens of 16-bit elements, from sm_80 on |
//! | [`generic::tiled`] | `mma.sp` | any number of tokens, from sm_80 on; 8-bit floats from sm_89 on |
//! | [`generic::staged`] | `mma.sp` | int4 weights, from sm_80 on |
//!
//! All of them read the same order of weight and metadata. Only the families' times on Hopper were measured; other
//! architectures run the generic ones.
//!
//! A [`Gemm`] is planned once for a problem. Its calls only launch kernels: they neither allocate nor synchronize, and
//! a CUDA graph can capture them.

mod choice;
pub(crate) mod copies;
mod cost;
pub(crate) mod digest;
mod epilogue;
mod families;
mod family;
pub mod finish;
pub mod generic;
pub mod hopper;
pub mod int4;
mod mma;
mod operands;
mod rasterization;
mod staging;
mod supported;
pub mod tensor_map;
mod wgmma;

use std::sync::Arc;

use crate::{
    Architecture, DataType, Device, Error, Result, Stream,
    arguments::expect_pointers,
    problem::{GemmProblem, Order, XOrder},
    raw::MetaOrder,
    source::{Source, Support},
};

use choice::Methods;
pub use epilogue::Epilogue;
use epilogue::RawOutput;
pub(crate) use epilogue::expect_epilogue;
use families::FAMILIES;
pub use families::GemmMethod;
use family::Plan;
pub(crate) use operands::tile_k;
pub use operands::{GemmOperands, PackedBytes, packed_bytes};
use staging::Staging;

/// Returns the source of every GEMM kernel.
pub(crate) fn sources() -> Vec<Source> {
    FAMILIES.iter().flat_map(|family| (family.sources)()).chain([copies::source(), finish::source()]).collect()
}

/// Returns the coefficients by which methods are chosen, as text.
pub(crate) fn coefficients() -> String {
    FAMILIES.iter().flat_map(|family| family.times).map(|times| format!("{times:?}\n")).collect()
}

impl GemmMethod {
    /// Returns the methods that compute a problem: none for one that [`Gemm::new`] refuses.
    pub fn all(problem: GemmProblem, architecture: Architecture) -> Vec<GemmMethod> {
        if problem.expect_known().is_err() {
            return Vec::new();
        }
        Methods::all(problem.computed(architecture), architecture)
    }

    /// Returns the methods that may be the fastest according to the model of the device's time: those worth measuring.
    /// On Hopper they are at most 24.
    pub fn likely(problem: GemmProblem, architecture: Architecture) -> Vec<GemmMethod> {
        if problem.expect_known().is_err() {
            return Vec::new();
        }
        choice::likely(problem.computed(architecture), architecture)
    }

    /// Returns the method with the least time according to the model of the device.
    ///
    /// # Errors
    /// Those of [`Gemm::new`] for a problem that no kernel computes.
    pub fn best(problem: GemmProblem, architecture: Architecture, sms: u32) -> Result<GemmMethod> {
        problem.expect_known()?;
        let best = choice::best(problem.computed(architecture), architecture, sms);
        best.map_or_else(
            || {
                Support::FLOAT8.expect("GEMM by mma.sp with 8-bit floats", architecture)?;
                let GemmProblem { element, output, epilogue, .. } = problem;
                Err(Error::Product { element, output, epilogue: epilogue.is_some() })
            },
            Ok,
        )
    }
}

/// A planned GEMM: its kernel is loaded and its launch configuration is fixed.
#[derive(Debug, Clone)]
pub struct Gemm {
    problem: GemmProblem,
    plan: Arc<dyn Plan<GemmProblem>>,
    staging: Staging,
}

impl Gemm {
    /// Plans with the method of least time according to the model of the device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for the device; [`Error::Product`] and [`Error::MixedElements`] for a combination of data
    /// types that no kernel has; [`Error::Dimension`] for a dimension that is 0 or larger than kernels support; those
    /// of compiling and loading.
    pub fn new(device: &Device, problem: GemmProblem) -> Result<Self> {
        // The model requires dimensions of at least 1.
        problem.expect_known()?;
        Self::with(device, problem, GemmMethod::best(problem, device.architecture(), device.sms())?)
    }

    /// Plans with a given method: one of [`GemmMethod::all`], or any of [`generic::tiled::MmaTile::all`].
    ///
    /// # Errors
    /// Those of [`Gemm::new`], and [`Error::Method`].
    pub fn with(device: &Device, problem: GemmProblem, method: GemmMethod) -> Result<Self> {
        problem.expect_known()?;
        let computed = problem.computed(device.architecture());
        let method = method.method();
        let plan = method.plan(device, computed)?;
        let x_row = if method.reads_by_tma() { computed.x_row_by_tma() } else { computed.padded().1 };
        let staging = Staging::new(device, (problem, computed), x_row, method.stores_by_tma(computed))?;
        Ok(Self { problem, plan, staging })
    }

    /// Returns the bytes of workspace that a call needs if X and the result are aligned to 16 bytes: those of a copy of
    /// X where its rows cannot be read in place, otherwise 0.
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
    /// [`Error::Pointer`] for a pointer that is null, for values, metadata or workspace that are not aligned to 16
    /// bytes, and for other pointers that are not aligned to their elements; [`Error::Epilogue`] for an epilogue where
    /// the problem has none; [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what the problem reads and writes until the stream has passed this call, and nothing
    /// else writes there. The weight is padded ([`packed_bytes`]), and the values of its padding are zeros. The
    /// workspace has [`Gemm::workspace_bytes`] bytes or, where X or the result is not aligned to 16 bytes,
    /// [`Gemm::unaligned_workspace_bytes`]. Calls that may run concurrently on several streams have one workspace each.
    /// Each metadata code is one of the six valid ones of sixteen, as compression writes them. The stream is of the
    /// plan's device.
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
        // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as
        // this function requires.
        let kernel = |operands| unsafe { self.plan.run(stream, operands, epilogue) };
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
        self.plan.kernel()
    }
}

#[cfg(test)]
mod tests;
