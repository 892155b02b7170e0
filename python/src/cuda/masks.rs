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
    // The soft threshold keeps what the magnitude rule keeps.
    let rule = match rule {
        MaskRule::Given => return Ok(()),
        MaskRule::SoftThreshold => MaskRule::Magnitude,
        other => other,
    };
    let to = PackTarget { packed: None, transposed: None, mask: MaskSlice::new(slice_mut(context, mask, "the mask")?) };
    // Nothing is packed, so the type that it would be packed as plays no part.
    let dtype = if matrix.data.dtype() == DataType::F16 { DataType::F16 } else { DataType::BF16 };
    let pass = if check { borrowed::remask_checked } else { borrowed::remask };
    Ok(pass(context, matrix, rule, None, dtype, to)?)
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
