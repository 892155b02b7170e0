//! The layer's passes over packed weights in borrowed device memory, such as another framework's tensors.
//!
//! A packed weight is one run of memory here: values, then metadata. A mask is a u16 for each 4x4 tile
//! ([`BothWays::tiles`](crate::raw::prune::BothWays::tiles)). The functions are those that [`super::SparseLinear`] is
//! made of, for front ends whose tensors own all state.

pub mod block_sparse;
mod estimates;
pub mod int4;
mod masters;

use twofour::{Compressed, Element, compressed::lengths};

use super::{
    DeviceSlice, DeviceSliceMut, LayerContext, dense::unpacked_product, elements, forward::linear as launch_linear,
    host_form, quantized::quantized_linear,
};
use crate::{
    Activation, DataType, DevicePtr, Error, Result,
    problem::GemmProblem,
    raw::{
        Packed,
        elementwise::ElementFunction,
        gemm::{Epilogue, packed_bytes},
        unpack::Unpacker,
    },
};

pub use estimates::{Sampling, estimate, sampled_weight_gradient, soft_threshold_scale};
pub use masters::{MasterSlice, PackTarget, keep, remask, remask_checked, remask_together};

/// Returns the number of elements of `dtype` that a packed `[rows, cols]` weight takes, padding included.
///
/// # Errors
/// [`Error::TooLarge`].
pub fn packed_len(dtype: DataType, rows: usize, cols: usize) -> Result<usize> {
    elements(rows, cols)?;
    Ok(packed_bytes(dtype, rows, cols).total() / dtype.bytes())
}

/// Returns the number of tiles of a `[rows, cols]` mask.
pub fn mask_len(rows: usize, cols: usize) -> usize {
    rows.div_ceil(4) * cols.div_ceil(4)
}

/// A packed 2:4 weight `[rows, cols]` in borrowed device memory.
#[derive(Debug, Clone, Copy)]
pub struct PackedSlice<'a> {
    memory: DeviceSlice<'a>,
    shape: (usize, usize),
}

impl<'a> PackedSlice<'a> {
    /// Returns the weight in memory that [`remask`] filled, of [`packed_len`] elements of the weight's type.
    pub fn new(memory: DeviceSlice<'a>, rows: usize, cols: usize) -> Self {
        Self { memory, shape: (rows, cols) }
    }

    /// Returns the addresses, after checking the length.
    fn expect(self, context: &LayerContext, dtype: DataType) -> Result<Packed> {
        let (rows, cols) = self.shape;
        let values = self.memory.expect("the packed weight", context, dtype, packed_len(dtype, rows, cols)?)?;
        Ok(packed_at(values, dtype, rows, cols))
    }
}

/// Borrowed device memory that a 2:4 weight `[rows, cols]` is packed into.
#[derive(Debug)]
pub struct PackedSliceMut<'a> {
    memory: DeviceSliceMut<'a>,
    shape: (usize, usize),
}

impl<'a> PackedSliceMut<'a> {
    /// Returns the destination for a weight, of [`packed_len`] elements of its type.
    pub fn new(memory: DeviceSliceMut<'a>, rows: usize, cols: usize) -> Self {
        Self { memory, shape: (rows, cols) }
    }

    fn expect(&self, context: &LayerContext, dtype: DataType) -> Result<Packed> {
        PackedSlice { memory: self.memory.as_slice(), shape: self.shape }.expect(context, dtype)
    }
}

/// A mask of `[rows, cols]` in borrowed device memory: [`mask_len`] tiles.
#[derive(Debug)]
pub struct MaskSlice<'a> {
    /// The tiles, as elements of 16 bits.
    tiles: DeviceSliceMut<'a>,
}

impl<'a> MaskSlice<'a> {
    /// Returns the mask in memory of 2-byte elements; what their data type is plays no part.
    pub fn new(tiles: DeviceSliceMut<'a>) -> Self {
        Self { tiles }
    }

    fn expect(&self, context: &LayerContext, rows: usize, cols: usize) -> Result<DevicePtr> {
        let dtype = self.tiles.dtype();
        if dtype.bytes() != 2 {
            return Err(Error::SliceType { what: "the mask", expected: DataType::F16, found: dtype });
        }
        self.tiles.expect("the mask", context, dtype, mask_len(rows, cols))
    }
}

/// Returns the addresses of values and metadata of a weight that starts at an address.
fn packed_at(values: DevicePtr, dtype: DataType, rows: usize, cols: usize) -> Packed {
    Packed { values, meta: values + packed_bytes(dtype, rows, cols).values as u64 }
}

/// Launches `y = activation(x · Wᵀ + bias)` for `x` `[tokens, cols]` and `y` `[tokens, rows]`, both of the weight's
/// type, f16 or bf16.
///
/// # Errors
/// Those of [`super::SparseLinear::forward`].
pub fn linear(
    context: &LayerContext,
    weight: PackedSlice<'_>,
    x: DeviceSlice<'_>,
    tokens: usize,
    bias: Option<DeviceSlice<'_>>,
    activation: Activation,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, (rows, cols)) = (x.dtype(), weight.shape);
    let packed = weight.expect(context, dtype)?;
    let x = x.expect("the input", context, dtype, elements(tokens, cols)?)?;
    let y = y.expect("the output", context, dtype, elements(tokens, rows)?)?;
    let bias = bias.map(|bias| bias.expect("the bias", context, dtype, rows)).transpose()?;
    let problem = GemmProblem::plain(dtype, dtype, rows, tokens, cols);
    launch_linear(context, problem, packed, x, Epilogue { bias, activation, ..Epilogue::default() }, y)
}

/// Launches `y = activation(x · Wᵀ · scales + bias)` for a weight of 8-bit integers or floats with a scale for each
/// row, in f32, and `x` and `y` of f16 or bf16. Activations are quantized on the device: to integers with a scale for
/// each token, or to floats with one scale.
///
/// # Errors
/// [`Error::Unsupported`] for 8-bit floats before compute capability 8.9; those of [`linear`].
pub fn scaled_linear(
    context: &LayerContext,
    (weight, scales): (PackedSlice<'_>, DeviceSlice<'_>),
    x: DeviceSlice<'_>,
    tokens: usize,
    bias: Option<DeviceSlice<'_>>,
    activation: Activation,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, of, (rows, cols)) = (x.dtype(), weight.memory.dtype(), weight.shape);
    let packed = weight.expect(context, of)?;
    let x = x.expect("the input", context, dtype, elements(tokens, cols)?)?;
    let y = y.expect("the output", context, dtype, elements(tokens, rows)?)?;
    let bias = bias.map(|bias| bias.expect("the bias", context, dtype, rows)).transpose()?;
    let scales = scales.expect("the scales", context, DataType::F32, rows)?;
    if tokens == 0 || rows == 0 || cols == 0 {
        return Ok(());
    }
    let problem = GemmProblem::plain(of, dtype, rows, tokens, cols);
    let epilogue = Epilogue { bias, activation, feature_scales: Some(scales), ..Epilogue::default() };
    quantized_linear(context, problem, packed, (x, dtype), epilogue, y)
}

/// Launches `y = x · Wᵀ` of 8-bit integers, exact in i32, for `x` `[tokens, cols]` of i8 and `y` `[tokens, rows]` of
/// i32.
///
/// # Errors
/// Those of [`linear`].
pub fn exact_linear(
    context: &LayerContext,
    weight: PackedSlice<'_>,
    x: DeviceSlice<'_>,
    tokens: usize,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (rows, cols) = weight.shape;
    let packed = weight.expect(context, DataType::I8)?;
    let x = x.expect("the input", context, DataType::I8, elements(tokens, cols)?)?;
    let y = y.expect("the output", context, DataType::I32, elements(tokens, rows)?)?;
    let problem = GemmProblem::plain(DataType::I8, DataType::I32, rows, tokens, cols);
    launch_linear(context, problem, packed, x, Epilogue::default(), y)
}

/// The scales and the bias of [`float8_linear`].
#[derive(Debug, Clone, Copy, Default)]
pub struct Float8Epilogue<'a> {
    /// A scale of each feature, f32.
    pub scales: Option<DeviceSlice<'a>>,
    /// A scale of each token, f32.
    pub token_scales: Option<DeviceSlice<'a>>,
    /// A bias of each feature, of the result's type; added after the scales.
    pub bias: Option<DeviceSlice<'a>>,
}

/// Launches `y = x · Wᵀ · scales + bias` of 8-bit floats for `x` `[tokens, cols]` of e4m3 or e5m2, quantized already,
/// and `y` `[tokens, rows]` of f16, bf16 or f32. Weight and activations may be of different types.
///
/// # Errors
/// [`Error::Unsupported`] before compute capability 8.9; those of [`linear`].
pub fn float8_linear(
    context: &LayerContext,
    weight: PackedSlice<'_>,
    x: DeviceSlice<'_>,
    tokens: usize,
    epilogue: Float8Epilogue<'_>,
    y: DeviceSliceMut<'_>,
) -> Result<()> {
    let (of, x_dtype, dtype, (rows, cols)) = (weight.memory.dtype(), x.dtype(), y.dtype(), weight.shape);
    let packed = weight.expect(context, of)?;
    let x = x.expect("the input", context, x_dtype, elements(tokens, cols)?)?;
    let y = y.expect("the output", context, dtype, elements(tokens, rows)?)?;
    let Float8Epilogue { scales, token_scales, bias } = epilogue;
    let expect = |slice: Option<DeviceSlice<'_>>, what, dtype, len| {
        slice.map(|slice| slice.expect(what, context, dtype, len)).transpose()
    };
    let epilogue = Epilogue {
        feature_scales: expect(scales, "the scales", DataType::F32, rows)?,
        token_scales: expect(token_scales, "the tokens' scales", DataType::F32, tokens)?,
        bias: expect(bias, "the bias", dtype, rows)?,
        ..Epilogue::default()
    };
    let problem = GemmProblem { x_element: x_dtype, ..GemmProblem::plain(of, dtype, rows, tokens, cols) };
    launch_linear(context, problem, packed, x, epilogue, y)
}

/// Launches `dx = dy · W` for `dy` `[tokens, rows]` and `dx` `[tokens, cols]`: a dense GEMM with the weight, which
/// every call unpacks. A weight whose mask is transposable has a packed transpose, and [`linear`] with it is faster.
///
/// # Errors
/// [`Error::NoLibrary`] where cuBLASLt is not installed; those of [`linear`].
pub fn input_gradient(
    context: &LayerContext,
    weight: PackedSlice<'_>,
    dy: DeviceSlice<'_>,
    tokens: usize,
    dx: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, (rows, cols)) = (dy.dtype(), weight.shape);
    let packed = weight.expect(context, dtype)?;
    let dy = dy.expect("the output gradient", context, dtype, elements(tokens, rows)?)?;
    let dx = dx.expect("the input gradient", context, dtype, elements(tokens, cols)?)?;
    unpacked_product(context, (packed, weight.shape, dtype), (dy, tokens), dx)
}

/// Launches `y = activation(y)` for elements of f32, f16 or bf16.
///
/// # Errors
/// Those of [`linear`].
pub fn activate(context: &LayerContext, activation: Activation, y: DeviceSliceMut<'_>) -> Result<()> {
    let (dtype, len) = (y.dtype(), y.len());
    let address = y.expect("the output", context, dtype, len)?;
    let function = ElementFunction::Activation(activation);
    // SAFETY: the slice has that many elements, and the stream is of its device.
    unsafe { context.elementwise(dtype)?.apply(context.raw(), function, address, address, len) }
}

/// Launches the decompression of a packed weight to a dense `[rows, cols]` one of the same type.
///
/// # Errors
/// Those of [`linear`].
pub fn unpack(context: &LayerContext, weight: PackedSlice<'_>, dense: DeviceSliceMut<'_>) -> Result<()> {
    let (dtype, (rows, cols)) = (dense.dtype(), weight.shape);
    let packed = weight.expect(context, dtype)?;
    let dense = dense.expect("the dense weight", context, dtype, elements(rows, cols)?)?;
    if rows == 0 || cols == 0 {
        return Ok(());
    }
    let unpacker = Unpacker::new(context.device(), dtype)?;
    // SAFETY: both forms of the weight are valid for its shape, and the stream is of their device.
    unsafe { unpacker.run(context.raw(), packed, (rows, cols), dense) }
}

/// Returns the packed form of a weight in host memory, for copying to the device: [`packed_len`] elements.
///
/// # Errors
/// [`Error::Core`] for a shape that is too large.
pub fn encode<T: Element>(weight: &Compressed<T>) -> Result<Vec<T>> {
    let (mut bytes, meta) = host_form::encode(weight)?;
    bytes.extend(meta);
    Ok(bytemuck::pod_collect_to_vec(&bytes))
}

/// Returns the canonical form of a packed `[rows, cols]` weight that was copied to host memory.
///
/// # Errors
/// [`Error::Length`] for memory of another length than [`packed_len`], [`Error::Core`] for metadata that is none.
pub fn decode<T: Element>(packed: &[T], rows: usize, cols: usize) -> Result<Compressed<T>> {
    let dtype: DataType = T::DTYPE;
    let (expected, found) = (packed_len(dtype, rows, cols)?, packed.len());
    if found != expected {
        return Err(Error::Length { what: "the packed weight", expected, found });
    }
    let (values, meta) = bytemuck::cast_slice(packed).split_at(packed_bytes(dtype, rows, cols).values);
    if rows == 0 || cols == 0 {
        let (values, meta) = lengths(rows, cols)?;
        return Ok(Compressed::from_parts(rows, cols, vec![T::ZERO; values], vec![0; meta])?);
    }
    host_form::decode(values, meta, rows, cols)
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;
    use twofour::MatrixRef;

    #[test]
    fn the_packed_form_is_a_bijection_of_the_canonical_one() {
        for (rows, cols) in [(64, 64), (1, 1), (70, 132), (7, 30), (0, 8), (8, 0)] {
            let dense: Vec<bf16> = (0..rows * cols).map(|i| bf16::from_f32((i * 37 % 19) as f32 - 9.0)).collect();
            let weight = Compressed::from_pruned(MatrixRef::new(rows, cols, &dense).unwrap()).unwrap();
            let packed = encode(&weight).unwrap();
            assert_eq!(packed.len(), packed_len(DataType::BF16, rows, cols).unwrap());
            assert_eq!(decode(&packed, rows, cols).unwrap(), weight, "[{rows}, {cols}]");
        }
        assert!(matches!(decode(&[bf16::ONE; 3], 4, 4), Err(Error::Length { found: 3, .. })));
    }
}
