//! Random tensors for GEMM on a GPU.

use std::sync::Arc;

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DriverError};
use half::{bf16, f16};
use rayon::prelude::*;
use twofour::{
    Compressed, F8E4M3,
    int4::{Granularity, Int4},
    layout::{lanes, sm90},
};

use crate::{
    DataType, Error, Result,
    raw::gemm::{Gemm, int4},
};

/// The six valid metadata codes of a group.
const CODES: [u32; 6] = [0x4, 0x8, 0xC, 0x9, 0xD, 0xE];

/// Returns pseudo-random bits, the same at every run (splitmix64, Steele, Lea and Flood 2014); they depend on the seed
/// and the index alone.
pub(super) fn bits(seed: u64, place: usize) -> u64 {
    let mut z = (seed << 40).wrapping_add((place as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15));
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Returns an approximately normal number: the sum of four uniform ones.
fn number(bits: u64) -> f32 {
    (0..4).map(|i| ((bits >> (16 * i)) & 0xFFFF) as f32 / 32768.0 - 1.0).sum::<f32>()
}

/// Returns an element's bytes: an approximately normal number, or for i8 a uniform one.
fn element(element: DataType, bits: u64) -> [u8; 4] {
    let half = |[low, high]: [u8; 2]| [low, high, 0, 0];
    match element {
        DataType::F32 => number(bits).to_le_bytes(),
        DataType::F16 => half(f16::from_f32(number(bits)).to_le_bytes()),
        DataType::BF16 => half(bf16::from_f32(number(bits)).to_le_bytes()),
        DataType::I8 => half([(bits >> 8) as u8, 0]),
        DataType::E4M3 | DataType::E5M2 => half([e4m3(number(bits)), 0]),
        DataType::I32 => bits.to_le_bytes()[..4].try_into().expect("four bytes"),
    }
}

/// Rounds to e4m3, towards zero.
fn e4m3(value: f32) -> u8 {
    let magnitude = value.abs().min(448.0);
    let sign = if value < 0.0 { 0x80 } else { 0 };
    let exponent = ((magnitude.to_bits() >> 23) as i32 - 127).max(-6);
    if magnitude < 2f32.powi(-6) {
        return sign | (magnitude * 512.0) as u8;
    }
    sign | ((exponent + 7) as u8) << 3 | (magnitude.to_bits() >> 20 & 7) as u8
}

/// Returns a dense tensor of approximately normal numbers, for i8 of uniform ones; the same for the same seed.
///
/// # Errors
/// [`Error::OutOfMemory`], [`Error::Driver`].
pub fn random(stream: &Arc<CudaStream>, kind: DataType, len: usize, seed: u64) -> Result<CudaSlice<u8>> {
    const PART: usize = 1 << 24;
    let width = kind.bytes();
    let bytes = len.checked_mul(width).ok_or(Error::OutOfMemory { action: "making random tensors" })?;
    // Allocates first, so that a tensor that is too large fails before the host computes any of it.
    let mut tensor = stream.alloc_zeros::<u8>(bytes).map_err(failed)?;
    let mut part = vec![0u8; len.min(PART) * width];
    for start in (0..len).step_by(PART) {
        let part = &mut part[..(len - start).min(PART) * width];
        fill(part, kind, seed, start);
        let place = start * width..start * width + part.len();
        stream.memcpy_htod(&*part, &mut tensor.slice_mut(place)).map_err(failed)?;
        // The host buffer is written again.
        stream.synchronize().map_err(failed)?;
    }
    Ok(tensor)
}

/// Fills a part of a tensor that begins at element `start`.
fn fill(part: &mut [u8], kind: DataType, seed: u64, start: usize) {
    let width = kind.bytes();
    part.par_chunks_mut(width << 16).enumerate().for_each(|(chunk, bytes)| {
        for (i, to) in bytes.chunks_mut(width).enumerate() {
            to.copy_from_slice(&element(kind, bits(seed, start + (chunk << 16) + i))[..width]);
        }
    });
}

/// A random 2:4 weight: dense, and compressed in the GEMM kernels' order with its padding.
#[derive(Debug)]
pub struct RandomWeight {
    /// `[rows, cols]`.
    pub dense: CudaSlice<u8>,
    /// [`crate::raw::gemm::packed_bytes`] bytes.
    pub values: CudaSlice<u8>,
    /// Metadata in [`crate::raw::gemm::Gemm::meta_order_of`] the element type.
    pub meta: CudaSlice<u8>,
}

impl RandomWeight {
    /// Returns a random weight of a shape.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn new(stream: &Arc<CudaStream>, kind: DataType, rows: usize, cols: usize) -> Result<Self> {
        let width = kind.bytes();
        let shape = (rows, cols);
        let (rows, cols) = Gemm::meta_order_of(kind).padded(rows, cols);
        let (mut dense, mut values, words) = random_weight(kind, rows, cols);
        if (rows, cols) != shape {
            dense = cut(kind, (rows, cols), shape, &dense);
            clear_padding(kind, (rows, cols), shape, &mut values, &words);
        }
        // The order of metadata does not depend on values.
        let meta: Vec<u8> = if width == 2 {
            let weight = Compressed::from_parts(rows, cols, vec![bf16::ONE; rows * cols / 2], words).map_err(wrong)?;
            sm90::encode_16(&weight, sm90::TileK::K64).map_err(wrong)?.iter().flat_map(|w| w.to_le_bytes()).collect()
        } else {
            let weight =
                Compressed::from_parts(rows, cols, vec![F8E4M3(0x38); rows * cols / 2], words).map_err(wrong)?;
            sm90::encode_8(&weight, sm90::TileK::K128).map_err(wrong)?.iter().flat_map(|w| w.to_le_bytes()).collect()
        };
        Ok(Self {
            dense: stream.clone_htod(&dense).map_err(failed)?,
            values: stream.clone_htod(&values).map_err(failed)?,
            meta: stream.clone_htod(&meta).map_err(failed)?,
        })
    }
}

/// Returns the first rows and columns of a matrix.
fn cut(kind: DataType, (_, cols): (usize, usize), (rows, kept): (usize, usize), dense: &[u8]) -> Vec<u8> {
    let width = kind.bytes();
    dense.chunks(cols * width).take(rows).flat_map(|row| &row[..kept * width]).copied().collect()
}

/// Zeros the values of a compressed weight outside its first rows and columns.
fn clear_padding(
    kind: DataType,
    (_, cols): (usize, usize),
    (rows, kept): (usize, usize),
    values: &mut [u8],
    words: &[u32],
) {
    let width = kind.bytes();
    for (i, value) in values.chunks_mut(width).enumerate() {
        let (group, second) = (i / 2, i % 2);
        let code = words[group / 8] >> (4 * (group % 8)) & 15;
        let place = if second == 0 { code & 3 } else { code >> 2 };
        let (row, col) = (group / (cols / 4), group % (cols / 4) * 4 + place as usize);
        if row >= rows || col >= kept {
            value.fill(0);
        }
    }
}

/// Returns the dense bytes, the kept bytes and the metadata of a random 2:4 weight.
fn random_weight(kind: DataType, rows: usize, cols: usize) -> (Vec<u8>, Vec<u8>, Vec<u32>) {
    let width = kind.bytes();
    let code = |group: usize| CODES[(bits(7, group) >> 32) as usize % 6];
    let mut dense = vec![0u8; rows * cols * width];
    let mut values = vec![0u8; rows * cols / 2 * width];
    const GROUPS: usize = 1 << 14;
    dense.par_chunks_mut(4 * GROUPS * width).zip(values.par_chunks_mut(2 * GROUPS * width)).enumerate().for_each(
        |(chunk, (dense, values))| {
            let groups = dense.chunks_mut(4 * width).zip(values.chunks_mut(2 * width));
            for (i, (dense, values)) in groups.enumerate() {
                let group = chunk * GROUPS + i;
                let code = code(group);
                for (j, place) in [code & 3, code >> 2].into_iter().enumerate() {
                    let bytes = element(kind, bits(3, 2 * group + j));
                    values[j * width..][..width].copy_from_slice(&bytes[..width]);
                    dense[place as usize * width..][..width].copy_from_slice(&bytes[..width]);
                }
            }
        },
    );
    let words = (0..rows * cols / 32).into_par_iter();
    let words: Vec<u32> = words.map(|w| (0..8).fold(0, |word, i| word | code(8 * w + i) << (4 * i))).collect();
    (dense, values, words)
}

/// A [`RandomWeight`] of bf16, quantized to int4.
#[derive(Debug)]
pub struct RandomInt4 {
    /// Values, in the order of [`twofour::layout::lanes`], like metadata and scales.
    pub values: CudaSlice<u32>,
    /// The metadata.
    pub meta: CudaSlice<u32>,
    /// The scales.
    pub scales: CudaSlice<u32>,
}

impl RandomInt4 {
    /// Returns a random weight of a shape: rows must be a multiple of 16, columns of 128.
    ///
    /// # Errors
    /// [`Error::Multiple`] and [`Error::Dimension`] for another shape; [`Error::Random`], [`Error::OutOfMemory`],
    /// [`Error::Driver`].
    pub fn new(stream: &Arc<CudaStream>, rows: usize, cols: usize, granularity: Granularity) -> Result<Self> {
        int4::expect_shape(rows, cols)?;
        let (_, values, words) = random_weight(DataType::BF16, rows, cols);
        let values = values.chunks_exact(2).map(|v| bf16::from_le_bytes([v[0], v[1]])).collect();
        let weight = Compressed::from_parts(rows, cols, values, words).map_err(wrong)?;
        let lanes = lanes::encode(&Int4::quantize(&weight, granularity).map_err(wrong)?).map_err(wrong)?;
        Ok(Self {
            values: stream.clone_htod(&lanes.values).map_err(failed)?,
            meta: stream.clone_htod(&lanes.meta).map_err(failed)?,
            scales: stream.clone_htod(&lanes.scales).map_err(failed)?,
        })
    }

    /// Returns the weight's device pointers; valid as long as `self` lives.
    pub fn weight(&self, stream: &Arc<CudaStream>) -> int4::Int4Weight {
        int4::Int4Weight {
            values: self.values.device_ptr(stream).0,
            meta: self.meta.device_ptr(stream).0,
            scales: self.scales.device_ptr(stream).0,
        }
    }
}

fn failed(error: DriverError) -> Error {
    Error::driver("making random tensors", error)
}

/// The shape was validated before.
fn wrong(error: twofour::Error) -> Error {
    Error::Random(error.to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tensor_is_the_same_in_parts() {
        for kind in [DataType::BF16, DataType::E4M3, DataType::I8] {
            let width = kind.bytes();
            let (mut whole, mut parts) = (vec![0; 200_000 * width], vec![0; 200_000 * width]);
            fill(&mut whole, kind, 5, 0);
            for (place, part) in parts.chunks_mut(70_001 * width).enumerate() {
                fill(part, kind, 5, place * 70_001);
            }
            assert_eq!(whole, parts, "{kind}");
            assert!(whole.iter().any(|byte| *byte != 0));
        }
    }
}
