//! GEMM of small batches with an int4 2:4 weight ([`twofour::int4`]), on every architecture from sm_80 on.
//!
//! W is in the order of [`twofour::layout::lanes`]. X has 16-bit elements. Kernels convert int4 values to X's type,
//! which is exact, and accumulate in f32; scales multiply accumulators, not weights. With at most eight tokens W goes
//! straight into registers ([`Int4Method::Direct`]). With more it goes through shared memory: on Hopper by a pipeline
//! for each warp ([`Int4Method::WarpPipelines`]) or by clusters ([`Int4Method::Cluster`]), elsewhere by
//! [`Int4Method::Staged`]. The families are those of other weights, each with a file `int4.rs` beside its kernels.

mod maps;

use std::sync::Arc;

use super::{
    Epilogue, RawOutput, choice,
    epilogue::{self, expect_epilogue},
    family::Plan,
    mma,
    supported::MAX_GEMM_DIMENSION,
};
use crate::{
    Architecture, DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::{expect_dimension, expect_multiple, expect_pointers},
    problem::Int4Problem,
    raw::headers,
    source::{File, Source, Support},
};
use twofour::int4::Granularity;

pub use super::families::Int4Method;
use choice::Methods;
pub(super) use maps::Maps;

/// Most tokens of a GEMM.
pub const MAX_TOKENS: usize = 64;

/// Rows and columns of a unit, the part of W that a warp multiplies at a time.
pub(super) const UNIT: (usize, usize) = (16, 128);

/// Conversions of int4 weights.
pub(super) const SOURCE: File = File::new("gemm/int4/int4.cuh", include_str!("int4.cuh"));

impl Int4Problem {
    /// Returns an error for a problem that no kernel supports.
    pub(crate) fn expect_known(self) -> Result<()> {
        let Int4Problem { element, output, features, tokens, reduction, .. } = self;
        if !matches!(element, DataType::F16 | DataType::BF16)
            || !matches!(output, o if o == element || o == DataType::F32)
        {
            return Err(Error::Product { element, output, epilogue: true });
        }
        expect_dimension("tokens", tokens, MAX_TOKENS)?;
        expect_shape(features, reduction)
    }

    /// Returns the units of a row.
    pub(super) fn steps(self) -> usize {
        self.reduction / UNIT.1
    }

    /// Returns whether the rows of W are at most three units for each SM.
    pub(super) fn has_few_rows(self, sms: u32) -> bool {
        self.features <= (3 * UNIT.0) * sms as usize
    }
}

/// Checks that kernels read an int4 weight of this shape.
pub(crate) fn expect_shape(features: usize, reduction: usize) -> Result<()> {
    expect_dimension("features", features, MAX_GEMM_DIMENSION)?;
    expect_dimension("reduction", reduction, MAX_GEMM_DIMENSION)?;
    expect_multiple("features of an int4 weight", features, UNIT.0)?;
    expect_multiple("reduction of an int4 weight", reduction, UNIT.1)
}

/// The device pointers of a weight in the order of [`twofour::layout::lanes`].
#[derive(Debug, Clone, Copy)]
pub struct Int4Weight {
    /// The values.
    pub values: DevicePtr,
    /// The metadata.
    pub meta: DevicePtr,
    /// The scales.
    pub scales: DevicePtr,
}

/// The device pointers of a call.
#[derive(Debug, Clone, Copy)]
pub(super) struct Int4Operands {
    pub(super) weight: Int4Weight,
    pub(super) x: DevicePtr,
    pub(super) out: DevicePtr,
}

/// The parameters of kernels without tensor maps, in their memory layout.
#[repr(C)]
pub(super) struct Int4Parameters {
    values: DevicePtr,
    meta: DevicePtr,
    scales: DevicePtr,
    x: DevicePtr,
    to: RawOutput,
    output: u32,
    features: u32,
    tokens: u32,
    reduction: u32,
    resident: u32,
}

impl Int4Parameters {
    /// Returns the parameters of a call. `resident` tells whether all of X stays in shared memory.
    pub(super) fn new(problem: Int4Problem, operands: Int4Operands, epilogue: Epilogue, resident: bool) -> Self {
        let Int4Operands { weight, x, out } = operands;
        Self {
            values: weight.values,
            meta: weight.meta,
            scales: weight.scales,
            x,
            to: RawOutput::of_int4(problem, out, epilogue),
            output: problem.output as u32,
            features: problem.features as u32,
            tokens: problem.tokens as u32,
            reduction: problem.reduction as u32,
            resident: u32::from(resident),
        }
    }
}

/// What the kernels of every family are compiled for.
#[derive(Debug, Clone, Copy)]
pub(super) struct Int4Types {
    /// Data type of X.
    pub(super) element: DataType,
    /// Granularity of the scales.
    pub(super) granularity: Granularity,
}

impl Int4Types {
    /// Returns those that kernels are compiled for.
    pub(super) fn all() -> impl Iterator<Item = Self> {
        let of = |element| [Granularity::Row, Granularity::Group].map(|granularity| Self { element, granularity });
        [DataType::F16, DataType::BF16].into_iter().flat_map(of)
    }

    /// Returns those of a problem.
    pub(super) fn of(problem: Int4Problem) -> Self {
        Self { element: problem.element, granularity: problem.granularity }
    }

    pub(super) fn is_by_row(self) -> bool {
        self.granularity == Granularity::Row
    }

    /// Returns the name of the kernel with a shape of this name.
    pub(super) fn kernel(self, shape: &str) -> String {
        let scales = match self.granularity {
            Granularity::Row => "row",
            Granularity::Group => "g128",
            // `twofour::layout::lanes` packs no such weight, so none comes here.
            Granularity::Group64 => "g64",
        };
        format!("{}-{scales}-{shape}", self.element)
    }

    /// Returns the beginning of the source of a kernel by `mma.sp`, with the name and the definitions of its shape.
    pub(super) fn source_by_mma(self, shape: &str, support: Support, definitions: &str) -> Source {
        let instruction = mma::instruction(self.element, self.element);
        let definitions = format!("{instruction}#define BY_ROW {}\n{definitions}", self.is_by_row());
        let source = Source::new(format!("int4-{}", self.kernel(shape)), support).define(definitions);
        source.with([headers::COMMON, epilogue::SOURCE, mma::SOURCE, SOURCE])
    }
}

impl Int4Method {
    /// Returns the methods that compute a problem. The list is empty for too many tokens.
    pub fn all(problem: Int4Problem, architecture: Architecture) -> Vec<Int4Method> {
        Methods::all(problem, architecture)
    }

    /// Returns the method that best balances the work over the SMs, as measured on an H200; `None` for too many tokens.
    pub fn best(problem: Int4Problem, architecture: Architecture, sms: u32) -> Option<Int4Method> {
        choice::best(problem, architecture, sms)
    }
}

/// A planned GEMM: its kernel is loaded and its launch configuration is fixed.
#[derive(Debug, Clone)]
pub struct Int4Gemm {
    problem: Int4Problem,
    plan: Arc<dyn Plan<Int4Problem>>,
}

impl Int4Gemm {
    /// Plans with [`Int4Method::best`].
    ///
    /// # Errors
    /// [`Error::Product`] for a combination of data types that no kernel has; [`Error::Multiple`] and
    /// [`Error::Dimension`] for a shape; those of compiling and loading.
    pub fn new(device: &Device, problem: Int4Problem) -> Result<Self> {
        problem.expect_known()?;
        let method = Int4Method::best(problem, device.architecture(), device.sms());
        let many = Error::Dimension { what: "tokens", size: problem.tokens, most: MAX_TOKENS };
        Self::with(device, problem, method.ok_or(many)?)
    }

    /// Plans with a given method, one of [`Int4Method::all`].
    ///
    /// # Errors
    /// Those of [`Int4Gemm::new`]; [`Error::Method`] and [`Error::Unsupported`] for another method.
    pub fn with(device: &Device, problem: Int4Problem, method: Int4Method) -> Result<Self> {
        problem.expect_known()?;
        Ok(Self { problem, plan: method.method().plan(device, problem)? })
    }

    /// Launches the GEMM.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to 16 bytes (scales of features and tokens and
    /// bias: to their elements); [`Error::Epilogue`] for an epilogue where the problem has none; [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what the problem reads and writes until the stream has passed this call, and nothing
    /// else writes there. Each metadata code is one of the six valid ones of sixteen, as
    /// [`twofour::layout::lanes::encode`] writes them. The stream is of the plan's device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        weight: Int4Weight,
        x: DevicePtr,
        out: DevicePtr,
        epilogue: Epilogue,
    ) -> Result<()> {
        expect_pointers(&[
            ("values", weight.values, 16),
            ("metadata", weight.meta, 16),
            ("scales", weight.scales, 16),
            ("X", x, 16),
            ("result", out, 16),
        ])?;
        expect_epilogue(epilogue, self.problem.epilogue, self.problem.output)?;
        // SAFETY: the pointers are valid until the stream has passed this call, and the stream is of the device, as
        // this function requires.
        unsafe { self.plan.run(stream, Int4Operands { weight, x, out }, epilogue) }
    }

    /// Returns the kernel's name, which includes its shape.
    pub fn kernel(&self) -> String {
        self.plan.kernel()
    }
}
