//! Devices, and the kernels that are loaded on them.

use std::{
    ffi::{CString, c_void},
    fmt,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
};

use cudarc::driver::{CudaContext, DriverError, result, sys};

use crate::{
    Architecture, Error, Result, TileScheduler, cache::Cache, compile_time::counted, loader, once_map::OnceMap,
    source::Source,
};

/// An address in device memory.
pub type DevicePtr = u64;

/// A stream of the CUDA driver; null is the default stream.
#[derive(Debug, Clone, Copy)]
pub struct Stream(pub sys::CUstream);

// SAFETY: a stream is a handle that the driver lets any thread use.
unsafe impl Send for Stream {}
// SAFETY: a stream is a handle that the driver lets any thread use.
unsafe impl Sync for Stream {}

impl Stream {
    /// The default stream.
    pub const DEFAULT: Stream = Stream(std::ptr::null_mut());
}

/// Bytes of a device's pool of memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct PooledMemory {
    /// Allocated now.
    pub in_use: usize,
    /// Taken from the device: allocated, and kept for later allocations.
    pub reserved: usize,
}

/// A GPU, with kernels compiled for it. Clones share all state, and can be used from several threads.
#[derive(Clone)]
pub struct Device(Arc<Inner>);

struct Inner {
    context: Arc<CudaContext>,
    architecture: Architecture,
    sms: u32,
    cache: Cache,
    /// Loaded modules, by the names of their sources.
    modules: OnceMap<String, Module>,
    /// Whether the hardware schedules tiles.
    schedules_tiles: AtomicBool,
}

/// A loaded module. It is never unloaded, because its kernels may be running.
#[derive(Clone, Copy)]
struct Module(sys::CUmodule);

// SAFETY: a module is a handle that the driver lets any thread use.
unsafe impl Send for Module {}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Device")
            .field("ordinal", &self.0.context.ordinal())
            .field("architecture", &self.0.architecture)
            .finish()
    }
}

/// A loaded kernel.
#[derive(Clone)]
pub struct Kernel {
    function: sys::CUfunction,
    device: Device,
}

impl fmt::Debug for Kernel {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Kernel").field("device", &self.device).finish()
    }
}

// SAFETY: a function is a handle that the driver lets any thread use.
unsafe impl Send for Kernel {}
// SAFETY: a function is a handle that the driver lets any thread use.
unsafe impl Sync for Kernel {}

impl Device {
    /// Opens device `ordinal`, with the user's cache of kernels.
    ///
    /// # Errors
    /// [`Error::NoDriver`], [`Error::NoDevice`], and [`Error::Unsupported`] below compute capability 8.0.
    pub fn open(ordinal: usize) -> Result<Self> {
        Self::with_cache(ordinal, Cache::of_user())
    }

    /// Opens device `ordinal` with another cache of kernels.
    ///
    /// # Errors
    /// Those of [`Device::open`].
    pub fn with_cache(ordinal: usize, cache: Cache) -> Result<Self> {
        if !loader::is_driver_present() {
            return Err(Error::NoDriver);
        }
        let failed = |error| Error::driver("opening a device", error);
        match result::init() {
            // The driver is installed, but there is no GPU.
            Err(error) if error.0 == sys::CUresult::CUDA_ERROR_NO_DEVICE => {
                return Err(Error::NoDevice { ordinal, count: 0 });
            }
            other => other.map_err(failed)?,
        }
        let count = result::device::get_count().map_err(failed)? as usize;
        if ordinal >= count {
            return Err(Error::NoDevice { ordinal, count });
        }
        let context = CudaContext::new(ordinal).map_err(failed)?;
        // SAFETY: calls take memory by its address, which the tracking of uses by events never sees: their order across
        // streams is that of this crate's own events. With the tracking, the first stream of a context waits for the
        // whole device, and so breaks the capture of a graph in another thread.
        unsafe { context.disable_event_tracking() };
        let attribute = |attribute| context.attribute(attribute).map(|value| value as u32).map_err(failed);
        use sys::CUdevice_attribute as Attribute;
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let sms = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        let architecture = Architecture::of(major, minor)?;
        let (modules, schedules_tiles) = (OnceMap::default(), AtomicBool::new(false));
        Ok(Self(Arc::new(Inner { context, architecture, sms, cache, modules, schedules_tiles })))
    }

    /// Returns the device's architecture.
    pub fn architecture(&self) -> Architecture {
        self.0.architecture
    }

    /// Returns the device's name, as the driver reports it.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn name(&self) -> Result<String> {
        self.0.context.name().map_err(|error| Error::driver("asking for the device's name", error))
    }

    /// Returns the newest CUDA version that the driver supports, as in (13, 0).
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn driver_version(&self) -> Result<(i32, i32)> {
        let mut version = 0;
        // SAFETY: the driver is loaded; the pointer is valid.
        let asked = unsafe { sys::cuDriverGetVersion(&mut version) }.result();
        asked.map_err(|error| Error::driver("asking for the driver's version", error))?;
        Ok((version / 1000, version % 1000 / 10))
    }

    /// Returns the number of SMs.
    pub fn sms(&self) -> u32 {
        self.0.sms
    }

    /// Returns how the tiles of large GEMMs are assigned to CTAs.
    pub fn tile_scheduler(&self) -> TileScheduler {
        match self.0.schedules_tiles.load(Ordering::Relaxed) {
            true => TileScheduler::Hardware,
            false => TileScheduler::Persistent,
        }
    }

    /// Sets how the tiles of large GEMMs are assigned to CTAs, from the next launch on, for all clones of this device.
    /// Results are the same bits. A captured CUDA graph keeps what it was captured with.
    pub fn set_tile_scheduler(&self, scheduler: TileScheduler) {
        self.0.schedules_tiles.store(scheduler == TileScheduler::Hardware, Ordering::Relaxed);
    }

    /// Returns what the pool holds from which this crate's buffers and workspaces are allocated: that of the device's
    /// stream-ordered allocations.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn pooled_memory(&self) -> Result<PooledMemory> {
        use sys::CUmemPool_attribute as Attribute;
        let failed = |error| Error::driver("asking for the memory of a pool", error);
        let pool = self.pool().map_err(failed)?;
        let bytes = |attribute| {
            let mut bytes = 0u64;
            // SAFETY: the pool is the device's, and both attributes are 64-bit numbers, for which there is room.
            let asked = unsafe { sys::cuMemPoolGetAttribute(pool, attribute, (&raw mut bytes).cast()) };
            asked.result().map(|()| bytes as usize).map_err(failed)
        };
        Ok(PooledMemory {
            in_use: bytes(Attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
            reserved: bytes(Attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
        })
    }

    /// Returns the bytes of the device's memory that nothing has taken, without those that the pool keeps.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn free_memory(&self) -> Result<usize> {
        let asked = self.0.context.mem_get_info();
        asked.map(|(free, _)| free).map_err(|error| Error::driver("asking for free memory", error))
    }

    /// Waits for the work of all streams, and gives back to the device what the pool of [`Device::pooled_memory`] holds
    /// and is not allocated. Dropped buffers are freed in the order of their streams, and the pool keeps their memory,
    /// so that free memory is counted rightly only after this. No stream of the device may be capturing a graph: the
    /// driver ends the capture.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn release_pooled_memory(&self) -> Result<()> {
        let failed = |error| Error::driver("giving back the memory of a pool", error);
        self.0.context.synchronize().map_err(failed)?;
        let pool = self.pool().map_err(failed)?;
        // SAFETY: the pool is the device's. Allocated memory stays.
        unsafe { sys::cuMemPoolTrimTo(pool, 0) }.result().map_err(failed)
    }

    /// Keeps in the pool of [`Device::pooled_memory`], for later allocations, what is freed; otherwise every wait for
    /// the device gives it back, and the next allocation takes it anew. [`Device::release_pooled_memory`] gives it back
    /// all the same.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn keep_pooled_memory(&self) -> Result<()> {
        use sys::CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let failed = |error| Error::driver("keeping the memory of a pool", error);
        let (pool, mut bytes) = (self.pool().map_err(failed)?, u64::MAX);
        // SAFETY: the pool is the device's, and the attribute is a 64-bit number.
        unsafe { sys::cuMemPoolSetAttribute(pool, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, (&raw mut bytes).cast()) }
            .result()
            .map_err(failed)
    }

    /// The device's pool of stream-ordered allocations.
    fn pool(&self) -> std::result::Result<sys::CUmemoryPool, DriverError> {
        self.0.context.bind_to_thread()?;
        let mut pool = std::ptr::null_mut();
        // SAFETY: the driver is loaded, the device was opened, and the pointer is valid.
        unsafe { sys::cuDeviceGetMemPool(&mut pool, self.0.context.cu_device()) }.result()?;
        Ok(pool)
    }

    /// Returns the device's primary context, in which memory for the kernels must be allocated.
    pub fn context(&self) -> &Arc<CudaContext> {
        &self.0.context
    }

    /// Returns a kernel of a source. The first call compiles the source or reads it from the cache.
    ///
    /// # Errors
    /// [`Error::NoCompiler`] and others of compiling; [`Error::Driver`].
    pub fn kernel(&self, source: &Source, name: &str) -> Result<Kernel> {
        self.bind()?;
        let module = self.module(source)?;
        let missing = |error| Error::driver("looking up a kernel", error);
        let name = CString::new(name).map_err(|_| Error::Driver {
            action: "looking up a kernel",
            code: "a zero byte in its name".into(),
            text: name.to_owned(),
        })?;
        // SAFETY: the module is loaded in this context.
        let function = unsafe { result::module::get_function(module.0, name) }.map_err(missing)?;
        Ok(Kernel { function, device: self.clone() })
    }

    /// Loads a source's module once. Different sources can be compiled concurrently.
    fn module(&self, source: &Source) -> Result<Module> {
        let load = || {
            let code = self.0.cache.code(source, self.0.architecture)?;
            // SAFETY: the image is a whole cubin: fresh from the compiler, or with the digest that it was kept with.
            let module = unsafe { result::module::load_data(code.as_ptr().cast()) };
            module.map(Module).map_err(|error| Error::driver("loading kernels", error))
        };
        self.0.modules.get_or_try_insert(source.name().to_owned(), || counted(load))
    }

    /// Returns an error while a stream of this device is being captured, for actions that cannot be part of a graph.
    ///
    /// # Errors
    /// [`Error::Capturing`], [`Error::Driver`].
    pub(crate) fn expect_not_capturing(&self, stream: Stream, action: &'static str) -> Result<()> {
        self.bind()?;
        // SAFETY: the caller launches on the stream, so it exists.
        let status = unsafe { result::stream::is_capturing(stream.0) };
        match status.map_err(|error| Error::driver("asking whether the stream is captured", error))? {
            sys::CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE => Ok(()),
            _ => Err(Error::Capturing { action }),
        }
    }

    /// Makes the context current on this thread.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn bind(&self) -> Result<()> {
        self.0.context.bind_to_thread().map_err(|error| Error::driver("entering the device's context", error))
    }
}

impl Kernel {
    /// Returns the device on which it is loaded.
    pub fn device(&self) -> &Device {
        &self.device
    }
}

/// A launch configuration.
#[derive(Debug, Clone, Copy)]
pub struct Launch {
    /// CTAs of the grid.
    pub grid: (u32, u32),
    /// Threads of a CTA.
    pub block: u32,
    /// Bytes of dynamic shared memory of a CTA.
    pub shared: u32,
    /// CTAs of a cluster, which are scheduled together and can access each other's shared memory; 1 without clusters.
    pub cluster: u32,
}

impl Launch {
    /// Returns a configuration without dynamic shared memory and clusters.
    pub fn simple(grid: (u32, u32), block: u32) -> Self {
        Self { grid, block, shared: 0, cluster: 1 }
    }

    /// Returns an error for a configuration that no device of the architecture launches.
    ///
    /// # Errors
    /// [`Error::Launch`].
    pub fn expect_within(self, architecture: Architecture) -> Result<()> {
        let (Launch { grid, block, shared, cluster }, features) = (self, architecture.features());
        let is_within = (1..=MAX_GRID_COLUMNS).contains(&grid.0)
            && (1..=MAX_GRID_ROWS as u32).contains(&grid.1)
            && (1..=MAX_THREADS).contains(&block)
            && shared <= features.shared_bytes
            && (1..=features.cluster).contains(&cluster)
            && grid.0.is_multiple_of(cluster);
        if is_within { Ok(()) } else { Err(Error::Launch { grid, block, shared, cluster, architecture }) }
    }
}

/// Most CTAs along a grid's second axis.
pub const MAX_GRID_ROWS: usize = 65_535;

/// Most CTAs along a grid's first axis.
const MAX_GRID_COLUMNS: u32 = i32::MAX as u32;

/// Most threads of a CTA.
const MAX_THREADS: u32 = 1024;

impl Kernel {
    /// Allows CTAs to use as much dynamic shared memory as the device has; required once for more than 48 KiB.
    ///
    /// The limit is one of the loaded function, which plans share. It is therefore not what one plan needs: a plan for
    /// a smaller problem would lower the limit of another plan.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn allow_shared(&self) -> Result<()> {
        use sys::CUfunction_attribute as Attribute;
        self.device.bind()?;
        let failed = |error| Error::driver("setting the limit of shared memory", error);
        let mut fixed = 0;
        // SAFETY: the function is loaded in this context, and the pointer is valid.
        unsafe { sys::cuFuncGetAttribute(&mut fixed, Attribute::CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, self.function) }
            .result()
            .map_err(failed)?;
        let most = self.device.architecture().features().shared_bytes as i32 - fixed;
        let limit = Attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
        // SAFETY: the function is loaded in this context.
        unsafe { result::function::set_function_attribute(self.function, limit, most) }.map_err(failed)
    }

    /// Returns the CTAs that can be resident on an SM, with `shared` bytes of dynamic shared memory each.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn blocks_per_sm(&self, threads: u32, shared: u32) -> Result<u32> {
        self.device.bind()?;
        let mut blocks = 0;
        // SAFETY: the function is loaded in this context.
        let asked = unsafe {
            sys::cuOccupancyMaxActiveBlocksPerMultiprocessor(
                &mut blocks,
                self.function,
                threads as i32,
                shared as usize,
            )
        };
        asked.result().map_err(|error| Error::driver("asking how many blocks run at once", error))?;
        Ok(blocks.max(1) as u32)
    }

    /// Launches with one parameter, a structure in the kernel's memory layout; neither allocates nor synchronizes.
    ///
    /// # Errors
    /// [`Error::Launch`], [`Error::Driver`].
    ///
    /// # Safety
    /// `parameter` has the memory layout of the kernel's parameter, and its pointers are valid as the kernel requires
    /// until it has run; the stream is of this device.
    pub unsafe fn launch<P>(&self, stream: Stream, launch: Launch, parameter: &P) -> Result<()> {
        launch.expect_within(self.device.architecture())?;
        self.device.bind()?;
        let Launch { grid, block, shared, cluster } = launch;
        let mut parameters = [std::ptr::from_ref(parameter).cast_mut().cast::<c_void>()];
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue {
                clusterDim: sys::CUlaunchAttributeValue_union__bindgen_ty_1 { x: cluster, y: 1, z: 1 },
            },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: grid.0,
            gridDimY: grid.1,
            gridDimZ: 1,
            blockDimX: block,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: shared,
            hStream: stream.0,
            attrs: &mut attribute,
            // Devices before Hopper have no clusters.
            numAttrs: u32::from(cluster > 1),
        };
        // SAFETY: the parameter has the kernel's layout and valid pointers, as this function requires; the driver
        // copies it before it returns.
        let launched =
            unsafe { sys::cuLaunchKernelEx(&config, self.function, parameters.as_mut_ptr(), std::ptr::null_mut()) };
        launched.result().map_err(|error| Error::driver("launching a kernel", error))
    }
}
