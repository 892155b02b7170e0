//! Turns an int4 weight into a compressed one of floats, in the order of the GEMM kernels.
//!
//! Calls only launch kernels: they neither allocate nor synchronize, and a CUDA graph can capture them.

use twofour::int4::GROUP;

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    raw::{
        MetaOrder, Packed,
        gemm::{int4::Int4Weight, tile_k},
        grid::BLOCK,
        headers,
        weight::RawMeta,
    },
    source::{File, Source, Support},
};

/// The kernel for results of one type, on one device.
#[derive(Debug, Clone)]
pub struct Dequantizer {
    element: DataType,
    kernel: Kernel,
}

/// The kernel's parameters, in its memory layout.
#[repr(C)]
struct DequantizeParameters {
    values: DevicePtr,
    meta: DevicePtr,
    scales: DevicePtr,
    to: DevicePtr,
    order: RawMeta,
    units: u32,
    rows: u32,
    per_row: u32,
    packed_rows: u32,
    words: u32,
}

fn source(element: DataType) -> Source {
    let kernel = File::new("dequantize/kernel.cu", include_str!("kernel.cu"));
    Source::new(format!("dequantize-{element}"), Support::ALL)
        .define(format!("#define ELEMENT {}\n", element.definition()))
        .with([headers::COMMON, headers::CODES, kernel])
}

/// Returns every source.
pub(crate) fn sources() -> Vec<Source> {
    [DataType::F16, DataType::BF16].into_iter().map(source).collect()
}

impl Dequantizer {
    /// Loads the kernel for results of f16 or bf16.
    ///
    /// # Errors
    /// [`Error::DataType`] for other types; those of compiling and loading.
    pub fn new(device: &Device, element: DataType) -> Result<Self> {
        if !matches!(element, DataType::F16 | DataType::BF16) {
            let (operation, supported) = ("dequantizing a weight", "f16, bf16");
            return Err(Error::DataType { operation, dtype: element, supported });
        }
        Ok(Self { element, kernel: device.kernel(&source(element), "dequantize")? })
    }

    /// Writes the `[rows, cols]` weight of an int4 one, which has `per_row` scales in a row and `tall` rows, padding
    /// included. The result is padded as [`crate::raw::gemm::packed_bytes`] has it.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to 16 bytes, [`Error::TooLarge`],
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has passed this call, and nothing else
    /// writes there; the stream is of this device.
    pub unsafe fn run(
        &self,
        stream: Stream,
        weight: Int4Weight,
        (rows, cols): (usize, usize),
        (tall, per_row): (usize, usize),
        to: Packed,
    ) -> Result<()> {
        let order = MetaOrder::Sm90(tile_k(self.element));
        let ((packed_rows, pitch), units) = (order.padded(rows, cols), cols.div_ceil(GROUP));
        let blocks = (packed_rows as u64 / 2).saturating_mul(pitch as u64 / 32).div_ceil(u64::from(BLOCK));
        let sizes = [units, tall, per_row, packed_rows, pitch / 32, blocks as usize];
        if sizes.iter().any(|size| i32::try_from(*size).is_err()) {
            return Err(Error::TooLarge { rows, cols });
        }
        if blocks == 0 {
            return Ok(());
        }
        expect_pointers(&[
            ("integers", weight.values, 16),
            ("their metadata", weight.meta, 16),
            ("scales", weight.scales, 16),
            ("values", to.values, 16),
            ("metadata", to.meta, 16),
        ])?;
        let [units, tall, per_row, packed_rows, words, blocks] = sizes.map(|size| size as u32);
        let parameters = DequantizeParameters {
            values: weight.values,
            meta: weight.meta,
            scales: weight.scales,
            to: to.values,
            order: RawMeta::new(to.meta, order),
            units,
            rows: tall,
            per_row,
            packed_rows,
            words,
        };
        // SAFETY: the structure has the kernel's layout, and pointers and stream are valid as this function requires.
        unsafe { self.kernel.launch(stream, Launch::simple((blocks, 1), BLOCK), &parameters) }
    }
}
