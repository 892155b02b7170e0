//! Work that was captured in a CUDA graph, and is replayed.

use std::fmt;

use cudarc::driver::{
    CudaGraph, CudaStream, result,
    sys::{CUgraphInstantiate_flags, CUstreamCaptureMode},
};

use super::LayerContext;
use crate::{Error, Result};

/// Launches of calls of this crate that were captured in a CUDA graph on a context's stream.
///
/// What changes from replay to replay is in device memory: ids, seeds, step numbers, learning rates. All memory must be
/// that of the capture: [`CapturedWork::replay`] returns `false`, and launches nothing, once a
/// [`DeviceBuffer`](super::DeviceBuffer), a layer or a schedule of the device has been dropped since, because the graph
/// may use what they held.
pub struct CapturedWork {
    graph: Option<CudaGraph>,
    context: LayerContext,
    freed: u64,
}

// SAFETY: a graph is used by one thread at a time, because `replay` and dropping require exclusive access, and the
// driver lets any thread use it.
unsafe impl Send for CapturedWork {}

impl fmt::Debug for CapturedWork {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CapturedWork").field("context", &self.context).field("is_empty", &self.graph.is_none()).finish()
    }
}

/// Ends the capture of a stream where that has failed before it reached the driver, so that later calls on the stream
/// are launched.
fn abandon(stream: &CudaStream) {
    // SAFETY: the stream is valid for as long as it is borrowed.
    unsafe {
        if let Ok(graph) = result::stream::end_capture(stream.cu_stream())
            && !graph.is_null()
        {
            let _ = result::graph::destroy(graph);
        }
    }
}

impl CapturedWork {
    /// Captures what `work` launches on the context's stream; nothing runs. `work` must launch nothing on other
    /// streams, must not wait, and must have run before, so that plans, kernels and memory are there.
    ///
    /// # Errors
    /// Those of `work`, such as [`Error::Capturing`]; [`Error::Driver`] where the driver cannot capture a call.
    pub fn capture<E: From<Error>>(context: &LayerContext, work: impl FnOnce() -> Result<(), E>) -> Result<Self, E> {
        let failed = |error| Error::driver("capturing a graph", error);
        let freed = *context.free_count().lock();
        let stream = context.stream();
        stream.begin_capture(CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL).map_err(failed)?;
        let worked = work();
        let graph = stream.end_capture(CUgraphInstantiate_flags(0)).map_err(failed);
        if graph.is_err() {
            abandon(stream);
        }
        worked?;
        Ok(Self { graph: graph?, context: context.clone(), freed })
    }

    /// Launches the work, and returns whether it did: not where memory has been freed since the capture.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn replay(&mut self) -> Result<bool> {
        // Held until the graph is launched: memory that is freed from now on is freed after it, in stream order.
        let freed = self.context.free_count().lock();
        if *freed != self.freed {
            return Ok(false);
        }
        if let Some(graph) = &self.graph {
            graph.launch().map_err(|error| Error::driver("launching a graph", error))?;
        }
        Ok(true)
    }
}
