//! A kernel that only reads memory. It flushes L2, and its time is the bandwidth limit of memory-bound GEMMs.

use crate::{
    Device, DevicePtr, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    raw::headers,
    source::{File, Source, Support},
};

/// Returns the source.
pub fn source() -> Source {
    let kernel = File::new("compare/read/kernel.cu", include_str!("kernel.cu"));
    Source::new("read".into(), Support::ALL).with([headers::COMMON, kernel])
}

/// The kernel.
#[derive(Debug, Clone)]
pub struct Reader {
    kernel: Kernel,
    blocks: u32,
}

/// The kernel's parameters, in its memory layout.
#[repr(C)]
struct ReadParameters {
    data: DevicePtr,
    sink: DevicePtr,
    quads: u64,
}

impl Reader {
    /// Loads the kernel.
    ///
    /// # Errors
    /// Those of compiling and loading.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { kernel: device.kernel(&source(), "read_all")?, blocks: 4 * device.sms() })
    }

    /// Reads `bytes` bytes, rounded down to a multiple of 16. `sink` is the address of four bytes that may be written.
    ///
    /// # Errors
    /// [`crate::Error::Pointer`], [`crate::Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for these accesses until the stream has passed this call; the stream is of the device.
    pub unsafe fn read(&self, stream: Stream, data: DevicePtr, bytes: usize, sink: DevicePtr) -> Result<()> {
        expect_pointers(&[("memory to be read", data, 16), ("sink", sink, 4)])?;
        let parameters = ReadParameters { data, sink, quads: bytes as u64 / 16 };
        // SAFETY: the structure has the kernel's layout, and pointers and stream are valid as this function requires.
        unsafe { self.kernel.launch(stream, Launch::simple((self.blocks, 1), 512), &parameters) }
    }
}
