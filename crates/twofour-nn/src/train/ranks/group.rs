//! What the ranks of one process tell each other in host memory.

use std::{
    fmt,
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    thread,
};

use crate::{Error, Result};

/// What a rank contributes to an exchange.
#[derive(Debug, Clone, PartialEq)]
pub(crate) enum Post {
    /// Rank 0 begins a step of that number; the others wait for it.
    Step(u64),
    /// Numbers that must be the same on all ranks.
    Words(Vec<u64>),
    /// Buffers to be summed.
    Floats(Vec<Vec<f32>>),
    /// The rank's gradients are not finite, and it sums no more of them in this step.
    Refused,
}

/// Called once when a rank has failed.
type Abort = Box<dyn Fn() + Send + Sync>;

/// State that the ranks share.
struct Shared {
    ranks: usize,
    state: Mutex<State>,
    changed: Condvar,
    aborts: Mutex<Vec<Abort>>,
}

/// An exchange in progress. A rank whose post is there waits for its results.
struct State {
    posts: Vec<Option<Post>>,
    results: Vec<Option<Arc<Vec<Post>>>>,
    /// The first rank that failed, and why.
    failure: Option<(usize, String)>,
    /// Whether rank 0 takes no further steps.
    closed: bool,
}

/// A rank's place in a group of ranks, which are threads of one process.
///
/// Dropping the place of rank 0 ends the work of the others. Dropping any place while its thread panics is a failure of
/// that rank.
pub struct Rank {
    shared: Arc<Shared>,
    index: usize,
}

impl fmt::Debug for Rank {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Rank").field("index", &self.index).field("ranks", &self.shared.ranks).finish()
    }
}

impl Rank {
    /// The places of a group.
    pub(crate) fn group(ranks: usize) -> Vec<Rank> {
        let state = State { posts: vec![None; ranks], results: vec![None; ranks], failure: None, closed: false };
        let shared =
            Arc::new(Shared { ranks, state: Mutex::new(state), changed: Condvar::new(), aborts: Mutex::default() });
        (0..ranks).map(|index| Rank { shared: shared.clone(), index }).collect()
    }

    /// The place, from 0.
    pub fn index(&self) -> usize {
        self.index
    }

    /// How many ranks there are.
    pub fn count(&self) -> usize {
        self.shared.ranks
    }

    /// Something to call when a rank has failed: it makes this rank's device stop waiting for others.
    pub(crate) fn on_failure(&self, abort: Abort) {
        self.shared.aborts.lock().unwrap_or_else(PoisonError::into_inner).push(abort);
    }

    /// Contributes `post`, and returns those of all ranks, in the order of ranks. Waits for the others.
    ///
    /// # Errors
    /// [`Error::Rank`] once a rank has failed.
    pub(crate) fn exchange(&self, post: Post) -> Result<Arc<Vec<Post>>> {
        let posts = self.exchange_or_end(post)?;
        posts.ok_or_else(|| Error::Rank { rank: 0, reason: "it ended in the middle of a step".to_owned() })
    }

    /// [`Rank::exchange`]; `None` where rank 0 takes no further steps.
    pub(crate) fn exchange_or_end(&self, post: Post) -> Result<Option<Arc<Vec<Post>>>> {
        let mut state = self.lock();
        state.posts[self.index] = Some(post);
        if state.posts.iter().all(Option::is_some) {
            let round: Arc<Vec<Post>> = Arc::new(state.posts.iter_mut().filter_map(Option::take).collect());
            state.results.fill(Some(round));
            self.shared.changed.notify_all();
        }
        loop {
            if let Some((rank, reason)) = &state.failure {
                return Err(Error::Rank { rank: *rank, reason: reason.clone() });
            }
            if let Some(round) = state.results[self.index].take() {
                return Ok(Some(round));
            }
            if state.closed {
                return Ok(None);
            }
            state = self.shared.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    /// An error once a rank has failed: what the device has summed since is worth nothing.
    pub(crate) fn check(&self) -> Result<()> {
        match &self.lock().failure {
            Some((rank, reason)) => Err(Error::Rank { rank: *rank, reason: reason.clone() }),
            None => Ok(()),
        }
    }

    /// Stops all ranks: this one has failed. Only the first failure counts.
    pub(crate) fn fail(&self, reason: String) {
        let mut state = self.lock();
        if state.failure.is_some() {
            return;
        }
        state.failure = Some((self.index, reason));
        self.shared.changed.notify_all();
        drop(state);
        let aborts = std::mem::take(&mut *self.shared.aborts.lock().unwrap_or_else(PoisonError::into_inner));
        aborts.iter().for_each(|abort| abort());
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.shared.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for Rank {
    fn drop(&mut self) {
        if thread::panicking() {
            self.fail("its thread panicked".to_owned());
        }
        if self.index == 0 {
            self.lock().closed = true;
            self.shared.changed.notify_all();
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn every_rank_reads_the_posts_of_all_in_order_round_after_round() {
        let ranks = Rank::group(3);
        thread::scope(|scope| {
            for rank in ranks {
                scope.spawn(move || {
                    for round in 0..200 {
                        let own = Post::Words(vec![round, rank.index() as u64]);
                        let found = rank.exchange(own).unwrap();
                        let expected: Vec<Post> = (0..3).map(|index| Post::Words(vec![round, index])).collect();
                        assert_eq!(*found, expected);
                    }
                });
            }
        });
    }

    #[test]
    fn a_failure_stops_the_others_and_aborts_once() {
        let mut ranks = Rank::group(3);
        let aborts = Arc::new(AtomicUsize::new(0));
        for rank in &ranks {
            let aborts = aborts.clone();
            rank.on_failure(Box::new(move || {
                aborts.fetch_add(1, Ordering::SeqCst);
            }));
        }
        let failing = ranks.remove(1);
        thread::scope(|scope| {
            let waiting: Vec<_> =
                ranks.into_iter().map(|rank| scope.spawn(move || rank.exchange(Post::Refused))).collect();
            failing.fail("out of memory".to_owned());
            failing.fail("a second reason".to_owned());
            for thread in waiting {
                let error = thread.join().unwrap().unwrap_err();
                assert!(matches!(&error, Error::Rank { rank: 1, reason } if reason == "out of memory"), "{error}");
            }
        });
        assert_eq!(aborts.load(Ordering::SeqCst), 3);
        assert!(failing.check().is_err());
    }

    #[test]
    fn a_panic_is_a_failure_and_the_end_of_rank_0_is_the_end() {
        let mut ranks = Rank::group(2);
        let (second, first) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        let panicked = thread::spawn(move || {
            let _rank = second;
            panic!("on purpose");
        });
        assert!(panicked.join().is_err());
        assert!(matches!(first.exchange(Post::Refused), Err(Error::Rank { rank: 1, .. })));

        let mut ranks = Rank::group(2);
        let (second, first) = (ranks.pop().unwrap(), ranks.pop().unwrap());
        drop(first);
        assert!(second.exchange_or_end(Post::Step(0)).unwrap().is_none());
    }
}
