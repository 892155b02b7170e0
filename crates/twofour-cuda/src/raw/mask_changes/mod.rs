//! The counters of mask changes of several layers, in one array.

use crate::{
    Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::headers,
    source::{File, Source, Support},
};

/// Layers of a launch.
const LAYERS: usize = 128;

/// The kernel on one device.
#[derive(Debug, Clone)]
pub(crate) struct MaskChanges {
    gather: Kernel,
}

/// The kernel's parameters, in its memory layout.
#[repr(C)]
struct MaskChangesParameters {
    counters: [DevicePtr; LAYERS],
    out: DevicePtr,
    count: u32,
}

/// Returns the source.
pub(crate) fn source() -> Source {
    let kernel = File::new("mask_changes/kernel.cu", include_str!("kernel.cu"));
    Source::new("mask_changes".into(), Support::ALL).with([headers::COMMON, kernel])
}

impl MaskChanges {
    /// Loads the kernel.
    pub(crate) fn new(device: &Device) -> Result<Self> {
        Ok(Self { gather: device.kernel(&source(), "gather")? })
    }

    /// Launches the reading of counters, addresses of u64s, to as many u64s from `out` on.
    ///
    /// # Safety
    /// The pointers are valid, and `out` has room for a u64 for each counter, until the stream has passed this call;
    /// the stream is of this device.
    pub(crate) unsafe fn gather(&self, stream: Stream, counters: &[DevicePtr], out: DevicePtr) -> Result<()> {
        for (chunk, some) in counters.chunks(LAYERS).enumerate() {
            let out = out + 8 * (chunk * LAYERS) as u64;
            let mut parameters = MaskChangesParameters { counters: [0; LAYERS], out, count: some.len() as u32 };
            parameters.counters[..some.len()].copy_from_slice(some);
            // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
            unsafe { self.gather.launch(stream, Launch::simple((1, 1), LAYERS as u32), &parameters) }?;
        }
        Ok(())
    }
}
