//! Thread pools for passes over weights.

use std::{
    collections::BTreeMap,
    sync::{Arc, Mutex},
};

use rayon::{ThreadPool, ThreadPoolBuildError};
use twofour::kernel::with_threads;

/// Runs `f` on a pool of so many threads, with its kernels limited to as many. A forked child, to which no thread of
/// its parent's pool came along, builds pools of its own.
///
/// # Errors
/// Where the system refuses to start the threads.
pub(crate) fn on_pool<R: Send>(threads: usize, f: impl FnOnce() -> R + Send) -> Result<R, ThreadPoolBuildError> {
    static POOLS: Mutex<BTreeMap<(u32, usize), Arc<ThreadPool>>> = Mutex::new(BTreeMap::new());
    let pool = {
        let mut pools = POOLS.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
        let key = (std::process::id(), threads);
        match pools.get(&key) {
            Some(pool) => pool.clone(),
            None => {
                let pool = Arc::new(rayon::ThreadPoolBuilder::new().num_threads(threads).build()?);
                // Dropping a pool of the parent's would wait for threads that this process does not have.
                pools.insert(key, pool.clone());
                pool
            }
        }
    };
    Ok(pool.install(|| with_threads(threads, f)))
}
