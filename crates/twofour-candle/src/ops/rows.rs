//! Cutting a batch of rows into tasks, and reading tensors as f32 slices.

use candle_core::{CpuStorage, DType, Layout, Result, Tensor, Var, bail};
use rayon::prelude::*;

/// Elements of one task: small enough to balance, large enough to pay for the hand-over, and within a first-level cache.
const TASK: usize = 8192;

/// Rows of one task. It depends on the row length alone, so that sums over tasks come out the same on every machine.
pub(crate) fn per_task(columns: usize) -> usize {
    (TASK / columns.max(1)).max(1)
}

/// Calls `f(first_row, rows_of_y)` for every task of `y`'s rows, in parallel.
pub(crate) fn for_each(y: &mut [f32], columns: usize, f: impl Fn(usize, &mut [f32]) + Sync) {
    if columns == 0 {
        return;
    }
    let rows = per_task(columns);
    y.par_chunks_mut(rows * columns).enumerate().for_each(|(task, y)| f(task * rows, y));
}

/// Adds to `sums` (of `width` elements) what `f(first_row, rows_of_y, partial)` adds to `partial` in each task, in the order
/// of the tasks.
pub(crate) fn for_each_summing(
    y: &mut [f32],
    columns: usize,
    sums: &mut [f32],
    f: impl Fn(usize, &mut [f32], &mut [f32]) + Sync,
) {
    if columns == 0 {
        return;
    }
    // A partial sum for each of a bounded number of stretches: a stretch holds many tasks, so its partial is reused.
    let rows = per_task(columns);
    let total = y.len() / columns;
    let stretch = (total.div_ceil(16)).next_multiple_of(rows).max(rows);
    let width = sums.len();
    let partials: Vec<Vec<f32>> = y
        .par_chunks_mut(stretch * columns)
        .enumerate()
        .map(|(index, y)| {
            let mut partial = vec![0f32; width];
            for (task, y) in y.chunks_mut(rows * columns).enumerate() {
                f(index * stretch + task * rows, y, &mut partial);
            }
            partial
        })
        .collect();
    for partial in partials {
        for (sum, value) in sums.iter_mut().zip(partial) {
            *sum += value;
        }
    }
}

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

/// Like [`operand`], and on the tape even if nothing before it is: for operators that hold parameters themselves, whose
/// backward pass would otherwise never run.
pub(crate) fn tracked_operand(tensor: &Tensor) -> Result<Tensor> {
    let tensor = operand(tensor)?;
    if tensor.track_op() { Ok(tensor) } else { Ok(Var::from_tensor(&tensor)?.into_inner()) }
}

/// The last dimension of a tensor, which must have one.
pub(crate) fn last_dim(tensor: &Tensor, what: &'static str) -> Result<usize> {
    match tensor.dims().last() {
        Some(&n) => Ok(n),
        None => bail!("{what}: a scalar has no last dimension"),
    }
}
