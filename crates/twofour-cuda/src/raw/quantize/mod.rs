//! Quantization of activations and weights on the device: to 8-bit integers with a scale for each row (token), and to
//! 8-bit floats with one scale.
//!
//! Scales stay on the device, as the vectors that an [`Epilogue`](crate::raw::gemm::Epilogue) multiplies by. Calls only
//! launch kernels: they neither allocate nor synchronize, and a CUDA graph can capture them.

mod rows;

pub use rows::RowCtas;

use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    raw::{float_types::FloatSource, grid::BLOCK, headers},
    source::{File, Support},
};

/// The kernels for matrices of one data type, on one device.
#[derive(Debug, Clone)]
pub struct Quantizer {
    dtype: DataType,
    sms: u32,
    rows: RowCtas,
    rows_to_i8: Kernel,
    largest_magnitude: Kernel,
    scales_of_magnitude: Kernel,
    /// The kernels to e4m3 and e5m2, where the architecture has them.
    floats: Option<[Kernel; 2]>,
}

/// Vectors of a row from which on another CTA is worth its share of a cluster's barriers, where they only are loaded.
const MIN_VECTORS: u32 = 512;

/// The parameters of the kernel for rows, in its memory layout.
#[repr(C)]
struct RowParameters {
    matrix: DevicePtr,
    out: DevicePtr,
    scales: DevicePtr,
    rows: u32,
    cols: u32,
}

/// The parameters of the kernels for whole matrices, in their memory layout.
#[repr(C)]
struct WholeParameters {
    matrix: DevicePtr,
    out: DevicePtr,
    amax: DevicePtr,
    inverse: DevicePtr,
    scales: DevicePtr,
    count: u64,
    count_scales: u32,
    output: u32,
}

/// The source.
pub(crate) const SOURCE: FloatSource = FloatSource {
    name: "quantize",
    operation: "quantization",
    contracts_fma: false,
    files: &[
        headers::ROWS,
        headers::ROW_SCALE,
        headers::QUANTIZED_ROW,
        File::new("quantize/kernel.cu", include_str!("kernel.cu")),
    ],
};

/// The device pointers of a matrix's scale in 8-bit floats.
#[derive(Debug, Clone, Copy)]
pub struct TensorScale {
    /// A u32 of workspace: zero before [`Quantizer::scale_to_floats`], afterwards the bits of the largest magnitude.
    pub amax: DevicePtr,
    /// An f32 that values are multiplied by: the largest finite 8-bit float divided by the largest magnitude.
    pub inverse: DevicePtr,
    /// `[count]` f32s that accumulators are multiplied by, all the same number.
    pub scales: DevicePtr,
    /// The number of scales: one for each token or feature that an epilogue reads.
    pub count: usize,
}

impl Quantizer {
    /// Loads the kernels for matrices of f32, f16 or bf16.
    ///
    /// # Errors
    /// [`Error::DataType`] for other types; those of compiling and loading.
    pub fn new(device: &Device, dtype: DataType) -> Result<Self> {
        let kernel = SOURCE.load(device, dtype)?;
        let has_floats = Support::FLOAT8.includes(device.architecture());
        let floats = if has_floats { Some([kernel("to_e4m3")?, kernel("to_e5m2")?]) } else { None };
        Ok(Self {
            dtype,
            sms: device.sms(),
            rows: RowCtas::new(device, dtype, MIN_VECTORS),
            rows_to_i8: kernel("rows_to_i8")?,
            largest_magnitude: kernel("largest_magnitude")?,
            scales_of_magnitude: kernel("scales_of_magnitude")?,
            floats,
        })
    }

    /// Quantizes a row-major `[rows, cols]` matrix to 8-bit integers, symmetrically and with an f32 scale for each row,
    /// `amax / 127`: the bytes of [`twofour::kernel::quantize`]. The scale of a row of zeros is 0. The scale of a row
    /// with a NaN or an infinity is NaN, and so are the GEMM's results for that row.
    ///
    /// # Errors
    /// [`Error::Pointer`] for pointers that are null or not aligned to their elements, [`Error::TooLarge`],
    /// [`Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for what is read and written until the stream has passed this call, and nothing else
    /// writes there; the stream is of this device.
    pub unsafe fn rows_to_i8(
        &self,
        stream: Stream,
        matrix: DevicePtr,
        (rows, cols): (usize, usize),
        out: DevicePtr,
        scales: DevicePtr,
    ) -> Result<()> {
        let side = |n: usize| i32::try_from(n).map(|n| n as u32).map_err(|_| Error::TooLarge { rows, cols });
        let (raw_rows, raw_cols) = (side(rows)?, side(cols)?);
        if rows == 0 {
            return Ok(());
        }
        expect_pointers(&[("scales", scales, 4)])?;
        if cols > 0 {
            expect_pointers(&[("matrix", matrix, self.dtype.bytes() as u64), ("quantized matrix", out, 1)])?;
        }
        let parameters = RowParameters { matrix, out, scales, rows: raw_rows, cols: raw_cols };
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.rows_to_i8.launch(stream, self.rows.launch(raw_rows, raw_cols), &parameters) }
    }

    /// Computes the scale of `count` elements for 8-bit floats of a type: 1 for zeros alone, NaN where an element is
    /// NaN or infinite.
    ///
    /// # Errors
    /// [`Error::DataType`] for another type than e4m3 and e5m2; those of [`Quantizer::rows_to_i8`].
    ///
    /// # Safety
    /// That of [`Quantizer::rows_to_i8`].
    pub unsafe fn scale_to_floats(
        &self,
        stream: Stream,
        matrix: DevicePtr,
        count: usize,
        output: DataType,
        scale: TensorScale,
    ) -> Result<()> {
        let parameters = self.whole(matrix, count, output, scale, 0)?;
        // Each thread reads several elements.
        let blocks = (count as u64).div_ceil(4 * u64::from(BLOCK)).min(8 * u64::from(self.sms)) as u32;
        if count > 0 {
            expect_pointers(&[("matrix", matrix, self.dtype.bytes() as u64)])?;
            let launch = Launch::simple((blocks, 1), BLOCK);
            // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
            unsafe { self.largest_magnitude.launch(stream, launch, &parameters) }?;
        }
        let launch = Launch::simple((parameters.count_scales.div_ceil(BLOCK).max(1), 1), BLOCK);
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.scales_of_magnitude.launch(stream, launch, &parameters) }
    }

    /// Quantizes `count` elements to 8-bit floats by [`TensorScale::inverse`]: rounded to nearest, ties to even, and
    /// saturated.
    ///
    /// # Errors
    /// [`Error::Unsupported`] before compute capability 8.9; those of [`Quantizer::scale_to_floats`].
    ///
    /// # Safety
    /// That of [`Quantizer::rows_to_i8`].
    pub unsafe fn to_floats(
        &self,
        stream: Stream,
        matrix: DevicePtr,
        count: usize,
        output: DataType,
        scale: TensorScale,
        out: DevicePtr,
    ) -> Result<()> {
        let Some([e4m3, e5m2]) = &self.floats else {
            let (operation, needs) = ("quantization to 8-bit floats", "8.9 (Ada) or later");
            return Err(Error::Unsupported { operation, major: 8, minor: 0, needs });
        };
        let parameters = self.whole(matrix, count, output, scale, out)?;
        if count == 0 {
            return Ok(());
        }
        expect_pointers(&[("matrix", matrix, self.dtype.bytes() as u64), ("quantized matrix", out, 1)])?;
        let blocks = (count as u64).div_ceil(4 * u64::from(BLOCK));
        let launch = Launch::simple((blocks as u32, 1), BLOCK);
        let kernel = if output == DataType::E4M3 { e4m3 } else { e5m2 };
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { kernel.launch(stream, launch, &parameters) }
    }

    fn whole(
        &self,
        matrix: DevicePtr,
        count: usize,
        output: DataType,
        scale: TensorScale,
        out: DevicePtr,
    ) -> Result<WholeParameters> {
        if !matches!(output, DataType::E4M3 | DataType::E5M2) {
            let operation = "quantization with one scale";
            return Err(Error::DataType { operation, dtype: output, supported: "e4m3, e5m2" });
        }
        let too_large = Error::TooLarge { rows: 1, cols: count };
        if (count as u64).div_ceil(4 * u64::from(BLOCK)) > i32::MAX as u64 || scale.count > i32::MAX as usize {
            return Err(too_large);
        }
        expect_pointers(&[
            ("largest magnitude", scale.amax, 4),
            ("inverse of the scale", scale.inverse, 4),
            ("scales", scale.scales, 4),
        ])?;
        Ok(WholeParameters {
            matrix,
            out,
            amax: scale.amax,
            inverse: scale.inverse,
            scales: scale.scales,
            count: count as u64,
            count_scales: scale.count as u32,
            output: output as u32,
        })
    }
}
