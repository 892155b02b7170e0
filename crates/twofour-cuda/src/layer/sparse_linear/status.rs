//! A layer's counters in device memory.

use cudarc::driver::{CudaSlice, DevicePtr as _, result};

use crate::{
    DevicePtr, Error, Result,
    layer::{FreeNote, LayerContext},
    raw::prune::NO_NAN,
};

/// The initial value of the flip counter: all ones, the same as the index of no NaN, so that one memset resets both.
pub(super) const NO_FLIPS: u64 = u64::MAX;

/// Device counters, u64s: the index of the first number that no mask can be selected with, the flipped mask elements
/// minus one, and the seed of the next MVUE.
#[derive(Debug)]
pub(super) struct Status {
    _freed: FreeNote,
    pub(super) memory: CudaSlice<u64>,
    pub(super) wrong: DevicePtr,
    pub(super) flips: DevicePtr,
    pub(super) seed: DevicePtr,
}

impl Status {
    pub(super) fn new(context: &LayerContext) -> Result<Self> {
        context.expect_not_capturing("allocating memory")?;
        let copied = context.stream().clone_htod(&[NO_NAN, NO_FLIPS, 0]);
        let memory = copied.map_err(|error| Error::driver("allocating device memory", error))?;
        let wrong = memory.device_ptr(context.stream()).0;
        Ok(Self { _freed: context.free_note(), memory, wrong, flips: wrong + 8, seed: wrong + 16 })
    }

    /// Returns a copy in memory of its own.
    pub(super) fn copy(&self, context: &LayerContext) -> Result<Self> {
        let memory = context.copy_of(&self.memory)?;
        let wrong = memory.device_ptr(context.stream()).0;
        Ok(Self { _freed: context.free_note(), memory, wrong, flips: wrong + 8, seed: wrong + 16 })
    }

    /// The values before a mask is selected: no NaN, no flips.
    pub(super) fn reset(&self, context: &LayerContext) -> Result<()> {
        let stream = context.stream().cu_stream();
        context.device().bind()?;
        // SAFETY: both numbers are neighbours in `memory`, 8 bytes each, and the stream is of their device.
        let set = unsafe { result::memset_d8_async(self.wrong, 0xFF, 16, stream) };
        set.map_err(|error| Error::driver("resetting a layer's counters", error))
    }

    pub(super) fn read(&self, context: &LayerContext) -> Result<[u64; 3]> {
        let failed = |error| Error::driver("reading a layer's counters", error);
        let mut found = [0; 3];
        context.stream().memcpy_dtoh(&self.memory, &mut found).map_err(failed)?;
        context.synchronize()?;
        Ok(found)
    }
}
