//! Dense GEMMs of a layer with cuBLASLt: planned once, with the fastest of a few of its algorithms.

use cudarc::driver::{CudaSlice, DevicePtr as _, sys};

use super::LayerContext;
use crate::{
    DataType, DevicePtr, Error, Result,
    cublaslt::{CublasLtPlan, DenseProblem, WORKSPACE_BYTES},
    raw::Packed,
};

/// Most algorithms of the library that are timed.
pub(super) const ALGORITHMS: usize = 4;

/// Rounds of the timing.
const ROUNDS: usize = 5;

/// A dense GEMM and its time, where it was timed.
#[derive(Debug, Clone)]
pub(crate) struct TimedPlan {
    pub(crate) plan: CublasLtPlan,
    pub(crate) us: Option<f64>,
}

/// Launches a dense GEMM, `D = op(A) op(B)`, or nothing if it has no elements.
pub(super) fn dense(
    context: &LayerContext,
    problem: DenseProblem,
    a: DevicePtr,
    b: DevicePtr,
    d: DevicePtr,
) -> Result<()> {
    if problem.rows == 0 || problem.cols == 0 || problem.reduction == 0 {
        return Ok(());
    }
    let TimedPlan { plan, .. } = context.dense(problem)?;
    let mut work = context.work();
    let [workspace] = work.parts([WORKSPACE_BYTES])?;
    // SAFETY: the operands come from slices that have been found to be as long as the problem reads and writes; the
    // stream is of the plan's device.
    unsafe { plan.run(context.raw(), a, b, d, workspace) }
}

/// Returns the problem of [`unpacked_product`]: row-major `[tokens, cols]` is column-major `[cols, tokens]`.
fn unpacked_problem((rows, cols): (usize, usize), dtype: DataType, tokens: usize) -> DenseProblem {
    DenseProblem {
        element: dtype,
        output: dtype,
        rows: cols,
        cols: tokens,
        reduction: rows,
        a_transposed: false,
        b_transposed: false,
        accumulate: false,
    }
}

/// Returns the bytes of the parts of [`unpacked_product`]'s workspace: the dense weight, and the library's own.
pub(super) fn unpacked_bytes((rows, cols): (usize, usize), dtype: DataType) -> [usize; 2] {
    [rows * cols * dtype.bytes(), WORKSPACE_BYTES]
}

/// Plans [`unpacked_product`], and allocates its workspace.
pub(super) fn prepare_unpacked(
    context: &LayerContext,
    (rows, cols): (usize, usize),
    dtype: DataType,
    tokens: usize,
) -> Result<()> {
    context.dense(unpacked_problem((rows, cols), dtype, tokens))?;
    context.unpacker(dtype)?;
    context.work().parts(unpacked_bytes((rows, cols), dtype))?;
    Ok(())
}

/// Launches `dx = dy · W` for `dy` `[tokens, rows]` as a dense GEMM with the packed weight `[rows, cols]`, unpacked
/// into the workspace.
pub(super) fn unpacked_product(
    context: &LayerContext,
    (packed, (rows, cols), dtype): (Packed, (usize, usize), DataType),
    (dy, tokens): (DevicePtr, usize),
    dx: DevicePtr,
) -> Result<()> {
    let problem = unpacked_problem((rows, cols), dtype, tokens);
    if tokens == 0 || rows == 0 || cols == 0 {
        return dense(context, problem, 0, dy, dx);
    }
    let (plan, unpacker) = (context.dense(problem)?.plan, context.unpacker(dtype)?);
    let mut work = context.work();
    let [unpacked, workspace] = work.parts(unpacked_bytes((rows, cols), dtype))?;
    let stream = context.raw();
    // SAFETY: the operands come from slices that have been found to be as long as the weight and the tokens require,
    // the workspace has been allocated for the unpacked weight, and the stream is of their device.
    unsafe {
        unpacker.run(stream, packed, (rows, cols), unpacked)?;
        plan.run(stream, unpacked, dy, dx, workspace)
    }
}

/// Returns the fastest of several plans for a problem, once or several times, by medians of interleaved launches on
/// random numbers. This also loads the library's kernels, which is impossible while a stream is being captured. Returns
/// the first plan, without a time, where there is no memory for the trial, and where the context times nothing.
pub(super) fn fastest(
    context: &LayerContext,
    (problem, batches): (DenseProblem, usize),
    plans: Vec<CublasLtPlan>,
) -> Result<Option<TimedPlan>> {
    let bytes =
        |rows: usize, cols: usize, size: usize| rows.saturating_mul(cols).saturating_mul(size).saturating_mul(batches);
    let DenseProblem { element, output, rows, cols, reduction, .. } = problem;
    let operands = [rows.saturating_mul(reduction), reduction.saturating_mul(cols)].map(|n| n.saturating_mul(batches));
    let sizes = [
        bytes(rows, reduction, element.bytes()),
        bytes(reduction, cols, element.bytes()),
        bytes(rows, cols, output.bytes()),
        WORKSPACE_BYTES,
    ];
    let memory: Result<Vec<CudaSlice<u8>>> = sizes.into_iter().map(|bytes| context.allocate(bytes)).collect();
    let memory = match memory {
        Err(Error::OutOfMemory { .. }) => {
            return Ok(plans.into_iter().next().map(|plan| TimedPlan { plan, us: None }));
        }
        memory => memory?,
    };
    let at: Vec<DevicePtr> = memory.iter().map(|memory| memory.device_ptr(context.stream()).0).collect();
    // Integers stay zeros.
    for (at, count) in at.iter().zip(operands).filter(|_| element.bytes() > 1) {
        // SAFETY: the memory was allocated above, and the stream is of its device.
        unsafe { context.elementwise(element)?.fill(context.raw(), *at, count) }?;
    }
    // SAFETY: the memory was allocated above for the problem, and the stream is of its device.
    let run = |plan: &CublasLtPlan| unsafe { plan.run(context.raw(), at[0], at[1], at[2], at[3]) };
    // An algorithm that the library lists but does not run is skipped.
    let plans: Vec<CublasLtPlan> = plans.into_iter().filter(|plan| run(plan).is_ok()).collect();
    if !context.shared.times_plans {
        return Ok(plans.into_iter().next().map(|plan| TimedPlan { plan, us: None }));
    }
    let launches: Vec<_> = plans.iter().map(|plan| move || run(plan)).collect();
    let launches: Vec<&dyn Fn() -> Result<()>> = launches.iter().map(|launch| launch as _).collect();
    let times = interleaved_times(context, &launches)?;
    let timed = plans.into_iter().zip(times).map(|(plan, us)| TimedPlan { plan, us: Some(us) });
    Ok(timed.min_by(|a, b| a.us.unwrap_or(f64::MAX).total_cmp(&b.us.unwrap_or(f64::MAX))))
}

/// Returns the median time of each launch, in microseconds. Rounds are interleaved.
pub(super) fn interleaved_times(context: &LayerContext, launches: &[&dyn Fn() -> Result<()>]) -> Result<Vec<f64>> {
    let mut times = vec![[0.0; ROUNDS]; launches.len()];
    for round in 0..ROUNDS {
        for (launch, times) in launches.iter().zip(&mut times) {
            times[round] = time(context, launch)?;
        }
    }
    Ok(times.into_iter().map(median).collect())
}

/// Returns the median of a few times of a launch, in microseconds, after one launch that is not timed.
pub(super) fn median_time(context: &LayerContext, mut launch: impl FnMut() -> Result<()>) -> Result<f64> {
    launch()?;
    let mut times = [0.0; ROUNDS];
    for us in &mut times {
        *us = time(context, &mut launch)?;
    }
    Ok(median(times))
}

fn median(mut times: [f64; ROUNDS]) -> f64 {
    times.sort_by(f64::total_cmp);
    times[ROUNDS / 2]
}

/// Returns the microseconds of a launch on the device.
fn time(context: &LayerContext, launch: impl FnOnce() -> Result<()>) -> Result<f64> {
    let failed = |error| Error::driver("timing a GEMM", error);
    let event = || context.stream().record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed);
    let begin = event()?;
    launch()?;
    Ok(f64::from(begin.elapsed_ms(&event()?).map_err(failed)?) * 1e3)
}
