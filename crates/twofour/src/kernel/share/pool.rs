//! The threads that help callers of [`share`](super::share).
//!
//! Each worker has a mailbox, one word that says whether it is idle, asleep or busy, or holds a job for it. A caller
//! posts its job to idle workers with one exchange each, computes, and takes the job back from those that have not
//! taken it: it waits for no worker that has claimed no part. A worker without a job polls its mailbox for [`POLLING`],
//! so that the next product of a model meets it awake, and then sleeps.

use std::{
    ptr,
    sync::{
        Arc, OnceLock,
        atomic::{AtomicPtr, AtomicU64, AtomicUsize, Ordering},
    },
    thread::{self, Thread},
    time::{Duration, Instant},
};

use super::job::{End, Job, poll};

/// How long a worker without a job stays awake: longer than what lies between two products of a model.
const POLLING: Duration = Duration::from_micros(150);

/// Workers that a pool has room for, at least.
const MIN_ROOM: usize = 64;

/// What a wake-up is taken to last until one has been measured.
const FIRST_WAKE: Duration = Duration::from_micros(60);

/// What a wake-up is taken to last at most: on a busy machine it may be long, and that says nothing about the next.
const LONGEST_WAKE: Duration = Duration::from_micros(400);

/// The workers of this process.
pub(super) struct Pool {
    workers: Box<[Worker]>,
    /// Callers that may use workers, at this moment.
    callers: AtomicUsize,
    begun: Instant,
    /// How long a wake-up lasts, from the call that wakes until the worker runs, as a moving average in nanoseconds.
    wake: AtomicU64,
    /// How long callers have computed alone because all workers were asleep, in nanoseconds, with pauses below
    /// [`POLLING`] between.
    alone: AtomicU64,
    /// When the last of them ended, in nanoseconds since `begun`.
    alone_until: AtomicU64,
}

/// A thread and its mailbox, on cache lines of its own.
#[repr(align(128))]
struct Worker {
    /// Null: idle and awake, or about to be. [`ASLEEP`], [`BUSY`], or a job, of which it owns a count.
    mail: AtomicPtr<Job>,
    /// Set when the thread is started; `None` where the operating system gave none.
    thread: OnceLock<Option<Thread>>,
    /// When it was woken last, in nanoseconds since the pool began.
    woken: AtomicU64,
}

/// Jobs lie at multiples of their alignment, so these are none.
const ASLEEP: *mut Job = ptr::without_provenance_mut(1);
const BUSY: *mut Job = ptr::without_provenance_mut(2);
const _: () = assert!(align_of::<Job>() > 2);

/// The pool of this process, once there is one.
static CURRENT: AtomicPtr<Pool> = AtomicPtr::new(ptr::null_mut());

/// Called in a forked child, which has none of its parent's threads and needs a pool of its own.
#[cfg(all(unix, not(miri)))]
extern "C" fn forget() {
    CURRENT.store(ptr::null_mut(), Ordering::Release);
}

impl Pool {
    /// The pool of this process, with room for workers of so many threads.
    pub(super) fn current(threads: usize) -> &'static Pool {
        let current = CURRENT.load(Ordering::Acquire);
        // SAFETY: a pool that is stored here is never freed.
        unsafe { current.as_ref() }.unwrap_or_else(|| Self::start(threads))
    }

    /// Makes the process's pool, unless another thread is faster.
    #[cold]
    fn start(threads: usize) -> &'static Pool {
        let new = Box::into_raw(Box::new(Pool::new(threads)));
        match CURRENT.compare_exchange(ptr::null_mut(), new, Ordering::AcqRel, Ordering::Acquire) {
            Ok(_) => {
                #[cfg(all(unix, not(miri)))]
                {
                    static REGISTERED: std::sync::Once = std::sync::Once::new();
                    // SAFETY: the function does nothing but store to an atomic, which is allowed in a forked child.
                    REGISTERED.call_once(|| _ = unsafe { libc::pthread_atfork(None, None, Some(forget)) });
                }
                // SAFETY: it is never freed from here on.
                unsafe { &*new }
            }
            Err(other) => {
                // SAFETY: made above, and stored nowhere.
                drop(unsafe { Box::from_raw(new) });
                // SAFETY: a pool that is stored there is never freed, and null was not found.
                unsafe { &*other }
            }
        }
    }

    fn new(threads: usize) -> Self {
        let hardware = thread::available_parallelism().map_or(1, usize::from);
        let worker =
            || Worker { mail: AtomicPtr::new(ptr::null_mut()), thread: OnceLock::new(), woken: AtomicU64::new(0) };
        Pool {
            workers: (0..threads.max(hardware).max(MIN_ROOM)).map(|_| worker()).collect(),
            callers: AtomicUsize::new(0),
            begun: Instant::now(),
            wake: AtomicU64::new(FIRST_WAKE.as_nanos() as u64),
            alone: AtomicU64::new(0),
            alone_until: AtomicU64::new(0),
        }
    }

    /// Counts the calling thread among those that compute, until the guard is dropped.
    pub(super) fn enter(&'static self) -> Caller {
        let others = self.callers.fetch_add(1, Ordering::Relaxed);
        Caller { pool: self, others }
    }

    fn now(&self) -> u64 {
        self.begun.elapsed().as_nanos() as u64
    }

    /// The workers that may help with a job.
    fn workers_of(&'static self, job: &Job) -> impl Iterator<Item = &'static Worker> {
        self.workers.iter().take(job.threads() - 1)
    }

    /// Wakes one worker for a job, or starts its thread; whether there was one.
    fn wake_one(&'static self, job: &Arc<Job>) -> bool {
        for worker in self.workers_of(job) {
            match worker.thread.get() {
                // A thread that has just been started is awake.
                None if worker.start(self) && worker.post(ptr::null_mut(), job) => return true,
                Some(Some(thread)) if worker.post(ASLEEP, job) => {
                    worker.woken.store(self.now(), Ordering::Relaxed);
                    thread.unpark();
                    return true;
                }
                _ => {}
            }
        }
        false
    }
}

impl Worker {
    /// Starts the thread, once; whether there is one.
    fn start(&'static self, pool: &'static Pool) -> bool {
        let start = || {
            let thread = thread::Builder::new().name("twofour".to_owned()).spawn(move || self.run(pool));
            Some(thread.ok()?.thread().clone())
        };
        self.thread.get_or_init(start).is_some()
    }

    /// Puts a job into the mailbox that holds `expected`.
    fn post(&self, expected: *mut Job, job: &Arc<Job>) -> bool {
        let mail = &self.mail;
        if mail.load(Ordering::Relaxed) != expected {
            return false;
        }
        let counted = Arc::into_raw(job.clone()).cast_mut();
        let posted = mail.compare_exchange(expected, counted, Ordering::Release, Ordering::Relaxed).is_ok();
        if !posted {
            // SAFETY: the count made above went nowhere.
            drop(unsafe { Arc::from_raw(counted) });
        }
        posted
    }

    /// Takes a job back that the worker has not taken.
    fn retract(&self, job: &Arc<Job>) {
        let posted = Arc::as_ptr(job).cast_mut();
        if self.mail.load(Ordering::Relaxed) == posted
            && self.mail.compare_exchange(posted, ptr::null_mut(), Ordering::Relaxed, Ordering::Relaxed).is_ok()
        {
            // SAFETY: the mailbox owned a count of this job, and does no longer.
            drop(unsafe { Arc::from_raw(posted) });
        }
    }

    /// Takes the job that is in the mailbox.
    fn take(&self) -> Option<Arc<Job>> {
        let mail = self.mail.load(Ordering::Relaxed);
        if mail.is_null() || self.mail.compare_exchange(mail, BUSY, Ordering::Acquire, Ordering::Relaxed).is_err() {
            return None;
        }
        // SAFETY: only this thread stores `ASLEEP` and `BUSY`, and neither is there when it takes. So this is a job,
        // and the mailbox's count is this thread's now.
        Some(unsafe { Arc::from_raw(mail) })
    }

    /// What the thread does: one job after the other.
    fn run(&self, pool: &'static Pool) {
        loop {
            let job = self.next(pool);
            // Many sleepers are woken by each other, and the caller pays for one.
            for _ in 0..2 {
                if job.take_wake() {
                    pool.wake_one(&job);
                }
            }
            super::with_threads(job.threads(), || job.take_part(End::Last));
            drop(job);
            self.mail.store(ptr::null_mut(), Ordering::Relaxed);
        }
    }

    /// The next job. Polls for a while, then sleeps.
    fn next(&self, pool: &Pool) -> Arc<Job> {
        loop {
            let mut job = None;
            poll(POLLING, || {
                job = self.take();
                job.is_some()
            });
            if let Some(job) = job {
                return job;
            }
            let (relaxed, idle) = (Ordering::Relaxed, ptr::null_mut());
            if self.mail.compare_exchange(idle, ASLEEP, relaxed, relaxed).is_ok() {
                while self.mail.load(relaxed) == ASLEEP {
                    thread::park();
                }
                let wake = pool.now().saturating_sub(self.woken.load(relaxed)).min(LONGEST_WAKE.as_nanos() as u64);
                pool.wake.store((7 * pool.wake.load(relaxed) + wake) / 8, relaxed);
            }
        }
    }
}

/// A caller of [`share`](super::share) while it computes.
pub(super) struct Caller {
    pool: &'static Pool,
    /// Other callers at the time.
    others: usize,
}

impl Drop for Caller {
    fn drop(&mut self) {
        self.pool.callers.fetch_sub(1, Ordering::Relaxed);
    }
}

impl Caller {
    /// Threads that may help with a job: fewer where others compute at the same time.
    pub(super) fn helpers(&self, job: &Job) -> usize {
        job.threads().saturating_sub(1 + self.others)
    }

    /// Computes all parts of a job on this thread and on workers that join; returns when no part is unfinished.
    /// `expected` is how long one thread takes, roughly.
    pub(super) fn compute(&self, job: Arc<Job>, expected: Duration) {
        let pool = self.pool;
        let helpers = self.helpers(&job);
        let posted = Posted { pool, job };
        let job = &posted.job;
        let mut missing = helpers;
        for worker in pool.workers_of(job) {
            if missing > 0 && worker.thread.get().is_some() && worker.post(ptr::null_mut(), job) {
                missing -= 1;
            }
        }
        // Many of a pool's threads may be asleep while some are awake; only where all are, the caller computes alone.
        let alone = missing == helpers;
        let woken = missing > 0 && (self.is_worth_waking(expected) || alone && self.has_been_alone()) && {
            pool.alone.store(0, Ordering::Relaxed);
            job.set_to_wake(missing - 1);
            pool.wake_one(job)
        };
        if !alone || woken {
            return job.take_part(End::First);
        }
        let begun = pool.now();
        job.take_part(End::First);
        let now = pool.now();
        pool.alone.fetch_add(now.saturating_sub(begun), Ordering::Relaxed);
        pool.alone_until.store(now, Ordering::Relaxed);
    }

    /// Whether a job takes longer than a wake-up. For a shorter one the caller would pay for the system call, and the
    /// worker come when the job is done.
    fn is_worth_waking(&self, expected: Duration) -> bool {
        expected.as_nanos() >= u128::from(self.pool.wake.load(Ordering::Relaxed))
    }

    /// Whether short jobs have come one after the other for as long as a wake-up takes, so that a worker, once awake,
    /// would stay so.
    fn has_been_alone(&self) -> bool {
        let pool = self.pool;
        let pause = pool.now().saturating_sub(pool.alone_until.load(Ordering::Relaxed));
        if pause > POLLING.as_nanos() as u64 {
            pool.alone.store(0, Ordering::Relaxed);
        }
        pool.alone.load(Ordering::Relaxed) >= pool.wake.load(Ordering::Relaxed)
    }
}

/// A job that workers may find in their mailboxes. However the caller leaves, no part is unfinished afterwards.
struct Posted {
    pool: &'static Pool,
    job: Arc<Job>,
}

impl Drop for Posted {
    fn drop(&mut self) {
        self.job.close();
        self.pool.workers_of(&self.job).for_each(|worker| worker.retract(&self.job));
        self.job.wait();
    }
}
