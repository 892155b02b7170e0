//! The layer's passes over packed weights in borrowed device memory, such as another framework's tensors.
//!
//! A packed weight is one run of memory here: values, then metadata. A mask is a u16 for each 4x4 tile ([`BothWays::tiles`]). The functions are those
//! that [`super::SparseLinear`] is made of, for front ends whose tensors own all state.

pub mod int4;

use cudarc::driver::result;
use twofour::{Axis, Compressed, Element, compressed::lengths, estimate::Estimator, layer::Activation};

use super::{
    DeviceSlice, DeviceSliceMut, LayerContext, MaskRule, dense::unpacked_product, elements,
    forward::linear as launch_linear, host_form, quantized::quantized_linear,
};
use crate::{
    DataType, DevicePtr, Error, Result,
    compress::{CompressRule, CompressTarget, Compressor},
    gemm::{Epilogue, Gemm, GemmProblem, packed_bytes},
    prune::{BothWays, DenseWeight, MaskChoice, Packed, Watch, first_nan},
    soft_threshold::SoftThresholdScale,
    unpack::Unpacker,
};

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

/// Launches `y = activation(x · Wᵀ + bias)` for `x` `[tokens, cols]` and `y` `[tokens, rows]`, both of the weight's type, f16 or bf16.
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

/// Launches `y = activation(x · Wᵀ · scales + bias)` for a weight of 8-bit integers or floats with a scale for each row, in f32, and `x` and `y` of f16 or
/// bf16. Activations are quantized on the device: to integers with a scale for each token, or to floats with one scale.
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

/// Launches `dx = dy · W` for `dy` `[tokens, rows]` and `dx` `[tokens, cols]`: a dense GEMM with the weight, which every call unpacks. A weight whose mask
/// is transposable has a packed transpose, and [`linear`] with it is faster.
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

/// The destinations of a pass over a master weight.
#[derive(Debug)]
pub struct PackTarget<'a> {
    /// The packed weight `[rows, cols]`, or none where only the mask is selected.
    pub packed: Option<PackedSliceMut<'a>>,
    /// The packed transpose `[cols, rows]`, for masks that are 2:4 along columns too.
    pub transposed: Option<PackedSliceMut<'a>>,
    /// The mask: written, but read by [`MaskRule::Given`].
    pub mask: MaskSlice<'a>,
}

/// A dense weight `[rows, cols]` in device memory, of f32, f16 or bf16.
#[derive(Debug, Clone, Copy)]
pub struct MasterSlice<'a> {
    /// The elements.
    pub data: DeviceSlice<'a>,
    /// Rows.
    pub rows: usize,
    /// Columns.
    pub cols: usize,
}

impl MasterSlice<'_> {
    fn expect(self, context: &LayerContext) -> Result<DenseWeight> {
        let data =
            self.data.expect("the master weight", context, self.data.dtype(), elements(self.rows, self.cols)?)?;
        Ok(DenseWeight { data, rows: self.rows, cols: self.cols })
    }
}

/// Launches the selection of a master weight's mask by a rule and the packing of what it keeps, as `dtype`, f16 or bf16. `scale` is one f32 in device
/// memory, for [`MaskRule::SoftThreshold`] ([`soft_threshold_scale`]).
///
/// A NaN is found only by [`remask_checked`].
///
/// # Errors
/// [`Error::NoTranspose`] for a transpose with a rule along rows, [`Error::NoMethod`] for the soft threshold without a scale or a packed weight,
/// [`Error::Length`], [`Error::SliceType`], [`Error::OtherDevice`], [`Error::Driver`]; those of compiling and loading kernels.
pub fn remask(
    context: &LayerContext,
    master: MasterSlice<'_>,
    rule: MaskRule,
    scale: Option<DeviceSlice<'_>>,
    dtype: DataType,
    to: PackTarget<'_>,
) -> Result<()> {
    launch_remask(context, master, rule, scale, dtype, to).map(drop)
}

/// [`remask`], which then waits for the pass and reports a NaN.
///
/// # Errors
/// [`Error::NotANumber`] with the index of the first NaN (with the soft threshold of the first NaN or infinity); [`Error::Capturing`]; those of [`remask`].
pub fn remask_checked(
    context: &LayerContext,
    master: MasterSlice<'_>,
    rule: MaskRule,
    scale: Option<DeviceSlice<'_>>,
    dtype: DataType,
    to: PackTarget<'_>,
) -> Result<()> {
    context.expect_not_capturing("reading where a NaN was found")?;
    let found_at = launch_remask(context, master, rule, scale, dtype, to)?;
    let mut found = [0u8; 8];
    // SAFETY: the address is of 8 bytes of the workspace, which no other call writes until this thread's next one; the stream is waited for.
    unsafe { result::memcpy_dtoh_async(&mut found, found_at, context.stream().cu_stream()) }
        .map_err(|error| Error::driver("reading where a NaN was found", error))?;
    context.synchronize()?;
    first_nan(u64::from_ne_bytes(found), master.cols)
}

/// Launches the pass, and returns the address of the index of a NaN.
fn launch_remask(
    context: &LayerContext,
    master: MasterSlice<'_>,
    rule: MaskRule,
    scale: Option<DeviceSlice<'_>>,
    dtype: DataType,
    to: PackTarget<'_>,
) -> Result<DevicePtr> {
    let weight = master.expect(context)?;
    let (rows, cols) = (master.rows, master.cols);
    let tiles = to.mask.expect(context, rows, cols)?;
    let expect = |packed: &PackedSliceMut<'_>, shape| {
        if packed.shape != shape {
            let (expected, found) = (shape, packed.shape);
            return Err(twofour::Error::Shape { what: "the packed weight", expected, found }.into());
        }
        packed.expect(context, dtype)
    };
    let packed = to.packed.as_ref().map(|packed| expect(packed, (rows, cols))).transpose()?;
    let transposed = to.transposed.as_ref().map(|packed| expect(packed, (cols, rows))).transpose()?;
    let order = Gemm::meta_order_of(dtype);
    let input = master.data.dtype();
    let pruner = context.pruner(input, dtype)?;
    let mut work = context.work();
    let [wrong] = work.parts([8])?;
    // SAFETY: the workspace has 8 bytes there, and the stream is of its device.
    unsafe { result::memset_d8_async(wrong, 0xFF, 8, context.stream().cu_stream()) }
        .map_err(|error| Error::driver("resetting the index of a NaN", error))?;
    let soft = rule == MaskRule::SoftThreshold;
    let choice = match rule {
        MaskRule::Transposable(rule) => MaskChoice::Rule(rule),
        MaskRule::Magnitude => MaskChoice::Rows,
        MaskRule::Given => MaskChoice::Given,
        _ if soft => MaskChoice::Rows,
        other => return Err(Error::NoMethod { what: format!("the mask rule {other:?}") }),
    };
    let kept = if soft { None } else { packed };
    let both = BothWays { packed: kept, transposed, tiles: Some(tiles), factor: None };
    let watch = Watch { nan: wrong, flips: None };
    // SAFETY: the weight, the packed weights and the mask are valid for their shapes, and the stream is of their device.
    unsafe { pruner.both_ways(context.raw(), weight, choice, both, order, watch) }?;
    if soft {
        let (Some(scale), Some(packed)) = (scale, packed) else {
            let what = "a soft threshold without a scale or a packed weight";
            return Err(Error::NoMethod { what: what.into() });
        };
        let factor = Some(scale.expect("the scale of the soft threshold", context, DataType::F32, 1)?);
        let rule = CompressRule::Estimate(Estimator::SoftThreshold);
        let target = CompressTarget { packed, order, factor, seed: None, wrong };
        let compressor = Compressor::new(context.device(), input, dtype)?;
        // SAFETY: the weight and the packed weight are valid for their shape, and the stream is of their device.
        unsafe { compressor.run(context.raw(), weight, Axis::Row, rule, target) }?;
    }
    Ok(wrong)
}

/// Launches the scale of the soft threshold for a master weight into one f32 (S-STE, Hu et al., NeurIPS 2024):
/// [`twofour::estimate::soft_threshold_scale`].
///
/// # Errors
/// Those of [`remask`].
pub fn soft_threshold_scale(context: &LayerContext, master: MasterSlice<'_>, scale: DeviceSliceMut<'_>) -> Result<()> {
    let weight = master.expect(context)?;
    let scale = scale.expect("the scale of the soft threshold", context, DataType::F32, 1)?;
    let kernel = SoftThresholdScale::new(context.device(), master.data.dtype())?;
    let mut work = context.work();
    let [workspace] = work.parts([SoftThresholdScale::WORKSPACE_BYTES])?;
    // SAFETY: the weight is valid for its shape, the scale is one f32, and the stream is of their device.
    unsafe { kernel.run(context.raw(), weight, scale, workspace) }
}

/// Launches the 2:4 estimate of a matrix along its rows, as a dense matrix of the same type, f16 or bf16, with zeros
/// ([`twofour::estimate::estimate`]). `scale` is one f32 in device memory that values are multiplied by.
///
/// # Errors
/// Those of [`remask`].
pub fn estimate(
    context: &LayerContext,
    matrix: MasterSlice<'_>,
    estimator: Estimator,
    scale: DeviceSlice<'_>,
    out: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, (rows, cols)) = (matrix.data.dtype(), (matrix.rows, matrix.cols));
    let dense = matrix.expect(context)?;
    let factor = Some(scale.expect("the scale of the estimate", context, DataType::F32, 1)?);
    let out = out.expect("the estimate", context, dtype, elements(rows, cols)?)?;
    let compressor = Compressor::new(context.device(), dtype, dtype)?;
    let unpacker = Unpacker::new(context.device(), dtype)?;
    let mut work = context.work();
    let [wrong, memory] = work.parts([8, packed_bytes(dtype, rows, cols).total()])?;
    let packed = packed_at(memory, dtype, rows, cols);
    let order = Gemm::meta_order_of(dtype);
    let to = CompressTarget { packed, order, factor, seed: None, wrong };
    // SAFETY: the matrix and the result are valid for their shape, the workspace for the packed estimate, and the stream is of their device.
    unsafe {
        compressor.run(context.raw(), dense, Axis::Row, CompressRule::Estimate(estimator), to)?;
        unpacker.run(context.raw(), packed, (rows, cols), out)
    }
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
    let dtype: DataType = T::DTYPE.into();
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
