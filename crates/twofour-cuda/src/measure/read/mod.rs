//! Reading memory and nothing else: what emptying a cache takes, and the least that a product of few tokens can take.

use crate::{
    Device, DevicePtr, Result, Stream,
    arguments::expect_pointers,
    device::{Kernel, Launch},
    headers,
    source::{File, Source, Support},
};

/// The source.
pub fn source() -> Source {
    let kernel = File::new("measure/read/kernel.cu", include_str!("kernel.cu"));
    Source::new("read".into(), Support::ALL).with([headers::COMMON, kernel])
}

/// The kernel that reads.
#[derive(Debug, Clone)]
pub struct Reader {
    kernel: Kernel,
    blocks: u32,
}

/// As the kernel has it.
#[repr(C)]
struct ReadParameters {
    data: DevicePtr,
    sink: DevicePtr,
    quads: u64,
}

impl Reader {
    /// Loads it.
    ///
    /// # Errors
    /// Those of compiling and loading.
    pub fn new(device: &Device) -> Result<Self> {
        Ok(Self { kernel: device.kernel(&source(), "read_all")?, blocks: 4 * device.multiprocessors() })
    }

    /// Reads so many bytes, down to a multiple of 16. `sink` is four bytes that may be written.
    ///
    /// # Errors
    /// [`crate::Error::Pointer`], [`crate::Error::Driver`].
    ///
    /// # Safety
    /// The pointers are valid for that until the stream has come past this call; the stream is of the device.
    pub unsafe fn read(&self, stream: Stream, data: DevicePtr, bytes: usize, sink: DevicePtr) -> Result<()> {
        expect_pointers(&[("memory to be read", data, 16), ("sink", sink, 4)])?;
        let parameters = ReadParameters { data, sink, quads: bytes as u64 / 16 };
        // SAFETY: the structure has the kernel's layout; its pointers are valid until the stream has passed this call, and the stream is of the device, as this function requires.
        unsafe { self.kernel.launch(stream, Launch::simple((self.blocks, 1), 512), &parameters) }
    }
}
