//! The shared state of the layers of one device: libraries, planned GEMMs, kernels and workspace.

use std::{
    collections::HashMap,
    fmt,
    hash::Hash,
    ops::{Deref, DerefMut},
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    thread::{self, ThreadId},
};

use cudarc::driver::{CudaSlice, CudaStream, DevicePtr as _, DeviceRepr, result, sys};

use super::{
    captured::{FreeCount, FreeNote},
    dense::TimedPlan,
};
use crate::{
    DataType, Device, DevicePtr, Error, Result, Stream,
    decode::DecodeKernels,
    libraries::{
        Libraries,
        cublaslt::{CublasLtPlan, DenseEpilogue, DenseProblem},
    },
    problem::{GemmProblem, Int4Problem},
    raw::{
        column_sums::ColumnSums,
        compress::Compressor,
        elementwise::Elementwise,
        estimate::DenseEstimator,
        flips::Flips,
        gemm::{Gemm, copies::Copies, int4::Int4Gemm},
        prune::Pruner,
        quantize::Quantizer,
        unpack::Unpacker,
    },
    transformer::TransformerKernels,
};

/// A stream of a device, with the plans and the workspace of the layers that run on it. Clones share all state, and can be used from several threads.
/// On the driver's per-thread default stream, which is another stream in each thread, each thread has a workspace of its own.
///
/// Every call of a layer launches its work on this stream. Memory passed to a call must have been written by earlier work on the stream, or the
/// stream must wait for that work first.
#[derive(Clone)]
pub struct LayerContext {
    pub(super) shared: Arc<Shared>,
    stream: Arc<CudaStream>,
    workspaces: Arc<Workspaces>,
}

pub(super) struct Shared {
    device: Device,
    pub(super) libraries: Libraries,
    /// Whether cuBLASLt's algorithms are chosen by timing them.
    pub(super) times_plans: bool,
    gemms: Plans<GemmProblem, Gemm>,
    pub(super) dense: Plans<DenseProblem, TimedPlan>,
    pub(super) bias_gradients: Plans<(DenseProblem, DevicePtr), Option<CublasLtPlan>>,
    pub(super) batched: Plans<(DenseProblem, usize), TimedPlan>,
    pub(super) epilogues: Plans<(DenseProblem, DenseEpilogue, (DevicePtr, DevicePtr)), TimedPlan>,
    pruners: Plans<(DataType, DataType), Pruner>,
    compressors: Plans<(DataType, DataType), Compressor>,
    unpackers: Plans<DataType, Unpacker>,
    estimators: Plans<DataType, DenseEstimator>,
    elementwise: Plans<DataType, Elementwise>,
    column_sums: Plans<DataType, ColumnSums>,
    quantizers: Plans<DataType, Quantizer>,
    int4: Plans<Int4Problem, Int4Gemm>,
    copies: Plans<(), Copies>,
    flips: Plans<(), Flips>,
    freed: FreeCount,
    transformer: TransformerKernels,
    decode: DecodeKernels,
}

impl fmt::Debug for LayerContext {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stream = self.stream.cu_stream();
        f.debug_struct("LayerContext").field("device", &self.shared.device).field("stream", &stream).finish()
    }
}

/// Plans and loaded kernels, by problem.
pub(crate) struct Plans<K, V>(Mutex<HashMap<K, V>>);

impl<K, V> Default for Plans<K, V> {
    fn default() -> Self {
        Self(Mutex::default())
    }
}

impl<K: Eq + Hash, V: Clone> Plans<K, V> {
    /// Returns the cached value, or else the result of `plan`. Two threads may plan the same concurrently; either plan is valid.
    pub(crate) fn of(&self, key: K, plan: impl FnOnce() -> Result<V>) -> Result<V> {
        if let Some(found) = self.lock().get(&key) {
            return Ok(found.clone());
        }
        let planned = plan()?;
        self.lock().insert(key, planned.clone());
        Ok(planned)
    }

    fn lock(&self) -> MutexGuard<'_, HashMap<K, V>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The workspace of a stream's calls, which run in stream order. Outgrown memory is kept, because captured graphs may use it.
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
pub(crate) struct Work<'a> {
    context: &'a LayerContext,
    workspace: Held<'a>,
}

impl Work<'_> {
    /// Returns buffers of these sizes, in bytes, aligned to 256 bytes. They are valid for this call.
    pub(crate) fn parts<const N: usize>(&mut self, bytes: [usize; N]) -> Result<[DevicePtr; N]> {
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

    /// Returns a context on an existing stream of the device. GEMM methods are chosen by the model of the device's time.
    pub fn on_stream(device: &Device, stream: Arc<CudaStream>) -> Self {
        Self::with(device, stream, true)
    }

    /// Returns a context on an existing stream that times nothing: of cuBLASLt's algorithms the library's first choice is taken, so that results of another
    /// process on the same kind of device, with the same library, are the same to the bit.
    pub fn repeatable(device: &Device, stream: Arc<CudaStream>) -> Self {
        Self::with(device, stream, false)
    }

    fn with(device: &Device, stream: Arc<CudaStream>, times_plans: bool) -> Self {
        let shared = Shared {
            device: device.clone(),
            libraries: Libraries::found(device),
            times_plans,
            gemms: Plans::default(),
            dense: Plans::default(),
            bias_gradients: Plans::default(),
            batched: Plans::default(),
            epilogues: Plans::default(),
            pruners: Plans::default(),
            compressors: Plans::default(),
            unpackers: Plans::default(),
            estimators: Plans::default(),
            elementwise: Plans::default(),
            column_sums: Plans::default(),
            quantizers: Plans::default(),
            int4: Plans::default(),
            copies: Plans::default(),
            flips: Plans::default(),
            freed: FreeCount::default(),
            transformer: TransformerKernels::default(),
            decode: DecodeKernels::default(),
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

    /// Returns whether the stream is the driver's per-thread default stream, whose handle names another stream in each thread.
    pub fn is_per_thread(&self) -> bool {
        self.stream.cu_stream().addr() == PER_THREAD_STREAM
    }

    /// Returns the bytes of the stream's workspace; of the per-thread default stream, those of all threads.
    pub fn workspace_bytes(&self) -> usize {
        let shared = self.workspaces.shared.lock().unwrap_or_else(PoisonError::into_inner).bytes();
        shared + self.workspaces.of_threads().values().map(Workspace::bytes).sum::<usize>()
    }

    pub(super) fn free_count(&self) -> &FreeCount {
        &self.shared.freed
    }

    /// Returns a note for the owner of device memory, which is dropped before the memory: graphs that were captured before are then not replayed.
    pub(crate) fn free_note(&self) -> FreeNote {
        self.shared.freed.note()
    }

    pub(crate) fn ordinal(&self) -> usize {
        self.shared.device.context().ordinal()
    }

    pub(crate) fn raw(&self) -> Stream {
        Stream(self.stream.cu_stream())
    }

    /// Returns the workspace, held until the call has been launched: the kernels of two calls on one stream must not be interleaved.
    pub(crate) fn work(&self) -> Work<'_> {
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
    pub(crate) fn expect_not_capturing(&self, action: &'static str) -> Result<()> {
        self.shared.device.bind()?;
        // SAFETY: the stream is valid for as long as this context holds it.
        let status = unsafe { result::stream::is_capturing(self.stream.cu_stream()) };
        match status.map_err(|error| Error::driver("asking whether the stream is captured", error))? {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
            _ => Err(Error::Capturing { action }),
        }
    }

    /// Returns zeroed memory, at least 16 bytes.
    pub(crate) fn allocate(&self, bytes: usize) -> Result<CudaSlice<u8>> {
        self.expect_not_capturing("allocating memory")?;
        let allocated = self.stream.alloc_zeros::<u8>(bytes.max(16));
        allocated.map_err(|error| Error::driver("allocating device memory", error))
    }

    /// Returns a copy of memory, which is written in stream order.
    pub(super) fn copy_of<T: DeviceRepr>(&self, memory: &CudaSlice<T>) -> Result<CudaSlice<T>> {
        self.expect_not_capturing("allocating memory")?;
        self.stream.clone_dtod(memory).map_err(|error| Error::driver("copying device memory", error))
    }

    /// Returns the GEMM for a problem.
    pub(super) fn gemm(&self, problem: GemmProblem) -> Result<Gemm> {
        self.shared.gemms.of(problem, || {
            self.expect_not_capturing("planning a GEMM")?;
            Gemm::new(&self.shared.device, problem)
        })
    }

    pub(super) fn pruner(&self, input: DataType, output: DataType) -> Result<Pruner> {
        self.shared.pruners.of((input, output), || self.load(|device| Pruner::new(device, input, output)))
    }

    pub(super) fn compressor(&self, input: DataType, output: DataType) -> Result<Compressor> {
        let load = || self.load(|device| Compressor::new(device, input, output));
        self.shared.compressors.of((input, output), load)
    }

    pub(super) fn unpacker(&self, dtype: DataType) -> Result<Unpacker> {
        self.shared.unpackers.of(dtype, || self.load(|device| Unpacker::new(device, dtype)))
    }

    pub(super) fn estimator(&self, dtype: DataType) -> Result<DenseEstimator> {
        self.shared.estimators.of(dtype, || self.load(|device| DenseEstimator::new(device, dtype)))
    }

    pub(crate) fn elementwise(&self, dtype: DataType) -> Result<Elementwise> {
        self.shared.elementwise.of(dtype, || self.load(|device| Elementwise::new(device, dtype)))
    }

    pub(crate) fn column_sums(&self, dtype: DataType) -> Result<ColumnSums> {
        self.shared.column_sums.of(dtype, || self.load(|device| ColumnSums::new(device, dtype)))
    }

    pub(crate) fn quantizer(&self, dtype: DataType) -> Result<Quantizer> {
        self.shared.quantizers.of(dtype, || self.load(|device| Quantizer::new(device, dtype)))
    }

    /// Returns the GEMM with an int4 weight for a problem.
    pub(super) fn int4(&self, problem: Int4Problem) -> Result<Int4Gemm> {
        self.shared.int4.of(problem, || self.load(|device| Int4Gemm::new(device, problem)))
    }

    /// Returns the kernels of [`crate::transformer`].
    pub(crate) fn transformer(&self) -> &TransformerKernels {
        &self.shared.transformer
    }

    /// Returns the kernels of [`crate::decode`].
    pub(crate) fn decode_kernels(&self) -> &DecodeKernels {
        &self.shared.decode
    }

    /// Returns the kernels that copy rows.
    pub(super) fn copies(&self) -> Result<Copies> {
        self.shared.copies.of((), || self.load(Copies::new))
    }

    /// Returns the kernel that reads the flips of several layers.
    pub(crate) fn flip_counters(&self) -> Result<Flips> {
        self.shared.flips.of((), || self.load(Flips::new))
    }

    /// Loads kernels, which is impossible during a capture.
    pub(crate) fn load<T>(&self, load: impl FnOnce(&Device) -> Result<T>) -> Result<T> {
        self.expect_not_capturing("loading kernels")?;
        load(&self.shared.device)
    }
}
