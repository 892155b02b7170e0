//! Interleaved measurement of contenders on a stream.

use std::{
    fmt,
    sync::Arc,
    time::{Duration, Instant},
};

use cudarc::driver::{CudaEvent, CudaSlice, CudaStream, DevicePtr, DriverError, sys::CUevent_flags};

use super::{read::Reader, tensors::bits};
use crate::{Device, Error, Result, Stream};

/// More than any L2.
const FLUSH: usize = 256 << 20;

/// Short launches between the one that empties the cache and the one that is timed. Soon after a long launch one takes 0.9 us more at times, whatever is launched: on an H200
/// a third of all launches after none, one or two short ones, and a sixth after four.
const SHORT_LAUNCHES: u32 = 4;

/// Rounds that warm up and do not count.
const WARM_UP: u32 = 2;

/// Rounds for all of one's kernels, and for those that come close.
const TRIAL_ROUNDS: u32 = 3;
const FINAL_ROUNDS: u32 = 9;

/// How long the device rests before contenders take turns: what it can do for a moment, not what its power lets it keep up.
pub const REST: Duration = Duration::from_millis(200);

/// Something that can be launched. Its errors are of the caller's type, this crate's among them.
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
    /// By whom, and with which of their kernels. `launch` neither waits nor allocates.
    pub fn new(name: &'static str, kernel: impl Into<String>, launch: impl FnMut() -> Result<(), E> + 'a) -> Self {
        Self { name, kernel: kernel.into(), launch: Box::new(launch) }
    }

    /// The same under another name.
    #[must_use]
    pub fn named(self, name: &'static str) -> Self {
        Self { name, ..self }
    }
}

/// The order of a round: another one each time, for the same kernel may take a microsecond more after one launch than after another.
fn order(round: u32, contenders: usize) -> Vec<usize> {
    let mut order: Vec<usize> = (0..contenders).collect();
    order.sort_by_key(|which| bits(3, round as usize * contenders + which));
    order
}

/// What a contender took.
#[derive(Debug, Clone, PartialEq)]
pub struct Time {
    /// Whose.
    pub contender: &'static str,
    /// Which of theirs.
    pub kernel: String,
    /// Median, microseconds.
    pub us: f64,
    /// The least, microseconds.
    pub min_us: f64,
    /// The most, microseconds.
    pub max_us: f64,
}

/// Times what is launched on a stream.
#[derive(Debug)]
pub struct Timer<'a> {
    stream: &'a Arc<CudaStream>,
    flush: CudaSlice<u8>,
    reader: Reader,
    begun: CudaEvent,
    ended: CudaEvent,
}

impl<'a> Timer<'a> {
    /// For a stream of that device; holds 256 MiB of its memory.
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

    /// Microseconds of device time, from a cold L2.
    ///
    /// # Errors
    /// The launch's, and [`Error::Driver`].
    pub fn time<E: From<Error>>(&mut self, launch: impl FnOnce() -> Result<(), E>) -> Result<f64, E> {
        // What is only read need not be written back while the launch runs, as what was written would.
        let flush = self.flush.device_ptr(self.stream).0;
        // SAFETY: the memory is allocated, as long as that, and lives as long as the timer; what is written there does not matter.
        unsafe { self.reader.read(Stream(self.stream.cu_stream()), flush, FLUSH, flush) }?;
        for _ in 0..SHORT_LAUNCHES {
            // SAFETY: the memory is allocated, as long as that, and lives as long as the timer; what is written there does not matter.
            unsafe { self.reader.read(Stream(self.stream.cu_stream()), flush, 16, flush) }?;
        }
        self.begun.record(self.stream).map_err(failed)?;
        launch()?;
        self.ended.record(self.stream).map_err(failed)?;
        self.ended.synchronize().map_err(failed)?;
        Ok(f64::from(self.begun.elapsed_ms(&self.ended).map_err(failed)?) * 1e3)
    }

    /// Lets contenders take turns after a rest, and tells their medians over so many rounds.
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

    /// Lets contenders take turns without a rest, and tells their medians over so many rounds, at least one, after others that do not count.
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

    /// The place of the fastest, and what it took: all of them for three rounds, then those within a tenth of the fastest for as many as it takes to tell
    /// them apart. `None` where there is none.
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

    /// Microseconds a launch when launches follow each other for so long, over the second half of that time: what the device's power lets it keep up.
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
