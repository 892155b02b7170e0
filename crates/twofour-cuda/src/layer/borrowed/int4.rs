//! The same for int4 weights ([`twofour::int4`]): one run of bytes with values, metadata and scales.

use twofour::int4::{Granularity, Int4};

use super::super::{
    DeviceSlice, DeviceSliceMut, LayerContext, elements,
    int4::{self, Int4Place, int4_linear},
};
use crate::{Activation, DataType, Result, raw::gemm::Epilogue};

/// Returns the bytes that a packed int4 weight `[rows, cols]` of any shape takes, padding included.
///
/// # Errors
/// [`Error::TooLarge`](crate::Error::TooLarge).
pub fn packed_len(rows: usize, cols: usize, granularity: Granularity) -> Result<usize> {
    int4::bytes((rows, cols), granularity)
}

/// Returns the packed form of a weight in host memory, for copying to the device: [`packed_len`] bytes.
///
/// # Errors
/// [`Error::TooLarge`](crate::Error::TooLarge).
pub fn encode(weight: &Int4) -> Result<Vec<u8>> {
    int4::encode(weight)
}

/// Returns the weight `[rows, cols]` of a packed form that was copied to host memory.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length) for memory of another length than [`packed_len`],
/// [`Error::Core`](crate::Error::Core) for contents that are no weight.
pub fn decode(packed: &[u8], rows: usize, cols: usize, granularity: Granularity) -> Result<Int4> {
    int4::decode(packed, (rows, cols), granularity)
}

/// A packed int4 weight `[rows, cols]` in borrowed device memory, with the bytes of [`encode`]: [`packed_len`] elements
/// of i8.
#[derive(Debug, Clone, Copy)]
pub struct Int4Slice<'a> {
    /// The bytes, at an address that is a multiple of 16.
    pub memory: DeviceSlice<'a>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
    /// What shares a scale.
    pub granularity: Granularity,
}

/// Launches `y = activation(x · Wᵀ + bias)` for `x` `[tokens, cols]` and `y` `[tokens, rows]` of f16 or bf16, with a
/// bias of the same type. Up to 256 tokens are multiplied 64 at a time with integers in the activations' type, exactly,
/// and scales multiply the sums in f32. More are multiplied with integers times scales, rounded to that type, which the
/// context's workspace holds meanwhile.
///
/// # Errors
/// [`Error::Length`](crate::Error::Length), [`Error::SliceType`](crate::Error::SliceType) and
/// [`Error::OtherDevice`](crate::Error::OtherDevice) for a slice with another length, type or device;
/// [`Error::Product`](crate::Error::Product) for another type of activations; [`Error::Pointer`](crate::Error::Pointer)
/// for a weight that is not aligned; [`Error::Capturing`](crate::Error::Capturing) where a plan is missing while the
/// stream is captured.
pub fn linear(
    context: &LayerContext,
    weight: Int4Slice<'_>,
    x: DeviceSlice<'_>,
    tokens: usize,
    bias: Option<DeviceSlice<'_>>,
    activation: Activation,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, Int4Slice { memory, rows, cols, granularity }) = (x.dtype(), weight);
    let len = packed_len(rows, cols, granularity)?;
    let address = memory.expect("the packed weight", context, DataType::I8, len)?;
    let x = x.expect("the input", context, dtype, elements(tokens, cols)?)?;
    let y = y.expect("the output", context, dtype, elements(tokens, rows)?)?;
    let bias = bias.map(|bias| bias.expect("the bias", context, dtype, rows)).transpose()?;
    let place = Int4Place::at(address, (rows, cols), granularity)?;
    int4_linear(context, place, (x, dtype, tokens), Epilogue { bias, activation, ..Epilogue::default() }, y)
}
