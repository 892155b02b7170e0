//! Interleaved measurement of contenders on a stream.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, DriverError, sys::CUevent_flags};

use super::{read::Reader, tensors::bits};
use crate::{Device, Error, Result, Stream};

/// Bytes of the L2 flush: more than any L2.
const FLUSH: usize = 256 << 20;

/// Short launches between the L2 flush and the timed launch. A launch soon after a long one sometimes takes 0.9 us
/// more, whatever the kernel: on an H200 a third of all launches after none, one or two short ones, and a sixth after
/// four.
const SHORT_LAUNCHES: u32 = 4;

/// Warm-up rounds.
const WARM_UP: u32 = 2;

/// Rounds for all kernels of a contender, and for those close to the fastest.
const TRIAL_ROUNDS: u32 = 3;
const FINAL_ROUNDS: u32 = 9;

/// The device's rest before interleaved rounds: they then measure short bursts, not throughput at the power limit.
pub const REST: Duration = Duration::from_millis(200);

/// A launch to be timed. Its error type is the caller's, and includes this crate's.
pub struct Contender<'a, E = Error> {
    name: &'static str,
    kernel: String,
    launch: Box<dyn FnMut() -> Result<(), E> + 'a>,
}

impl<E> fmt::Debug for Contender<'_, E> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Contender").field("name", &self.name).field("kernel", &self.kernel).finish()
    }
}

impl<'a, E> Contender<'a, E> {
    /// Returns a contender with its own name and its kernel's. `launch` must neither synchronize nor allocate.
    pub fn new(name: &'static str, kernel: impl Into<String>, launch: impl FnMut() -> Result<(), E> + 'a) -> Self {
        Self { name, kernel: kernel.into(), launch: Box::new(launch) }
    }

    /// Returns the contender under another name.
    #[must_use]
    pub fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }
}

/// Returns the shuffled order of a round. The same kernel may take a microsecond more after one launch than after
/// another, so every round has another order.
fn order(round: u32, contenders: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..contenders).collect();
    order.sort_by_key(|which| bits(3, round as usize * contenders + which));
    order
}

/// The times of a contender.
#[derive(Debug, Clone, PartialEq)]
pub struct Time {
    /// The contender's name.
    pub contender: &'static str,
    /// Its kernel's name.
    pub kernel: String,
    /// Median, microseconds.
    pub us: f64,
    /// The minimum, microseconds.
    pub min_us: f64,
    /// The maximum, microseconds.
    pub max_us: f64,
}

/// Times launches on a stream.
#[derive(Debug)]
pub struct Timer<'a> {
    stream: &'a Arc<CudaStream>,
    flush: CudaSlice<u8>,
    reader: Reader,
    begun: CudaEvent,
    ended: CudaEvent,
}

impl<'a> Timer<'a> {
    /// Returns a timer for a stream of a device; it holds 256 MiB of device memory.
    ///
    /// # Errors
    /// [`Error::OutOfMemory`], [`Error::Driver`].
    pub fn new(device: &Device, stream: &'a Arc<CudaStream>) -> Result<Self> {
        let event = || device.context().new_event(Some(CUevent_flags::CU_EVENT_DEFAULT)).map_err(failed);
        Ok(Self {
            stream,
            flush: stream.alloc_zeros(FLUSH).map_err(failed)?,
            reader: Reader::new(device)?,
            begun: event()?,
            ended: event()?,
        })
    }

    /// Returns the microseconds of device time of a launch with a cold L2.
    ///
    /// # Errors
    /// The launch's errors, and [`Error::Driver`].
    pub fn time<E: From<Error>>(&mut self, launch: impl FnOnce() -> Result<(), E>) -> Result<f64, E> {
        // The flush reads: lines that it wrote would be written back during the timed launch.
        let flush = self.flush.device_ptr(self.stream).0;
        // SAFETY: the memory is allocated, as long as that, and lives as long as the timer; what is written there does
        // not matter.
        unsafe { self.reader.read(Stream(self.stream.cu_stream()), flush, FLUSH, flush) }?;
        for _ in 0..SHORT_LAUNCHES {
            // SAFETY: the memory is allocated, as long as that, and lives as long as the timer; what is written there
            // does not matter.
            unsafe { self.reader.read(Stream(self.stream.cu_stream()), flush, 16, flush) }?;
        }
        self.begun.record(self.stream).map_err(failed)?;
        launch()?;
        self.ended.record(self.stream).map_err(failed)?;
        self.ended.synchronize().map_err(failed)?;
        Ok(f64::from(self.begun.elapsed_ms(&self.ended).map_err(failed)?) * 1e3)
    }

    /// Interleaves contenders after a rest, and returns their medians over `rounds` rounds.
    ///
    /// # Errors
    /// Those of [`Timer::time`].
    pub fn alternate<E: From<Error>>(
        &mut self,
        contenders: &mut [Contender<'_, E>],
        rounds: u32,
    ) -> Result<Vec<Time>, E> {
        std::thread::sleep(REST);
        self.interleave(contenders, WARM_UP, rounds)
    }

    /// Interleaves contenders without a rest, and returns their medians over `rounds` rounds, at least one, after
    /// `warm_up` rounds.
    ///
    /// # Errors
    /// Those of [`Timer::time`].
    pub fn interleave<E: From<Error>>(
        &mut self,
        contenders: &mut [Contender<'_, E>],
        warm_up: u32,
        rounds: u32,
    ) -> Result<Vec<Time>, E> {
        let mut times = vec![Vec::new(); contenders.len()];
        for round in 0..rounds.max(1) + warm_up {
            for which in order(round, contenders.len()) {
                let us = self.time(&mut contenders[which].launch)?;
                if round >= warm_up {
                    times[which].push(us);
                }
            }
        }
        let time = |(contender, mut times): (&Contender<'_, E>, Vec<f64>)| {
            times.sort_by(f64::total_cmp);
            Time {
                contender: contender.name,
                kernel: contender.kernel.clone(),
                us: times[times.len() / 2],
                min_us: times[0],
                max_us: times[times.len() - 1],
            }
        };
        Ok(contenders.iter().zip(times).map(time).collect())
    }

    /// Returns the index of the fastest contender and its time, or `None` for no contenders. All run for three rounds,
    /// and those within 10 % of the fastest for more rounds.
    ///
    /// # Errors
    /// Those of [`Timer::time`].
    pub fn fastest<E: From<Error>>(&mut self, contenders: Vec<Contender<'_, E>>) -> Result<Option<(usize, Time)>, E> {
        let mut left: Vec<_> = contenders.into_iter().enumerate().collect();
        let mut fastest = None;
        for rounds in [TRIAL_ROUNDS, FINAL_ROUNDS] {
            let (places, mut contenders): (Vec<_>, Vec<_>) = left.into_iter().unzip();
            let times = self.interleave(&mut contenders, WARM_UP, rounds)?;
            let least = times.iter().map(|time| time.us).fold(f64::INFINITY, f64::min);
            let entries = places.iter().copied().zip(contenders).zip(&times);
            left = entries.filter(|(_, time)| time.us <= 1.1 * least).map(|(entry, _)| entry).collect();
            fastest = places.into_iter().zip(times).min_by(|a, b| a.1.us.total_cmp(&b.1.us));
        }
        Ok(fastest)
    }

    /// Returns the microseconds of a launch when launches follow each other for `duration`, over the second half of
    /// that time: the sustained throughput at the power limit.
    ///
    /// # Errors
    /// Those of [`Timer::time`].
    pub fn sustained<E: From<Error>>(
        &mut self,
        contender: &mut Contender<'_, E>,
        duration: Duration,
    ) -> Result<f64, E> {
        let begun = Instant::now();
        let mut times = Vec::new();
        let us = self.time(&mut contender.launch)?;
        // Ten milliseconds of launches between events.
        let launches = (1e4 / us).ceil().max(1.0) as u32;
        while begun.elapsed() < duration {
            self.begun.record(self.stream).map_err(failed)?;
            for _ in 0..launches {
                (contender.launch)()?;
            }
            self.ended.record(self.stream).map_err(failed)?;
            self.ended.synchronize().map_err(failed)?;
            if begun.elapsed() > duration / 2 {
                times.push(f64::from(self.begun.elapsed_ms(&self.ended).map_err(failed)?) * 1e3 / f64::from(launches));
            }
        }
        Ok(times.iter().sum::<f64>() / times.len().max(1) as f64)
    }
}

fn failed(error: DriverError) -> Error {
    Error::driver("measuring", error)
}

#[cfg(test)]
mod tests {
    use super::order;

    #[test]
    fn every_order_of_three_comes_up_about_as_often() {
        let mut counts = std::collections::BTreeMap::new();
        for round in 0..6000 {
            *counts.entry(order(round, 3)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|count| (850..1150).contains(count)), "{counts:?}");
    }
}
