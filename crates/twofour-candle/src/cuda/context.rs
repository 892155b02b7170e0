//! The context of each of candle's CUDA devices.

use std::{
    collections::HashMap,
    sync::{Mutex, PoisonError},
};

use candle_core::{CudaDevice, Device, cuda_backend::DeviceId};
use twofour_cuda::layer::LayerContext;

use crate::{Error, Result};

/// The contexts that were asked for. They live as long as the process: a program has few devices, and kernels and plans
/// are worth keeping.
static CONTEXTS: Mutex<Option<HashMap<DeviceId, LayerContext>>> = Mutex::new(None);

/// The context that launches on the stream of a device. Contexts of one GPU share kernels and plans.
///
/// # Errors
/// A GPU before compute capability 8.0; the driver's errors.
pub(crate) fn of(device: &CudaDevice) -> Result<LayerContext> {
    let mut contexts = CONTEXTS.lock().unwrap_or_else(PoisonError::into_inner);
    let contexts = contexts.get_or_insert_default();
    if let Some(context) = contexts.get(&device.id()) {
        return Ok(context.clone());
    }
    let stream = device.cuda_stream();
    let ordinal = stream.context().ordinal();
    let of_gpu = contexts.values().find(|context| context.device().context().ordinal() == ordinal);
    let context = match of_gpu {
        Some(context) => context.for_stream(stream),
        None => LayerContext::on_stream(&twofour_cuda::Device::open(ordinal)?, stream),
    };
    contexts.insert(device.id(), context.clone());
    Ok(context)
}

/// The CUDA device of a tensor.
///
/// # Errors
/// [`Error::Device`] for a tensor elsewhere.
pub(crate) fn device_of<'a>(what: &'static str, device: &'a Device) -> Result<&'a CudaDevice> {
    match device {
        Device::Cuda(device) => Ok(device),
        other => Err(Error::Device { what, found: other.location() }),
    }
}
