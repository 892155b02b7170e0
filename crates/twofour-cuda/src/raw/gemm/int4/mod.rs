//! GEMM of small batches with an int4 2:4 weight ([`twofour::int4`]), on every architecture from sm_80 on.
//!
//! W is in the order of [`twofour::layout::lanes`]. X has 16-bit elements. Kernels convert int4 values to X's type, which is exact, and accumulate in
//! f32; scales multiply accumulators, not weights. With at most eight tokens W goes straight into registers ([`Int4Method::Direct`]). With more it
//! goes through shared memory: on Hopper by circular buffers of stages ([`Int4Method::Rings`]) or by clusters ([`Int4Method::Streamed`]), elsewhere
//! by [`staged`].

mod kernel;
mod maps;
mod method;
mod rings;
pub mod staged;
mod stream;

use super::{Epilogue, RawOutput, direct, expect_epilogue, supported::MOST};
use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::{expect_dimension, expect_multiple, expect_pointers},
    device::{Kernel, Launch},
    problem::Int4Problem,
};

pub use kernel::Int4Kernel;
pub use method::Int4Method;

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
        let variant = Int4Kernel::of(problem, method);
        let kernel = device.kernel(&variant.compiled().source(), "decode")?;
        let mut launch = method.launch(problem);
        launch.expect_within(device.architecture())?;
        kernel.allow_shared()?;
        let resident = match method {
            Int4Method::Direct(_) => true,
            Int4Method::Rings(_) | Int4Method::Streamed(_) => false,
            Int4Method::Staged(shape) => {
                let at_once = kernel.blocks_per_multiprocessor(launch.block, launch.shared)? * device.multiprocessors();
                launch.grid.0 = launch.grid.0.min(at_once);
                shape.shared(problem).0
            }
        };
        Ok(Self { problem, variant, kernel, launch, resident })
    }

    /// Launches the GEMM.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to 16 bytes (scales of features and tokens and bias: to their elements);
    /// [`Error::Epilogue`] for an epilogue where the problem has none; [`Error::Driver`].
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
        expect_epilogue(epilogue, self.problem.epilogue, output)?;
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
