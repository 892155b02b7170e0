//! Windows of images' tokens, and terms for relative positions.

use twofour_cuda::{
    DataType, Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{float_types::FloatSource, grid::BLOCK},
    source::File,
};

/// Most elements of a head that terms for relative positions are computed for.
pub(crate) const MAX_HEAD_DIM: usize = 256;

/// Most threads of a CTA that computes terms.
const TERM_THREADS: u32 = 128;

/// The kernels for tensors of one data type, on one device.
#[derive(Debug, Clone)]
pub(crate) struct ImageWindows {
    dtype: DataType,
    /// In vectors, and one by one.
    split: [Kernel; 2],
    merge: [Kernel; 2],
    terms: Kernel,
}

/// The parameters of windows, in their memory layout; `windows.cu` says what each is.
#[derive(Debug, Clone, Copy, Default)]
#[repr(C)]
pub(crate) struct WindowParameters {
    pub(crate) fused: DevicePtr,
    pub(crate) bias: DevicePtr,
    pub(crate) rows: DevicePtr,
    pub(crate) columns: DevicePtr,
    pub(crate) q: DevicePtr,
    pub(crate) k: DevicePtr,
    pub(crate) v: DevicePtr,
    pub(crate) out: DevicePtr,
    pub(crate) merged: DevicePtr,
    pub(crate) tokens: u32,
    pub(crate) grid_rows: u32,
    pub(crate) grid_columns: u32,
    pub(crate) side: u32,
    pub(crate) windows: u32,
    pub(crate) positions: u32,
    pub(crate) span_rows: u32,
    pub(crate) span_columns: u32,
    pub(crate) heads: u32,
    pub(crate) own: u32,
    pub(crate) dim: u32,
    pub(crate) query_factor: f32,
    pub(crate) term_factor: f32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "image-windows",
    operation: "attention over images",
    contracts_fma: true,
    files: &[File::new("image/windows.cu", include_str!("windows.cu"))],
};

impl ImageWindows {
    /// Loads the kernels for tensors of f32, f16 or bf16.
    pub(crate) fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let pair = |name: &str| super::vectors_and_one_by_one(&kernel, name);
        Ok(Self { dtype, split: pair("split")?, merge: pair("merge")?, terms: kernel("terms")? })
    }

    /// Launches the way of the fused projection to the heads of so many sequences, and the terms for relative positions
    /// where there are tables. `sequences` is at least one.
    ///
    /// # Safety
    /// The pointers are valid, with the lengths that `windows.cu` has, until the stream has passed this call; the
    /// stream is of this device; `sequences · positions` and the CTAs of terms are below 2^31; with tables a head has
    /// at most [`MAX_HEAD_DIM`] elements and `dim` has room for the terms.
    pub(crate) unsafe fn split(&self, stream: Stream, sequences: u32, parameters: &WindowParameters) -> Result<()> {
        let WindowParameters { fused, bias, rows, q, k, v, own, dim, positions, heads, .. } = *parameters;
        let aligned = super::is_aligned(self.dtype, &[own, dim], fused | bias | q | k | v);
        let launch = Launch::simple((sequences * positions, 1), BLOCK);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.split[usize::from(!aligned)].launch(stream, launch, parameters) }?;
        if rows == 0 {
            return Ok(());
        }
        let (span_rows, span_columns) = (parameters.span_rows, parameters.span_columns);
        let threads = span_rows.max(span_columns).next_multiple_of(32).min(TERM_THREADS);
        let launch = Launch::simple((sequences * heads * (span_rows + span_columns), 1), threads);
        // SAFETY: as for the launch before.
        unsafe { self.terms.launch(stream, launch, parameters) }
    }

    /// Launches the way back of the heads of so many sequences, at least one.
    ///
    /// # Safety
    /// Those of [`ImageWindows::split`].
    pub(crate) unsafe fn merge(&self, stream: Stream, sequences: u32, parameters: &WindowParameters) -> Result<()> {
        let WindowParameters { out, merged, own, dim, positions, .. } = *parameters;
        let aligned = super::is_aligned(self.dtype, &[own, dim], out | merged);
        let launch = Launch::simple((sequences * positions, 1), BLOCK);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.merge[usize::from(!aligned)].launch(stream, launch, parameters) }
    }
}
