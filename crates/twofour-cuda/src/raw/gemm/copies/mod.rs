//! Copies of X and of results for shapes and addresses that a GEMM kernel cannot use: rows that are not multiples of 16
//! bytes, or the transpose of X.

use crate::{
    Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{grid::MAX_GRID_ROWS, headers},
    source::{File, Source, Support},
};

/// The copy kernels.
#[derive(Debug, Clone)]
pub(crate) struct Copies {
    /// Copies of rows, by units of 1, 2, 4 and 16 bytes.
    rows: [Kernel; 4],
    /// Transposes, of elements of 1 and 2 bytes.
    transposes: [Kernel; 2],
}

/// The kernels' parameters, in their memory layout.
#[repr(C)]
struct Parameters {
    from: DevicePtr,
    to: DevicePtr,
    from_pitch: u64,
    to_pitch: u64,
    from_length: u32,
    rows: u32,
    length: u32,
}

/// A matrix, and its pitch in bytes.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Rows {
    pub(crate) data: DevicePtr,
    pub(crate) pitch: usize,
}

/// Bytes of a unit.
const UNITS: [usize; 4] = [1, 2, 4, 16];

/// Threads of a CTA, and units of a row that a CTA copies.
const THREADS: u32 = 256;
const BLOCK_UNITS: usize = 256 * 8;

/// Elements of the side of a transpose's tile.
const SIDE: usize = 32;

pub(super) fn source() -> Source {
    let kernel = File::new("gemm/copies/kernel.cu", include_str!("kernel.cu"));
    Source::new("gemm-copies".into(), Support::ALL).with([headers::COMMON, kernel])
}

impl Copies {
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let source = source();
        let kernel = |name: &str| device.kernel(&source, name);
        Ok(Self {
            rows: [kernel("copy_rows_1")?, kernel("copy_rows_2")?, kernel("copy_rows_4")?, kernel("copy_rows_16")?],
            transposes: [kernel("transpose_1")?, kernel("transpose_2")?],
        })
    }

    /// Copies `rows` rows of `bytes` bytes, and writes zeros up to `length` bytes of each row of `to`.
    ///
    /// # Safety
    /// The rows are valid for what is read and written until the stream has passed this call; the stream is of the
    /// kernels' device.
    pub(crate) unsafe fn rows(
        &self,
        stream: Stream,
        (from, to): (Rows, Rows),
        rows: usize,
        bytes: usize,
        length: usize,
    ) -> Result<()> {
        let sizes = [from.data as usize, to.data as usize, from.pitch, to.pitch, bytes, length];
        let fits = |unit: &&usize| sizes.iter().all(|size| size.is_multiple_of(**unit));
        let unit = *UNITS.iter().rfind(fits).unwrap_or(&1);
        let which = UNITS.iter().position(|width| *width == unit).unwrap_or(0);
        let parameters = Parameters {
            from: from.data,
            to: to.data,
            from_pitch: (from.pitch / unit) as u64,
            to_pitch: (to.pitch / unit) as u64,
            from_length: (bytes / unit) as u32,
            rows: rows as u32,
            length: (length / unit) as u32,
        };
        let blocks = (length / unit).div_ceil(BLOCK_UNITS).clamp(1, MAX_GRID_ROWS);
        let launch = Launch::simple((rows as u32, blocks as u32), THREADS);
        // SAFETY: the structure has the kernel's layout; the rows are valid, and the stream is of the device, as this
        // function requires.
        unsafe { self.rows[which].launch(stream, launch, &parameters) }
    }

    /// Writes the transpose of a `[rows, cols]` matrix of elements of `width` bytes (1 or 2) to rows of `length`
    /// elements, with zeros past `rows` of each.
    ///
    /// # Safety
    /// That of [`Copies::rows`].
    pub(super) unsafe fn transpose(
        &self,
        stream: Stream,
        (from, to): (DevicePtr, DevicePtr),
        (rows, cols): (usize, usize),
        width: usize,
        length: usize,
    ) -> Result<()> {
        let parameters = Parameters {
            from,
            to,
            from_pitch: cols as u64,
            to_pitch: length as u64,
            from_length: rows as u32,
            rows: cols as u32,
            length: length as u32,
        };
        let grid = (cols.div_ceil(SIDE) as u32, length.div_ceil(SIDE).clamp(1, MAX_GRID_ROWS) as u32);
        let kernel = &self.transposes[usize::from(width == 2)];
        // SAFETY: the structure has the kernel's layout; the matrices are valid, and the stream is of the device, as
        // this function requires.
        unsafe { kernel.launch(stream, Launch::simple(grid, THREADS), &parameters) }
    }
}
