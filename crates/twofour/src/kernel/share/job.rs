//! One call of [`share`](super::share): which of its parts are claimed, and which are finished.

use std::{
    any::Any,
    cell::UnsafeCell,
    panic::{self, AssertUnwindSafe},
    sync::{
        Mutex, PoisonError,
        atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

/// How long a caller polls for the parts that others have claimed before it sleeps.
const POLLING: Duration = Duration::from_micros(100);

/// The end of the list of parts that a thread claims from. The caller takes the first ones and helpers the last ones,
/// so that in repeated calls a thread mostly meets the parts that are still in its own caches.
#[derive(Debug, Clone, Copy)]
pub(super) enum End {
    First,
    Last,
}

/// What the call is to compute, in the caller's stack frame.
pub(super) struct Frame<'a, P, I, W> {
    /// Each is taken once, by the thread that has claimed it.
    parts: Vec<UnsafeCell<Option<P>>>,
    state: &'a I,
    work: &'a W,
}

impl<'a, P, I, W> Frame<'a, P, I, W> {
    pub(super) fn new(parts: impl Iterator<Item = P>, state: &'a I, work: &'a W) -> Self {
        Self { parts: parts.map(|part| UnsafeCell::new(Some(part))).collect(), state, work }
    }

    pub(super) fn len(&self) -> usize {
        self.parts.len()
    }
}

/// Computes part `first`, which the thread has claimed, and then all that it can claim.
///
/// # Safety
/// `frame` is the `Frame<P, I, W>` of `job`; the thread has claimed part `first` of `job`, which is unfinished.
unsafe fn compute<P, S, I: Fn() -> S, W: Fn(&mut S, P)>(frame: *const (), job: &Job, first: usize, end: End) {
    let mut claimed = 1;
    let outcome = {
        // SAFETY: the type is the frame's. The caller leaves its frame only when no part is unfinished, and `first` is
        // until `finish`.
        let Frame { parts, state, work } = unsafe { &*frame.cast::<Frame<'_, P, I, W>>() };
        panic::catch_unwind(AssertUnwindSafe(|| {
            let mut state = state();
            let mut next = Some(first);
            while let Some(i) = next {
                // SAFETY: a part is claimed once, so no other thread has a reference to what this cell holds.
                if let Some(part) = unsafe { (*parts[i].get()).take() } {
                    work(&mut state, part);
                }
                next = job.claim(end);
                claimed += usize::from(next.is_some());
            }
        }))
    };
    // The thread's state, which may borrow from the caller, is gone.
    if let Err(payload) = outcome {
        job.panic.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(payload);
        job.close();
    }
    job.finish(claimed);
}

/// The state of a call. It is shared by reference counting and outlives the call, so that a thread that comes late
/// finds it closed.
pub(super) struct Job {
    /// The parts that nobody has claimed: the first one in the upper half, the one past the last in the lower.
    unclaimed: AtomicU64,
    /// Parts that are not finished.
    unfinished: AtomicUsize,
    /// Threads that compute at most, the caller included.
    threads: usize,
    /// Sleeping threads that those who come shall still wake.
    to_wake: AtomicUsize,
    caller: Thread,
    /// The caller sleeps until no part is unfinished.
    caller_sleeps: AtomicBool,
    /// What the first panic was about.
    panic: Mutex<Option<Box<dyn Any + Send>>>,
    /// The caller's [`Frame`]: valid while a part is unfinished.
    frame: *const (),
    compute: unsafe fn(*const (), &Job, usize, End),
}

// SAFETY: `frame` is the only field that is not `Send` and `Sync` by itself. It is read only by `compute`, and
// `Job::new` demands of the frame's type that threads may share it.
unsafe impl Send for Job {}
// SAFETY: `frame` is read only by `compute`, whose types `Job::new` demands to be shareable; all other fields are
// `Sync`.
unsafe impl Sync for Job {}

impl Job {
    /// A job of all parts of `frame`, which are fewer than 2^32.
    ///
    /// # Safety
    /// `frame` stays where it is, and is not borrowed mutably, until [`Job::wait`] has returned.
    pub(super) unsafe fn new<P: Send, S, I: Fn() -> S + Sync, W: Fn(&mut S, P) + Sync>(
        frame: &Frame<'_, P, I, W>,
        threads: usize,
    ) -> Self {
        let parts = frame.len();
        Self {
            unclaimed: AtomicU64::new(parts as u64),
            unfinished: AtomicUsize::new(parts),
            threads,
            to_wake: AtomicUsize::new(0),
            caller: thread::current(),
            caller_sleeps: AtomicBool::new(false),
            panic: Mutex::new(None),
            frame: (&raw const *frame).cast(),
            compute: compute::<P, S, I, W>,
        }
    }

    /// Threads that compute at most, the caller included.
    pub(super) fn threads(&self) -> usize {
        self.threads
    }

    /// Sets how many sleeping threads are to be woken by those who come.
    pub(super) fn set_to_wake(&self, count: usize) {
        self.to_wake.store(count, Ordering::Relaxed);
    }

    /// Whether the asking thread shall wake one that sleeps.
    pub(super) fn take_wake(&self) -> bool {
        let less = |count: usize| count.checked_sub(1);
        self.has_unclaimed() && self.to_wake.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less).is_ok()
    }

    fn has_unclaimed(&self) -> bool {
        let ends = self.unclaimed.load(Ordering::Relaxed);
        ends >> 32 < ends & u64::from(u32::MAX)
    }

    /// Computes parts until all are claimed.
    pub(super) fn take_part(&self, end: End) {
        if let Some(first) = self.claim(end) {
            // SAFETY: `frame` and `compute` are of the same types by `Job::new`; the part was claimed just now and is
            // not finished.
            unsafe { (self.compute)(self.frame, self, first, end) }
        }
    }

    /// Claims a part that nobody has.
    fn claim(&self, end: End) -> Option<usize> {
        let next = |ends: u64| {
            let (first, last) = (ends >> 32, ends & u64::from(u32::MAX));
            if first >= last {
                return None;
            }
            Some(match end {
                End::First => (first + 1) << 32 | last,
                End::Last => first << 32 | (last - 1),
            })
        };
        let ends = self.unclaimed.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next).ok()?;
        Some(match end {
            End::First => (ends >> 32) as usize,
            End::Last => (ends & u64::from(u32::MAX)) as usize - 1,
        })
    }

    /// Leaves the parts that nobody has claimed undone.
    pub(super) fn close(&self) {
        let ends = self.unclaimed.swap(0, Ordering::Relaxed);
        self.finish((ends & u64::from(u32::MAX)).saturating_sub(ends >> 32) as usize);
    }

    /// Counts parts as finished. The caller's frame may be gone when this returns.
    fn finish(&self, parts: usize) {
        // Sequentially consistent, as is `wait`: either this sees that the caller sleeps, or the caller sees that all
        // is finished.
        let before = self.unfinished.fetch_sub(parts, Ordering::SeqCst);
        if parts > 0 && before == parts && self.caller_sleeps.load(Ordering::SeqCst) {
            self.caller.unpark();
        }
    }

    /// Waits on the caller's thread for the parts that are claimed and not finished.
    pub(super) fn wait(&self) {
        let is_finished = || self.unfinished.load(Ordering::SeqCst) == 0;
        if poll(POLLING, is_finished) {
            return;
        }
        self.caller_sleeps.store(true, Ordering::SeqCst);
        while !is_finished() {
            thread::park();
        }
    }

    /// What the first panic was about.
    pub(super) fn panic(&self) -> Option<Box<dyn Any + Send>> {
        self.panic.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// Asks until `is_so` or until the time is over, and returns the last answer. After the first microseconds the thread
/// offers its core to others between two questions: one of them may be who is waited for.
pub(super) fn poll(time: Duration, mut is_so: impl FnMut() -> bool) -> bool {
    /// Questions that are asked in a row.
    const ROW: usize = 32;
    /// Rows before the core is offered: a few microseconds.
    const EAGER: usize = 8;
    let mut row = || {
        (0..ROW).any(|_| {
            let so = is_so();
            if !so {
                std::hint::spin_loop();
            }
            so
        })
    };
    if (0..EAGER).any(|_| row()) {
        return true;
    }
    let begun = Instant::now();
    while begun.elapsed() < time {
        thread::yield_now();
        if row() {
            return true;
        }
    }
    false
}
