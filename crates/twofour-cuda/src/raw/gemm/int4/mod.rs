//! GEMM of small batches with an int4 2:4 weight ([`twofour::int4`]), on every architecture from sm_80 on.
//!
//! W is in the order of [`twofour::layout::lanes`]. X has 16-bit elements. Kernels convert int4 values to X's type, which is exact, and accumulate in
//! f32; scales multiply accumulators, not weights. With at most eight tokens W goes straight into registers ([`Int4Method::Direct`]). With more it
//! goes through shared memory: on Hopper by circular buffers of stages ([`Int4Method::Rings`]) or by clusters ([`Int4Method::Streamed`]), elsewhere
//! by [`staged`].

mod maps;
mod rings;
pub mod staged;
mod stream;

use serde::{Deserialize, Serialize};
use twofour::int4::Granularity;

use super::{
    Epilogue, RawOutput, XOrder, direct, expect_epilogue, mma,
    supported::{MOST, is_hopper},
    wgmma::{self, Weights},
};
use crate::{
    Architecture, DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::{expect_dimension, expect_multiple, expect_pointers},
    device::{Kernel, Launch},
    problem::Int4Problem,
    raw::headers,
    source::{File, Source, Support},
};

/// Most tokens of a GEMM.
pub const MOST_TOKENS: usize = 64;

/// Rows and columns of a unit, the part of W that a warp multiplies at a time.
const UNIT: (usize, usize) = (16, 128);

impl Int4Problem {
    /// Returns an error for a problem that no kernel supports.
    pub(crate) fn expect_known(self) -> Result<()> {
        let Int4Problem { element, output, features, tokens, reduction, .. } = self;
        if !matches!(element, DataType::F16 | DataType::BF16)
            || !matches!(output, o if o == element || o == DataType::F32)
        {
            return Err(Error::Product { element, output, epilogue: true });
        }
        for (what, size, most) in
            [("features", features, MOST), ("tokens", tokens, MOST_TOKENS), ("reduction", reduction, MOST)]
        {
            expect_dimension(what, size, most)?;
        }
        expect_multiple("features of an int4 weight", features, UNIT.0)?;
        expect_multiple("reduction of an int4 weight", reduction, UNIT.1)
    }

    /// Returns the units of a row.
    fn steps(self) -> usize {
        self.reduction / UNIT.1
    }

    /// Returns the bytes of shared memory of a direct kernel.
    fn shared_bytes(self, shape: direct::DirectShape) -> usize {
        shape.shared_bytes(self.tokens, self.steps(), UNIT.1 * 2)
    }
}

/// The kernel family that computes a GEMM, with its shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Int4Method {
    /// W goes from memory straight into registers; for at most eight tokens.
    Direct(direct::DirectShape),
    /// A circular buffer of stages for each warp, filled by TMA; on Hopper.
    Rings(super::rings::RingsShape),
    /// Clusters with split-K; on Hopper, for more than eight tokens.
    Streamed(super::stream::StreamShape),
    /// `cp.async` pipelines through shared memory, on all architectures.
    Staged(staged::StagedShape),
}

/// Shapes of the direct kernels, named by the problems for which they were the fastest on an H200.
const MANY_ROWS: direct::DirectShape = direct::DirectShape { height: 1, warps: 8, depth: 2, blocks: 5 };
const MANY_ROWS_MORE_TOKENS: direct::DirectShape = direct::DirectShape { height: 2, warps: 8, depth: 1, blocks: 4 };
const FEW_ROWS: direct::DirectShape = direct::DirectShape { height: 1, warps: 16, depth: 1, blocks: 3 };
const FEW_LONG_ROWS: direct::DirectShape = direct::DirectShape { height: 1, warps: 16, depth: 2, blocks: 2 };
const DIRECT: [direct::DirectShape; 4] = [MANY_ROWS, MANY_ROWS_MORE_TOKENS, FEW_ROWS, FEW_LONG_ROWS];

impl Int4Method {
    /// Returns the methods that compute a problem. The list is empty for too many tokens.
    pub fn all(problem: Int4Problem, architecture: Architecture) -> Vec<Int4Method> {
        let fits = |shape: &direct::DirectShape| {
            problem.tokens <= direct::TOKENS && problem.shared_bytes(*shape) <= architecture.shared_bytes() as usize
        };
        let direct = DIRECT.into_iter().filter(fits).map(Int4Method::Direct);
        direct
            .chain(rings_for(problem, architecture).into_iter().map(Int4Method::Rings))
            .chain(streams_for(problem, architecture).into_iter().map(Int4Method::Streamed))
            .chain(staged::StagedShape::all(problem.tokens).into_iter().map(Int4Method::Staged))
            .collect()
    }

    /// Returns the method that best balances the work over the SMs, as measured on an H200.
    pub fn best(problem: Int4Problem, architecture: Architecture, multiprocessors: u32) -> Option<Int4Method> {
        let few_rows = problem.features <= (3 * UNIT.0) * multiprocessors as usize;
        let best = match few_rows {
            true if problem.steps() > 64 => FEW_LONG_ROWS,
            true => FEW_ROWS,
            false if problem.tokens > 4 => MANY_ROWS_MORE_TOKENS,
            false => MANY_ROWS,
        };
        let best = Int4Method::Direct(best);
        let rings = rings_for(problem, architecture);
        if Int4Method::all(problem, architecture).contains(&best) && (problem.tokens <= 4 || rings.is_empty()) {
            return Some(best);
        }
        // The more tokens there are, the more it matters that few CTAs read X.
        if !few_rows && problem.tokens > 16 || problem.tokens > 32 {
            let streams = streams_for(problem, architecture);
            if let Some(shape) = super::stream::StreamShape::best(&streams, problem.features, multiprocessors) {
                return Some(Int4Method::Streamed(shape));
            }
        }
        let rings = super::rings::RingsShape::best(&rings, problem.features, multiprocessors).or(rings.last().copied());
        if let Some(rings) = rings {
            return Some(Int4Method::Rings(rings));
        }
        staged::StagedShape::best(problem, multiprocessors).map(Int4Method::Staged)
    }
}

/// Returns the [`Int4Method::Rings`] shapes for a problem's tokens, where the architecture supports them.
fn rings_for(problem: Int4Problem, architecture: Architecture) -> Vec<super::rings::RingsShape> {
    let shapes: &[_] = if is_hopper(architecture) { &rings::SHAPES } else { &[] };
    super::rings::RingsShape::with_room(shapes, problem.tokens)
}

/// Returns the [`Int4Method::Streamed`] shapes for a problem, where the architecture supports them.
fn streams_for(problem: Int4Problem, architecture: Architecture) -> Vec<super::stream::StreamShape> {
    if is_hopper(architecture) { stream::shapes(problem) } else { Vec::new() }
}

/// A kernel: a data type, the granularity of scales, and a method.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Int4Kernel {
    /// Data type of X.
    pub element: DataType,
    /// Granularity of the scales.
    pub granularity: Granularity,
    /// The method.
    pub method: Int4Method,
}

impl Int4Kernel {
    /// Returns every kernel that a problem can need.
    pub fn all() -> Vec<Int4Kernel> {
        let staged = staged::StagedShape::every().into_iter().map(Int4Method::Staged);
        let rings = rings::SHAPES.into_iter().map(Int4Method::Rings);
        let streams = stream::kernels().into_iter().map(Int4Method::Streamed);
        let direct = DIRECT.into_iter().map(Int4Method::Direct);
        let methods: Vec<Int4Method> = direct.chain(rings).chain(streams).chain(staged).collect();
        let of = |element, granularity| {
            methods.iter().map(move |method| Int4Kernel { element, granularity, method: *method })
        };
        [DataType::F16, DataType::BF16]
            .into_iter()
            .flat_map(|element| [Granularity::Row, Granularity::Group].map(|granularity| (element, granularity)))
            .flat_map(|(element, granularity)| of(element, granularity))
            .collect()
    }

    /// Returns the kernel's name.
    pub fn name(&self) -> String {
        let scales = match self.granularity {
            Granularity::Row => "row",
            Granularity::Group => "g128",
        };
        let shape = match self.method {
            Int4Method::Direct(shape) => format!("direct-{}", shape.name()),
            Int4Method::Rings(shape) => format!("rings-{}", shape.name()),
            Int4Method::Streamed(shape) => format!("stream-{}", shape.name()),
            Int4Method::Staged(shape) => shape.name(),
        };
        format!("{}-{scales}-{shape}", self.element)
    }

    /// Returns the entry of [`Int4Kernel::all`] that is compiled for this kernel: the launch, not the kernel, sets the CTAs of a cluster.
    fn compiled(self) -> Int4Kernel {
        match self.method {
            Int4Method::Streamed(shape) => {
                Int4Kernel { method: Int4Method::Streamed(super::stream::StreamShape { split: 1, ..shape }), ..self }
            }
            _ => self,
        }
    }

    pub(super) fn source(&self) -> Source {
        let support = match self.method {
            Int4Method::Rings(_) | Int4Method::Streamed(_) => Support::Only((9, 0)),
            Int4Method::Direct(_) | Int4Method::Staged(_) => Support::ALL,
        };
        let source = Source::new(format!("int4-{}", self.name()), support).define(self.definitions());
        let by_mma = [headers::COMMON, headers::EPILOGUE, headers::SPARSE_PRODUCT, headers::INT4];
        match self.method {
            Int4Method::Direct(_) => {
                let kernel = File::new("gemm/int4/direct/kernel.cu", include_str!("direct/kernel.cu"));
                source.with(by_mma).with([headers::DIRECT, kernel])
            }
            Int4Method::Rings(_) => {
                let kernel = File::new("gemm/int4/rings/kernel.cu", include_str!("rings/kernel.cu"));
                source.with(by_mma).with([headers::HOPPER, headers::RINGS, headers::MAPS_INT4, kernel])
            }
            Int4Method::Streamed(shape) => {
                let (tokens, x) = (shape.tile.tokens, XOrder::TokensFirst);
                let products = wgmma::products((self.element, self.element), tokens, x, Weights::Registers);
                let kernel = File::new("gemm/int4/stream/kernel.cu", include_str!("stream/kernel.cu"));
                source.with([headers::COMMON, headers::HOPPER, products, headers::EPILOGUE, headers::INT4]).with([
                    headers::STREAM,
                    headers::MAPS_INT4,
                    kernel,
                ])
            }
            Int4Method::Staged(_) => {
                let kernel = File::new("gemm/int4/staged/kernel.cu", include_str!("staged/kernel.cu"));
                source.with(by_mma).with([kernel])
            }
        }
    }

    /// Returns the source's preprocessor definitions.
    pub(crate) fn definitions(&self) -> String {
        let by_row = self.granularity == Granularity::Row;
        let shape = match self.method {
            Int4Method::Direct(shape) => shape.definitions(),
            Int4Method::Rings(shape) => shape.definitions(rings::step_bytes(shape, self.granularity)),
            Int4Method::Streamed(shape) => {
                let element = self.element.definition();
                let tile = shape.tile.definitions(stream::step(shape.tile, self.granularity));
                return format!("#define BY_ROW {by_row}\n#define ELEMENT {element}\n{tile}");
            }
            Int4Method::Staged(shape) => shape.definitions(),
        };
        format!("{}#define BY_ROW {by_row}\n{shape}", mma::instruction(self.element, self.element))
    }
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

/// A planned GEMM: its kernel is loaded and its launch configuration is fixed.
#[derive(Debug, Clone)]
pub struct Int4Gemm {
    problem: Int4Problem,
    variant: Int4Kernel,
    kernel: Kernel,
    launch: Launch,
    resident: bool,
}

/// The kernel's parameters, in their memory layout.
#[repr(C)]
struct Int4Parameters {
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

impl Int4Gemm {
    /// Plans with [`Int4Method`]'s default for the problem and device.
    ///
    /// # Errors
    /// [`Error::Unsupported`] for the device; [`Error::Product`] for a combination of data types that no kernel has; [`Error::Multiple`] and
    /// [`Error::Dimension`] for a shape; those of compiling and loading.
    pub fn new(device: &Device, problem: Int4Problem) -> Result<Self> {
        problem.expect_known()?;
        let method = Int4Method::best(problem, device.architecture(), device.multiprocessors());
        let many = Error::Dimension { what: "tokens", size: problem.tokens, most: MOST_TOKENS };
        Self::with(device, problem, method.ok_or(many)?)
    }

    /// Plans with a given method, one of [`Int4Method::all`].
    ///
    /// # Errors
    /// Those of [`Int4Gemm::new`]; [`Error::Int4Method`] for another method.
    pub fn with(device: &Device, problem: Int4Problem, method: Int4Method) -> Result<Self> {
        let (major, minor) = device.architecture().capability();
        if major < 8 {
            return Err(Error::Unsupported {
                operation: "GEMM by mma.sp",
                major,
                minor,
                needs: "8.0 (Ampere) or later",
            });
        }
        problem.expect_known()?;
        if !Int4Method::all(problem, device.architecture()).contains(&method) {
            return Err(Error::Int4Method { method, problem });
        }
        let variant = Int4Kernel { element: problem.element, granularity: problem.granularity, method };
        let kernel = device.kernel(&variant.compiled().source(), "decode")?;
        let (resident, launch) = match method {
            Int4Method::Direct(shape) => {
                let shared = problem.shared_bytes(shape) as u32;
                kernel.allow_shared(shared)?;
                (true, shape.launch(problem.features, shared))
            }
            Int4Method::Rings(shape) => {
                let launch = shape.launch(problem.features, rings::step_bytes(shape, problem.granularity));
                kernel.allow_shared(launch.shared)?;
                (false, launch)
            }
            Int4Method::Streamed(shape) => {
                let launch =
                    shape.launch((problem.features, problem.tokens), stream::step(shape.tile, problem.granularity));
                kernel.allow_shared(launch.shared)?;
                (false, launch)
            }
            Int4Method::Staged(shape) => {
                let (resident, shared) = shape.shared(problem);
                kernel.allow_shared(shared)?;
                let threads = staged::WARPS * 32;
                let at_once = kernel.blocks_per_multiprocessor(threads, shared)? * device.multiprocessors();
                let grid = (shape.blocks(problem.features).min(at_once), 1);
                (resident, Launch { grid, block: threads, shared, cluster: 1 })
            }
        };
        Ok(Self { problem, variant, kernel, launch, resident })
    }

    /// Launches the GEMM.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to 16 bytes (scales of features and tokens and bias: to their elements),
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what the problem reads and writes until the stream has passed this call, and nothing else writes there. Each
    /// metadata code is one of the six valid ones of sixteen, as [`twofour::layout::lanes::encode`] writes them. The stream is of the plan's device.
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
        let Int4Problem { output, features, tokens, reduction, order, .. } = self.problem;
        expect_epilogue(epilogue, output)?;
        let to = RawOutput::new((features, tokens), order, out, epilogue);
        match self.variant.method {
            Int4Method::Rings(shape) => {
                let parameters = rings::Int4RingsParameters::new(self.problem, shape, weight, x, to)?;
                // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
                return unsafe { self.kernel.launch(stream, self.launch, &parameters) };
            }
            Int4Method::Streamed(shape) => {
                let parameters = stream::Int4StreamParameters::new(self.problem, shape, weight, x, to)?;
                // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
                return unsafe { self.kernel.launch(stream, self.launch, &parameters) };
            }
            Int4Method::Direct(_) | Int4Method::Staged(_) => {}
        }
        let parameters = Int4Parameters {
            values: weight.values,
            meta: weight.meta,
            scales: weight.scales,
            x,
            to,
            output: output as u32,
            features: features as u32,
            tokens: tokens as u32,
            reduction: reduction as u32,
            resident: u32::from(self.resident),
        };
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.kernel.launch(stream, self.launch, &parameters) }
    }

    /// The kernel's name, which tells its shape.
    pub fn kernel(&self) -> String {
        self.variant.name()
    }
}
