//! Ctrl-C: no partial output, exit code 130.
//!
//! A command that writes nothing ends at once. One that writes is [`guard`]ed: the first signal only sets a flag, which
//! the command tests where it can stop ([`check`], or [`flow`] as a callback's result), so that temporary files are
//! removed. A second signal ends the process at once. Files with their final names are then still unchanged, because
//! renaming is the last step.

use std::{
    ops::ControlFlow,
    sync::atomic::{AtomicUsize, Ordering},
};

use anyhow::Result;

use crate::{present::progress, threads};

/// The exit code that shells report for a process ended by Ctrl-C: 128 + SIGINT.
pub const EXIT_CODE: u8 = 130;

static GUARDS: AtomicUsize = AtomicUsize::new(0);
static SIGNALS: AtomicUsize = AtomicUsize::new(0);

/// The command was interrupted and has cleaned up.
#[derive(Debug, thiserror::Error)]
#[error("interrupted")]
pub struct Interrupted;

/// Installs the handler of SIGINT and SIGTERM.
pub fn install() -> Result<()> {
    ctrlc::set_handler(|| {
        let earlier = SIGNALS.fetch_add(1, Ordering::SeqCst);
        if GUARDS.load(Ordering::SeqCst) == 0 || earlier > 0 {
            // A bar would stay on the terminal.
            progress::clear();
            std::process::exit(i32::from(EXIT_CODE));
        }
    })
    .map_err(|error| match error {
        // It waits for signals on a thread.
        ctrlc::Error::System(error) => threads::refused(error),
        error => anyhow::Error::new(error).context("installing the handler for Ctrl-C"),
    })
}

/// While this lives, the first signal waits for the command to stop by itself.
#[must_use = "dropped at once, it guards nothing"]
#[derive(Debug)]
pub struct Guard(());

/// Begins work that must clean up when interrupted.
pub fn guard() -> Guard {
    GUARDS.fetch_add(1, Ordering::SeqCst);
    Guard(())
}

impl Drop for Guard {
    fn drop(&mut self) {
        GUARDS.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Returns whether a signal was received.
pub fn requested() -> bool {
    SIGNALS.load(Ordering::SeqCst) > 0
}

/// Returns an error if a signal was received.
pub fn check() -> Result<()> {
    if requested() { Err(Interrupted.into()) } else { Ok(()) }
}

/// Returns the result of a callback: break if a signal was received.
pub fn flow() -> ControlFlow<()> {
    if requested() { ControlFlow::Break(()) } else { ControlFlow::Continue(()) }
}

/// Returns whether an error says that a command stopped because of a signal.
pub fn is_cause_of(error: &anyhow::Error) -> bool {
    let is_core = matches!(error.downcast_ref(), Some(twofour::Error::Interrupted));
    let is_inside = matches!(error.downcast_ref(), Some(twofour_nn::Error::Core(twofour::Error::Interrupted)));
    error.is::<Interrupted>() || is_core || is_inside
}
