//! Decompresses a packed weight on the device.
//!
//! Calls only launch kernels: they neither allocate nor synchronize, and a CUDA graph can capture them.

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    raw::{Packed, grid::BLOCK, headers},
    source::{File, Source, Support},
};

/// The kernel for elements of one size, on one device.
#[derive(Debug, Clone)]
pub struct Unpacker {
    bytes: usize,
    kernel: Kernel,
}

/// The kernel's parameters, in its memory layout.
#[repr(C)]
struct UnpackParameters {
    values: DevicePtr,
    meta: DevicePtr,
    dense: DevicePtr,
    rows: u32,
    cols: u32,
    packed_rows: u32,
    pitch: u32,
}

fn source(bytes: usize) -> Source {
    let kernel = File::new("unpack/kernel.cu", include_str!("kernel.cu"));
    Source::new(format!("unpack-{}", 8 * bytes), Support::ALL)
        .define(format!("#define BYTES {bytes}\n"))
        .with([headers::COMMON, kernel])
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    [1, 2].into_iter().map(source).collect()
}

impl Unpacker {
    /// Loads the kernel for values of f16, bf16, i8 or 8-bit floats.
    ///
    /// # Errors
    /// [`Error::DataType`] for other types; those of compiling and loading.
    pub fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let bytes = dtype.bytes();
        if bytes > 2 {
            let (operation, supported) = ("unpacking a weight", "f16, bf16, e4m3, e5m2, i8");
            return Err(Error::DataType { operation, dtype, supported });
        }
        Ok(Self { bytes, kernel: device.kernel(&source(bytes), "unpack")? })
    }

    /// Writes the dense `[rows, cols]` weight of a packed one, whose metadata is in
    /// [`crate::raw::gemm::Gemm::meta_order_of`] its type.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned (values: 16 bytes; metadata: 16; the dense weight:
    /// its elements), [`Error::TooLarge`], [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has passed this call, and nothing else
    /// writes there; the stream is of this device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        packed: Packed,
        (rows, cols): (usize, usize),
        dense: DevicePtr,
    ) -> Result<()> {
        let too_large = || Error::TooLarge { rows, cols };
        let tile = if self.bytes == 2 { 64 } else { 128 };
        let side = |n: usize, multiple: usize| {
            let padded = n.checked_next_multiple_of(multiple).and_then(|padded| i32::try_from(padded).ok());
            padded.map(|padded| padded as u32).ok_or_else(too_large)
        };
        let (packed_rows, pitch) = (side(rows, 64)?, side(cols, tile)?);
        let blocks = (rows as u64 * cols.div_ceil(32) as u64).div_ceil(u64::from(BLOCK));
        let blocks = i32::try_from(blocks).map_err(|_| too_large())? as u32;
        if blocks == 0 {
            return Ok(());
        }
        expect_pointers(&[
            ("values", packed.values, 16),
            ("metadata", packed.meta, 16),
            ("dense weight", dense, self.bytes as u64),
        ])?;
        let parameters = UnpackParameters {
            values: packed.values,
            meta: packed.meta,
            dense,
            rows: rows as u32,
            cols: cols as u32,
            packed_rows,
            pitch,
        };
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.kernel.launch(stream, Launch::simple((blocks, 1), BLOCK), &parameters) }
    }
}
