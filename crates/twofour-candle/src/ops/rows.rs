//! Reading tensors as f32 slices.

use candle_core::{CpuStorage, DType, Layout, Result, Tensor, bail};
pub(crate) use twofour_transformer::cpu::rows::for_each;

/// The f32 elements of a contiguous CPU tensor inside a custom operator.
pub(crate) fn slice<'a>(storage: &'a CpuStorage, layout: &Layout, what: &'static str) -> Result<&'a [f32]> {
    let CpuStorage::F32(data) = storage else {
        bail!("{what}: expected f32, found {:?}", storage_dtype(storage));
    };
    match layout.contiguous_offsets() {
        Some((start, end)) => Ok(&data[start..end]),
        None => bail!("{what}: expected a contiguous tensor, found strides {:?}", layout.stride()),
    }
}

fn storage_dtype(storage: &CpuStorage) -> DType {
    use candle_core::backend::BackendStorage;
    storage.dtype()
}

/// Calls `f` with the f32 elements of a CPU tensor, made contiguous and widened if it is neither.
pub(crate) fn with_slice<R>(tensor: &Tensor, what: &'static str, f: impl FnOnce(&[f32]) -> Result<R>) -> Result<R> {
    let tensor = tensor.to_dtype(DType::F32)?.contiguous()?;
    let (storage, layout) = tensor.storage_and_layout();
    let candle_core::Storage::Cpu(storage) = &*storage else {
        bail!("{what}: this operator runs on the CPU; move the tensor there first");
    };
    f(slice(storage, layout, what)?)
}

/// Like [`with_slice`], for two tensors.
pub(crate) fn with_slices<R>(
    a: &Tensor,
    b: &Tensor,
    what: &'static str,
    f: impl FnOnce(&[f32], &[f32]) -> Result<R>,
) -> Result<R> {
    with_slice(a, what, |a| with_slice(b, what, |b| f(a, b)))
}

/// The operand of an operator that computes in f32: contiguous and widened, both steps recorded for the backward pass.
pub(crate) fn operand(tensor: &Tensor) -> Result<Tensor> {
    tensor.to_dtype(DType::F32)?.contiguous()
}

/// The last dimension of a tensor, which must have one.
pub(crate) fn last_dim(tensor: &Tensor, what: &'static str) -> Result<usize> {
    match tensor.dims().last() {
        Some(&n) => Ok(n),
        None => bail!("{what}: a scalar has no last dimension"),
    }
}
