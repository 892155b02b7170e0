//! NCCL: sums over several GPUs of one machine.
//!
//! | item | |
//! |---|---|
//! | [`Communicator`] | one GPU's part in a group of them |
//! | [`StreamedSums`] | sums over the group on a stream of their own, beside the work of another stream |
//!
//! The library is searched in the folder that `TWOFOUR_NCCL` names, by the system's loader, in a CUDA toolkit and in
//! Python packages (`nvidia-nccl`).

mod error;
mod functions;
mod sums;

use std::{
    fmt, ptr,
    sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError},
    thread,
    time::{Duration, Instant},
};

use functions::{Handle, Nccl};

use crate::{DataType, Device, Result, context::LayerContext, memory::DeviceBuffer};

pub use error::NcclError;
pub use sums::StreamedSums;

/// Elements of the sums that establish the connections between GPUs: few, and enough for the way that large buffers
/// take.
const FIRST_SUMS: [usize; 2] = [1, 8 << 20];

/// How long [`Communicator::abort`] waits for a call of another thread.
const ABORT_PATIENCE: Duration = Duration::from_secs(20);

/// Returns the version of the installed library, as in (2, 27, 3).
///
/// # Errors
/// [`NcclError::Missing`] with the places that were searched.
pub fn version() -> Result<(i32, i32, i32)> {
    Ok(Nccl::find()?.version())
}

/// One GPU's part in a group of GPUs. Clones share all state. It is destroyed with its last clone; work that is not
/// complete is aborted then.
#[derive(Clone)]
pub struct Communicator(Arc<Inner>);

struct Inner {
    nccl: &'static Nccl,
    device: Device,
    rank: usize,
    ranks: usize,
    /// `None` once aborted.
    handle: Mutex<Option<Owned>>,
}

/// The library's communicator.
struct Owned(Handle);

// SAFETY: the library lets any thread use a communicator, one at a time; the mutex sees to that.
unsafe impl Send for Owned {}

impl fmt::Debug for Communicator {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Inner { device, rank, ranks, .. } = &*self.0;
        f.debug_struct("Communicator").field("device", device).field("rank", rank).field("ranks", ranks).finish()
    }
}

impl Communicator {
    /// Creates the communicators of a group of GPUs, in the order of the devices, and connects them: no later call
    /// establishes a connection, so none waits for another rank on the host.
    ///
    /// # Errors
    /// [`NcclError::Missing`]; [`NcclError::Call`] for a device that is named twice, or GPUs that cannot reach each
    /// other; those of allocating memory.
    pub fn of_devices(devices: &[Device]) -> Result<Vec<Self>> {
        let nccl = Nccl::find()?;
        let ordinals: Vec<i32> = devices.iter().map(|device| device.context().ordinal() as i32).collect();
        let mut handles = vec![ptr::null_mut(); devices.len()];
        // SAFETY: there is room for as many communicators as there are devices.
        let created = unsafe { (nccl.create_all)(handles.as_mut_ptr(), ordinals.len() as i32, ordinals.as_ptr()) };
        nccl.expect("creating communicators of several GPUs", created)?;
        let of = |(rank, (device, handle)): (usize, (&Device, Handle))| {
            let handle = Mutex::new(Some(Owned(handle)));
            Communicator(Arc::new(Inner { nccl, device: device.clone(), rank, ranks: devices.len(), handle }))
        };
        let communicators: Vec<Self> = devices.iter().zip(handles).enumerate().map(of).collect();
        FIRST_SUMS.iter().try_for_each(|len| connect(nccl, &communicators, *len))?;
        Ok(communicators)
    }

    /// Returns the place of its GPU in the group.
    pub fn rank(&self) -> usize {
        self.0.rank
    }

    /// Returns the number of GPUs in the group.
    pub fn ranks(&self) -> usize {
        self.0.ranks
    }

    /// Returns the GPU.
    pub fn device(&self) -> &Device {
        &self.0.device
    }

    /// Aborts the communicator's work, so that streams which wait for another GPU go on, with unspecified sums. For a
    /// thread other than the one that waits, when a rank has failed. Later sums are errors. A call that another thread
    /// is in may take up to 20 s; it is left alone after that.
    pub fn abort(&self) {
        let begun = Instant::now();
        loop {
            match self.0.handle.try_lock() {
                Ok(mut handle) => return self.0.destroy(&mut handle),
                Err(TryLockError::Poisoned(poisoned)) => return self.0.destroy(&mut poisoned.into_inner()),
                Err(TryLockError::WouldBlock) if begun.elapsed() > ABORT_PATIENCE => return,
                Err(TryLockError::WouldBlock) => thread::sleep(Duration::from_millis(5)),
            }
        }
    }

    /// Returns the locked handle.
    fn lock(&self) -> MutexGuard<'_, Option<Owned>> {
        self.0.handle.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Inner {
    fn destroy(&self, handle: &mut Option<Owned>) {
        if let Some(Owned(handle)) = handle.take() {
            // SAFETY: the library created the communicator, and nothing uses it after it is taken. A failure cannot be
            // reported. Unlike `ncclCommDestroy`, this does not wait for other ranks.
            let _ = unsafe { (self.nccl.abort)(handle) };
        }
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        let handle = self.handle.get_mut().unwrap_or_else(PoisonError::into_inner);
        if let Some(Owned(handle)) = handle.take() {
            // SAFETY: that of `destroy`.
            let _ = unsafe { (self.nccl.abort)(handle) };
        }
    }
}

/// Sums a buffer of zeros over all GPUs, from one thread.
fn connect(nccl: &Nccl, communicators: &[Communicator], len: usize) -> Result<()> {
    let mut buffers = vec![];
    for communicator in communicators {
        let context = LayerContext::new(communicator.device())?;
        buffers.push((DeviceBuffer::zeros(&context, DataType::F32, len)?, context));
    }
    // SAFETY: the function has no operands.
    nccl.expect("connecting GPUs", unsafe { (nccl.begin_group)() })?;
    let mut launch = || {
        communicators.iter().zip(&mut buffers).try_for_each(|(communicator, (buffer, context))| {
            let handle = communicator.lock();
            sums::launch(nccl, &handle, context, context.stream(), &mut [buffer.as_slice_mut()])
        })
    };
    let launched = launch();
    // SAFETY: the group was begun above. It is ended whether or not the calls in it succeeded.
    let ended = unsafe { (nccl.end_group)() };
    launched?;
    nccl.expect("connecting GPUs", ended)?;
    buffers.iter().try_for_each(|(_, context)| context.synchronize())
}
