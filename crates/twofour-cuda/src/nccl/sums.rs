//! Sums over a group of GPUs, on a stream of their own.

use std::sync::Arc;

use cudarc::driver::CudaStream;

use super::{
    Communicator, NcclError, Owned,
    functions::{F32, Nccl, SUM},
};
use crate::{DataType, Error, Result, context::LayerContext, memory::DeviceSliceMut};

/// Sums of f32 buffers over a group of GPUs, in place, on a stream of their own, while the stream of a [`LayerContext`]
/// goes on with other work.
///
/// Every rank must begin the same sums, of as many buffers with the same lengths, in the same order. The sums of all
/// ranks have the same bits; those of two runs have the same bits on the same machine, because NCCL's order of addition
/// depends on its version, on the number of GPUs, on how they are connected and on the lengths, not on time.
#[derive(Debug)]
pub struct StreamedSums {
    communicator: Communicator,
    context: LayerContext,
    stream: Arc<CudaStream>,
    /// Whether the context's stream has not waited yet for the last sums.
    in_flight: bool,
}

fn failed(error: cudarc::driver::DriverError) -> Error {
    Error::driver("ordering the streams of sums over GPUs", error)
}

impl StreamedSums {
    /// Returns sums of buffers that the context's stream writes and reads.
    ///
    /// # Errors
    /// [`Error::OtherDevice`] where the context is another GPU's; [`Error::Driver`].
    pub fn new(communicator: Communicator, context: &LayerContext) -> Result<Self> {
        let (expected, found) = (communicator.device().context().ordinal(), context.ordinal());
        if expected != found {
            return Err(Error::OtherDevice { what: "the context of sums over GPUs", expected, found });
        }
        let stream = context.device().context().new_stream().map_err(failed)?;
        Ok(Self { communicator, context: context.clone(), stream, in_flight: false })
    }

    /// Returns this GPU's part in the group.
    pub fn communicator(&self) -> &Communicator {
        &self.communicator
    }

    /// Begins the sums of buffers, after the work that is on the context's stream now. They must be neither read nor
    /// written nor freed by later work before [`StreamedSums::finish`], which dropping this does, too.
    ///
    /// # Errors
    /// [`Error::SliceType`] and [`Error::OtherDevice`] for a buffer of another type or GPU; [`NcclError::Aborted`] once
    /// another rank has failed; [`NcclError::Call`], [`Error::Driver`].
    pub fn begin(&mut self, buffers: &mut [DeviceSliceMut<'_>]) -> Result<()> {
        let nccl = Nccl::find()?;
        self.stream.join(self.context.stream()).map_err(failed)?;
        self.in_flight = true;
        let handle = self.communicator.lock();
        // SAFETY: the function has no operands.
        nccl.expect("beginning sums over GPUs", unsafe { (nccl.begin_group)() })?;
        let launched = launch(nccl, &handle, &self.context, &self.stream, buffers);
        // SAFETY: the group was begun above. It is ended whether or not the calls in it succeeded.
        let ended = unsafe { (nccl.end_group)() };
        launched?;
        nccl.expect("launching sums over GPUs", ended)
    }

    /// Makes the context's stream wait for the sums that have begun. It does not wait itself.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn finish(&mut self) -> Result<()> {
        if std::mem::take(&mut self.in_flight) {
            self.context.stream().join(&self.stream).map_err(failed)?;
        }
        Ok(())
    }
}

impl Drop for StreamedSums {
    fn drop(&mut self) {
        // Buffers are freed in the order of the context's stream. A failure cannot be reported.
        let _ = self.finish();
    }
}

/// Launches sums in place on a stream of the communicator's device.
pub(super) fn launch(
    nccl: &Nccl,
    handle: &Option<Owned>,
    context: &LayerContext,
    stream: &CudaStream,
    buffers: &mut [DeviceSliceMut<'_>],
) -> Result<()> {
    let Some(Owned(handle)) = handle else { return Err(NcclError::Aborted.into()) };
    for buffer in buffers {
        let len = buffer.len();
        let at = buffer.expect("a buffer to sum over GPUs", context, DataType::F32, len)?;
        // SAFETY: the buffer is valid for its length on the communicator's device; the communicator is not aborted,
        // because its lock is held; the stream is of its device.
        let launched = unsafe { (nccl.all_reduce)(at, at, len, F32, SUM, *handle, stream.cu_stream()) };
        nccl.expect("launching sums over GPUs", launched)?;
    }
    Ok(())
}
