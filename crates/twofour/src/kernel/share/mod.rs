//! Sharing work between the thread that asks for it and helping threads.
//!
//! This is not rayon's pool. A thread outside that pool which calls a parallel iterator sleeps until the pool has woken
//! up and done everything, and `rayon::in_place_scope` waits for every job that it has spawned, also for one whose
//! thread has not woken up. A small layer takes less time than that. Here the caller begins at once, helpers that are
//! awake join, and the caller waits only for parts that a helper has claimed.
//!
//! | one token, 1 and 2 threads, as fast as with rayon's iterators | int8 |
//! |---|---|
//! | `[256, 256]` | 10 and 11 times |
//! | `[1024, 1024]` | 4.4 and 2.2 times |
//! | `[2048, 2048]` | 2.0 and 1.2 times |
//! | `[14336, 4096]` | 1.10 to 1.15 and 1.01 to 1.08 times |
//!
//! (Zen 3, a virtual machine, two builds interleaved in one process; `docs/explanation/kernels/cpu.md` has more.)
//! `cargo bench -p twofour threads` compares both on this machine.
//!
//! - A call is a *job* (`job`): parts, a counter of those that nobody has claimed, and a counter of those that are not
//!   finished.
//! - Each helper has a *mailbox* (`pool`), one word. A caller posts the job to helpers that are awake and takes it back
//!   from those that have not taken it when the work is done. A helper without a job polls for a while, and then
//!   sleeps; it is woken for work that outlasts a wake-up.
//! - An *executor* (`executor`) puts jobs on another library's threads instead.

mod executor;
mod job;
mod pool;

use std::{cell::Cell, panic, sync::Arc, thread::LocalKey, time::Duration};

pub use executor::Executor;
use job::{Frame, Job};
use pool::Pool;

/// Does `work` for every part, once, on the calling thread and on helping threads, all together at most
/// [`rayon::current_num_threads`]: what `RAYON_NUM_THREADS` or the present rayon pool says. Each thread that takes part
/// makes a state of its own with `state` first.
///
/// A thread outside rayon's pool that calls a parallel iterator sleeps until the pool has woken up and done everything,
/// and `rayon::scope` waits for every job it has spawned. With products of a millisecond and less, waking is a part of
/// them that counts (measured on virtual machines: 0.05 to 0.2 ms). Here the caller begins at once, helpers that are
/// awake join, and the caller waits only for parts that a helper has claimed. One part, or one thread, is computed by
/// the caller alone, and so is what several threads ask for at the same time when there are not as many more.
///
/// ```
/// let mut squares = [1, 2, 3, 4, 5];
/// twofour::kernel::share(squares.chunks_mut(2), || (), |(), part| part.iter_mut().for_each(|v| *v *= *v));
/// assert_eq!(squares, [1, 4, 9, 16, 25]);
/// ```
///
/// # Panics
/// Where `state` or `work` does, when the parts that were begun have ended; the others are dropped.
pub fn share<P: Send, S>(
    parts: impl ExactSizeIterator<Item = P>,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, P) + Sync,
) {
    share_expecting(Duration::MAX, parts, state, work);
}

/// [`share`] for work that takes one thread about as long as `expected`: helpers that sleep are woken only for work
/// that outlasts a wake-up, alone or together with what came just before. On the threads of an [`Executor`], which may
/// be asleep, too, only work that outlasts their meeting is shared.
pub(super) fn share_expecting<P: Send, S>(
    expected: Duration,
    parts: impl ExactSizeIterator<Item = P>,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, P) + Sync,
) {
    let limit = if parts.len() < 2 { 1 } else { threads() };
    let threads = limit.min(parts.len());
    // A job counts its parts in 32 bits.
    if threads < 2 || u32::try_from(parts.len()).is_err() {
        let mut parts = parts;
        let Some(first) = parts.next() else { return };
        let mut state = state();
        work(&mut state, first);
        return parts.for_each(|part| work(&mut state, part));
    }
    let frame = Frame::new(parts, &state, &work);
    // SAFETY: `frame` is borrowed, not moved, until `compute` has returned, which waits for the job.
    let job = Arc::new(unsafe { Job::new(&frame, threads) });
    let caller = Pool::current(limit).enter();
    match EXECUTOR.get().filter(|_| executor::is_worth_trying()) {
        Some(executor) => executor::compute(executor, &job, caller.helpers(&job), expected),
        None => caller.compute(job.clone(), expected),
    }
    if let Some(payload) = job.panic() {
        panic::resume_unwind(payload);
    }
}

/// Elements of a part, at least, where each takes about a nanosecond.
pub(crate) const MIN_PART: usize = 1 << 14;

/// [`share_expecting`] for a pass over so many elements, in parts of [`MIN_PART`] or more.
pub(crate) fn share_elements<P: Send>(
    elements: usize,
    parts: impl ExactSizeIterator<Item = P>,
    work: impl Fn(P) + Sync,
) {
    share_expecting(Duration::from_nanos(elements as u64), parts, || (), |(), part| work(part));
}

thread_local! {
    /// The number of threads that may compute together, where [`with_threads`] or, on a helping thread, its caller sets
    /// it.
    static THREADS: Cell<Option<usize>> = const { Cell::new(None) };
    /// Whose threads help, where [`with_executor`] sets it.
    static EXECUTOR: Cell<Option<Executor>> = const { Cell::new(None) };
}

/// The number of threads that may compute together.
pub(super) fn threads() -> usize {
    THREADS.get().unwrap_or_else(rayon::current_num_threads)
}

/// Runs `f`, whose kernels compute on at most so many threads, this one included, whatever rayon's pool has. What rayon
/// itself computes inside `f`, such as packing, keeps to rayon's pool.
///
/// ```
/// use twofour::kernel::{share, with_threads};
/// with_threads(1, || share(0..3, || (), |(), part| assert!(part < 3)));
/// ```
pub fn with_threads<R>(threads: usize, f: impl FnOnce() -> R) -> R {
    with(&THREADS, threads.max(1), f)
}

/// Runs `f`, whose kernels compute on the threads of `executor` instead of threads of their own; [`with_threads`] says
/// on how many. This is for programs whose other work runs on such threads: two sets of threads that poll for work take
/// each other's cores. Where a call shows that they come late, because they sleep or others have their cores, the next
/// calls do without them for a while.
///
/// What a part of a call shares in turn, its thread computes alone.
///
/// ```
/// use twofour::kernel::{share, with_executor, with_threads};
/// fn scoped(threads: usize, take_part: &(dyn Fn(usize) + Sync)) {
///     std::thread::scope(|scope| {
///         (1..threads).for_each(|i| drop(scope.spawn(move || take_part(i))));
///         take_part(0);
///     });
/// }
/// let mut squares = [1, 2, 3, 4, 5];
/// with_threads(2, || {
///     with_executor(scoped, || share(squares.iter_mut(), || (), |(), v| *v *= *v));
/// });
/// assert_eq!(squares, [1, 4, 9, 16, 25]);
/// ```
pub fn with_executor<R>(executor: Executor, f: impl FnOnce() -> R) -> R {
    with(&EXECUTOR, executor, f)
}

/// Runs `f` with a value in a thread's variable, which has its former value afterwards, after a panic too.
fn with<T: Copy + 'static, R>(key: &'static LocalKey<Cell<Option<T>>>, value: T, f: impl FnOnce() -> R) -> R {
    struct Restore<T: Copy + 'static>(&'static LocalKey<Cell<Option<T>>>, Option<T>);
    impl<T: Copy> Drop for Restore<T> {
        fn drop(&mut self) {
            self.0.set(self.1);
        }
    }
    let _restore = Restore(key, key.replace(Some(value)));
    f()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::{
        collections::BTreeSet,
        sync::{
            Mutex,
            atomic::{AtomicUsize, Ordering::Relaxed},
        },
        thread,
        time::Instant,
    };

    /// Rounds of a test that hopes to meet many interleavings.
    const ROUNDS: usize = if cfg!(miri) { 5 } else { 2000 };

    fn with_pool<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> R {
        rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap().install(f)
    }

    /// Keeps a core busy.
    fn compute_for(time: Duration) {
        let begun = Instant::now();
        while begun.elapsed() < time {
            std::hint::spin_loop();
        }
    }

    #[test]
    fn every_part_is_done_once_by_no_more_threads_than_the_pool_has() {
        for threads in [1, 2, 5] {
            for count in [0, 1, 2, 100] {
                with_pool(threads, || {
                    for expected in [Duration::ZERO, Duration::MAX] {
                        let mut done = vec![0; count];
                        let states = AtomicUsize::new(0);
                        let state = || states.fetch_add(1, Relaxed);
                        let parts = done.iter_mut().enumerate();
                        share_expecting(expected, parts, state, |_, (i, done)| *done += i + 1);
                        assert_eq!(done, (1..=count).collect::<Vec<_>>());
                        assert!(states.load(Relaxed) <= threads.min(count));
                    }
                });
            }
        }
    }

    #[test]
    fn helpers_join_and_their_states_are_gone_at_the_end() {
        struct State<'a>(&'a AtomicUsize);
        impl Drop for State<'_> {
            fn drop(&mut self) {
                self.0.fetch_sub(1, Relaxed);
            }
        }
        with_pool(3, || {
            let seen = Mutex::new(BTreeSet::new());
            let begun = Instant::now();
            // On a busy machine a helper may be late for a few calls, but not for minutes.
            while seen.lock().unwrap().len() < 2 && begun.elapsed() < Duration::from_secs(60) {
                let states = AtomicUsize::new(0);
                let state = || {
                    states.fetch_add(1, Relaxed);
                    State(&states)
                };
                share(0..8, state, |_, _| {
                    seen.lock().unwrap().insert(format!("{:?}", thread::current().id()));
                    compute_for(Duration::from_micros(200));
                });
                assert_eq!(states.load(Relaxed), 0);
            }
            assert!(seen.lock().unwrap().len() >= 2, "no helper came");
        });
    }

    #[test]
    fn the_caller_waits_for_no_thread_that_has_claimed_nothing() {
        with_pool(4, || {
            let caller = thread::current().id();
            // Helpers that have claimed a part hold it until the caller has done all others.
            let (others, claimed) = (AtomicUsize::new(0), AtomicUsize::new(0));
            share(
                0..64,
                || (),
                |(), _| {
                    if thread::current().id() == caller {
                        compute_for(Duration::from_micros(20));
                        others.fetch_add(1, Relaxed);
                    } else {
                        claimed.fetch_add(1, Relaxed);
                        let begun = Instant::now();
                        while others.load(Relaxed) + claimed.load(Relaxed) < 64
                            && begun.elapsed() < Duration::from_secs(60)
                        {
                            thread::yield_now();
                        }
                    }
                },
            );
            assert!(claimed.load(Relaxed) <= 3, "each helper had one part only, and the caller did not wait for them");
            assert_eq!(others.load(Relaxed) + claimed.load(Relaxed), 64);
        });
    }

    #[test]
    fn many_callers_and_nested_calls_share_the_helpers() {
        let sum = |count: usize| {
            let sum = AtomicUsize::new(0);
            share(
                0..count,
                || (),
                |(), i| {
                    share(
                        0..3,
                        || (),
                        |(), j| {
                            sum.fetch_add(i * j, Relaxed);
                        },
                    );
                },
            );
            sum.into_inner()
        };
        thread::scope(|scope| {
            for caller in 0..4 {
                scope.spawn(move || {
                    with_pool(3, || {
                        for round in 0..ROUNDS / 10 {
                            let count = (caller + round) % 9;
                            assert_eq!(sum(count), 3 * (count * count.saturating_sub(1) / 2));
                        }
                    });
                });
            }
        });
    }

    #[test]
    fn calls_in_quick_succession_keep_to_their_own_parts() {
        with_pool(3, || {
            for round in 0..ROUNDS {
                let mut values = [round; 17];
                share(values.iter_mut(), || round, |add, value| *value += *add);
                assert!(values.iter().all(|value| *value == 2 * round));
                if round % 64 == 0 {
                    // Long enough for helpers to fall asleep.
                    thread::sleep(Duration::from_millis(1));
                }
            }
        });
    }

    #[test]
    #[should_panic(expected = "part 3")]
    fn a_panic_reaches_the_caller() {
        share(0..8, || (), |(), part| assert!(part != 3, "part {part}"));
    }

    #[test]
    fn after_a_panic_nothing_runs_and_the_next_call_works() {
        with_pool(3, || {
            for round in 0..ROUNDS / 20 {
                let (running, dropped) = (AtomicUsize::new(0), AtomicUsize::new(0));
                struct Part<'a>(usize, &'a AtomicUsize);
                impl Drop for Part<'_> {
                    fn drop(&mut self) {
                        self.1.fetch_add(1, Relaxed);
                    }
                }
                let parts: Vec<_> = (0..32).map(|i| Part(i, &dropped)).collect();
                let outcome = panic::catch_unwind(panic::AssertUnwindSafe(|| {
                    share(
                        parts.into_iter(),
                        || (),
                        |(), part| {
                            running.fetch_add(1, Relaxed);
                            compute_for(Duration::from_micros(5));
                            running.fetch_sub(1, Relaxed);
                            if part.0 == round % 32 {
                                panic::resume_unwind(Box::new(round));
                            }
                        },
                    );
                }));
                assert_eq!(outcome.unwrap_err().downcast_ref(), Some(&round));
                assert_eq!((running.into_inner(), dropped.into_inner()), (0, 32));
            }
            let sum = AtomicUsize::new(0);
            share(0..10, || (), |(), i| _ = sum.fetch_add(i, Relaxed));
            assert_eq!(sum.into_inner(), 45);
        });
    }

    #[cfg(all(target_os = "linux", not(miri)))]
    #[test]
    fn a_forked_child_has_helpers_of_its_own() {
        with_pool(2, || {
            let sum = || {
                let sum = AtomicUsize::new(0);
                share(
                    0..100,
                    || (),
                    |(), i| {
                        compute_for(Duration::from_micros(10));
                        sum.fetch_add(i, Relaxed);
                    },
                );
                sum.into_inner()
            };
            assert_eq!(sum(), 4950);
            // SAFETY: the child computes, without output, and ends without unwinding or running the parent's
            // destructors.
            let child = unsafe { libc::fork() };
            assert!(child >= 0);
            if child == 0 {
                let right = (0..100).all(|_| sum() == 4950);
                // SAFETY: ends the child.
                unsafe { libc::_exit(i32::from(!right)) };
            }
            let mut status = -1;
            // SAFETY: `status` is valid for writing; the child is this process's.
            assert_eq!(unsafe { libc::waitpid(child, &mut status, 0) }, child);
            assert_eq!(status, 0, "the child computed something else, or crashed");
            assert_eq!(sum(), 4950);
        });
    }
}
