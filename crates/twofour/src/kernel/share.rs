//! Sharing work between the thread that asks for it and those of the pool.

use std::sync::{Mutex, PoisonError};

/// Does `work` for every part, once, on the calling thread and on so many of rayon's that all together are as many as its pool has.
/// Each thread that takes part makes a state of its own with `state` first; parts are begun in their order.
///
/// A thread outside the pool that calls a parallel iterator sleeps until the pool has woken up and done everything. With
/// products of a millisecond and less, waking is a part of them that counts (measured on a virtual machine: 0.1 ms and more). Here
/// the caller begins at once and the others join when they are awake; one part, or a pool of one thread, wakes nobody.
///
/// ```
/// let mut squares = [1, 2, 3, 4, 5];
/// twofour::kernel::share(squares.chunks_mut(2), || (), |(), part| part.iter_mut().for_each(|v| *v *= *v));
/// assert_eq!(squares, [1, 4, 9, 16, 25]);
/// ```
///
/// # Panics
/// Where `state` or `work` does, when the parts that were begun have ended.
pub fn share<P, S>(
    parts: impl ExactSizeIterator<Item = P> + Send,
    state: impl Fn() -> S + Sync,
    work: impl Fn(&mut S, P) + Sync,
) {
    let threads = parts.len().min(rayon::current_num_threads());
    let parts = Mutex::new(parts);
    let next = || parts.lock().unwrap_or_else(PoisonError::into_inner).next();
    let take_part = || {
        let Some(first) = next() else { return };
        let mut state = state();
        work(&mut state, first);
        while let Some(part) = next() {
            work(&mut state, part);
        }
    };
    if threads < 2 {
        return take_part();
    }
    rayon::in_place_scope(|scope| {
        for _ in 1..threads {
            scope.spawn(|_| take_part());
        }
        take_part();
    });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};

    #[test]
    fn every_part_is_done_once_by_no_more_threads_than_the_pool_has() {
        for threads in [1, 2, 5] {
            let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().unwrap();
            for count in [0, 1, 2, 100] {
                let mut done = vec![0; count];
                let states = AtomicUsize::new(0);
                let state = || states.fetch_add(1, Relaxed);
                pool.install(|| share(done.iter_mut().enumerate(), state, |_, (i, done)| *done += i + 1));
                assert_eq!(done, (1..=count).collect::<Vec<_>>());
                assert!(states.load(Relaxed) <= threads.min(count));
            }
        }
    }

    #[test]
    #[should_panic(expected = "part 3")]
    fn a_panic_reaches_the_caller() {
        share(0..8, || (), |(), part| assert!(part != 3, "part {part}"));
    }
}
