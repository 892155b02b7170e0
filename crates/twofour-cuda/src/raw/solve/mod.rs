//! What solvers do between GEMMs: passes over weights in f32, sums of rows in f64, and the inverse Cholesky factor of a
//! small block. Masks have a byte for each element.

use crate::{
    Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{grid::BLOCK, headers},
    source::{File, Source, Support},
};

/// Most rows of a block that [`SolveKernel::InvertFactor`] takes.
pub(crate) const BASE: usize = 64;

/// Most CTAs of a pass over elements, each of which takes several then.
const MAX_BLOCKS: u64 = 1 << 16;

/// A kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum SolveKernel {
    CopyBlock,
    Subtract,
    ShiftDiagonal,
    InvertFactor,
    Largest,
    Differences,
    Apply,
    AlpsRight,
    AlpsProject,
    RowProducts,
    RefitBegin,
    RefitStep,
}

/// The kernels on one device.
#[derive(Debug, Clone)]
pub(crate) struct SolveKernels {
    kernels: [Kernel; 12],
}

/// The kernels' parameters, in their memory layout; each kernel reads some of them.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct SolveParameters {
    pub(crate) a: DevicePtr,
    pub(crate) b: DevicePtr,
    pub(crate) c: DevicePtr,
    pub(crate) kept: DevicePtr,
    pub(crate) other: DevicePtr,
    pub(crate) x: DevicePtr,
    pub(crate) y: DevicePtr,
    pub(crate) z: DevicePtr,
    pub(crate) mask: DevicePtr,
    pub(crate) sums: DevicePtr,
    pub(crate) count: DevicePtr,
    pub(crate) elements: u64,
    pub(crate) rows: u32,
    pub(crate) cols: u32,
    pub(crate) stride: u32,
    pub(crate) to_stride: u32,
    pub(crate) n: u32,
    pub(crate) m: u32,
    pub(crate) first: u32,
    pub(crate) factor: f32,
    pub(crate) shift: f32,
}

/// Returns the source.
pub(crate) fn source() -> Source {
    let kernel = File::new("solve/kernel.cu", include_str!("kernel.cu"));
    Source::new("solve".into(), Support::ALL).with([headers::COMMON, kernel])
}

impl SolveKernels {
    /// Loads the kernels.
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let source = source();
        let kernel = |name: &str| device.kernel(&source, name);
        // In the order of `SolveKernel`.
        let kernels = [
            kernel("copy_block")?,
            kernel("subtract")?,
            kernel("shift_diagonal")?,
            kernel("invert_factor")?,
            kernel("largest")?,
            kernel("differences")?,
            kernel("apply")?,
            kernel("alps_right")?,
            kernel("alps_project")?,
            kernel("row_products")?,
            kernel("refit_begin")?,
            kernel("refit_step")?,
        ];
        Ok(Self { kernels })
    }

    /// Launches a kernel; nothing for no elements.
    ///
    /// # Safety
    /// The pointers that the kernel reads and writes are valid for the elements, rows and columns that the parameters
    /// name until the stream has passed this call; the stream is of this device.
    pub(crate) unsafe fn run(&self, stream: Stream, kernel: SolveKernel, parameters: &SolveParameters) -> Result<()> {
        let SolveParameters { elements, rows, cols, .. } = *parameters;
        let of = |count: u64| count.div_ceil(u64::from(BLOCK)).min(MAX_BLOCKS) as u32;
        let blocks = match kernel {
            SolveKernel::CopyBlock | SolveKernel::Largest => of(u64::from(rows) * u64::from(cols)),
            SolveKernel::ShiftDiagonal => of(u64::from(rows)),
            SolveKernel::InvertFactor => rows.min(1),
            SolveKernel::RowProducts | SolveKernel::RefitBegin | SolveKernel::RefitStep => rows,
            _ => of(elements),
        };
        if blocks == 0 {
            return Ok(());
        }
        // SAFETY: the structure has the kernels' layout, and its pointers are valid, as this function requires.
        unsafe { self.kernels[kernel as usize].launch(stream, Launch::simple((blocks, 1), BLOCK), parameters) }
    }
}
