//! Kernels on torch's own threads.
//!
//! torch's threads poll for a while after each of its loops. Threads of our own would have to share the cores with
//! them.

use std::{
    ffi::c_void,
    panic::{AssertUnwindSafe, catch_unwind},
    sync::atomic::{AtomicBool, Ordering},
};

use twofour::kernel::{with_executor, with_threads};

use crate::torch::{shim::shim, torch_threads};

/// Whether this process is a forked child of the one that loaded torch's interface.
static FORKED: AtomicBool = AtomicBool::new(false);

extern "C" fn forked() {
    FORKED.store(true, Ordering::Relaxed);
}

/// Has children noted that are forked from now on: to be called when torch's interface is loaded.
pub(crate) fn note_forks() {
    // SAFETY: the function does nothing but store to an atomic, which is allowed in a forked child; the library is
    // never unloaded.
    unsafe { libc::pthread_atfork(None, None, Some(forked)) };
}

/// Runs kernels on as many threads as torch computes with: torch's own, but in a forked child, where those of GNU's
/// OpenMP would wait for threads that stayed with the parent.
pub(crate) fn on_torch_threads<R>(f: impl FnOnce() -> R) -> R {
    let on_own = || with_threads(torch_threads(), f);
    if FORKED.load(Ordering::Relaxed) { on_own() } else { with_executor(parallel_for, on_own) }
}

/// What [`parallel_for`] passes through torch.
struct Context<'a>(&'a (dyn Fn(usize) + Sync));

/// Calls `take_part` on torch's threads; inside one of its loops torch calls it on this thread alone.
fn parallel_for(threads: usize, take_part: &(dyn Fn(usize) + Sync)) {
    let context = Context(take_part);
    // A range of one for each thread. What torch refuses, the caller computes.
    // SAFETY: torch calls the function with this context, and returns when all calls have returned.
    unsafe { (shim().torch_parallel_for)(0, threads as i64, 1, enter, (&raw const context).cast_mut().cast()) };
}

/// Takes part on one of torch's threads.
///
/// # Safety
/// `context` is a [`Context`] that stays during the call.
unsafe extern "C" fn enter(begin: i64, _end: i64, context: *mut c_void) {
    // SAFETY: as the caller promises; it is only read.
    let Context(take_part) = unsafe { &*context.cast_const().cast::<Context<'_>>() };
    // `take_part` keeps the panics of kernels for the calling thread; any other must not unwind into torch.
    let _ = catch_unwind(AssertUnwindSafe(|| take_part(begin as usize)));
}
