//! Packs what a mask keeps of a weight, and its transpose where asked; otherwise that is an empty tensor. Masks are in
//! tiles ([`crate::cpu::to_tiles`]).

use half::{bf16, f16};
use twofour::{
    Axis, Mask, MatrixRef, Pattern,
    kernel::SparseWeightMut,
    layer::{MaskRule, remask},
};
use twofour_cuda::layer::borrowed::{self, MaskSlice, MasterSlice, PackTarget, PackedSliceMut};

use super::*;
use crate::torch::shapes::Operand;

/// `pack` chooses the mask by a rule. `dtype` is torch's number of a type of 16 bits that a weight of float32 is packed
/// as, or -1. On a CPU a NaN is always found; on a GPU `check` finds it, which waits for the device.
pub(super) const OPERATORS: &[Operator] = &[
    Operator::new(
        "pack(Tensor weight, int rule, float scale, bool transpose, bool check, int dtype=-1) -> (Tensor packed, \
         Tensor packed_t, Tensor mask)",
        kernel!(cpu),
    )
    .cuda(kernel!(cuda))
    .shapes(|arguments| {
        let dtype = ScalarType::of(arguments.int(5)?);
        let weight = arguments.tensor(0)?;
        let (packed, packed_t) = packed_shapes(arguments, &weight, arguments.flag(3)?, dtype)?;
        Ok(vec![packed, packed_t, tiles_shape(&weight)?])
    }),
    Operator::new(
        "pack_masked(Tensor weight, Tensor mask, bool transpose) -> (Tensor packed, Tensor packed_t)",
        kernel!(cpu_masked),
    )
    .cuda(kernel!(cuda_masked))
    .shapes(|arguments| {
        let (packed, packed_t) = packed_shapes(arguments, &arguments.tensor(0)?, arguments.flag(2)?, None)?;
        Ok(vec![packed, packed_t])
    }),
];

/// The shapes of a packed weight and of its packed transpose.
pub(super) fn packed_shapes<'py>(
    arguments: &Arguments<'py>,
    weight: &Operand<'py>,
    transpose: bool,
    dtype: Option<ScalarType>,
) -> pyo3::PyResult<(Shape<'py>, Shape<'py>)> {
    let ([rows, cols], dtype) = (weight.matrix()?, dtype.or(weight.dtype));
    let transposed = match transpose {
        true => shape(dtype, weight.on_gpu, cols, rows)?,
        false => arguments.empty()?.of(dtype),
    };
    Ok((shape(dtype, weight.on_gpu, rows, cols)?, transposed))
}

pub(super) fn cpu(
    weight: Tensor,
    rule: MaskRule,
    scale: f64,
    transpose: bool,
    _check: bool,
    dtype: FloatType,
) -> Result<(Tensor, Tensor, Tensor)> {
    let found = weight.dtype()?;
    let dtype = dtype.or(found);
    let (rows, cols) = weight.matrix("the weight")?;
    let (mut mask, scale) = (Mask::empty(rows, cols), scale as f32);
    let (packed, packed_t) = match (found, dtype) {
        (ScalarType::F32, ScalarType::Bf16) => on_cpu::<bf16, f32>(&weight, rule, scale, &mut mask, transpose),
        (ScalarType::F32, ScalarType::F16) => on_cpu::<f16, f32>(&weight, rule, scale, &mut mask, transpose),
        _ if found == dtype => {
            for_floats!(found, "the weight", same_type::<T>(&weight, rule, scale, &mut mask, transpose))
        }
        _ => Err(Failure::not_implemented(format!(
            "a weight of {} cannot be packed as {}: convert it first",
            found.name(),
            dtype.name()
        ))),
    }?;
    Ok((packed, packed_t, to_tiles(&mask)?))
}

fn cpu_masked(weight: Tensor, mask: Tensor, transpose: bool) -> Result<(Tensor, Tensor)> {
    let dtype = weight.dtype()?;
    let (rows, cols) = weight.matrix("the weight")?;
    let mut mask = from_tiles(&mask, rows, cols)?;
    for_floats!(dtype, "the weight", same_type::<T>(&weight, MaskRule::Given, 1.0, &mut mask, transpose))
}

fn same_type<T: Float>(
    weight: &Tensor,
    rule: MaskRule,
    scale: f32,
    mask: &mut Mask,
    transpose: bool,
) -> Result<(Tensor, Tensor)> {
    on_cpu::<T, T>(weight, rule, scale, mask, transpose)
}

fn on_cpu<T: Float, M: Float>(
    weight: &Tensor,
    rule: MaskRule,
    scale: f32,
    mask: &mut Mask,
    transpose: bool,
) -> Result<(Tensor, Tensor)> {
    let (rows, cols) = weight.matrix("the weight")?;
    if transpose && rule == MaskRule::Given {
        mask.verify(Pattern::TWO_FOUR, Axis::Column)?;
    }
    let values = weight.elements::<M>("the weight", M::SCALAR)?;
    let master = MatrixRef::new(rows, cols, &values)?;
    let mut packed = new_on_cpu::<T>(rows, cols)?;
    let mut packed_t = if transpose { new_on_cpu::<T>(cols, rows)? } else { Tensor::empty(&[0], T::SCALAR)? };
    let memory = packed.bytes_mut()?;
    let memory_t = if transpose { Some(packed_t.bytes_mut()?) } else { None };
    on_pool(|| {
        let packed = SparseWeightMut::<T>::new(rows, cols, memory)?;
        let transposed = memory_t.map(|memory| SparseWeightMut::<T>::new(cols, rows, memory)).transpose()?;
        remask(master, rule, scale, mask, packed, transposed)
    })??;
    Ok((packed, packed_t))
}

pub(super) fn cuda(
    weight: Tensor,
    rule: MaskRule,
    scale: f64,
    transpose: bool,
    check: bool,
    dtype: FloatType,
) -> Result<(Tensor, Tensor, Tensor)> {
    let dtype = dtype.or(weight.dtype()?);
    let (rows, cols) = weight.matrix("the weight")?;
    let mut mask = new_mask(weight.device(), rows, cols)?;
    let scale = (rule == MaskRule::SoftThreshold).then_some(scale);
    let (packed, packed_t) = on_cuda(&weight, dtype, rule, scale, &mut mask, transpose, check)?;
    Ok((packed, packed_t, mask))
}

/// The mask is not verified.
fn cuda_masked(weight: Tensor, mask: Tensor, transpose: bool) -> Result<(Tensor, Tensor)> {
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
    on_cuda(&weight, weight.dtype()?, MaskRule::Given, None, &mut mask, transpose, false)
}

fn on_cuda(
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
    let mut packed = new_on_gpu(device, dtype, rows, cols)?;
    let mut packed_t = match transpose {
        true => new_on_gpu(device, dtype, cols, rows)?,
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
