//! Devices, and the context of each of torch's streams.

use std::{
    cell::RefCell,
    collections::HashMap,
    ffi::{OsStr, c_void},
    ptr,
    sync::{Mutex, OnceLock, PoisonError},
};

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};
use twofour_cuda::{Device, TileScheduler, layer::LayerContext};

use crate::torch::{Failure, Result, Tensor, shim::NOLOAD};

/// `aoti_torch_get_current_cuda_stream` of libtorch_cuda.
type CurrentStream = unsafe extern "C-unwind" fn(i32, *mut *mut c_void) -> i32;

static CURRENT_STREAM: OnceLock<CurrentStream> = OnceLock::new();

/// Finds what CUDA tensors need in the libtorch_cuda that the process has loaded.
///
/// # Errors
/// The loader's.
pub(crate) fn load(libtorch_cuda: &OsStr) -> std::result::Result<(), libloading::Error> {
    // SAFETY: `RTLD_NOLOAD` runs no initializer: the library is loaded already.
    let library = unsafe { Library::open(Some(libtorch_cuda), RTLD_NOW | RTLD_LOCAL | NOLOAD) }?;
    // SAFETY: torch's stable header declares the function with this signature.
    let function: CurrentStream = *unsafe { library.get(b"aoti_torch_get_current_cuda_stream\0") }?;
    std::mem::forget(library);
    let _ = CURRENT_STREAM.set(function);
    Ok(())
}

thread_local! {
    /// The contexts that this thread has used: a few, looked up without a lock.
    static CONTEXTS: RefCell<Vec<((i32, usize), LayerContext)>> = const { RefCell::new(Vec::new()) };
}

/// The contexts of all streams, so that threads share a stream's workspace and plans.
static SHARED: Mutex<Option<HashMap<(i32, usize), LayerContext>>> = Mutex::new(None);

/// The tile scheduler of devices that are opened from now on.
static SCHEDULER: Mutex<TileScheduler> = Mutex::new(TileScheduler::Persistent);

/// Sets the tile scheduler of all devices.
pub(crate) fn set_tile_scheduler(scheduler: TileScheduler) {
    // Held until the end: a device that another thread opens meanwhile has the new one, too.
    let shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    *SCHEDULER.lock().unwrap_or_else(PoisonError::into_inner) = scheduler;
    for context in shared.iter().flat_map(HashMap::values) {
        context.device().set_tile_scheduler(scheduler);
    }
}

/// The context of torch's current stream on a tensor's device.
///
/// # Errors
/// A `RuntimeError` where the device cannot be opened: no driver, or a GPU before Ampere.
pub(crate) fn of(tensor: &Tensor) -> Result<LayerContext> {
    let index = tensor.device().index;
    let Some(current_stream) = CURRENT_STREAM.get() else {
        return Err(Failure::runtime("this torch has no libtorch_cuda: install a torch built for CUDA"));
    };
    let mut stream = ptr::null_mut();
    // SAFETY: the function stores a pointer.
    let status = unsafe { current_stream(index, &mut stream) };
    if status != 0 {
        return Err(Failure::runtime(format!("torch has no current stream on cuda:{index}")));
    }
    let key = (index, stream.addr());
    let known = CONTEXTS.with_borrow(|known| known.iter().find(|(k, _)| *k == key).map(|(_, c)| c.clone()));
    if let Some(context) = known {
        return Ok(context);
    }
    let context = shared(key, stream)?;
    CONTEXTS.with_borrow_mut(|known| known.push((key, context.clone())));
    Ok(context)
}

fn shared(key: (i32, usize), stream: *mut c_void) -> Result<LayerContext> {
    let mut shared = SHARED.lock().unwrap_or_else(PoisonError::into_inner);
    let contexts = shared.get_or_insert_default();
    if let Some(context) = contexts.get(&key) {
        return Ok(context.clone());
    }
    let of_device = contexts.iter().find(|((index, _), _)| *index == key.0).map(|(_, context)| context.clone());
    let device = match &of_device {
        Some(context) => context.device().clone(),
        None => {
            let device = Device::open(key.0 as usize)?;
            device.set_tile_scheduler(*SCHEDULER.lock().unwrap_or_else(PoisonError::into_inner));
            device
        }
    };
    // SAFETY: torch's streams live as long as the process; this context never destroys a borrowed stream.
    let stream = unsafe { device.context().wrap_borrowed_stream(stream.cast()) };
    let context = match of_device {
        Some(context) => context.for_stream(stream),
        None => LayerContext::on_stream(&device, stream),
    };
    contexts.insert(key, context.clone());
    Ok(context)
}
