//! Layers with random weights made on the device: to measure a model of a shape without its checkpoint.

use cudarc::driver::{CudaSlice, DevicePtr as _, result};
use twofour::int4::Granularity;

use super::{DeviceBuffer, LayerContext, PackedLinear, int4::parts, packed::PackedWeight, weight::PackedBuffer};
use crate::{Activation, DataType, DevicePtr, Error, Result, raw::Packed};

/// The form of a random 2:4 weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum RandomForm {
    /// Of the activations' type.
    Float,
    /// 8-bit integers with a scale for each row.
    Int8,
    /// int4 with a scale for each group of 128.
    Int4,
}

/// Bytes of the pattern that integers and metadata repeat.
const PATTERN: usize = 1 << 20;

/// The six valid metadata codes of a group.
const CODES: [u8; 6] = [0x4, 0x8, 0xC, 0x9, 0xD, 0xE];

fn failed(error: cudarc::driver::DriverError) -> Error {
    Error::driver("making a random weight", error)
}

/// Returns pseudo-random bits (splitmix64, Steele, Lea and Flood 2014).
fn bits(index: usize) -> u64 {
    let mut z = (index as u64).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Random bytes, valid metadata and small f16 scales, once for a context's random layers.
#[derive(Debug)]
struct Patterns {
    bytes: CudaSlice<u8>,
    codes: CudaSlice<u8>,
    scales: CudaSlice<u8>,
}

impl Patterns {
    fn new(context: &LayerContext) -> Result<Self> {
        let up = |of: &dyn Fn(u64) -> u8| -> Result<CudaSlice<u8>> {
            let host: Vec<u8> = (0..PATTERN).map(|index| of(bits(index))).collect();
            context.stream().clone_htod(&host).map_err(failed)
        };
        let code = |bits: u64| CODES[(bits % 6) as usize];
        let scale = half::f16::from_f32(0.01).to_le_bytes();
        let host: Vec<u8> = (0..PATTERN).map(|index| scale[index % 2]).collect();
        Ok(Self {
            bytes: up(&|bits| (bits >> 8) as u8)?,
            codes: up(&|bits| code(bits >> 8) | code(bits >> 32) << 4)?,
            scales: context.stream().clone_htod(&host).map_err(failed)?,
        })
    }
}

/// Fills device memory with repetitions of a pattern.
///
/// # Safety
/// `len` bytes from `to` on are valid until the stream has passed this call, and nothing else writes there.
unsafe fn fill(context: &LayerContext, pattern: &CudaSlice<u8>, to: DevicePtr, len: usize) -> Result<()> {
    let (source, stream) = (pattern.device_ptr(context.stream()).0, context.stream().cu_stream());
    context.device().bind()?;
    for first in (0..len).step_by(PATTERN) {
        let count = PATTERN.min(len - first);
        // SAFETY: the pattern has PATTERN bytes, the caller's memory has `len`, and the stream is of their device.
        unsafe { result::memcpy_dtod_async(to + first as u64, source, count, stream) }.map_err(failed)?;
    }
    Ok(())
}

/// Returns a buffer of random numbers between -1 and 1 for floats, of random integers for i8.
///
/// # Errors
/// [`Error::DataType`] for other types than f32, f16, bf16 and i8; those of allocating and launching.
pub fn random_buffer(context: &LayerContext, dtype: DataType, len: usize) -> Result<DeviceBuffer> {
    let buffer = DeviceBuffer::zeros(context, dtype, len)?;
    let at = buffer.expect("random numbers", context, dtype, len)?;
    if dtype == DataType::I8 {
        let pattern = Patterns::new(context)?;
        // SAFETY: the buffer has that many bytes.
        unsafe { fill(context, &pattern.bytes, at, len) }?;
        return Ok(buffer);
    }
    // SAFETY: the buffer has that many elements, and the stream is of its device.
    unsafe { context.elementwise(dtype)?.fill(context.raw(), at, len) }?;
    Ok(buffer)
}

impl PackedLinear {
    /// Returns layers `[out_features, in_features]` with random 2:4 weights and without biases; activations are of
    /// `dtype`. The weights never are in host memory.
    ///
    /// # Errors
    /// Those of [`PackedLinear::new`].
    #[doc(hidden)]
    pub fn random(
        context: &LayerContext,
        form: RandomForm,
        shapes: &[(usize, usize)],
        dtype: DataType,
    ) -> Result<Vec<Self>> {
        let patterns = Patterns::new(context)?;
        let layer = |&shape: &(usize, usize)| {
            let weight = weight(context, &patterns, form, shape, dtype)?;
            Self::with(context, weight, shape, None, Activation::Identity, dtype)
        };
        shapes.iter().map(layer).collect()
    }
}

fn weight(
    context: &LayerContext,
    patterns: &Patterns,
    form: RandomForm,
    (rows, cols): (usize, usize),
    dtype: DataType,
) -> Result<PackedWeight> {
    let packed = |of: DataType| -> Result<PackedBuffer> {
        let buffer = PackedBuffer::new(context, of, rows, cols)?;
        let (Packed { values, meta }, (value_bytes, meta_bytes)) = (buffer.packed(), buffer.lengths());
        // SAFETY: values and metadata were allocated above with these lengths, and the stream is of their device.
        unsafe {
            match of {
                DataType::I8 => fill(context, &patterns.bytes, values, value_bytes)?,
                _ => context.elementwise(of)?.fill(context.raw(), values, value_bytes / of.bytes())?,
            }
            fill(context, &patterns.codes, meta, meta_bytes)?;
        }
        Ok(buffer)
    };
    Ok(match form {
        RandomForm::Float => PackedWeight::Float(packed(dtype)?),
        RandomForm::Int8 => {
            let scales = DeviceBuffer::from_host(context, &vec![0.01f32; rows])?;
            PackedWeight::Scaled { dtype: DataType::I8, weight: packed(DataType::I8)?, scales }
        }
        RandomForm::Int4 => {
            let granularity = Granularity::Group;
            let [values, meta, scales] = parts((rows, cols), granularity)?;
            let len = values + meta + scales;
            let bytes = DeviceBuffer::zeros(context, DataType::I8, len)?;
            let at = bytes.expect("the weight", context, DataType::I8, len)?;
            // SAFETY: the three parts follow one another in the memory that was allocated above.
            unsafe {
                fill(context, &patterns.bytes, at, values)?;
                fill(context, &patterns.codes, at + values as u64, meta)?;
                fill(context, &patterns.scales, at + (values + meta) as u64, scales)?;
            }
            PackedWeight::Int4 { granularity, bytes }
        }
    })
}
