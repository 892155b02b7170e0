//! Masks and estimates on a GPU.

use twofour::layer::MaskRule;
use twofour_cuda::{
    DataType,
    layer::{
        DeviceSlice, LayerContext,
        borrowed::{self, MaskSlice, MasterSlice, PackTarget, Sampling},
    },
};

use super::{expect_device, slice_mut};
use crate::torch::{
    Device, Result, ScalarType, Tensor,
    numbers::{self, EstimatorKind},
};

/// A mask to be written, in tiles ([`crate::cpu::to_tiles`]).
pub(crate) fn new_mask(device: Device, rows: usize, cols: usize) -> Result<Tensor> {
    Tensor::empty_on(device, &[rows.div_ceil(4) as i64, cols.div_ceil(4) as i64], ScalarType::I16)
}

/// Writes the mask that a rule chooses; a given one stays.
pub(crate) fn select_into(
    context: &LayerContext,
    matrix: MasterSlice<'_>,
    rule: MaskRule,
    mask: &mut Tensor,
    check: bool,
) -> Result<()> {
    let Some(rule) = selecting(rule) else { return Ok(()) };
    let (dtype, to) = (any_type(matrix), mask_alone(context, mask)?);
    let pass = if check { borrowed::remask_checked } else { borrowed::remask };
    Ok(pass(context, matrix, rule, None, dtype, to)?)
}

/// Writes the masks that a rule chooses for several matrices of a type, without a search for NaN; given ones stay.
pub(crate) fn select_together_into(
    context: &LayerContext,
    matrices: Vec<MasterSlice<'_>>,
    rule: MaskRule,
    masks: &mut [Tensor],
) -> Result<()> {
    let (Some(rule), Some(first)) = (selecting(rule), matrices.first()) else { return Ok(()) };
    let dtype = any_type(*first);
    let passes = matrices.into_iter().zip(masks).map(|(matrix, mask)| Ok((matrix, mask_alone(context, mask)?)));
    Ok(borrowed::remask_together(context, passes.collect::<Result<_>>()?, rule, dtype)?)
}

/// The rule by which a mask is chosen, if it is: the soft threshold keeps what the magnitude rule keeps.
fn selecting(rule: MaskRule) -> Option<MaskRule> {
    match rule {
        MaskRule::Given => None,
        MaskRule::SoftThreshold => Some(MaskRule::Magnitude),
        other => Some(other),
    }
}

/// A type that a matrix may be packed as: where nothing is packed, which one plays no part.
fn any_type(matrix: MasterSlice<'_>) -> DataType {
    if matrix.data.dtype() == DataType::F16 { DataType::F16 } else { DataType::BF16 }
}

fn mask_alone<'a>(context: &LayerContext, mask: &'a mut Tensor) -> Result<PackTarget<'a>> {
    Ok(PackTarget { packed: None, transposed: None, mask: MaskSlice::new(slice_mut(context, mask, "the mask")?) })
}

/// One f32 on a device.
pub(crate) fn number(device: Device, value: f32) -> Result<Tensor> {
    let mut host = Tensor::empty(&[1], ScalarType::F32)?;
    host.elements_mut()?[0] = value;
    host.copied_to(device, "a number")
}

/// An estimator with a seed in the host's memory or on the device, where the kernel reads it.
pub(crate) fn sampling<'a>(context: &LayerContext, kind: EstimatorKind, seed: &'a Tensor) -> Result<Sampling<'a>> {
    numbers::expect_seed(seed)?;
    if !seed.device().is_cuda() {
        return Ok(Sampling { estimator: kind.with_seed(numbers::seed(seed)?)?, seed: None });
    }
    expect_device(context, seed, "the seed")?;
    // SAFETY: the tensor is one number of eight bytes, which it keeps alive as `slice` says.
    let bytes = unsafe { DeviceSlice::from_raw(context.device(), seed.address(), 8, DataType::I8) };
    Ok(Sampling { estimator: kind.with_seed(0)?, seed: Some(bytes) })
}
