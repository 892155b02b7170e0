//! Jobs on the threads of another library.
//!
//! Whether those threads are awake, and have a core each, their library does not say, and a call on them ends when the
//! last of them has come, even one that finds nothing to do. So each call is judged by its times, and after a loss the
//! next ones do without them for a while.

use std::{
    cell::Cell,
    sync::atomic::{AtomicU64, Ordering},
    time::{Duration, Instant},
};

use super::{
    job::{End, Job},
    with_threads,
};

/// Threads that another library keeps, for [`with_executor`](super::with_executor): a function that calls `take_part`
/// on at most so many threads at the same time and returns when all calls have returned. The calling thread is one of
/// them and passes 0, the others pass other numbers. Fewer calls than threads are right, too; `take_part` does not
/// panic.
pub type Executor = fn(threads: usize, take_part: &(dyn Fn(usize) + Sync));

/// Work of one thread that is worth a meeting of threads that are awake.
const MIN_SHARED: Duration = Duration::from_micros(20);

/// How much longer than a loss the pause after it is: losses take up at most one part of so many of the time.
const PAUSE: u32 = 16;

/// The longest pause.
const LONGEST_PAUSE: Duration = Duration::from_secs(1);

/// What calls on an executor's threads have taught the calling thread, for which its library keeps threads.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Experience {
    /// No call goes there before.
    resume: Option<Instant>,
    /// The last pause; zero after a gain.
    pause: Duration,
}

thread_local! {
    static EXPERIENCE: Cell<Experience> = const { Cell::new(Experience { resume: None, pause: Duration::ZERO }) };
}

impl Experience {
    /// Whether a call shall go to the executor's threads.
    fn is_good(self) -> bool {
        self.resume.is_none_or(|resume| Instant::now() >= resume)
    }

    /// Adds a call in which the caller idled for the others, and what they computed for it meanwhile. Alone it would
    /// have computed that itself.
    fn after(self, idle: Duration, helped: Duration, now: Instant) -> Self {
        let loss = idle.saturating_sub(helped);
        if loss.is_zero() {
            return Self::default();
        }
        let pause = (loss * PAUSE).max(self.pause * 2).min(LONGEST_PAUSE);
        Self { resume: now.checked_add(pause), pause }
    }
}

/// Returns true unless this thread's recent calls on an executor's threads were slower than computing alone.
pub(super) fn is_worth_trying() -> bool {
    EXPERIENCE.get().is_good()
}

/// Computes all parts of a job on this thread and on so many others at most; returns when no part is unfinished.
pub(super) fn compute(executor: Executor, job: &Job, helpers: usize, expected: Duration) {
    /// However the caller leaves, no part is unfinished afterwards.
    struct Finished<'a>(&'a Job);
    impl Drop for Finished<'_> {
        fn drop(&mut self) {
            self.0.close();
            self.0.wait();
        }
    }
    let _finished = Finished(job);
    if helpers > 0 && expected >= MIN_SHARED {
        meet(executor, helpers + 1, job);
    }
    // All of it, or what an executor has left that called nobody.
    job.take_part(End::First);
}

/// Computes on the executor's threads and learns from it.
fn meet(executor: Executor, threads: usize, job: &Job) {
    let begun = Instant::now();
    let since = |begun: Instant| begun.elapsed().as_nanos() as u64;
    // When the caller was done, since `begun`, and how long others computed.
    let (done, helped) = (AtomicU64::new(0), AtomicU64::new(0));
    executor(threads, &|number| {
        let begun = if number == 0 { begun } else { Instant::now() };
        let end = if number == 0 { End::First } else { End::Last };
        // The library's threads meet in one call at a time: what a part shares in turn must not wait for them.
        with_threads(1, || job.take_part(end));
        match number {
            0 => done.store(since(begun), Ordering::Relaxed),
            _ => _ = helped.fetch_add(since(begun), Ordering::Relaxed),
        }
    });
    let now = Instant::now();
    let idle = (now - begun).saturating_sub(Duration::from_nanos(done.into_inner()));
    EXPERIENCE.set(EXPERIENCE.get().after(idle, Duration::from_nanos(helped.into_inner()), now));
}

#[cfg(test)]
mod tests {
    use std::{
        collections::BTreeSet,
        panic::{self, AssertUnwindSafe},
        sync::{
            Mutex,
            atomic::{AtomicBool, AtomicUsize, Ordering::Relaxed},
        },
        thread,
    };

    use super::{
        super::{share, share_expecting, with_executor},
        *,
    };

    /// Threads made for each call, and whether a call unwound into this function.
    fn scoped(threads: usize, take_part: &(dyn Fn(usize) + Sync)) {
        let take_part =
            |number| assert!(panic::catch_unwind(AssertUnwindSafe(|| take_part(number))).is_ok(), "unwound");
        thread::scope(|scope| {
            for number in 1..threads {
                scope.spawn(move || take_part(number));
            }
            take_part(0);
        });
    }

    /// More threads than other tests have at the same time: a call is on the executor's, however many of them compute.
    const MANY: usize = 64;

    /// Runs `f` for an executor that is new to this thread.
    fn on<R>(executor: Executor, threads: usize, f: impl FnOnce() -> R) -> R {
        EXPERIENCE.set(Experience::default());
        with_threads(threads, || with_executor(executor, f))
    }

    fn here() -> String {
        format!("{:?}", thread::current().id())
    }

    #[test]
    fn every_part_is_done_once_by_the_executors_threads() {
        fn counted(threads: usize, take_part: &(dyn Fn(usize) + Sync)) {
            CALLS.fetch_add(1, Relaxed);
            scoped(threads, take_part);
        }
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        for (count, calls) in [(0, 0), (1, 0), (MANY, 1), (3 * MANY, 2)] {
            let mut done = vec![0; count];
            let threads = Mutex::new(BTreeSet::new());
            let work = |done: &mut usize| {
                *done += 1;
                threads.lock().unwrap().insert(thread::current().name().map(str::to_owned));
            };
            on(counted, MANY, || share(done.iter_mut(), || (), |(), done| work(done)));
            assert!(done.iter().all(|done| *done == 1));
            assert_eq!(CALLS.load(Relaxed), calls);
            assert!(!threads.into_inner().unwrap().contains(&Some("twofour".to_owned())));
        }
    }

    #[test]
    fn what_an_executor_leaves_the_caller_computes_and_so_short_work() {
        fn nobody(_threads: usize, _take_part: &(dyn Fn(usize) + Sync)) {
            CALLS.fetch_add(1, Relaxed);
        }
        static CALLS: AtomicUsize = AtomicUsize::new(0);
        for (expected, calls) in [(Duration::ZERO, 0), (Duration::MAX, 1)] {
            let threads = Mutex::new(Vec::new());
            let work = |(): &mut (), _| threads.lock().unwrap().push(here());
            on(nobody, MANY, || share_expecting(expected, 0..MANY, || (), work));
            assert_eq!(threads.into_inner().unwrap(), vec![here(); MANY]);
            assert_eq!(CALLS.load(Relaxed), calls);
        }
    }

    #[test]
    fn what_a_part_shares_its_thread_computes() {
        let sum = AtomicUsize::new(0);
        on(scoped, 3, || {
            let inner = |i: usize| {
                let thread = here();
                let work = |(): &mut (), j: usize| {
                    assert_eq!(here(), thread);
                    sum.fetch_add(i * j, Relaxed);
                };
                share(0..4, || (), work);
            };
            share(0..5, || (), |(), i| inner(i));
        });
        assert_eq!(sum.into_inner(), 60);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_not_the_executor() {
        for bad in 0..8 {
            let running = AtomicUsize::new(0);
            let work = |(): &mut (), part: usize| {
                running.fetch_add(1, Relaxed);
                thread::yield_now();
                running.fetch_sub(1, Relaxed);
                if part == bad {
                    panic::resume_unwind(Box::new(part));
                }
            };
            let outcome = panic::catch_unwind(AssertUnwindSafe(|| on(scoped, 3, || share(0..8, || (), work))));
            assert_eq!(outcome.unwrap_err().downcast_ref(), Some(&bad));
            assert_eq!(running.into_inner(), 0);
            assert!(super::super::EXECUTOR.get().is_none(), "the executor is set after a panic");
        }
    }

    #[test]
    fn callers_at_the_same_time_keep_to_their_own_parts() {
        thread::scope(|scope| {
            for caller in 0..3usize {
                scope.spawn(move || {
                    for round in 0..if cfg!(miri) { 3 } else { 50 } {
                        let mut values = [caller + round; 9];
                        on(scoped, 4, || share(values.iter_mut(), || (), |(), value| *value *= 2));
                        assert_eq!(values, [2 * (caller + round); 9]);
                    }
                });
            }
        });
    }

    #[test]
    fn after_threads_that_come_late_the_next_call_does_without() {
        fn late(_threads: usize, take_part: &(dyn Fn(usize) + Sync)) {
            assert!(!CALLED.swap(true, Relaxed), "called again");
            take_part(0);
            thread::sleep(Duration::from_millis(200));
        }
        static CALLED: AtomicBool = AtomicBool::new(false);
        on(late, MANY, || {
            for _ in 0..2 {
                let count = AtomicUsize::new(0);
                share(0..MANY, || (), |(), _| _ = count.fetch_add(1, Relaxed));
                assert_eq!(count.into_inner(), MANY);
            }
        });
        assert!(CALLED.load(Relaxed));
    }

    #[test]
    fn losses_are_followed_by_pauses_that_double_until_a_gain() {
        let (now, micros) = (Instant::now(), Duration::from_micros);
        let gain = Experience::default().after(micros(5), micros(50), now);
        assert!(gain.is_good() && gain.pause.is_zero());
        let one = gain.after(micros(60), micros(10), now);
        assert_eq!((one.pause, one.resume), (micros(800), Some(now + micros(800))));
        let two = one.after(micros(1), micros(0), now);
        assert_eq!(two.pause, micros(1600));
        let three = two.after(Duration::from_secs(5), micros(0), Instant::now());
        assert_eq!(three.pause, LONGEST_PAUSE);
        assert!(!three.is_good());
        assert!(three.after(micros(5), micros(50), now).is_good());
    }
}
