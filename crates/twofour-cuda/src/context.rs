//! A stream of a device with the state that calls on it share: libraries, plans, kernels and workspace.

use std::{
    collections::HashMap,
    fmt,
    hash::Hash,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DeviceRepr};

use crate::{
    Device, DevicePtr, Error, Result, Stream,
    cublaslt::CublasLt,
    freed::{FreeCount, FreeNote},
    plans::{PlanCache, Plans},
};

/// A stream of a device, with the plans and the workspace of the layers that run on it. Clones share all state, and can
/// be used from several threads. On the driver's per-thread default stream, which is another stream in each thread,
/// each thread has a workspace of its own.
///
/// Every call of a layer launches its work on this stream. Memory passed to a call must have been written by earlier
/// work on the stream, or the stream must wait for that work first.
#[derive(Clone)]
pub struct LayerContext {
    pub(crate) shared: Arc<Shared>,
    stream: Arc<CudaStream>,
    workspaces: Arc<Workspaces>,
}

pub(crate) struct Shared {
    device: Device,
    /// For dense GEMMs; none where it is not installed.
    pub(crate) cublaslt: Option<CublasLt>,
    /// Whether cuBLASLt's algorithms are chosen by timing them.
    pub(crate) times_plans: bool,
    plans: PlanCache,
    freed: FreeCount,
}

impl fmt::Debug for LayerContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stream = self.stream.cu_stream();
        f.debug_struct("LayerContext").field("device", &self.shared.device).field("stream", &stream).finish()
    }
}

/// The workspace of a stream's calls, which run in stream order. Outgrown memory is kept, because captured graphs may
/// use it.
#[derive(Default)]
struct Workspace {
    memory: Option<(CudaSlice<u8>, DevicePtr)>,
    outgrown: Vec<CudaSlice<u8>>,
}

impl Workspace {
    fn bytes(&self) -> usize {
        self.memory.iter().map(|(memory, _)| memory).chain(&self.outgrown).map(CudaSlice::len).sum()
    }
}

/// The workspace of a stream that all threads launch on, and those of threads, for the per-thread default stream.
#[derive(Default)]
struct Workspaces {
    shared: Mutex<Workspace>,
    of_threads: Mutex<HashMap<ThreadId, Workspace>>,
}

impl Workspaces {
    fn of_threads(&self) -> MutexGuard<'_, HashMap<ThreadId, Workspace>> {
        self.of_threads.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A workspace that no other call uses.
enum Held<'a> {
    Locked(MutexGuard<'a, Workspace>),
    /// Taken out of those of threads, and put back when the call has been launched.
    OfThread(Workspace, &'a Workspaces),
}

impl Deref for Held<'_> {
    type Target = Workspace;

    fn deref(&self) -> &Workspace {
        match self {
            Held::Locked(workspace) => workspace,
            Held::OfThread(workspace, _) => workspace,
        }
    }
}

impl DerefMut for Held<'_> {
    fn deref_mut(&mut self) -> &mut Workspace {
        match self {
            Held::Locked(workspace) => workspace,
            Held::OfThread(workspace, _) => workspace,
        }
    }
}

impl Drop for Held<'_> {
    fn drop(&mut self) {
        if let Held::OfThread(workspace, of) = self {
            of.of_threads().insert(thread::current().id(), std::mem::take(workspace));
        }
    }
}

/// The workspace, for the launch of one call.
pub struct Work<'a> {
    context: &'a LayerContext,
    workspace: Held<'a>,
}

impl fmt::Debug for Work<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Work").field("context", self.context).field("bytes", &self.workspace.bytes()).finish()
    }
}

impl Work<'_> {
    /// Returns buffers of these sizes, in bytes, aligned to 256 bytes. They are valid for this call.
    ///
    /// # Errors
    /// Those of allocating memory.
    pub fn parts<const N: usize>(&mut self, bytes: [usize; N]) -> Result<[DevicePtr; N]> {
        let mut total = 0usize;
        let mut offsets = [0u64; N];
        for (offset, bytes) in offsets.iter_mut().zip(bytes) {
            *offset = total as u64;
            total = bytes.checked_next_multiple_of(256).and_then(|bytes| total.checked_add(bytes)).ok_or(TOO_LARGE)?;
        }
        let have = self.workspace.memory.as_ref().map_or(0, |(memory, _)| memory.len());
        if have < total {
            // Twice as much as needed, so that outgrown memory is at most as large as the memory in use.
            let memory = self.context.allocate(total.max(2 * have))?;
            let address = memory.device_ptr(&self.context.stream).0;
            let outgrown = self.workspace.memory.replace((memory, address));
            self.workspace.outgrown.extend(outgrown.map(|(memory, _)| memory));
        }
        let first = self.workspace.memory.as_ref().map_or(0, |(_, address)| *address);
        Ok(offsets.map(|offset| first + offset))
    }
}

/// The handle of the per-thread default stream, `CU_STREAM_PER_THREAD` of the driver's header.
const PER_THREAD_STREAM: usize = 2;

const TOO_LARGE: Error = Error::OutOfMemory { action: "allocating a workspace" };

impl LayerContext {
    /// Returns a context with a new stream. GEMM methods are chosen by the model of the device's time.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn new(device: &Device) -> Result<Self> {
        let stream = device.context().new_stream().map_err(|error| Error::driver("creating a stream", error))?;
        Ok(Self::with(device, stream, true))
    }

    /// Returns a context on an existing stream of the device. GEMM methods are chosen by the model of the device's
    /// time.
    pub fn on_stream(device: &Device, stream: Arc<CudaStream>) -> Self {
        Self::with(device, stream, true)
    }

    /// Returns a context on an existing stream that times nothing: of cuBLASLt's algorithms the library's first choice
    /// is taken, and products with packed weights are sparse, so that results of another process on the same kind of
    /// device, with the same library, are the same to the bit.
    pub fn repeatable(device: &Device, stream: Arc<CudaStream>) -> Self {
        Self::with(device, stream, false)
    }

    fn with(device: &Device, stream: Arc<CudaStream>, times_plans: bool) -> Self {
        let shared = Shared {
            device: device.clone(),
            cublaslt: CublasLt::open(device).ok(),
            times_plans,
            plans: PlanCache::default(),
            freed: FreeCount::default(),
        };
        Self { shared: Arc::new(shared), stream, workspaces: Arc::default() }
    }

    /// Returns a context for another stream of the same device, with the same plans and its own workspace.
    #[must_use]
    pub fn for_stream(&self, stream: Arc<CudaStream>) -> Self {
        Self { shared: self.shared.clone(), stream, workspaces: Arc::default() }
    }

    /// Returns the device.
    pub fn device(&self) -> &Device {
        &self.shared.device
    }

    /// Returns the stream.
    pub fn stream(&self) -> &Arc<CudaStream> {
        &self.stream
    }

    /// Waits until all work on the stream is complete.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn synchronize(&self) -> Result<()> {
        self.stream.synchronize().map_err(|error| Error::driver("waiting for the stream", error))
    }

    /// Returns whether the stream is the driver's per-thread default stream, whose handle names another stream in each
    /// thread.
    pub fn is_per_thread(&self) -> bool {
        self.stream.cu_stream().addr() == PER_THREAD_STREAM
    }

    /// Returns the bytes of the stream's workspace; of the per-thread default stream, those of all threads.
    pub fn workspace_bytes(&self) -> usize {
        let shared = self.workspaces.shared.lock().unwrap_or_else(PoisonError::into_inner).bytes();
        shared + self.workspaces.of_threads().values().map(Workspace::bytes).sum::<usize>()
    }

    pub(crate) fn free_count(&self) -> &FreeCount {
        &self.shared.freed
    }

    /// Returns a note for the owner of device memory, which is dropped before the memory: graphs that were captured
    /// before are then not replayed.
    pub fn free_note(&self) -> FreeNote {
        self.shared.freed.note()
    }

    /// Returns the number of the device.
    pub fn ordinal(&self) -> usize {
        self.shared.device.context().ordinal()
    }

    /// Returns the stream as raw calls take it.
    pub fn raw(&self) -> Stream {
        Stream(self.stream.cu_stream())
    }

    /// Returns the workspace, held until the call has been launched: the kernels of two calls on one stream must not be
    /// interleaved.
    pub fn work(&self) -> Work<'_> {
        let workspaces = &*self.workspaces;
        let workspace = match self.is_per_thread() {
            true => {
                let own = workspaces.of_threads().remove(&thread::current().id());
                Held::OfThread(own.unwrap_or_default(), workspaces)
            }
            false => Held::Locked(workspaces.shared.lock().unwrap_or_else(PoisonError::into_inner)),
        };
        Work { context: self, workspace }
    }

    /// Returns an error while the stream is being captured, for actions that cannot be part of a graph.
    ///
    /// # Errors
    /// [`Error::Capturing`], [`Error::Driver`].
    pub fn expect_not_capturing(&self, action: &'static str) -> Result<()> {
        self.shared.device.expect_not_capturing(self.raw(), action)
    }

    /// Returns zeroed memory, at least 16 bytes.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<CudaSlice<u8>> {
        self.expect_not_capturing("allocating memory")?;
        let allocated = self.stream.alloc_zeros::<u8>(bytes.max(16));
        allocated.map_err(|error| Error::driver("allocating device memory", error))
    }

    /// Returns a copy of memory, which is written in stream order.
    pub(crate) fn copy_of<T: DeviceRepr>(&self, memory: &CudaSlice<T>) -> Result<CudaSlice<T>> {
        self.expect_not_capturing("allocating memory")?;
        self.stream.clone_dtod(memory).map_err(|error| Error::driver("copying device memory", error))
    }

    /// Returns the plans or loaded kernels of a pair of types, which all streams of the context share. A crate
    /// that plans operations of its own keeps the plans here, under types of its own.
    pub fn plans<K: Send + 'static, V: Send + 'static>(&self) -> Arc<Plans<K, V>> {
        self.shared.plans.plans()
    }

    /// Returns the kernels of a key, which the first call loads.
    ///
    /// # Errors
    /// [`Error::Capturing`] where they must be loaded during a capture; those of `load`.
    pub fn kernels<K, V, E>(&self, key: K, load: impl FnOnce(&Device) -> Result<V, E>) -> Result<V, E>
    where
        K: Eq + Hash + Send + 'static,
        V: Clone + Send + 'static,
        E: From<Error>,
    {
        self.plans().of(key, || {
            self.expect_not_capturing("loading kernels")?;
            load(&self.shared.device)
        })
    }
}
