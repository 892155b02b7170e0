//! Choosing masks, packing weights, and reading packed ones.

use half::{bf16, f16};
use twofour::{Compressed, Element, layer::MaskRule};
use twofour_cuda::{
    DataType,
    layer::borrowed::{self, MaskSlice, MasterSlice, PackTarget, PackedSlice, PackedSliceMut, packed_len},
};

use super::{Failure, Result, ScalarType, Tensor, context, half_type, slice, slice_mut};
use crate::torch::{numbers, shape::dimension, tensor::Device};

/// Chooses the mask of a weight by a rule and packs what it keeps, and its transpose where asked (otherwise an empty tensor). The mask is in tiles.
/// Only `check` finds a NaN, which waits for the device.
pub(super) fn pack(
    weight: Tensor,
    rule: i64,
    scale: f64,
    transpose: bool,
    check: bool,
) -> Result<(Tensor, Tensor, Tensor)> {
    let rule = numbers::rule(rule)?;
    let (rows, cols) = weight.matrix("the weight")?;
    let mut mask = new_mask(weight.device(), rows, cols)?;
    let scale = (rule == MaskRule::SoftThreshold).then_some(scale);
    let (packed, packed_t) = packed_by(&weight, rule, scale, &mut mask, transpose, check)?;
    Ok((packed, packed_t, mask))
}

/// Packs what a mask of tiles keeps of a weight, and its transpose where asked. The mask is not verified here.
pub(super) fn pack_masked(weight: Tensor, mask: Tensor, transpose: bool) -> Result<(Tensor, Tensor)> {
    let (rows, cols) = weight.matrix("the weight")?;
    let (found, expected) = (mask.matrix("the mask")?, (rows.div_ceil(4), cols.div_ceil(4)));
    if found != expected || mask.dtype()? != ScalarType::I16 {
        return Err(Failure::runtime(format!(
            "the mask must be {expected:?} tiles of int16 for a matrix of shape {:?}; it has {found:?} of {}",
            (rows, cols),
            mask.dtype()?.name()
        )));
    }
    let mut mask = mask.copied_to(weight.device(), "the mask")?;
    packed_by(&weight, MaskRule::Given, None, &mut mask, transpose, false)
}

fn new_mask(device: Device, rows: usize, cols: usize) -> Result<Tensor> {
    Tensor::empty_on(device, &[rows.div_ceil(4) as i64, cols.div_ceil(4) as i64], ScalarType::I16)
}

fn new_packed(weight: &Tensor, dtype: DataType, rows: usize, cols: usize) -> Result<Tensor> {
    Tensor::empty_on(weight.device(), &[packed_len(dtype, rows, cols)? as i64], weight.dtype()?)
}

fn packed_by(
    weight: &Tensor,
    rule: MaskRule,
    scale: Option<f64>,
    mask: &mut Tensor,
    transpose: bool,
    check: bool,
) -> Result<(Tensor, Tensor)> {
    let (dtype, context) = (half_type(weight, "the weight")?, context::of(weight)?);
    let (rows, cols) = weight.matrix("the weight")?;
    let weight = weight.contiguous("the weight")?;
    let mut packed = new_packed(&weight, dtype, rows, cols)?;
    let mut packed_t = match transpose {
        true => new_packed(&weight, dtype, cols, rows)?,
        false => Tensor::empty_on(weight.device(), &[0], weight.dtype()?)?,
    };
    let scale = scale.map(|scale| number(weight.device(), scale as f32)).transpose()?;
    let scale = scale.as_ref().map(|scale| slice(&context, scale, "the scale")).transpose()?;
    let master = MasterSlice { data: slice(&context, &weight, "the weight")?, rows, cols };
    let transposed = match transpose {
        true => Some(PackedSliceMut::new(slice_mut(&context, &mut packed_t, "the packed transpose")?, cols, rows)),
        false => None,
    };
    let to = PackTarget {
        packed: Some(PackedSliceMut::new(slice_mut(&context, &mut packed, "the packed weight")?, rows, cols)),
        transposed,
        mask: MaskSlice::new(slice_mut(&context, mask, "the mask")?),
    };
    let pass = if check { borrowed::remask_checked } else { borrowed::remask };
    pass(&context, master, rule, scale, dtype, to)?;
    Ok((packed, packed_t))
}

/// One f32 on a device.
fn number(device: Device, value: f32) -> Result<Tensor> {
    let mut host = Tensor::empty(&[1], ScalarType::F32)?;
    host.elements_mut()?[0] = value;
    host.copied_to(device, "a number")
}

/// The mask that a rule chooses, in tiles.
pub(super) fn select(dense: Tensor, rule: i64) -> Result<Tensor> {
    let rule = numbers::rule(rule)?;
    let (dtype, context) = (half_type(&dense, "the matrix")?, context::of(&dense)?);
    let (rows, cols) = dense.matrix("the matrix")?;
    let dense = dense.contiguous("the matrix")?;
    let mut mask = new_mask(dense.device(), rows, cols)?;
    let master = MasterSlice { data: slice(&context, &dense, "the matrix")?, rows, cols };
    // The soft threshold keeps what the magnitude rule keeps.
    let rule = if rule == MaskRule::SoftThreshold { MaskRule::Magnitude } else { rule };
    let to = PackTarget {
        packed: None,
        transposed: None,
        mask: MaskSlice::new(slice_mut(&context, &mut mask, "the mask")?),
    };
    borrowed::remask_checked(&context, master, rule, None, dtype, to)?;
    Ok(mask)
}

/// The scale of the soft threshold for a weight; waits for the device.
pub(super) fn soft_threshold_scale(dense: Tensor) -> Result<f64> {
    let context = context::of(&dense)?;
    let (rows, cols) = dense.matrix("the weight")?;
    let dense = dense.contiguous("the weight")?;
    let mut scale = Tensor::empty_on(dense.device(), &[1], ScalarType::F32)?;
    let master = MasterSlice { data: slice(&context, &dense, "the weight")?, rows, cols };
    borrowed::soft_threshold_scale(&context, master, slice_mut(&context, &mut scale, "the scale")?)?;
    let host = scale.copied_to(Device::HOST, "the scale")?;
    Ok(f64::from(host.elements::<f32>("the scale", ScalarType::F32)?[0]))
}

/// The 2:4 stand-in for a matrix along its rows, as a dense matrix with zeros.
pub(super) fn estimate(dense: Tensor, estimator: i64, scale: f64, seed: i64) -> Result<Tensor> {
    let estimator = numbers::estimator(estimator, seed)?;
    half_type(&dense, "the matrix")?;
    let context = context::of(&dense)?;
    let (rows, cols) = dense.matrix("the matrix")?;
    let dense = dense.contiguous("the matrix")?;
    let mut out = Tensor::empty_on(dense.device(), dense.sizes(), dense.dtype()?)?;
    let scale = number(dense.device(), scale as f32)?;
    let master = MasterSlice { data: slice(&context, &dense, "the matrix")?, rows, cols };
    let factor = slice(&context, &scale, "the scale")?;
    borrowed::estimate(&context, master, estimator, factor, slice_mut(&context, &mut out, "the estimate")?)?;
    Ok(out)
}

/// The dense weight of a packed one.
pub(super) fn unpack(packed: Tensor, rows: i64, cols: i64) -> Result<Tensor> {
    if packed.dtype()? != ScalarType::I8 {
        half_type(&packed, "the packed weight")?;
    }
    let context = context::of(&packed)?;
    let shape = (dimension("rows", rows)?, dimension("cols", cols)?);
    let packed = packed.contiguous("the packed weight")?;
    let mut out = Tensor::empty_on(packed.device(), &[rows, cols], packed.dtype()?)?;
    let weight = PackedSlice::new(slice(&context, &packed, "the packed weight")?, shape.0, shape.1);
    borrowed::unpack(&context, weight, slice_mut(&context, &mut out, "the dense weight")?)?;
    Ok(out)
}

/// The canonical form of a packed weight, which is converted in the host's memory.
pub(super) fn canonical(packed: Tensor, rows: i64, cols: i64) -> Result<(Tensor, Tensor)> {
    if packed.dtype()? == ScalarType::I8 {
        return parts::<i8>(&packed, rows, cols);
    }
    match half_type(&packed, "the packed weight")? {
        DataType::F16 => parts::<f16>(&packed, rows, cols),
        _ => parts::<bf16>(&packed, rows, cols),
    }
}

fn parts<T: Element>(packed: &Tensor, rows: i64, cols: i64) -> Result<(Tensor, Tensor)> {
    let (height, width) = (dimension("rows", rows)?, dimension("cols", cols)?);
    let (device, dtype) = (packed.device(), packed.dtype()?);
    let host = packed.copied_to(Device::HOST, "the packed weight")?;
    let compressed = borrowed::decode::<T>(&host.elements("the packed weight", dtype)?, height, width)?;
    let per_row = |len: usize| len.checked_div(height).unwrap_or(0) as i64;
    let mut values = Tensor::empty(&[rows, per_row(compressed.values().len())], dtype)?;
    values.elements_mut::<T>()?.copy_from_slice(compressed.values());
    let mut meta = Tensor::empty(&[rows, per_row(compressed.meta().len())], ScalarType::I32)?;
    meta.elements_mut::<u32>()?.copy_from_slice(compressed.meta());
    Ok((values.copied_to(device, "the values")?, meta.copied_to(device, "the metadata")?))
}

/// Packs a weight in canonical form, which is converted in the host's memory.
pub(super) fn from_canonical(values: Tensor, meta: Tensor, cols: i64) -> Result<Tensor> {
    if values.dtype()? == ScalarType::I8 {
        return from_parts::<i8>(&values, &meta, cols);
    }
    match half_type(&values, "the values")? {
        DataType::F16 => from_parts::<f16>(&values, &meta, cols),
        _ => from_parts::<bf16>(&values, &meta, cols),
    }
}

fn from_parts<T: Element>(values: &Tensor, meta: &Tensor, cols: i64) -> Result<Tensor> {
    let ((rows, _), cols) = (values.matrix("the values")?, dimension("cols", cols)?);
    let (device, dtype) = (values.device(), values.dtype()?);
    let values = values.copied_to(Device::HOST, "the values")?;
    let meta = meta.copied_to(Device::HOST, "the metadata")?;
    let values = values.elements::<T>("the values", dtype)?.into_owned();
    let meta = meta.elements::<u32>("the metadata", ScalarType::I32)?.into_owned();
    let packed = borrowed::encode(&Compressed::from_parts(rows, cols, values, meta)?)?;
    let mut host = Tensor::empty(&[packed.len() as i64], dtype)?;
    host.elements_mut::<T>()?.copy_from_slice(&packed);
    host.copied_to(device, "the packed weight")
}
