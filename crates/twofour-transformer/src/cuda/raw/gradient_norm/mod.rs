//! The norm of several f32 buffers, and the factor that clips it.

use twofour_cuda::{
    Device, DevicePtr, Result, Stream,
    device::{Kernel, Launch},
    raw::{grid::BLOCK, headers},
    source::{File, Source, Support},
};

/// Buffers of a launch.
const BUFFERS: usize = 64;

/// Parts of a buffer.
const PARTS: usize = 64;

/// The kernels on one device.
#[derive(Debug, Clone)]
pub(crate) struct GradientNorm {
    squares: Kernel,
    clip: Kernel,
}

/// The parameters of the kernel that sums squares, in its memory layout.
#[repr(C)]
struct SquaresParameters {
    buffers: [DevicePtr; BUFFERS],
    counts: [u64; BUFFERS],
    partial: DevicePtr,
}

/// The parameters of the kernel that computes the factor, in its memory layout; `kernel.cu` says what each is.
#[repr(C)]
pub(crate) struct ClipParameters {
    pub(crate) partial: DevicePtr,
    pub(crate) loss_scale: DevicePtr,
    pub(crate) loss: DevicePtr,
    pub(crate) norm: DevicePtr,
    pub(crate) scale: DevicePtr,
    pub(crate) non_finite: DevicePtr,
    pub(crate) count: u32,
    pub(crate) clip: f32,
    pub(crate) host_scale: f32,
}

/// Returns the source.
pub(crate) fn source() -> Source {
    let kernel = File::new("gradient_norm/kernel.cu", include_str!("kernel.cu"));
    Source::new("gradient-norm".into(), Support::ALL).with([headers::COMMON, kernel])
}

impl GradientNorm {
    /// Loads the kernels.
    pub(crate) fn new(device: &Device) -> Result<Self> {
        let source = source();
        Ok(Self { squares: device.kernel(&source, "squares")?, clip: device.kernel(&source, "clip")? })
    }

    /// Returns the bytes of partial sums for this many buffers.
    pub(crate) fn partial_bytes(buffers: usize) -> usize {
        buffers * PARTS * 8
    }

    /// Launches the sums of squares of buffers, addresses and lengths, and the factor from them.
    ///
    /// # Safety
    /// The pointers are valid, and `partial` has room for [`GradientNorm::partial_bytes`], until the stream has passed
    /// this call; the stream is of this device.
    pub(crate) unsafe fn run(
        &self,
        stream: Stream,
        buffers: &[(DevicePtr, usize)],
        mut parameters: ClipParameters,
    ) -> Result<()> {
        let mut partial = parameters.partial;
        for some in buffers.chunks(BUFFERS) {
            let mut squares = SquaresParameters { buffers: [0; BUFFERS], counts: [0; BUFFERS], partial };
            for (i, (address, count)) in some.iter().enumerate() {
                (squares.buffers[i], squares.counts[i]) = (*address, *count as u64);
            }
            let launch = Launch::simple((PARTS as u32, some.len() as u32), BLOCK);
            // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
            unsafe { self.squares.launch(stream, launch, &squares) }?;
            partial += Self::partial_bytes(some.len()) as u64;
        }
        parameters.count = (buffers.len() * PARTS) as u32;
        // SAFETY: the structure has the kernel's layout, and its pointers are valid, as this function requires.
        unsafe { self.clip.launch(stream, Launch::simple((1, 1), BLOCK), &parameters) }
    }
}
