//! Packs what a rule keeps of several weights, each as `pack` does: on a GPU in few launches, since a weight alone
//! leaves SMs idle at its end.

use twofour::layer::MaskRule;
use twofour_cuda::layer::borrowed::{self, MaskSlice, MasterSlice, PackTarget, PackedSliceMut};

use super::{pack, *};
use crate::torch::List;

/// The weights are of one type, on one device; of their transposes there are as many tensors, which are empty unless
/// they are asked for. NaN is found on a CPU only.
pub(super) const OPERATORS: &[Operator] = &[Operator::new(
    "pack_together(Tensor[] weights, int rule, bool transpose, int dtype=-1) -> (Tensor[] packed, Tensor[] packed_t)",
    kernel!(cpu),
)
.cuda(kernel!(cuda))
.shapes(|arguments| {
    let (weights, transpose, dtype) = (arguments.tensors(0)?, arguments.flag(2)?, ScalarType::of(arguments.int(3)?));
    let both = weights.iter().map(|weight| pack::packed_shapes(arguments, weight, transpose, dtype));
    let (packed, packed_t) = both.collect::<pyo3::PyResult<(Vec<_>, Vec<_>)>>()?;
    Ok([packed, packed_t].concat())
})];

fn cpu(weights: Vec<Tensor>, rule: MaskRule, transpose: bool, dtype: FloatType) -> Result<(List, List)> {
    one_by_one(weights, |weight| pack::cpu(weight, rule, 1.0, transpose, false, dtype))
}

fn one_by_one(weights: Vec<Tensor>, pack: impl Fn(Tensor) -> Result<(Tensor, Tensor, Tensor)>) -> Result<(List, List)> {
    let pack = |weight| pack(weight).map(|(packed, packed_t, _)| (packed, packed_t));
    let (packed, packed_t) = weights.into_iter().map(pack).collect::<Result<(Vec<_>, Vec<_>)>>()?;
    Ok((List::of(packed)?, List::of(packed_t)?))
}

fn cuda(weights: Vec<Tensor>, rule: MaskRule, transpose: bool, dtype: FloatType) -> Result<(List, List)> {
    let Some(first) = weights.first() else { return Ok((List::of(vec![])?, List::of(vec![])?)) };
    let (device, dtype_of_result) = (first.device(), dtype.or(first.dtype()?));
    if dtype_of_result == ScalarType::F32 || rule == MaskRule::SoftThreshold {
        return one_by_one(weights, |weight| pack::cuda(weight, rule, 1.0, transpose, false, dtype));
    }
    let (of, context) = (packable(dtype_of_result)?, context::of(first)?);
    let masters = weights.iter().map(|weight| weight.contiguous("a weight")).collect::<Result<Vec<_>>>()?;
    let shapes = weights.iter().map(|weight| weight.matrix("a weight")).collect::<Result<Vec<_>>>()?;
    let made = |make: &dyn Fn(usize, usize) -> Result<Tensor>| {
        shapes.iter().map(|(rows, cols)| make(*rows, *cols)).collect::<Result<Vec<_>>>()
    };
    let mut packed = made(&|rows, cols| new_on_gpu(device, dtype_of_result, rows, cols))?;
    let mut packed_t = made(&|rows, cols| match transpose {
        true => new_on_gpu(device, dtype_of_result, cols, rows),
        false => Tensor::empty_on(device, &[0], dtype_of_result),
    })?;
    let mut masks = made(&|rows, cols| new_mask(device, rows, cols))?;
    let mut passes = vec![];
    let results = packed.iter_mut().zip(&mut packed_t).zip(&mut masks);
    for ((weight, &(rows, cols)), ((packed, packed_t), mask)) in masters.iter().zip(&shapes).zip(results) {
        let transposed = match transpose {
            true => Some(PackedSliceMut::new(slice_mut(&context, packed_t, "a packed transpose")?, cols, rows)),
            false => None,
        };
        let to = PackTarget {
            packed: Some(PackedSliceMut::new(slice_mut(&context, packed, "a packed weight")?, rows, cols)),
            transposed,
            mask: MaskSlice::new(slice_mut(&context, mask, "a mask")?),
        };
        passes.push((MasterSlice { data: slice(&context, weight, "a weight")?, rows, cols }, to));
    }
    borrowed::remask_together(&context, passes, rule, of)?;
    Ok((List::of(packed)?, List::of(packed_t)?))
}
