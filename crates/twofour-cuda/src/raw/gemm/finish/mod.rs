//! The epilogue as a kernel of its own, after a GEMM of a library that lacks the epilogue or the output type.

use super::{
    Epilogue, GemmProblem, Order,
    epilogue::{self, RawOutput},
};
use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    device::{Kernel, Launch},
    raw::headers,
    source::{File, Source, Support},
};

/// The kernel.
#[derive(Debug, Clone)]
pub struct Finish(Kernel);

/// The kernel's parameters, in their memory layout.
#[repr(C)]
struct Parameters {
    sums: DevicePtr,
    to: RawOutput,
    sum_type: u32,
    output: u32,
    rows: u32,
    length: u32,
    features_first: u32,
    in_fours: u32,
}

/// Threads of a CTA, each of which stores four results.
const THREADS: u32 = 256;

pub(super) fn source() -> Source {
    let kernel = File::new("gemm/finish/kernel.cu", include_str!("kernel.cu"));
    Source::new("gemm-finish".into(), Support::ALL).define("typedef float Sum;\n").with([
        headers::COMMON,
        epilogue::SOURCE,
        kernel,
    ])
}

impl Finish {
    /// Loads the kernel.
    ///
    /// # Errors
    /// Those of compiling and loading.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self(device.kernel(&source(), "finish")?))
    }

    /// Writes a problem's results, or adds them to the output, from a library's results of type `sum_type` (f32, f16,
    /// bf16 or i32) in the output's order. `sums` may be `out` where the types are the same and nothing is accumulated.
    ///
    /// # Errors
    /// [`Error::TooLarge`], [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for the problem's results until the stream has passed this call; the stream is of the
    /// kernel's device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        problem: GemmProblem,
        (sums, sum_type): (DevicePtr, DataType),
        out: DevicePtr,
        epilogue: Epilogue,
    ) -> Result<()> {
        let GemmProblem { features, tokens, output, order, .. } = problem;
        let (rows, length) = match order {
            Order::TokensFirst => (tokens, features),
            Order::FeaturesFirst => (features, tokens),
        };
        let aligned = |address: u64, element: DataType| address.is_multiple_of(4 * element.bytes() as u64);
        let in_fours = length.is_multiple_of(4) && aligned(sums, sum_type) && aligned(out, output);
        let blocks = (rows as u64 * length.div_ceil(4) as u64).div_ceil(u64::from(THREADS));
        if blocks > i32::MAX as u64 {
            return Err(Error::TooLarge { rows, cols: length });
        }
        let parameters = Parameters {
            sums,
            to: RawOutput::of(problem, out, epilogue),
            sum_type: sum_type as u32,
            output: output as u32,
            rows: rows as u32,
            length: length as u32,
            features_first: u32::from(order == Order::FeaturesFirst),
            in_fours: u32::from(in_fours),
        };
        // SAFETY: the structure has the kernel's layout; sums and results are valid, and the stream is of the device,
        // as this function requires.
        unsafe { self.0.launch(stream, Launch::simple((blocks as u32, 1), THREADS), &parameters) }
    }
}
