//! Masks of dense weights, and packing what they keep.

use cudarc::driver::result;
use twofour::{Axis, estimate::Estimator};

use super::{MaskSlice, PackedSliceMut};
use crate::{
    DataType, DevicePtr, Error, Result,
    layer::{DeviceSlice, DeviceSliceMut, LayerContext, MaskRule, elements},
    raw::{
        DenseWeight,
        compress::{CompressRule, CompressTarget},
        gemm::Gemm,
        prune::{BothWays, MaskChoice, Watch, first_nan},
    },
};

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
    pub(super) fn expect(self, context: &LayerContext) -> Result<DenseWeight> {
        let data =
            self.data.expect("the master weight", context, self.data.dtype(), elements(self.rows, self.cols)?)?;
        Ok(DenseWeight { data, rows: self.rows, cols: self.cols })
    }
}

/// Launches the selection of a master weight's mask by a rule and the packing of what it keeps, as `dtype`, f16 or
/// bf16. `scale` is one f32 in device memory, for [`MaskRule::SoftThreshold`] ([`super::soft_threshold_scale`]).
///
/// A NaN is reported only by [`remask_checked`]. Here it is kept, so that what would depend on it is NaN; of several in
/// a tile one is.
///
/// # Errors
/// [`Error::NoTranspose`] for a transpose with a rule along rows, [`Error::NoMethod`] for the soft threshold without a
/// scale or a packed weight, [`Error::Length`], [`Error::SliceType`], [`Error::OtherDevice`], [`Error::Driver`]; those
/// of compiling and loading kernels.
pub fn remask(
    context: &LayerContext,
    master: MasterSlice<'_>,
    rule: MaskRule,
    scale: Option<DeviceSlice<'_>>,
    dtype: DataType,
    to: PackTarget<'_>,
) -> Result<()> {
    launch_remask(context, master, rule, scale, dtype, to, Nan::Ignored).map(drop)
}

/// [`remask`], which then waits for the pass and reports a NaN.
///
/// # Errors
/// [`Error::NotANumber`] with the index of the first NaN (with the soft threshold of the first NaN or infinity);
/// [`Error::Capturing`]; those of [`remask`].
pub fn remask_checked(
    context: &LayerContext,
    master: MasterSlice<'_>,
    rule: MaskRule,
    scale: Option<DeviceSlice<'_>>,
    dtype: DataType,
    to: PackTarget<'_>,
) -> Result<()> {
    context.expect_not_capturing("reading where a NaN was found")?;
    let found_at = launch_remask(context, master, rule, scale, dtype, to, Nan::Reported)?;
    let mut found = [0u8; 8];
    // SAFETY: the address is of 8 bytes of the workspace, which no other call writes until this thread's next one; the
    // stream is waited for.
    unsafe { result::memcpy_dtoh_async(&mut found, found_at, context.stream().cu_stream()) }
        .map_err(|error| Error::driver("reading where a NaN was found", error))?;
    context.synchronize()?;
    first_nan(u64::from_ne_bytes(found), master.cols)
}

/// Whether the index of a NaN is read after a pass.
#[derive(PartialEq, Eq)]
enum Nan {
    Reported,
    Ignored,
}

/// Launches the pass, and returns the address of the index of a NaN.
fn launch_remask(
    context: &LayerContext,
    master: MasterSlice<'_>,
    rule: MaskRule,
    scale: Option<DeviceSlice<'_>>,
    dtype: DataType,
    to: PackTarget<'_>,
    nan: Nan,
) -> Result<DevicePtr> {
    let (weight, both) = addresses(context, master, dtype, &to)?;
    let order = Gemm::meta_order_of(dtype);
    let input = master.data.dtype();
    let pruner = context.pruner(input, dtype)?;
    let mut work = context.work();
    let [wrong] = work.parts([8])?;
    if nan == Nan::Reported {
        // SAFETY: the workspace has 8 bytes there, and the stream is of its device.
        unsafe { result::memset_d8_async(wrong, 0xFF, 8, context.stream().cu_stream()) }
            .map_err(|error| Error::driver("resetting the index of a NaN", error))?;
    }
    let soft = rule == MaskRule::SoftThreshold;
    let choice = if soft { MaskChoice::Rows } else { choice_of(rule)? };
    let packed = both.packed;
    let both = if soft { BothWays { packed: None, ..both } } else { both };
    let watch = Watch { nan: wrong, flips: None };
    // SAFETY: the weight, the packed weights and the mask are valid for their shapes, and the stream is of their
    // device.
    unsafe { pruner.both_ways(context.raw(), weight, choice, both, order, watch) }?;
    if soft {
        let (Some(scale), Some(packed)) = (scale, packed) else {
            let what = "a soft threshold without a scale or a packed weight";
            return Err(Error::NoMethod { what: what.into() });
        };
        let factor = Some(scale.expect("the scale of the soft threshold", context, DataType::F32, 1)?);
        let rule = CompressRule::Estimate(Estimator::SoftThreshold);
        let target = CompressTarget { packed, order, factor, seed: None, wrong };
        let compressor = context.compressor(input, dtype)?;
        // SAFETY: the weight and the packed weight are valid for their shape, and the stream is of their device.
        unsafe { compressor.run(context.raw(), weight, Axis::Row, rule, target) }?;
    }
    Ok(wrong)
}

/// Returns the addresses of a master weight, and of what a pass over it writes.
fn addresses(
    context: &LayerContext,
    master: MasterSlice<'_>,
    dtype: DataType,
    to: &PackTarget<'_>,
) -> Result<(DenseWeight, BothWays)> {
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
    Ok((weight, BothWays { packed, transposed, tiles: Some(tiles), factor: None, skip: None }))
}

/// Returns how a rule chooses a mask.
fn choice_of(rule: MaskRule) -> Result<MaskChoice> {
    match rule {
        MaskRule::Transposable(rule) => Ok(MaskChoice::Rule(rule)),
        MaskRule::Magnitude => Ok(MaskChoice::Rows),
        MaskRule::Given => Ok(MaskChoice::Given),
        other => Err(Error::NoMethod { what: format!("the mask rule {other:?}") }),
    }
}

/// Launches [`remask`] of several master weights of one type by one rule, 24 in a launch, with the same bits: a weight
/// alone leaves SMs idle at its end.
///
/// # Errors
/// [`Error::SliceType`] for weights of several types, [`Error::NoMethod`] for the soft threshold; those of [`remask`].
pub fn remask_together(
    context: &LayerContext,
    passes: Vec<(MasterSlice<'_>, PackTarget<'_>)>,
    rule: MaskRule,
    dtype: DataType,
) -> Result<()> {
    let Some(input) = passes.first().map(|(master, _)| master.data.dtype()) else { return Ok(()) };
    let choice = choice_of(rule)?;
    if let Some((other, _)) = passes.iter().find(|(master, _)| master.data.dtype() != input) {
        return Err(Error::SliceType { what: "a master weight", expected: input, found: other.data.dtype() });
    }
    let pruner = context.pruner(input, dtype)?;
    let mut work = context.work();
    let [nan] = work.parts([8])?;
    let watch = Watch { nan, flips: None };
    let pass = |(master, to): &(MasterSlice<'_>, PackTarget<'_>)| {
        addresses(context, *master, dtype, to).map(|(weight, both)| (weight, both, watch))
    };
    let weights = passes.iter().map(pass).collect::<Result<Vec<_>>>()?;
    // SAFETY: the weights, the packed weights and the masks are valid for their shapes, and the stream is of their
    // device.
    unsafe { pruner.both_ways_together(context.raw(), &weights, choice, Gemm::meta_order_of(dtype)) }
}

/// Launches the copy of a dense weight, of its type, with zeros where a mask of tiles prunes.
///
/// # Errors
/// Those of [`remask`].
pub fn keep(
    context: &LayerContext,
    master: MasterSlice<'_>,
    mask: MaskSlice<'_>,
    out: DeviceSliceMut<'_>,
) -> Result<()> {
    let (dtype, weight) = (master.data.dtype(), master.expect(context)?);
    let tiles = mask.expect(context, master.rows, master.cols)?;
    let out = out.expect("the masked weight", context, dtype, elements(master.rows, master.cols)?)?;
    // What the kernel computes does not depend on the type that it could pack to.
    let packed = if dtype == DataType::F32 { DataType::BF16 } else { dtype };
    // SAFETY: the weight, the mask and the result are valid for their shape, and the stream is of their device.
    unsafe { context.pruner(dtype, packed)?.apply_mask(context.raw(), weight, tiles, out) }
}
