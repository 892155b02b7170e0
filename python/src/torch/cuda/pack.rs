//! Choosing masks, packing weights, and reading packed ones.

use half::{bf16, f16};
use twofour::{Compressed, Element, F8E4M3, F8E5M2, layer::MaskRule};
use twofour_cuda::{
    DataType,
    layer::{
        LayerContext,
        borrowed::{self, MaskSlice, MasterSlice, PackTarget, PackedSlice, PackedSliceMut, packed_len},
    },
};

use super::{Failure, Result, ScalarType, Tensor, context, gradient, half_type, packable, slice, slice_mut, wide};
use crate::torch::{numbers, shape::dimension, tensor::Device};

/// Chooses the mask of a weight by a rule and packs what it keeps, and its transpose where asked (otherwise an empty tensor), as `dtype` where that is
/// a number: floats of 16 bits for a weight of float32. The mask is in tiles. Only `check` finds a NaN, which waits for the device.
pub(super) fn pack(
    weight: Tensor,
    rule: i64,
    scale: f64,
    transpose: bool,
    check: bool,
    dtype: i64,
) -> Result<(Tensor, Tensor, Tensor)> {
    let rule = numbers::rule(rule)?;
    let dtype = numbers::packed_type(dtype, weight.dtype()?)?;
    let (rows, cols) = weight.matrix("the weight")?;
    let mut mask = new_mask(weight.device(), rows, cols)?;
    let scale = (rule == MaskRule::SoftThreshold).then_some(scale);
    let (packed, packed_t) = packed_by(&weight, dtype, rule, scale, &mut mask, transpose, check)?;
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
    packed_by(&weight, weight.dtype()?, MaskRule::Given, None, &mut mask, transpose, false)
}

fn new_mask(device: Device, rows: usize, cols: usize) -> Result<Tensor> {
    Tensor::empty_on(device, &[rows.div_ceil(4) as i64, cols.div_ceil(4) as i64], ScalarType::I16)
}

fn new_packed(device: Device, dtype: ScalarType, rows: usize, cols: usize) -> Result<Tensor> {
    Tensor::empty_on(device, &[packed_len(packable(dtype)?, rows, cols)? as i64], dtype)
}

fn packed_by(
    weight: &Tensor,
    dtype: ScalarType,
    rule: MaskRule,
    scale: Option<f64>,
    mask: &mut Tensor,
    transpose: bool,
    check: bool,
) -> Result<(Tensor, Tensor)> {
    let weight = weight.contiguous("the weight")?;
    if dtype == ScalarType::F32 && wide::is_wide(&weight)? {
        return wide::packed_by(&weight, rule, scale, mask, transpose, check);
    }
    let (of, context, device) = (packable(dtype)?, context::of(&weight)?, weight.device());
    let (rows, cols) = weight.matrix("the weight")?;
    let mut packed = new_packed(device, dtype, rows, cols)?;
    let mut packed_t = match transpose {
        true => new_packed(device, dtype, cols, rows)?,
        false => Tensor::empty_on(device, &[0], dtype)?,
    };
    let scale = scale.map(|scale| number(device, scale as f32)).transpose()?;
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
    pass(&context, master, rule, scale, of, to)?;
    Ok((packed, packed_t))
}

/// One f32 on a device.
pub(super) fn number(device: Device, value: f32) -> Result<Tensor> {
    let mut host = Tensor::empty(&[1], ScalarType::F32)?;
    host.elements_mut()?[0] = value;
    host.copied_to(device, "a number")
}

/// The mask that a rule chooses, in tiles.
pub(super) fn select(dense: Tensor, rule: i64) -> Result<Tensor> {
    let rule = numbers::rule(rule)?;
    let context = context::of(&dense)?;
    let (rows, cols) = dense.matrix("the matrix")?;
    let dense = dense.contiguous("the matrix")?;
    let mut mask = new_mask(dense.device(), rows, cols)?;
    let master = MasterSlice { data: slice(&context, &dense, "the matrix")?, rows, cols };
    select_into(&context, master, rule, &mut mask, true)?;
    Ok(mask)
}

/// Writes the mask that a rule chooses; a given one stays.
pub(super) fn select_into(
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

/// The scale of the soft threshold for a weight, one number of float32.
pub(super) fn soft_threshold_scale(dense: Tensor) -> Result<Tensor> {
    let context = context::of(&dense)?;
    let (rows, cols) = dense.matrix("the weight")?;
    let dense = dense.contiguous("the weight")?;
    let mut scale = Tensor::empty_on(dense.device(), &[], ScalarType::F32)?;
    let master = MasterSlice { data: slice(&context, &dense, "the weight")?, rows, cols };
    borrowed::soft_threshold_scale(&context, master, slice_mut(&context, &mut scale, "the scale")?)?;
    Ok(scale)
}

/// The 2:4 stand-in for a matrix along its rows, as a dense matrix with zeros. A seed on the device is read when the kernel runs.
pub(super) fn estimate(dense: Tensor, estimator: i64, scale: f64, seed: Tensor) -> Result<Tensor> {
    let context = context::of(&dense)?;
    let sampling = gradient::sampling(&context, estimator, &seed)?;
    let (rows, cols) = dense.matrix("the matrix")?;
    let dense = dense.contiguous("the matrix")?;
    let mut out = Tensor::empty_on(dense.device(), dense.sizes(), dense.dtype()?)?;
    let scale = (scale != 1.0).then(|| number(dense.device(), scale as f32)).transpose()?;
    let master = MasterSlice { data: slice(&context, &dense, "the matrix")?, rows, cols };
    let factor = scale.as_ref().map(|scale| slice(&context, scale, "the scale")).transpose()?;
    borrowed::estimate(&context, master, sampling, factor, slice_mut(&context, &mut out, "the estimate")?)?;
    Ok(out)
}

/// The dense weight of a packed one.
pub(super) fn unpack(packed: Tensor, rows: i64, cols: i64) -> Result<Tensor> {
    let shape = (dimension("rows", rows)?, dimension("cols", cols)?);
    match packed.dtype()? {
        ScalarType::F32 => return wide::unpack(&packed, shape.0, shape.1),
        ScalarType::I8 => {}
        other => drop(packable(other)?),
    }
    let context = context::of(&packed)?;
    let packed = packed.contiguous("the packed weight")?;
    let mut out = Tensor::empty_on(packed.device(), &[rows, cols], packed.dtype()?)?;
    let weight = PackedSlice::new(slice(&context, &packed, "the packed weight")?, shape.0, shape.1);
    borrowed::unpack(&context, weight, slice_mut(&context, &mut out, "the dense weight")?)?;
    Ok(out)
}

/// The canonical form of a packed weight, which is converted in the host's memory.
pub(super) fn canonical(packed: Tensor, rows: i64, cols: i64) -> Result<(Tensor, Tensor)> {
    match packed.dtype()? {
        ScalarType::I8 => return parts::<i8>(&packed, rows, cols),
        ScalarType::E4m3 => return parts::<F8E4M3>(&packed, rows, cols),
        ScalarType::E5m2 => return parts::<F8E5M2>(&packed, rows, cols),
        ScalarType::F32 => {
            let shape = (dimension("rows", rows)?, dimension("cols", cols)?);
            return canonical_parts(&wide::compressed(&packed, shape.0, shape.1)?, ScalarType::F32, packed.device());
        }
        _ => {}
    }
    match half_type(&packed, "the packed weight")? {
        DataType::F16 => parts::<f16>(&packed, rows, cols),
        _ => parts::<bf16>(&packed, rows, cols),
    }
}

fn parts<T: Element>(packed: &Tensor, rows: i64, cols: i64) -> Result<(Tensor, Tensor)> {
    let (height, width) = (dimension("rows", rows)?, dimension("cols", cols)?);
    let host = packed.copied_to(Device::HOST, "the packed weight")?;
    let compressed = borrowed::decode::<T>(&host.elements("the packed weight", packed.dtype()?)?, height, width)?;
    canonical_parts(&compressed, packed.dtype()?, packed.device())
}

/// Values and metadata of a weight, on a device.
fn canonical_parts<T: Element>(weight: &Compressed<T>, dtype: ScalarType, device: Device) -> Result<(Tensor, Tensor)> {
    let (rows, per_row) = (weight.rows(), |len: usize| len.checked_div(weight.rows()).unwrap_or(0) as i64);
    let mut values = Tensor::empty(&[rows as i64, per_row(weight.values().len())], dtype)?;
    values.elements_mut::<T>()?.copy_from_slice(weight.values());
    let mut meta = Tensor::empty(&[rows as i64, per_row(weight.meta().len())], ScalarType::I32)?;
    meta.elements_mut::<u32>()?.copy_from_slice(weight.meta());
    Ok((values.copied_to(device, "the values")?, meta.copied_to(device, "the metadata")?))
}

/// Packs a weight in canonical form, which is converted in the host's memory.
pub(super) fn from_canonical(values: Tensor, meta: Tensor, cols: i64) -> Result<Tensor> {
    match values.dtype()? {
        ScalarType::I8 => return from_parts::<i8>(&values, &meta, cols, borrowed::encode),
        ScalarType::E4m3 => return from_parts::<F8E4M3>(&values, &meta, cols, borrowed::encode),
        ScalarType::E5m2 => return from_parts::<F8E5M2>(&values, &meta, cols, borrowed::encode),
        ScalarType::F32 => return from_parts::<f32>(&values, &meta, cols, |weight| Ok(weight.to_dense())),
        _ => {}
    }
    match half_type(&values, "the values")? {
        DataType::F16 => from_parts::<f16>(&values, &meta, cols, borrowed::encode),
        _ => from_parts::<bf16>(&values, &meta, cols, borrowed::encode),
    }
}

fn from_parts<T: Element>(
    values: &Tensor,
    meta: &Tensor,
    cols: i64,
    encode: impl Fn(&Compressed<T>) -> twofour_cuda::Result<Vec<T>>,
) -> Result<Tensor> {
    let ((rows, _), cols) = (values.matrix("the values")?, dimension("cols", cols)?);
    let (device, dtype) = (values.device(), values.dtype()?);
    let values = values.copied_to(Device::HOST, "the values")?;
    let meta = meta.copied_to(Device::HOST, "the metadata")?;
    let values = values.elements::<T>("the values", dtype)?.into_owned();
    let meta = meta.elements::<u32>("the metadata", ScalarType::I32)?.into_owned();
    let packed = encode(&Compressed::from_parts(rows, cols, values, meta)?)?;
    let mut host = Tensor::empty(&[packed.len() as i64], dtype)?;
    host.elements_mut::<T>()?.copy_from_slice(&packed);
    host.copied_to(device, "the packed weight")
}
