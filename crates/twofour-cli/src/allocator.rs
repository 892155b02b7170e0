//! The allocator: where memory is refused to code that has no answer to it, the command ends with a message.
//!
//! Rust's own answer is an abort, behind a backtrace that needs memory, too, and may wait for ever for a lock that it
//! holds. Allocations whose refusal is an error of the library ([`twofour::memory`]) are refused here as well.

#![allow(unsafe_code)]

use std::{
    alloc::{GlobalAlloc, Layout, System},
    fmt,
    io::{Cursor, Write},
    sync::atomic::{AtomicBool, Ordering},
};

/// The system's allocator, which ends the process where the system has no memory.
#[derive(Debug)]
pub struct EndsWithoutMemory;

// SAFETY: every method is the system allocator's, with its arguments and its result.
unsafe impl GlobalAlloc for EndsWithoutMemory {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is that of the method called.
        granted(unsafe { System.alloc(layout) }, layout.size())
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise is that of the method called.
        granted(unsafe { System.alloc_zeroed(layout) }, layout.size())
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        // SAFETY: the caller's promise is that of the method called.
        granted(unsafe { System.realloc(memory, layout, size) }, size)
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: the caller's promise is that of the method called.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[inline]
fn granted(memory: *mut u8, bytes: usize) -> *mut u8 {
    if memory.is_null() && !twofour::memory::is_attempt() {
        end(format_args!("{bytes} bytes were"));
    }
    memory
}

/// Ends the process with a message, without allocating. Temporary files without a name go with the process; those with
/// one are removed by the next command.
#[cold]
#[cfg(unix)]
fn end(what: fmt::Arguments<'_>) -> ! {
    static IS_ENDING: AtomicBool = AtomicBool::new(false);
    if IS_ENDING.swap(true, Ordering::SeqCst) {
        // Another thread says so already.
        loop {
            // SAFETY: it waits for signals and touches no memory.
            unsafe { libc::pause() };
        }
    }
    let mut text = [0; 192];
    let mut line = Cursor::new(&mut text[..]);
    let _ = writeln!(
        line,
        "error: out of memory: {what} asked for and refused; free memory, or raise the limit of this process"
    );
    let length = line.position() as usize;
    // SAFETY: the buffer holds `length` bytes; the file descriptor need not be open; `_exit` runs no code of this
    // process.
    unsafe {
        libc::write(libc::STDERR_FILENO, text.as_ptr().cast(), length);
        libc::_exit(1);
    }
}

/// Leaves it to Rust's own answer.
#[cold]
#[cfg(not(unix))]
fn end(_: fmt::Arguments<'_>) {}

/// Ends the process where a new thread is refused the memory of its signal stack.
pub(crate) fn end_without_stack() {
    end(format_args!("the signal stack of a thread was"));
}
