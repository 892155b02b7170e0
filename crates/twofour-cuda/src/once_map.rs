//! A map whose values are computed once per key: different keys at the same time, the same key by one thread while
//! others wait for it.

use std::{
    collections::HashMap,
    hash::Hash,
    sync::{Arc, Mutex, PoisonError},
};

/// Values that stay once they have been computed. A computation that fails leaves no value: the next caller tries
/// again.
#[derive(Debug)]
pub(crate) struct OnceMap<K, V> {
    slots: Mutex<HashMap<K, Arc<Mutex<Option<V>>>>>,
}

impl<K, V> Default for OnceMap<K, V> {
    fn default() -> Self {
        Self { slots: Mutex::default() }
    }
}

impl<K: Eq + Hash, V: Clone> OnceMap<K, V> {
    /// Returns the value of a key, which `compute` computes if there is none yet. Only calls with the same key wait for
    /// each other.
    pub(crate) fn get_or_try_insert<E>(&self, key: K, compute: impl FnOnce() -> Result<V, E>) -> Result<V, E> {
        // The map is locked for the look-up only; the slot is locked while its value is computed.
        let slot = self.slots.lock().unwrap_or_else(PoisonError::into_inner).entry(key).or_default().clone();
        let mut slot = slot.lock().unwrap_or_else(PoisonError::into_inner);
        match *slot {
            Some(ref value) => Ok(value.clone()),
            None => Ok(slot.insert(compute()?).clone()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        sync::{
            atomic::{AtomicU32, Ordering},
            mpsc,
        },
        time::Duration,
    };

    use super::*;

    #[test]
    fn different_keys_are_computed_at_the_same_time() {
        let map = OnceMap::<u32, u32>::default();
        let (to_first, at_first) = mpsc::channel();
        let (to_second, at_second) = mpsc::channel();
        // Each computation needs the other one to have started.
        let meet = |send: mpsc::Sender<()>, receive: mpsc::Receiver<()>| {
            move || {
                send.send(()).unwrap();
                receive.recv_timeout(Duration::from_secs(10)).map(|()| 1)
            }
        };
        let (first, second) = (meet(to_second, at_first), meet(to_first, at_second));
        std::thread::scope(|scope| {
            let other = scope.spawn(|| map.get_or_try_insert(1, first));
            assert_eq!(map.get_or_try_insert(2, second), Ok(1));
            assert_eq!(other.join().unwrap(), Ok(1));
        });
    }

    #[test]
    fn the_same_key_is_computed_once() {
        let map = OnceMap::<u32, u32>::default();
        let count = AtomicU32::new(0);
        let compute = || {
            std::thread::sleep(Duration::from_millis(20));
            Ok::<_, ()>(count.fetch_add(1, Ordering::Relaxed))
        };
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| assert_eq!(map.get_or_try_insert(7, compute), Ok(0)));
            }
        });
        assert_eq!(count.into_inner(), 1);
    }

    #[test]
    fn a_failure_is_returned_and_not_kept() {
        let map = OnceMap::<u32, u32>::default();
        assert_eq!(map.get_or_try_insert(1, || Err("no compiler")), Err("no compiler"));
        assert_eq!(map.get_or_try_insert(1, || Ok::<_, &str>(3)), Ok(3));
        assert_eq!(map.get_or_try_insert(1, || Err("not called")), Ok(3));
    }
}
