//! Dense GEMMs of a layer with cuBLASLt: planned once, with the fastest of a few of its algorithms.

use cudarc::driver::{CudaSlice, DevicePtr as _, result, sys};

use super::LayerContext;
use crate::{
    DevicePtr, Error, Result,
    libraries::cublaslt::{CublasLtPlan, DenseProblem, WORKSPACE_BYTES},
};

/// Most algorithms of the library that are timed.
pub(super) const ALGORITHMS: usize = 4;

/// Timed launches of each algorithm.
const RUNS: u32 = 3;

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
    let plan = context.dense(problem)?;
    let mut work = context.work();
    let [workspace] = work.parts([WORKSPACE_BYTES])?;
    // SAFETY: the layer's slices have been found to be as long as the problem reads and writes; the stream is of the plan's device.
    unsafe { plan.run(context.raw(), a, b, d, workspace) }
}

/// Returns the fastest of several plans for a problem: each runs a few times on constant numbers. This also loads the library's kernels, which is
/// impossible while a stream is being captured. Returns the first plan where there is no memory for the trial.
pub(super) fn fastest(
    context: &LayerContext,
    problem: DenseProblem,
    plans: Vec<CublasLtPlan>,
) -> Result<Option<CublasLtPlan>> {
    let bytes = |rows: usize, cols: usize, size: usize| rows.saturating_mul(cols).saturating_mul(size);
    let DenseProblem { element, output, rows, cols, reduction, .. } = problem;
    let sizes = [
        bytes(rows, reduction, element.bytes()),
        bytes(reduction, cols, element.bytes()),
        bytes(rows, cols, output.bytes()),
        WORKSPACE_BYTES,
    ];
    let memory: Result<Vec<CudaSlice<u8>>> = sizes.into_iter().map(|bytes| context.allocate(bytes)).collect();
    let memory = match memory {
        Err(Error::OutOfMemory { .. }) => return Ok(plans.into_iter().next()),
        memory => memory?,
    };
    let stream = context.stream();
    let at: Vec<DevicePtr> = memory.iter().map(|memory| memory.device_ptr(stream).0).collect();
    for (at, bytes) in at.iter().zip(sizes).take(2) {
        // Small numbers in every data type: time depends on the numbers' bits.
        // SAFETY: the memory was allocated above, and the stream is of its device.
        let set = unsafe { result::memset_d8_async(*at, 0x2D, bytes, stream.cu_stream()) };
        set.map_err(|error| Error::driver("filling memory", error))?;
    }
    let mut best: Option<(f32, CublasLtPlan)> = None;
    for plan in plans {
        // SAFETY: the memory was allocated above for the problem, and the stream is of its device.
        let run = || unsafe { plan.run(context.raw(), at[0], at[1], at[2], at[3]) };
        // An algorithm that the library lists but does not run is skipped.
        if run().is_err() {
            continue;
        }
        let timed = |error| Error::driver("timing a dense GEMM", error);
        let event = || stream.record_event(Some(sys::CUevent_flags::CU_EVENT_DEFAULT)).map_err(timed);
        let begin = event()?;
        for _ in 0..RUNS {
            run()?;
        }
        let time = begin.elapsed_ms(&event()?).map_err(timed)?;
        if best.as_ref().is_none_or(|(least, _)| time < *least) {
            best = Some((time, plan));
        }
    }
    Ok(best.map(|(_, plan)| plan))
}
