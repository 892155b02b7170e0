//! How long a process has spent on compiling and loading kernels.

use std::{
    sync::{Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

/// Time during which at least one thread was busy.
#[derive(Debug)]
struct Busy {
    threads: usize,
    since: Option<Instant>,
    total: Duration,
}

/// A clock that runs while a thread holds a [`Running`] of it.
#[derive(Debug)]
struct Clock(Mutex<Busy>);

/// Keeps a clock running.
struct Running<'a>(&'a Clock);

impl Clock {
    const fn new() -> Self {
        Self(Mutex::new(Busy { threads: 0, since: None, total: Duration::ZERO }))
    }

    fn lock(&self) -> MutexGuard<'_, Busy> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn run(&self) -> Running<'_> {
        let mut busy = self.lock();
        busy.threads += 1;
        busy.since.get_or_insert_with(Instant::now);
        Running(self)
    }

    fn time(&self) -> Duration {
        let busy = self.lock();
        busy.total + busy.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

impl Drop for Running<'_> {
    fn drop(&mut self) {
        let mut busy = self.0.lock();
        busy.threads -= 1;
        if busy.threads == 0 {
            let since = busy.since.take();
            busy.total += since.map_or(Duration::ZERO, |since| since.elapsed());
        }
    }
}

static CLOCK: Clock = Clock::new();

/// Returns what `work` returns, and counts its time.
pub(crate) fn counted<R>(work: impl FnOnce() -> R) -> R {
    let _running = CLOCK.run();
    work()
}

/// Returns how long this process has spent so far on compiling kernels and loading them, on all devices: the time
/// during which at least one thread did so. What else a program measures may contain it, since a kernel is loaded by
/// the first call that launches it.
pub fn compile_time() -> Duration {
    CLOCK.time()
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;

    use super::*;

    #[test]
    fn the_clock_runs_while_a_thread_is_busy_and_counts_threads_at_the_same_time_once() {
        let (clock, barrier, begin) = (Clock::new(), Barrier::new(4), Instant::now());
        assert_eq!(clock.time(), Duration::ZERO);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let _running = clock.run();
                    barrier.wait();
                    std::thread::sleep(Duration::from_millis(30));
                });
            }
        });
        let all = begin.elapsed();
        let counted = clock.time();
        assert!(counted >= Duration::from_millis(30) && counted <= all, "{counted:?} of {all:?}");
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(clock.time(), counted, "nobody is busy");
        let running = clock.run();
        std::thread::sleep(Duration::from_millis(2));
        assert!(clock.time() > counted, "one is");
        drop(running);
    }
}
