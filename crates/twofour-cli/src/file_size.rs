//! The limit of the size of files, as `ulimit -f` sets it.

#![allow(unsafe_code)]

/// From here on a write beyond the limit is an error, with which a command ends as on a full disk. By default a signal
/// ends the process without a word.
#[cfg(unix)]
pub(crate) fn expect_errors() {
    // SAFETY: no handler of this process is replaced: it runs at the start, and ignoring a signal runs no code.
    unsafe { libc::signal(libc::SIGXFSZ, libc::SIG_IGN) };
}

#[cfg(not(unix))]
pub(crate) fn expect_errors() {}
